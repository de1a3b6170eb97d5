"""The sentences of the page: what was trained, the results, differences between runs, and commands."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from growprune.methods import METHODS
from growprune.report.groups import Cell, Group, best_by_validation, group_runs, what_differs
from growprune.report.tables import duration, spread
from growprune.runs import Record
from growprune.runs.metric import decimals, in_full

MEANINGS = {
    "sparsity": "the fraction of weights that are exactly zero; at 0.9, one weight in ten is left",
    "density": "the fraction of weights that are left: 1 - sparsity",
    "live weight": "a weight that is trained and can be non-zero",
    "prunable weights": "weights that can be removed: those of convolutions and matrix products, not norms and biases",
    "part": "a subset of the layers; methods such as GaP train one part dense at a time",
    "epoch": "one pass over the training data",
    "validation and test data": "data not used for training; validation data selects a model, test data measures it",
}


def title(groups: Sequence[Group], records: Sequence[Record]) -> str:
    tasks = list(dict.fromkeys(group.title for group in groups))
    what = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks" if tasks else "nothing to show yet"
    return f"{_count(len(records), 'run')}: {what}"


def summary(group: Group) -> list[str]:
    """A few sentences on one group of runs."""
    finished = [cell for cell in group.cells if cell.quality is not None]
    if not finished:
        return [f"No run of {group.title} is finished yet. The data so far is shown below."]
    return [_trained(group), *_how_good(group, finished), _how_long(finished)]


def _trained(group: Group) -> str:
    cells = group.sparse or group.dense
    names = list(dict.fromkeys(cell.method for cell in cells))
    said = " and ".join(map(in_full, sorted({cell.sparsity for cell in cells})))
    runs = sum(len(cell.records) for cell in group.cells)
    what = f"{_count(runs, 'run')} of {group.title}, {group.budget}".rstrip(", ")
    these = "This is" if runs == 1 else "These are"
    if not group.sparse:
        return f"{these} {what}: a dense model without pruning."
    if len(names) > 1:
        return f"{these} {what}: {len(names)} methods, at sparsity {said} (the fraction of weights removed)."
    about = (METHODS[names[0]].__doc__ or "").strip().splitlines()[0] if names[0] in METHODS else ""
    return f"{these} {what}: the method {names[0]} at sparsity {said}. {about}".strip()


def _how_good(group: Group, finished: Sequence[Cell]) -> list[str]:
    sentences, what = [], group.metric.name + group.metric.direction
    dense = group.reference
    if dense is not None:
        which = f" ({dense.label})" if sum(cell.is_dense for cell in finished) > 1 else ""
        sentences.append(f"The dense model{which} has {what} {spread(dense)} on test data.")
    sparse = [cell for cell in finished if not cell.is_dense]
    for sparsity in sorted({cell.sparsity for cell in sparse}):
        cells = [cell for cell in sparse if cell.sparsity == sparsity]
        cells = [cell for cell in cells if not cell.is_off] or cells  # missing the target makes it easier
        best = cells[0] if len(cells) == 1 else best_by_validation(cells, group.metric)
        if best is None:
            continue
        who = f"{best.series} (the best of {len(cells)} on validation data)" if len(cells) > 1 else best.series
        score = f"{group.metric.name} {spread(best)}"
        text = f"At sparsity {in_full(sparsity)}, {who} reaches {score} on test data"
        sentences.append(text + (f", {_gap(best, dense)}." if dense is not None else "."))
    return sentences


def _gap(cell: Cell, dense: Cell) -> str:
    gap = (cell.quality or 0.0) - (dense.quality or 0.0)
    places = decimals(dense.quality)
    if math.isnan(gap):
        return "which cannot be compared with dense"
    if abs(gap) < 0.5 * 10**-places:
        return "as good as dense"
    return f"{abs(gap):.{places}f} {'above' if gap > 0 else 'below'} dense"


def _how_long(cells: Sequence[Cell]) -> str:
    results = [record.result for cell in cells for record in cell.records if record.result is not None]
    seconds = [result.seconds for result in results]
    devices = sorted({str(result.environment.get("device") or "") for result in results} - {""})
    where = f" on {' and '.join(devices)}" if devices else ""
    if len(seconds) == 1:
        return f"The run took {duration(seconds[0])}{where}."
    return f"A run took between {duration(min(seconds))} and {duration(max(seconds))}{where}."


def notes(records: Sequence[Record]) -> list[str]:
    """Warnings for the reader: differences between runs, and unfinished runs."""
    said = []
    if differ := what_differs(records):
        said.append(
            f"Not all of these runs are comparable: {'; '.join(differ)}. Each group of comparable runs has its own "
            f"charts."
        )
    said += _twice(records)
    counts = Counter(record.status for record in records if not record.is_finished)
    if counts:
        each = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        said.append(f"Not all of these runs are finished ({each}). The table of all runs says why.")
    return said


def _twice(records: Sequence[Record]) -> list[str]:
    """Warn about runs that look like copies of each other, which would make a spread too small."""
    found: dict[tuple[str, ...], None] = {}
    for cell in [cell for group in group_runs(records) for cell in group.cells]:
        by_seed: dict[int, list[str]] = {}
        for record in [record for record in cell.records if record.is_finished]:
            by_seed.setdefault(record.seed, []).append(record.name)
        found |= {tuple(sorted(names)): None for names in by_seed.values() if len(names) > 1}
    return [
        f"{' and '.join(names)} have the same seed and settings, but count as different seeds here." for names in found
    ]


def commands(records: Sequence[Record]) -> str:
    """The commands that reproduce the runs, and the names of runs without a known command."""
    known = [f"# {record.name}\n{command(record)}" for record in records if record.origin.get("source")]
    others = [record.name for record in records if not record.origin.get("source")]
    unknown = f"# started from Python, or without a known command (their recipes are below): {', '.join(others)}"
    return "\n".join([*known, *([unknown] if others else [])])


def command(record: Record) -> str:
    """The command that reproduces a run, without paths on this machine."""
    source, colon, function = str(record.origin["source"]).rpartition(":")
    name = f"{PurePath(source).name}:{function}" if colon else function
    settings = dict(record.origin.get("settings") or {})
    data = settings.pop("task.data", None) or record.task.get("data")
    words = ["growprune", "train", name, *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))]
    words += [] if not data else ["--data", f"DATA/{PurePath(str(data)).name}"]
    return shlex.join([*words, "--out", record.name])


def environments(records: Sequence[Record]) -> list[tuple[dict[str, Any], list[str]]]:
    """The machines and versions, each with the names of its runs."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for record in records:
        if environment := record.figure("environment"):
            found.setdefault(json.dumps(environment, sort_keys=True), (environment, []))[1].append(record.name)
    return list(found.values())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
