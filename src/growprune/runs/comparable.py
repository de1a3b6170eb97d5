"""Which runs can be in one table, how they differ, and the names of rows.

Runs are comparable if their task, data, budget and all other settings are the same, except for those of the row (ROW)
and those that do not change results (NO_INFLUENCE). `growprune compare` refuses other runs, unless the difference is
allowed. The page of `growprune report` has separate charts for each task, data set and budget, and names what else
differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from growprune.engine.compatibility import MAY_CHANGE, flat
from growprune.engine.metric import in_full
from growprune.errors import GrowpruneError, shorten
from growprune.runs.record import Json, Record

ROW = {"method", "options", "sparsity", "allocation", "scope", "parts", "seed"}
"""Fields of a recipe that may differ between rows, or between runs of a row. Older runs have a `scope`."""
SPARSE = {"pattern", "keep_dense", "include", "lr_scaling"}
"""Fields without effect on a dense run."""
NO_INFLUENCE = (MAY_CHANGE - {"storage", "task.data", "weights"}) | {
    *("evaluate_every", "candidates", "device", "graph", "task.in_memory", "task.channels_last"),
}
"""Fields that do not change the numbers of a table."""
TOLERANCE = 0.0005
"""Difference from the target sparsity above which tables note it."""


def settings(run: Record) -> Json:
    """Every setting of a run that can change results, by dotted names such as `task.width`."""
    found = _without(flat(run.recipe), NO_INFLUENCE)
    if found.get("task.data"):  # which may lie elsewhere on each machine
        found["task.data"] = PurePath(str(found["task.data"])).name
    # a small model stands for the full one, and is compared with its runs
    return found | {f"task.{name}": value for name, value in run.small.get("of", {}).items()}


def deciding(run: Record) -> Json:
    """The settings that can change the results of this run. For a dense run, without those of masks."""
    return _without(settings(run), SPARSE if run.trains_dense else set())


def _without(fields: Mapping[str, Any], names: set[str]) -> Json:
    """Fields without the given names and their nested fields."""
    return {key: value for key, value in fields.items() if not {key, key.partition(".")[0]} & names}


# What runs of one table have in common


@dataclass(frozen=True)
class Terms:
    """The settings and data that must be the same in all runs of a table."""

    name: str
    """Name of the run, for messages."""
    seed: int
    fields: Json
    """Settings by dotted names."""
    data: Json
    """The fingerprint of its data; empty if there is none."""


def terms_of(run: Record, *, epochs: float | None = None, name: str = "") -> Terms:
    """The terms of a run. Epochs are compared if given."""
    grid = run.tuning.get("grid", {})
    fields = _without(deciding(run), ROW | {*grid})
    more = {"epochs": epochs, "signature": run.figure("signature") or None, "tuning": say_grid(grid) or "none"}
    fields |= {key: value for key, value in more.items() if value is not None}
    name = name or f"{run.row} {in_full(run.sparsity)} seed {run.seed}"
    return Terms(name, run.seed, fields, run.figure("data") or {})


def say_grid(grid: Mapping[str, Sequence[str]]) -> str:
    """The grid as the user typed it.
    >>> say_grid({"optimizer.lr": ["x1", "x2"], "lr_scaling": ["0", "1"]})
    'optimizer.lr=x1,x2 lr_scaling=0,1'
    """
    return " ".join(f"{key}={','.join(values)}" for key, values in grid.items())


def check(terms: Sequence[Terms], allowed: Sequence[str] = ()) -> list[str]:
    """Raise if runs differ in fields that are not allowed. Return the differences, for the table.

    >>> from pathlib import Path
    >>> runs = [terms_of(Record(Path(), row=row), epochs=epochs) for row, epochs in (("a", 20), ("b", 40))]
    >>> check(runs, allowed=["epochs"])
    ['epochs differ: 20 in a 0 seed 0; 40 in b 0 seed 0']
    """
    found = _differences(terms)
    refused = {name: values for name, values in found.items() if not _is_allowed(name, allowed)}
    if refused:
        allow = " ".join(f"--allow {name}" for name in refused)
        raise GrowpruneError(
            f"the runs are not comparable: {'; '.join(_say(*item) for item in refused.items())}. Make them equal, or "
            f"add {shorten(allow, 200)}; the table will then note the difference"
        )
    return [_say(*item) for item in found.items()]


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """True if a field or its parent may differ."""
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def _differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """For each field that differs, the runs by value. A field that a run does not have is not compared."""
    found = {}
    names = dict.fromkeys(name for run in runs for name in run.fields)
    if _are_same_data(runs):  # there is something better than a name
        names.pop("task.data", None)
    for name in names:
        values = _by_value([(run.name, run.fields[name]) for run in runs if name in run.fields])
        if len(values) > 1:
            found[name] = values
    return found | _data_differences(runs)


def _are_same_data(runs: Sequence[Terms]) -> bool:
    """True if runs on all data paths share a seed, so that their first batches can be compared instead of names."""
    seeds: dict[Any, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.fields.get("task.data"), set()).add(run.seed)
    return all(run.data for run in runs) and bool(seeds) and bool(set.intersection(*seeds.values()))


def _data_differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """Differences of data: runs of one task need the same number of batches, and per seed the same first batch."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for run in runs:
        task = {name: value for name, value in run.fields.items() if name.startswith("task.") and name != "task.data"}
        if run.data:
            alike = repr((run.fields.get("accumulate"), task))
            groups.setdefault(f"{alike} {run.seed}", []).append((run.name, run.data))
            groups.setdefault(alike, []).append((run.name, {"num_batches": run.data.get("num_batches")}))
    for group in groups.values():
        if len(values := _by_value(group)) > 1:
            return {"data": values}
    return {}


