"""Groups the runs of a page by task, data set and budget, and finds runs that differ only by seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growprune.runs import Record
from growprune.runs.comparable import task_settings, telling, variant, varying
from growprune.runs.metric import Metric, deviation, in_full, mean
from growprune.runs.result import Json
from growprune.runs.table import TOLERANCE

SAME_FLOPS = 0.05
"""Largest relative difference of training FLOPs within one budget."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ only by seed. Either all are finished, or none."""

    method: str
    variant: str
    """The settings that distinguish it from other runs of the method in its group. May be empty."""
    sparsity: float
    records: tuple[Record, ...]

    @property
    def series(self) -> str:
        return f"{self.method}, {self.variant}" if self.variant else self.method

    @property
    def label(self) -> str:
        return self.series if self.is_dense else f"{self.series} {in_full(self.sparsity)}"

    @property
    def is_dense(self) -> bool:
        return self.first.is_dense

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def epochs(self) -> int:
        return self.first.epochs

    @property
    def quality(self) -> float | None:
        """The mean over seeds of the task's metric on test data."""
        return self.mean(lambda record: record.test)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of quality over seeds, if there are several."""
        return self.spread(lambda record: record.test)

    @property
    def num_scores(self) -> int:
        return len(self.values(lambda record: record.test))

    @property
    def is_off(self) -> bool:
        """True if its runs ended at another sparsity than their target. A small dense model has no target."""
        if self.first.small:
            return False
        reached = self.mean(lambda record: record.total("sparsity"))
        return reached is not None and abs(reached - self.sparsity) > TOLERANCE

    def values(self, of: Callable[[Record], float | None]) -> list[float]:
        return [value for record in self.records if (value := of(record)) is not None]

    def mean(self, of: Callable[[Record], float | None]) -> float | None:
        return mean(self.values(of))

    def spread(self, of: Callable[[Record], float | None]) -> float | None:
        return deviation(self.values(of))


@dataclass(frozen=True)
class Group:
    """Comparable runs. Dense runs are the baseline in every group of their task and data."""

    title: str
    budget: str
    cells: tuple[Cell, ...]

    @property
    def sparse(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.is_dense]

    @property
    def dense(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_dense]

    @property
    def reference(self) -> Cell | None:
        """The dense runs that others are compared with: the best one, of equal length if possible."""
        finished = [cell for cell in self.dense if cell.first.is_finished]
        lengths = {record.epochs for cell in self.sparse for record in cell.records if record.is_finished}
        fitting = [cell for cell in finished if cell.epochs in lengths] or finished
        return best_by_validation(fitting, self.metric) or next(iter(fitting), None)

    @property
    def metric(self) -> Metric:
        return next((cell.first.metric for cell in self.cells if cell.first.metric.name), Metric("metric"))


def best_by_validation(cells: Sequence[Cell], metric: Metric) -> Cell | None:
    """The best cell by validation data. None without validation data, because test data selects nothing."""
    scores = {n: cell.mean(lambda record: record.validation) for n, cell in enumerate(cells)}
    best = metric.best({n: score for n, score in scores.items() if score is not None})
    return None if best is None else cells[best]


def order(record: Record) -> tuple[str, float, str]:
    """Sort key of a run on a page."""
    return record.method, record.sparsity, record.name


def group_runs(records: Sequence[Record]) -> list[Group]:
    """Group all runs that have data to show."""
    tasks: dict[str, list[Record]] = {}
    for record in _shown(records):
        tasks.setdefault(json.dumps(task_settings(record), sort_keys=True), []).append(record)
    alike = _by_name(records)
    return [group for same in tasks.values() for group in _split(same, varying(alike[_name(same[0])]))]


def what_differs(records: Sequence[Record]) -> list[str]:
    """Describe the differences between runs in task, data and budget."""
    names = _by_name(records)
    said = [f"the task is {' or '.join(names)}"] if len(names) > 1 else []
    for name, tasks in names.items():
        of = f" ({name})" if len(names) > 1 else ""
        said += [f"task.{key} is {' or '.join(map(str, found))}{of}" for key, found in varying(tasks).items()]
    budgets: dict[str, list[str]] = {}
    for group in group_runs(records):
        budgets.setdefault(group.title, []).append(group.budget)
    several = {title: found for title, found in budgets.items() if len(found) > 1}
    return said + [f"the budget is {' or '.join(sorted(found))} ({title})" for title, found in several.items()]


def _shown(records: Sequence[Record]) -> list[Record]:
    """Runs that started. For tuned rows, only the chosen ones."""
    begun = [record for record in records if record.history or record.is_finished]
    return sorted((record for record in begun if not record.is_passed_over), key=order)


def _name(record: Record) -> str:
    return str(record.task.get("name", "a task"))


def _by_name(records: Sequence[Record]) -> dict[str, list[Json]]:
    """Settings of tasks by the name of the task, because different tasks have different settings."""
    found: dict[str, list[Json]] = {}
    for record in _shown(records):
        found.setdefault(_name(record), []).append(task_settings(record))
    return found


def _split(records: list[Record], differing: Mapping[str, Any]) -> list[Group]:
    """Split the runs of one task by budget."""
    dense = [record for record in records if record.is_dense]
    by_epochs: dict[int, list[Record]] = {}
    for record in [record for record in records if not record.is_dense and record.is_finished]:
        by_epochs.setdefault(record.epochs, []).append(record)
    budgets = _joined_by_flops(by_epochs)
    unfinished = [record for record in records if not record.is_dense and not record.is_finished]
    if unfinished:  # their length is not known: they are shown with the budget that has most runs
        budgets.setdefault(max(budgets, key=lambda name: len(budgets[name]), default=""), []).extend(unfinished)
    budgets = budgets or {f"{max((record.epochs for record in dense), default=0)} epochs": []}
    title = _title(records[0], differing)
    return [Group(title, budget, tuple(_cells([*dense, *found]))) for budget, found in budgets.items()]


def _joined_by_flops(by_epochs: Mapping[int, list[Record]]) -> dict[str, list[Record]]:
    """Join budgets of different epochs if all their runs have nearly the same training FLOPs."""
    ranges = {epochs: flops for epochs, records in by_epochs.items() if (flops := _flops(records)) is not None}
    joined: list[list[int]] = []
    for epochs in sorted(ranges, key=lambda epochs: ranges[epochs]):
        together = [ranges[other] for other in [*(joined[-1] if joined else ()), epochs]]
        if joined and max(most for _, most in together) <= (1 + SAME_FLOPS) * together[0][0]:
            joined[-1].append(epochs)
        else:
            joined.append([epochs])
    name_of = {epochs: f"{epochs} epochs" for epochs in by_epochs}
    for same in [same for same in joined if len(same) > 1]:
        name_of |= dict.fromkeys(same, f"equal training FLOPs ({min(same)} to {max(same)} epochs)")
    found: dict[str, list[Record]] = {}
    for epochs, records in by_epochs.items():
        found.setdefault(name_of[epochs], []).extend(records)
    return found


def _flops(records: Sequence[Record]) -> tuple[float, float] | None:
    """Smallest and largest training FLOPs of runs. None if any is unknown."""
    flops = [record.figure("training_flops") for record in records]
    return None if None in flops else (min(flops), max(flops))


def _title(record: Record, differing: Mapping[str, Any]) -> str:
    task = task_settings(record)
    title = _name(record) + (f" {task['model']}" if task.get("model") else "")
    title += f" on {task['data']}" if task.get("data") else ""
    more = [f"{name} {task[name]}" for name in differing if name in task and name not in ("name", "model", "data")]
    return ", ".join([title, *more])


def _cells(records: Sequence[Record]) -> list[Cell]:
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault("dense" if record.is_dense else record.method, []).append(record)
    cells: list[Cell] = []
    for method, of_method in by_method.items():
        settings = [variant(record) for record in of_method]
        names = telling(settings)
        found: dict[tuple[float, str], list[Record]] = {}
        for record, setting in zip(of_method, settings, strict=True):
            said = ", ".join(_say(name, setting[name]) for name in names if setting.get(name) is not None)
            found.setdefault((record.sparsity, said), []).append(record)
        for (sparsity, said), same in found.items():
            cells += _by_finish(method, said, sparsity, same)
    return sorted(cells, key=lambda cell: (not cell.is_dense, cell.method, cell.variant, cell.sparsity))


def _by_finish(method: str, variant: str, sparsity: float, same: list[Record]) -> Iterator[Cell]:
    """Separate cells for finished and unfinished runs, because their mean would be meaningless."""
    for is_finished in (True, False):
        records = sorted((r for r in same if r.is_finished is is_finished), key=lambda record: record.seed)
        is_other = not is_finished and len(records) < len(same)
        if records:
            name = ", ".join(filter(None, [variant, "unfinished" if is_other else ""]))
            yield Cell(method, name, sparsity, tuple(records))


def _say(name: str, value: Any) -> str:
    plain = name.removeprefix("options.").removesuffix(".name")
    return str(value) if plain in ("allocation", "pattern", "storage", "method") else f"{plain} {value}"
