"""What every task has, and what it need not have."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from toy import Toy, cyclic

from growprune.errors import GrowpruneError
from growprune.tasks import TASKS, Task
from growprune.tasks.task import map_tensors, num_examples


class Named(dict[str, Tensor]):
    """A batch of a class of its own, as some collate functions return."""


class Pair(NamedTuple):
    """A batch whose parts have names."""

    inputs: Tensor
    targets: Tensor


class Plain(Task):
    """Only what must be there, but no dataclass."""

    metric = "accuracy"

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def example(self) -> Tensor:
        return torch.zeros(1, 2)

    def num_batches(self) -> int:
        return 1

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        yield from [torch.zeros(4, 2)][start:]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch).sum()

    def evaluate(self, model: nn.Module, split: str, *, device: torch.device) -> dict[str, float]:
        return {"accuracy": 1.0}


@dataclass(frozen=True)
class Least(Plain):
    """A task with only what must be there."""


def test_what_a_task_need_not_write_has_a_default() -> None:
    task = Least()
    assert task.files() == {}
    assert task.signature == ""
    assert task.for_replica(1, 2) is task
    assert task.weigh((3, torch.zeros(5, 2))) == 5
    assert task.weigh(torch.tensor(1.0)) == 1
    assert not task.reads_files
    assert [field.name for field in fields(task)] == []


def test_a_task_that_lacks_a_method_is_refused_by_its_name() -> None:
    class Incomplete(Toy):
        loss = Task.loss

    with pytest.raises(TypeError, match=r"abstract class Incomplete .*loss"):
        Incomplete()


@pytest.mark.parametrize("task", ["digits", Plain()], ids=["text", "no dataclass"])
def test_a_task_that_is_no_task_is_refused(task: Any) -> None:
    with pytest.raises(ValueError, match=r"task must be a frozen dataclass derived from growprune"):
        replace(cyclic(), task=task)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_derives_from_the_base_class(name: str) -> None:
    task = TASKS[name]()
    assert isinstance(task, Task)
    assert task.reads_files == (name != "digits")


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.tensor(1.0), torch.zeros(4)), 4),
        ({"x": [torch.zeros(2, 5)]}, 2),
        (Named(x=torch.zeros(2, 5)), 2),
        (Pair(torch.zeros(6), torch.zeros(6)), 6),
        (7, 0),
        ((), 0),
    ],
)
def test_examples_are_counted_by_the_first_tensor_with_an_axis(batch: Any, count: int) -> None:
    assert num_examples(batch) == count


@pytest.mark.parametrize("batch", [Named(x=torch.zeros(3)), Pair(torch.zeros(3), torch.zeros(3)), [torch.zeros(3)]])
def test_tensors_of_batches_of_any_class_are_mapped(batch: Any) -> None:
    changed = map_tensors(lambda tensor: tensor + 1, batch)
    assert all(bool((value == 1).all()) for value in (changed.values() if isinstance(changed, dict) else changed))


@pytest.mark.parametrize(
    ("task", "settings", "named"),
    [
        ("classification", {"model": "resnet34"}, "'resnet34'"),
        ("classification", {"stem": "mnist"}, "'mnist'"),
        ("classification", {"crop": "none"}, "'none'"),
        ("classification", {"crop": "resized", "in_memory": True}, "'resized'"),
        ("classification", {"batch_size": 1}, "batch_size must be >= 2, got 1"),
        ("classification", {"workers": -1}, "workers"),
        ("classification", {"min_scale": 0.0}, "min_scale"),
        ("classification", {"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ("classification", {"mixup": -0.1}, "mixup"),
        ("classification", {"std": (1.0, 0.0, 1.0)}, "std"),
        ("detection", {"batch_size": 1}, "batch_size"),
        ("detection", {"num_classes": 0}, "num_classes"),
        ("detection", {"zoom_out": 0.5}, "zoom_out"),
        ("segmentation", {"batch_size": 0}, "batch_size must be > 0, got 0"),
        ("segmentation", {"num_points": 31}, "num_points must be >= 512.* got 31"),
        ("translation", {"heads": 3}, "d_model .*heads=3, got 512"),
        ("translation", {"d_model": 15, "heads": 3}, "d_model .*heads=3, got 15"),
        ("translation", {"beam": 0}, "beam"),
        ("translation", {"dropout": 1.0}, "dropout"),
        ("translation", {"max_length": 61, "max_tokens": 63}, "max_tokens .*max_length=61, got 63"),
        ("translation", {"target": "en"}, "'en' for both"),
        ("language", {"context": 0}, "context"),
        ("language", {"dropout": -0.1}, "dropout"),
        ("language", {"d_model": 9}, "d_model .*heads=6, got 9"),
    ],
)
def test_settings_that_cannot_be_are_refused(task: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(GrowpruneError, match=named):
        TASKS[task](**settings)