def _by_value(values: Sequence[tuple[str, Any]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, value in values:
        grouped.setdefault(_text(value), []).append(name)
    return grouped


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return in_full(value) if isinstance(value, float) else str(value)


def _say(name: str, values: Mapping[str, Sequence[str]]) -> str:
    where = (f"{shorten(value, 60)} in {shorten(', '.join(runs), 90)}" for value, runs in values.items())
    return f"{name} differ{'' if name in ('epochs', 'data') else 's'}: {'; '.join(where)}"


# What stands in a table of rows that were tuned


def without_tried(runs: Sequence[Record]) -> list[Record]:
    """Drop the runs of points that were not chosen. A row without a choice keeps one run without a result."""
    kept = []
    undecided: set[Path] = set()
    for run in runs:
        cell = run.folder.parent.parent
        if run.is_passed_over and (run.tuning.get("chosen") is not None or cell in undecided):
            continue
        if run.is_passed_over:
            undecided.add(cell)
        kept.append(replace(run, result=None) if run.is_passed_over else run)
    return kept


# What a row of a table is called


def with_rows(runs: Sequence[Record], allowed: Sequence[str]) -> list[Record]:
    """Set the row name of each run. Runs that differ in an allowed field get rows of their own."""
    terms = [terms_of(run, epochs=run.final_epochs) for run in runs]
    differing = _differences([known for known, run in zip(terms, runs, strict=True) if run.recipe])
    fields = [name for name in differing if name != "data" and _is_allowed(name, allowed)]
    named = []
    for run, known in zip(runs, terms, strict=True):
        options = run.recipe.get("options") or {}
        shown = [name for name in fields if name != "epochs" or _is_plain(options)]
        said = {"epochs": options.get("epochs")} | known.fields  # an unfinished run has them in its recipe only
        extra = (f"{name}={said[name]}" for name in shown if said.get(name) is not None)
        named.append(replace(run, row=" ".join([_row_name(run), *extra])))
    return _cut_apart(named)


def _row_name(run: Record) -> str:
    """Method, allocation and options. The epochs of plain training have a column of their own."""
    if not run.recipe:
        return str(run.path)
    options = run.recipe.get("options") or {}
    hidden = ("epochs", "iterations", "small") if _is_plain(options) else ()
    shown = (f"{key}={value}" for key, value in options.items() if key not in hidden)
    method = run.recipe["method"]
    name = run.method if run.trains_dense else f"{method}:{run.recipe.get('allocation')}"
    return " ".join([name, *shown])


def _is_plain(options: Mapping[str, Any]) -> bool:
    """True if its epochs are those of the whole training."""
    return not {"steps", "finetune"} & options.keys()


def _cut_apart(runs: Sequence[Record]) -> list[Record]:
    """Add the partition to row names where runs of the same name differ in it."""
    by_name: dict[str, list[Mapping[str, str]]] = {}
    for run in runs:
        by_name.setdefault(run.row, []).append(_cut(run))
    named = []
    for run in runs:
        own = _cut(run)
        differing = [name for name in own if len({other[name] for other in by_name[run.row] if name in other}) > 1]
        named.append(replace(run, row=" ".join([run.row, *(f"{name}={own[name]}" for name in differing)])))
    return named


def _cut(run: Record) -> dict[str, str]:
    """The partition of a sparse run, if its recipe has one."""
    if run.trains_dense:
        return {}
    cut = {}
    if parts := run.recipe.get("parts"):
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(parts.get("name"))).lower()
        cut["parts"] = f"{kind}({', '.join(str(value) for key, value in parts.items() if key != 'name')})"
    return cut


# How runs on a page differ


def task_settings(run: Record) -> Json:
    """The settings of a task and its data, without the prefix `task.`."""
    return {name[5:]: value for name, value in settings(run).items() if name.startswith("task.")}


def variant(run: Record) -> Json:
    """Settings in which runs of one method and sparsity can differ, by dotted names. Dense runs: also their epochs."""
    hidden = {"task", "method", "seed", "sparsity", *run.tuning.get("grid", {})}  # tuned settings are shown elsewhere
    found = _without(settings(run), hidden | (ROW | SPARSE if run.trains_dense else set()))
    # the path of initial weights does not matter, and each seed may have its own
    found["weights"] = "pretrained" if found.get("weights") else "new"
    length = {"epochs": run.epochs} if run.is_dense else {}
    return length | {name: value for name, value in found.items() if value != {}}


def varying(found: Sequence[Json]) -> dict[str, list[Any]]:
    """The settings that are not the same everywhere, with their values.

    An option that is not set counts as null; any other field that a run does not have is not compared.
    """
    names = dict.fromkeys(name for each in found for name in each)
    values = {
        name: {json.dumps(each.get(name)) for each in found if name in each or name.startswith("options.")}
        for name in names
    }
    return {name: sorted(map(json.loads, texts), key=str) for name, texts in values.items() if len(texts) > 1}


def telling(found: Sequence[Json]) -> list[str]:
    """A small set of settings that distinguishes all different runs, starting with those that papers name."""
    chosen: list[str] = []
    for name in sorted(varying(found), key=lambda name: not name.startswith(("allocation", "pattern", "options"))):
        if _num_kinds(found, [*chosen, name]) > _num_kinds(found, chosen):
            chosen.append(name)
    return chosen


def _num_kinds(found: Sequence[Json], names: Sequence[str]) -> int:
    return len({json.dumps([each.get(name) for name in names]) for each in found})
