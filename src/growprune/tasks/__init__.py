"""Tasks: data, a model, a loss and a metric. To add a task, write its file and add a line here.

A task does not depend on sparsity, methods or the engine. Tasks are loaded on first use, so a run loads only its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from growprune.tasks.task import Split as Split
from growprune.tasks.task import Task as Task

if TYPE_CHECKING:
    from growprune.tasks.classification import Classification as Classification
    from growprune.tasks.detection import Detection as Detection
    from growprune.tasks.digits import Digits as Digits
    from growprune.tasks.language import Language as Language
    from growprune.tasks.segmentation import PartSegmentation as PartSegmentation
    from growprune.tasks.translation import Translation as Translation

    TASKS: dict[str, type[Task]]

_CLASSES = {
    "digits": "Digits",
    "classification": "Classification",
    "detection": "Detection",
    "segmentation": "PartSegmentation",
    "translation": "Translation",
    "language": "Language",
}
"""The class of each task, by the name of its module."""


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return {task: _load(task) for task in _CLASSES}
    for task, kind in _CLASSES.items():
        if name == kind:
            return _load(task)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(task: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{task}"), _CLASSES[task])
