"""Groups the rows of a page by task, data set and budget, because only those of one group can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growprune.methods import METHODS
from growprune.plan import declaration_of
from growprune.runs import Record
from growprune.runs.comparison import Comparison
from growprune.runs.result import Json, Metric
from growprune.runs.table import RunRow, rows_of, task_settings, varying

SAME_FLOPS = 0.05
"""Largest relative difference of training FLOPs within one budget."""


@dataclass(frozen=True)
class Group:
    """Comparable rows. Dense rows are the baseline in every group of their task and data."""

    title: str
    budget: str
    table: Comparison
    """Runs of a row are either all finished or all unfinished, because a mean of both would be meaningless."""

    @property
    def name(self) -> str:
        return f"{self.title}, {self.budget}".rstrip(", ")

    @property
    def rows(self) -> list[RunRow]:
        return self.table.rows

    @property
    def sparse(self) -> list[RunRow]:
        return [row for row in self.rows if not row.is_dense]

    @property
    def dense(self) -> list[RunRow]:
        return [row for row in self.rows if row.is_dense]

    @property
    def finished(self) -> list[RunRow]:
        return [row for row in self.rows if row.mean("test") is not None]

    @property
    def metric(self) -> Metric:
        return self.table.metric if self.table.metric.name else Metric("metric")


def is_control(row: RunRow) -> bool:
    """True for a method without its growth, which the method declares as a control."""
    method = METHODS.get(str(row.first.recipe.get("method")))
    return method is not None and declaration_of(method).control in (row.first.recipe.get("options") or {})


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
    """Runs that started, and whose recipe is known. For tuned rows, only the chosen ones."""
    begun = [record for record in records if record.recipe and (record.history or record.is_finished)]
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
    task = task_settings(records[0])
    title = _name(records[0]) + (f" {task['model']}" if task.get("model") else "")
    title += f" on {task['data']}" if task.get("data") else ""
    more = [f"{name} {task[name]}" for name in differing if name in task and name not in ("name", "model", "data")]
    title = ", ".join([title, *more])
    return [Group(title, budget, Comparison(_rows([*dense, *found]))) for budget, found in budgets.items()]


def _joined_by_flops(by_epochs: Mapping[int, list[Record]]) -> dict[str, list[Record]]:
    """Join budgets of different epochs if all their runs have nearly the same training FLOPs."""
    flops = {epochs: [record.figure("training_flops") for record in records] for epochs, records in by_epochs.items()}
    known = [epochs for epochs, found in flops.items() if None not in found]
    joined: list[list[int]] = [[]]
    for epochs in sorted(known, key=lambda epochs: (min(flops[epochs]), max(flops[epochs]))):
        together = [count for other in (*joined[-1], epochs) for count in flops[other]]
        if max(together) > (1 + SAME_FLOPS) * min(together):
            joined.append([])
        joined[-1].append(epochs)
    name_of = {epochs: f"{epochs} epochs" for epochs in by_epochs}
    for same in [same for same in joined if len(same) > 1]:
        name_of |= dict.fromkeys(same, f"equal training FLOPs ({min(same)} to {max(same)} epochs)")
    found: dict[str, list[Record]] = {}
    for epochs, records in by_epochs.items():
        found.setdefault(name_of[epochs], []).extend(records)
    return found


def _rows(records: Sequence[Record]) -> list[RunRow]:
    found = []
    for row in rows_of(records):
        finished = tuple(sorted(row.finished, key=lambda run: run.seed))
        others = tuple(run for run in row.runs if not run.is_finished)
        found += [RunRow(row.name, finished)] if finished else []
        found += [RunRow(f"{row.name} unfinished" if finished else row.name, others)] if others else []
    return sorted(found, key=lambda row: (not row.is_dense, row.method, row.name, row.sparsity))
