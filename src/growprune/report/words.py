"""The sentences of the page: what was trained, the results, differences between runs, and commands."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from growprune.report.groups import Group, group_runs, what_differs
from growprune.runs import Record
from growprune.runs.record import in_full
from growprune.runs.table import best_by_validation, version_of


def title(groups: Sequence[Group], records: Sequence[Record]) -> str:
    tasks = list(dict.fromkeys(group.title for group in groups))
    what = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks" if tasks else "nothing to show yet"
    return f"{len(records)} run{'' if len(records) == 1 else 's'}: {what}"


def summary(group: Group) -> list[str]:
    """A few sentences on one group of runs."""
    if not group.finished:
        return [f"No run of {group.title} is finished yet. The data so far is shown below."]
    sentences, what, dense = [f"{group.name}."], group.metric.name + group.metric.direction, group.table.reference
    if dense is not None:
        which = f" ({dense.label})" if sum(row.is_dense for row in group.finished) > 1 else ""
        sentences.append(f"The dense model{which} has {what} {group.table.cells(dense)['test']} on test data.")
    sparse = [row for row in group.finished if not row.is_dense]
    for sparsity in sorted({row.sparsity for row in sparse}):
        rows = [row for row in sparse if row.sparsity == sparsity]
        rows = [row for row in rows if not row.is_off] or rows  # missing the target makes it easier
        best = rows[0] if len(rows) == 1 else best_by_validation(rows)
        if best is not None:
            who = f"{best.name} (the best of {len(rows)} on validation data)" if len(rows) > 1 else best.name
            cells = group.table.cells(best)
            against = f" ({cells['vs dense']} against dense)" if cells["vs dense"] else ""
            score = f"{group.metric.name} {cells['test']}{against}"
            sentences.append(f"At sparsity {in_full(sparsity)}, {who} reaches {score} on test data.")
    return sentences


def notes(records: Sequence[Record]) -> list[str]:
    """Warnings for the reader: differences between runs, and unfinished runs."""
    said = []
    if differ := what_differs(records):
        said.append(
            f"Not all of these runs are comparable: {'; '.join(differ)}. Each group of comparable runs has its own "
            f"charts."
        )
    copies: dict[tuple[str, ...], None] = {}  # runs that look like copies would make a spread too small
    for row in [row for group in group_runs(records) for row in group.rows]:
        by_seed: dict[int, list[str]] = {}
        for run in row.finished:
            by_seed.setdefault(run.seed, []).append(run.name)
        copies |= {tuple(sorted(names)): None for names in by_seed.values() if len(names) > 1}
    said += [
        f"{' and '.join(names)} have the same seed and settings: only the last of them counts." for names in copies
    ]
    counts = Counter(record.status for record in records if not record.is_finished)
    if counts:
        each = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        said.append(f"Not all of these runs are finished ({each}). The table of all runs says why.")
    return said


def compare_command(group: Group) -> str:
    """The one `growprune compare` that makes all runs of a group. Empty if they were not made by one."""
    runs = [run for row in group.rows for run in row.runs]
    epochs = {run.final_epochs for run in runs} - {None}
    given = {"method", "options", "sparsity", "allocation", "parts", "seed"}
    common = []
    for run in [run for run in runs if not run.small]:  # which has a task of its own
        source, data, settings = _said(run)
        common.append((source, data, {k: v for k, v in settings.items() if k.partition(".")[0] not in given}))
    is_one_call = all(run.origin.get("row") and not run.tuning.get("grid") for run in runs)
    if not common or not is_one_call or len(epochs) != 1 or any(each != common[0] for each in common):
        return ""
    source, data, kept = common[0]
    sparsities = sorted({in_full(row.sparsity) for row in group.sparse})
    typed: dict[str, None] = {}  # the rows, where a method of the user is path.py:function
    for run in runs:
        row, method = str(run.origin["row"]), str((run.origin.get("settings") or {}).get("method", ""))
        path, colon, function = method.rpartition(":")
        typed[f"{PurePath(path).name}:{row}" if colon and row.startswith(function) else row] = None
    words = ["growprune", "compare", source, *data, "--methods", ",".join(typed)]
    words += ["--sparsities", ",".join(sparsities)] if sparsities else []
    words += ["--seeds", ",".join(map(str, sorted({run.seed for run in runs}))), "--epochs", f"{epochs.pop():g}"]
    return shlex.join([*words, *(word for key, value in kept.items() for word in ("--set", f"{key}={value}"))])


def _said(record: Record) -> tuple[str, list[str], dict[str, Any]]:
    """What a run was started with, without paths on this machine: the recipe, `--data` and the other settings."""
    source, colon, function = str(record.origin.get("source", "")).rpartition(":")
    settings = dict(record.origin.get("settings") or {})
    data = settings.pop("task.data", None) or record.task.get("data")
    given = ["--data", f"DATA/{PurePath(str(data)).name}"] if data else []
    return f"{PurePath(source).name}:{function}" if colon else function, given, settings


def commands(records: Sequence[Record]) -> str:
    """The commands that reproduce the runs, and the names of runs without a known command."""
    known = [f"# {record.name}\n{command(record)}" for record in records if record.origin.get("source")]
    others = [record.name for record in records if not record.origin.get("source")]
    unknown = f"# started from Python, or without a known command (their recipes are below): {', '.join(others)}"
    return "\n".join([*known, *([unknown] if others else [])])


def command(record: Record) -> str:
    """The command that reproduces a run, without paths on this machine."""
    source, data, settings = _said(record)
    words = ["growprune", "train", source, *(word for key in settings for word in ("--set", f"{key}={settings[key]}"))]
    return shlex.join([*words, *data, "--out", record.name])


def environments(records: Sequence[Record]) -> list[tuple[dict[str, Any], list[str]]]:
    """The machines and versions, each with the names of its runs."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for record in records:
        if environment := record.figure("environment"):
            found.setdefault(json.dumps(environment, sort_keys=True), (environment, []))[1].append(record.name)
    return list(found.values())


def versions(records: Sequence[Record]) -> str:
    """The versions of growprune and torch that made the runs."""
    found = [environment for environment, _ in environments(records)]
    made = " and ".join(sorted({version_of(environment) for environment in found}))
    torch = " and ".join(sorted({str(environment.get("torch") or "unknown") for environment in found}))
    return f"growprune ({made}) and torch {torch}" if found else ""
