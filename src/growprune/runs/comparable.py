"""Which runs may stand in one table, what varies among them, and what a row is called.

Runs are comparable if their task, data, budget and all other settings are the same, but for those of the row (ROW) and
those that change no figure (NO_INFLUENCE). `growprune compare` refuses other runs, unless what differs is allowed. The
page of `growprune report` gives runs of another task, data or budget charts of their own, and names what else differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from growprune.engine.compatibility import MAY_CHANGE, flat
from growprune.engine.metric import in_full
from growprune.errors import GrowpruneError, shorten
from growprune.runs.record import Json, Record

ROW = {"method", "options", "sparsity", "allocation", "scope", "partition", "seed"}
"""Fields of a recipe in which rows, or the runs of one row, may differ."""
SPARSE = {"pattern", "keep_dense", "include", "lr_scaling"}
"""Fields that mean nothing to a dense run."""
NO_INFLUENCE = (MAY_CHANGE - {"storage", "task.data", "weights"}) | {
    *("evaluate_every", "candidates", "device", "graph", "task.in_memory", "task.channels_last"),
}
"""Fields that change no figure of a table."""
TOLERANCE = 0.0005
"""How far a run may end from its target sparsity before tables say so."""


def settings(run: Record) -> Json:
    """Every setting of a run that can change a figure, by dotted names such as `task.width`."""
    found = _without(flat(run.recipe), NO_INFLUENCE)
    if found.get("task.data"):  # which may lie elsewhere on each machine
        found["task.data"] = PurePath(str(found["task.data"])).name
    return found


def _without(fields: Mapping[str, Any], names: set[str]) -> Json:
    """Fields but for some, and for all that is inside of these."""
    return {key: value for key, value in fields.items() if not {key, key.partition(".")[0]} & names}


# What runs of one table have in common


@dataclass(frozen=True)
class Terms:
    """What must be the same in all runs of a table."""

    name: str
    """Of the run, for people."""
    seed: int
    fields: Json
    """By dotted names."""
    data: Json
    """The fingerprint of its data; empty if there is none."""


def terms_of(run: Record, *, epochs: float | None = None, name: str = "") -> Terms:
    """The terms of a run; epochs count if they are given."""
    fields = _without(settings(run), ROW | (SPARSE if run.is_dense else set()))
    more = {"epochs": epochs, "signature": run.figure("signature") or None}
    fields |= {key: value for key, value in more.items() if value is not None}
    name = name or f"{run.row} {in_full(run.sparsity)} seed {run.seed}"
    return Terms(name, run.seed, fields, run.figure("data") or {})


def check(terms: Sequence[Terms], allowed: Sequence[str] = ()) -> list[str]:
    """Raise unless runs differ only in what is allowed; returns what they differ in, for the table.

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
            f"the runs cannot be compared: {'; '.join(_say(*item) for item in refused.items())}. Make them alike, or "
            f"say {shorten(allow, 200)}, and the table will say so"
        )
    return [_say(*item) for item in found.items()]


def _is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """True if a field, or one that it is in, may differ."""
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def _differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """By field that differs: by value, the runs that have it. A field that a run does not have is not compared."""
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
    """True if data of different names have runs of a common seed, whose first batches are then compared."""
    seeds: dict[Any, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.fields.get("task.data"), set()).add(run.seed)
    return all(run.data for run in runs) and bool(seeds) and bool(set.intersection(*seeds.values()))


def _data_differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """Runs of one task must have equally many batches, and those of one seed the same first batch."""
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


# What a row of a table is called


def with_rows(runs: Sequence[Record], allowed: Sequence[str]) -> list[Record]:
    """The runs with the names of their rows. Runs that differ in what is allowed are rows of their own."""
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
    """Method, allocation and options; the length of a plain training has a column of its own."""
    if not run.recipe:
        return str(run.path)
    options = run.recipe.get("options") or {}
    hidden = ("epochs", "iterations") if _is_plain(options) else ()
    shown = (f"{key}={value}" for key, value in options.items() if key not in hidden)
    method = run.recipe["method"]
    return " ".join([method if run.is_dense else f"{method}:{run.recipe.get('allocation')}", *shown])


def _is_plain(options: Mapping[str, Any]) -> bool:
    """True if its epochs are those of the whole training."""
    return not {"steps", "finetune"} & options.keys()


def _cut_apart(runs: Sequence[Record]) -> list[Record]:
    """Runs of one name with another partition, or another scope of the sparsity, are rows of their own too."""
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
    """The partition and the scope of a sparse run, as far as its recipe has them."""
    if run.is_dense:
        return {}
    cut = {"scope": str(run.recipe["scope"])} if "scope" in run.recipe else {}
    if parts := run.recipe.get("partition"):
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(parts.get("name"))).lower()
        cut["partition"] = f"{kind}({', '.join(str(value) for key, value in parts.items() if key != 'name')})"
    return cut


# What tells runs apart on a page


def task_settings(run: Record) -> Json:
    """What decides a task and its data, without the prefix `task.`."""
    return {name[5:]: value for name, value in settings(run).items() if name.startswith("task.")}


def variant(run: Record) -> Json:
    """What may tell runs of one method and sparsity apart, by dotted names; of dense runs, also their length."""
    found = _without(settings(run), {"task", "method", "seed", "sparsity"} | (ROW | SPARSE if run.is_dense else set()))
    # where weights lie, and that each seed may have its own, tells nothing apart
    found["weights"] = "trained before" if found.get("weights") else "new"
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
    """As few settings as tell all runs apart that differ, those that papers name first."""
    chosen: list[str] = []
    for name in sorted(varying(found), key=lambda name: not name.startswith(("allocation", "pattern", "options"))):
        if _num_kinds(found, [*chosen, name]) > _num_kinds(found, chosen):
            chosen.append(name)
    return chosen


def _num_kinds(found: Sequence[Json], names: Sequence[str]) -> int:
    return len({json.dumps([each.get(name) for name in names]) for each in found})
