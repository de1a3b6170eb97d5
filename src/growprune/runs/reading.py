"""Finds run folders and results, and checks their content. A damaged run becomes a record that says why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from growprune.errors import GrowpruneError
from growprune.files import json_file
from growprune.files.json_file import NUMBER
from growprune.runs.packed import RESULTS, read_packed
from growprune.runs.record import TUNING, Record
from growprune.runs.result import NAMES, Json, Result

FORMAT = 4
"""Format version of run folders. A run of another format is refused."""
OWN = ("recipe", "format", "inode", "job")
"""Keys of recipe.json that are not part of the origin."""
_RECIPE: json_file.Names = {
    **{"recipe.task.name": str, "recipe.method": str, "recipe.sparsity": NUMBER, "recipe.options?": dict},
    **{"recipe.seed?": int, "recipe.accumulate?": int, "format?": int, "inode?": int, "job?": str},
    **{"source?": str, "settings?": dict, "settings?.*": str, "row?": str, "files?": dict, "files?.*": str},
}
_TUNING: json_file.Names = {
    **{"row": str, "sparsity": NUMBER, "grid": dict, "grid.*": list, "size": int, "seed": int, "metric": str},
    **{"chosen?": str, "folder?": str, "points": list, "points.*.name": str, "points.*.folder": str},
    **{"points.*.status": str, "points.*.validation?": NUMBER, "points.*.error": str},
}
"""Required fields of tuning.json."""


def find_runs(paths: Sequence[Path]) -> list[Record]:
    """Find every run at or below some paths, each once, in this order.

    A path is a run folder, a folder of runs, a result.json, or a folder that a results file stands for (packed.py). A
    folder without runs counts as a run that has not started.
    """
    found: dict[Path, Record] = {}
    for record in (record for path in paths for record in _records(Path(path))):
        found.setdefault(record.path.resolve(), record)
    names = _names([*(record.path for record in found.values())])
    return [replace(record, name=name) for record, name in zip(found.values(), names, strict=True)]


def _records(given: Path) -> Iterator[Record]:
    if not given.exists():
        study = next((folder for folder in given.parents if (folder / RESULTS).is_file()), None)
        records = [] if study is None else _packed(study, given)
        if not records:
            raise GrowpruneError(f"{given} does not exist. Give run folders, folders of runs, or result.json files")
        yield from records
        return
    if given.is_file() and given.name != RESULTS:
        yield read_run(given.parent if given.name == "result.json" else given)  # the folder has more to show
        return
    is_empty = True
    for folder, subfolders, files in os.walk(given.parent if given.is_file() else given):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if "result.json" in files or "recipe.json" in files:
            is_empty = False
            subfolders.clear()  # what lies in a run belongs to it, such as its earlier results
            yield read_run(Path(folder))
        elif RESULTS in files:
            is_empty = False
            yield from _packed(Path(folder), Path(folder))
    if is_empty:
        yield read_run(given)


def _packed(folder: Path, below: Path) -> list[Record]:
    """The runs at or below a path, from the results file of a folder."""
    try:
        runs, tunings = read_packed(folder / RESULTS)
    except (GrowpruneError, OSError) as error:
        return [Record(folder / RESULTS, damage=" ".join(str(error).split()))]
    records = []
    for name, content in runs.items():
        place = folder / name
        if below in (place, *place.parents) and not (place / "result.json").exists():
            tuning = tunings.get(Path(name).parent.parent.as_posix(), {})
            if wrong := json_file.fault(content, NAMES):
                records.append(Record(place, damage=f"{folder / RESULTS} is damaged ({wrong} in {name})"))
            else:
                result = Result.from_dict(content)
                records.append(Record(place, "", result.recipe, result.origin, result, tuning=tuning))
    return records


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest paths that distinguish the runs."""
    folders = [place.parent if place.is_file() else place for place in places]
    if len(set(folders)) < len(folders):  # several files of a folder
        folders = list(places)
    common = Path(os.path.commonpath(folders)) if len(folders) > 1 else Path(*folders).parent
    return [folder.relative_to(common).as_posix() for folder in folders]


def read_recipe(folder: Path) -> Json:
    """Read recipe.json. Raise GrowpruneError if the folder has no run, or one of another format."""
    file = folder / "recipe.json"
    try:
        content = json_file.read(file, _RECIPE, "restore a copy of it, or start a new run elsewhere")
    except OSError as error:
        raise GrowpruneError(
            f"{folder} is no run folder: cannot read {file.name} ({error.strerror or error}). Give the folder that "
            f"was --out of `growprune train`"
        ) from error
    if (found := content.get("format") or 1) != FORMAT:
        age, remedy = ("a newer", "upgrade growprune") if found > FORMAT else ("an older", "start a new run")
        raise GrowpruneError(
            f"{folder} was started by {age} growprune: it has format {found}, this version reads {FORMAT}. Use that "
            f"version, or {remedy}"
        )
    return content


def origin_of(content: Json) -> Json:
    """How to find the recipe again, from the content of recipe.json."""
    return {name: value for name, value in content.items() if name not in OWN}


def read_run(place: Path, name: str = "") -> Record:
    """Read a run from its folder, or from a result file. A damaged run becomes a record that says why."""
    file = place if place.is_file() else place / "result.json"
    try:
        stored = read_recipe(place) if (place / "recipe.json").exists() else {"recipe": {}}
        tuning = _read_tuning(file.parent)
        if not file.exists():
            return Record(place, name, stored["recipe"], origin_of(stored), tuning=tuning)
        result = Result.read(file)
        return Record(place, name, result.recipe, origin_of(stored) or result.origin, result, tuning=tuning)
    except (GrowpruneError, OSError) as error:
        return Record(place, name, damage=" ".join(str(error).split()))


def _read_tuning(folder: Path) -> Json:
    """Read tuning.json of the row of a run, if the run is a point of a grid."""
    file = folder.parent.parent / TUNING
    if not file.exists():
        return {}
    return json_file.read(file, _TUNING, "remove it and run growprune compare again to write it again")
