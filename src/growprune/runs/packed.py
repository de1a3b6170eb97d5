"""One file with the results of many runs. It stands for their folders, wherever folders of runs are read.

`results.json` has for each folder what its `result.json` had. Values that all runs share are stored once; lists of
entries, such as the history, are stored as columns, and may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from growprune.errors import GrowpruneError
from growprune.files import json_file
from growprune.runs.result import Json

RESULTS = "results.json"
"""Name of the file."""
FORMAT = 1
_NAMES: json_file.Names = {
    "format": int,
    "shared": dict,
    "runs": dict,
    "runs.*": dict,
    "tunings": dict,
    "tunings.*": dict,
}
_LISTS = (("history",), ("sparsity", "rows"))
"""Lists of entries in a result."""
_ENTRY: Json = {"branch": None, "stage": 0, "edits": ""}
"""What an entry of the history is if its columns were left out."""


def read_packed(file: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    """The content of each `result.json` by folder, and of each `tuning.json` by folder."""
    content = json_file.read(file, _NAMES, "restore it from where it came from")
    if content["format"] != FORMAT:
        raise GrowpruneError(f"{file} has format {content['format']}, this version reads {FORMAT}. Upgrade growprune")
    runs = {name: _merged(content["shared"], own) for name, own in content["runs"].items()}
    for run in runs.values():
        run["history"] = [_ENTRY | entry for entry in _entries(run.get("history"))]
        run["sparsity"] = {**run["sparsity"], "rows": _entries(run["sparsity"].get("rows"))}
    return runs, content["tunings"]


def pack(runs: Mapping[str, Json], tunings: Mapping[str, Json]) -> Json:
    """The content of the file, for results by folder whose lists may have been left out."""
    packed = {name: _with_columns(run) for name, run in runs.items()}
    shared = _shared([*packed.values()])
    return {
        "format": FORMAT,
        "shared": shared,
        "runs": {name: _without(run, shared) for name, run in packed.items()},
        "tunings": dict(tunings),
    }


def _with_columns(run: Json) -> Json:
    run = {**run, "history": _columns(run.get("history", []))}
    return run | {"sparsity": {**run["sparsity"], "rows": _columns(run["sparsity"].get("rows", []))}}


def _columns(entries: Sequence[Json]) -> Json:
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: [entry.get(name) for entry in entries] for name in names}


def _entries(columns: Json | None) -> list[Json]:
    """The entries of columns, without the fields that are null."""
    found = columns or {}
    rows = zip(*found.values(), strict=True)
    return [{name: value for name, value in zip(found, row, strict=True) if value is not None} for row in rows]


def _shared(runs: Sequence[Json]) -> Json:
    """The values that all runs have, and of their parts, such as the recipe, the values that all have."""
    found: Json = {}
    for name in [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]:
        values = [run[name] for run in runs]
        if all(value == values[0] for value in values):
            found[name] = values[0]
        elif all(isinstance(value, dict) for value in values):
            names = [key for key in values[0] if all(key in v and v[key] == values[0][key] for v in values)]
            found[name] = {key: values[0][key] for key in names}
    return found


def _without(run: Json, shared: Json) -> Json:
    kept = {name: value for name, value in run.items() if name not in shared}
    for name in [name for name in run if name in shared and run[name] != shared[name]]:
        kept[name] = {key: value for key, value in run[name].items() if key not in shared[name]}
    return kept


def _merged(shared: Json, own: Json) -> Json:
    both = {name: shared[name] | value for name, value in own.items() if name in shared}
    return {**shared, **own, **both}
