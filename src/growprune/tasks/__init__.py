"""What is trained: data, a model, a loss and a metric. To add a task: write its file, add its line here.

A task knows nothing of sparsity, methods or the engine.
"""

from collections.abc import Callable

from growprune.tasks.digits import Digits
from growprune.tasks.task import Split, Task

TASKS: dict[str, Callable[..., Task]] = {"digits": Digits}

__all__ = ["TASKS", "Digits", "Split", "Task"]
