"""What is trained: data, a model, a loss and a metric. To add a task: write its file, add its line here.

A task knows nothing of sparsity, methods or the engine. Tasks are loaded when first used: a run loads its own only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from growprune.tasks.task import Split, Task

if TYPE_CHECKING:
    from growprune.tasks.classification import Classification
    from growprune.tasks.detection import Detection
    from growprune.tasks.digits import Digits
    from growprune.tasks.language import Language
    from growprune.tasks.segmentation import PartSegmentation
    from growprune.tasks.translation import Translation

    TASKS: dict[str, type[Task]]

_CLASSES = {
    "digits": "Digits",
    "classification": "Classification",
    "detection": "Detection",
    "segmentation": "PartSegmentation",
    "translation": "Translation",
    "language": "Language",
}
"""By the name of a task, which is that of its module, its class."""

__all__ = [
    "TASKS",
    "Classification",
    "Detection",
    "Digits",
    "Language",
    "PartSegmentation",
    "Split",
    "Task",
    "Translation",
]


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return {task: _load(task) for task in _CLASSES}
    for task, kind in _CLASSES.items():
        if name == kind:
            return _load(task)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(task: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{task}"), _CLASSES[task])
