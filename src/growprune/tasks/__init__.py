"""What is trained: data, a model, a loss and a metric. To add a task: write its file, add its line here.

A task knows nothing of sparsity, methods or the engine.
"""

from growprune.tasks.classification import Classification
from growprune.tasks.detection import Detection
from growprune.tasks.digits import Digits
from growprune.tasks.language import Language
from growprune.tasks.segmentation import PartSegmentation
from growprune.tasks.task import Split, Task
from growprune.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {
    "digits": Digits,
    "classification": Classification,
    "detection": Detection,
    "segmentation": PartSegmentation,
    "translation": Translation,
    "language": Language,
}

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
