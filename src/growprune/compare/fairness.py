"""The rules of a fair comparison: what must be the same in all runs, and who says so if it is not.

A run is known by the description of its recipe, as `result.json` and `recipe.json` have it, so that runs from anywhere
can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from growprune.engine.compatibility import MAY_CHANGE, defaults_of, flat, is_dense, recipe_defaults
from growprune.engine.metric import in_full
from growprune.errors import GrowpruneError, shorten
from growprune.tasks import TASKS

OF_THE_ROW = {"method", "options", "sparsity", "allocation", "scope", "partition", "seed"}
"""Fields of a recipe in which rows, or the runs of one, may differ. The next ones change no figure of the table."""
NO_INFLUENCE = (MAY_CHANGE - {"storage", "task.data", "weights"}) | {"evaluate_every", "candidates", "device", "graph"}
OF_SPARSITY = {"pattern", "keep_dense", "include", "also"}
"""What means nothing to a dense run."""
OLD_PARTITION = {"kappa", "parts"}
"""What the partition was called in results of the first format."""


@dataclass(frozen=True)
class Facts:
    """What fairness knows of a run."""

    name: str
    """For people."""
    seed: int
    fields: dict[str, Any]
    """Settings that must be the same, by dotted names."""
    data: dict[str, Any] = field(default_factory=dict)
    """The fingerprint of its data; empty if there is none."""


def facts_of(
    name: str,
    recipe: Mapping[str, Any],
    *,
    data: Mapping[str, Any] | None = None,
    **more: Any,
) -> Facts:
    """Of a run with this recipe; `more` are other things that must be the same, such as epochs."""
    fields = _defaults(recipe) | flat(dict(recipe))
    skipped = OF_THE_ROW | OLD_PARTITION | NO_INFLUENCE | (OF_SPARSITY if is_dense(recipe) else set())
    kept = {key: value for key, value in fields.items() if not ({key, key.partition(".")[0]} & skipped)}
    if "task.data" in kept:  # it may lie elsewhere on each machine
        kept["task.data"] = PurePath(str(kept["task.data"])).name
    known = {key: value for key, value in more.items() if value is not None}
    return Facts(name, int(recipe.get("seed") or 0), {**kept, **known}, dict(data or {}))


def _defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Of fields that a stored recipe may lack, because they came later: their defaults are what the run did."""
    task = next((kind for kind in TASKS.values() if kind.__name__ == recipe.get("task", {}).get("name")), None)
    found = recipe_defaults() | (dict(defaults_of(task, "task.")) if task else {})
    return {name: value for name, value in found.items() if not ("curve" in recipe and name.startswith("lr_schedule"))}


def check(runs: Sequence[Facts], allowed: Sequence[str] = ()) -> list[str]:
    """Raise unless runs differ only in what is allowed; gives what they differ in, for the table.

    >>> same = {"task": {"name": "Digits"}}
    >>> check([facts_of("a", same, epochs=20), facts_of("b", same, epochs=40)], allowed=["epochs"])
    ['epochs differ: 20 in a; 40 in b']
    """
    found = _differences(runs)
    refused = {name: values for name, values in found.items() if not is_allowed(name, allowed)}
    if refused:
        allow = " ".join(f"--allow {name}" for name in refused)
        raise GrowpruneError(
            f"the runs cannot be compared: {'; '.join(_say(*item) for item in refused.items())}. Make them alike, or "
            f"say {shorten(allow, 200)}, and the table will say so"
        )
    return [_say(*item) for item in found.items()]


def varying(runs: Sequence[Facts], allowed: Sequence[str]) -> list[str]:
    """Of the fields that may differ, those that do."""
    return [name for name in _differences(runs) if is_allowed(name, allowed)]


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """Whether a field, or one that it is in, is among those that may differ."""
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def _differences(runs: Sequence[Facts]) -> dict[str, dict[str, list[str]]]:
    """By field that differs: by value, the runs that have it."""
    found = {}
    names = dict.fromkeys(name for run in runs for name in run.fields)
    if _are_same_data(runs):  # there is something better than a name
        names.pop("task.data", None)
    for name in names:
        values = _by_value([(run.name, run.fields[name]) for run in runs if name in run.fields])
        if len(values) > 1:  # what a run does not say is not held against it
            found[name] = values
    return found | _data_differences(runs)


def _are_same_data(runs: Sequence[Facts]) -> bool:
    """Whether data of different names have runs of a common seed, whose first batches are then compared."""
    seeds: dict[Any, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.fields.get("task.data"), set()).add(run.seed)
    return all(run.data for run in runs) and bool(seeds) and bool(set.intersection(*seeds.values()))


def _data_differences(runs: Sequence[Facts]) -> dict[str, dict[str, list[str]]]:
    """Runs whose tasks are alike must have as many batches, and those of one seed have seen the same first one."""
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
