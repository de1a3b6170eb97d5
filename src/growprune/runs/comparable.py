"""Which runs can be in one table, and how they differ.

Runs are comparable if their task, data, budget and all other settings are the same, except for those of the row (ROW)
and those that do not change results (NO_INFLUENCE). `growprune compare` refuses other runs, unless the difference is
allowed. The page of `growprune report` has separate charts for each task, data set and budget, and names what else
differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from growprune.errors import GrowpruneError, shorten
from growprune.runs.metric import in_full
from growprune.runs.record import Record
from growprune.runs.result import Json

ROW = {"method", "options", "sparsity", "allocation", "scope", "parts", "seed"}
"""Fields of a recipe that may differ between rows, or between runs of a row. Older runs have a `scope`."""
MAY_CHANGE = {
    *("task.data", "task.workers", "weights", "storage", "checkpoint_seconds", "exploration", "claim", "log"),
    *("replicas", "shard", "timeout_seconds"),
}
"""Fields that may be other when a run is resumed: they do not change results, or, as for the places of data and
weights, what lies there is checked itself."""
SPARSE = {"pattern", "keep_dense", "include", "lr_scaling", "lr_ramp", "cost_power", "rescale"}
"""Fields without effect on a dense run."""
NO_INFLUENCE = (MAY_CHANGE - {"storage", "task.data", "weights"}) | {
    *("evaluate_every", "candidates", "device", "graph", "task.in_memory", "task.channels_last"),
}
"""Fields that do not change the numbers of a table."""


def flat(content: Any, prefix: str = "") -> Json:
    """Flatten nested dicts: {"task": {"width": 3}} -> {"task.width": 3}"""
    if not isinstance(content, dict) or not content:
        return {prefix.removesuffix("."): content}
    return {name: value for key, inside in content.items() for name, value in flat(inside, f"{prefix}{key}.").items()}


def settings(run: Record) -> Json:
    """Every setting of a run that can change results, by dotted names such as `task.width`."""
    found = _without(flat(run.recipe), NO_INFLUENCE)
    for name in ("task.data", "weights"):  # which may lie elsewhere on each machine
        if found.get(name):
            found[name] = PurePath(str(found[name])).name
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


def terms_of(run: Record, name: str, *, epochs: float | None = None) -> Terms:
    """The terms of a run, which messages call `name`. Epochs are compared if given."""
    grid = run.tuning.get("grid", {})
    fields = _without(deciding(run), ROW | {*grid})
    more = {"epochs": epochs, "signature": run.figure("signature") or None, "tuning": say_grid(grid) or "none"}
    fields |= {key: value for key, value in more.items() if value is not None}
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
    >>> check([terms_of(Record(Path()), name, epochs=epochs) for name, epochs in (("a", 20), ("b", 40))], ["epochs"])
    ['epochs differ: 20 in a; 40 in b']
    """
    found = _differences(terms)
    refused = {name: values for name, values in found.items() if not is_allowed(name, allowed)}
    if refused:
        allow = " ".join(f"--allow {name}" for name in refused)
        raise GrowpruneError(
            f"the runs are not comparable: {'; '.join(_say(*item) for item in refused.items())}. Make them equal, or "
            f"add {shorten(allow, 200)}; the table will then note the difference"
        )
    return [_say(*item) for item in found.items()]


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
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


# How runs on a page differ


def task_settings(run: Record) -> Json:
    """The settings of a task and its data, without the prefix `task.`."""
    return {name[5:]: value for name, value in settings(run).items() if name.startswith("task.")}


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
