"""Finds run folders and results, and checks their content. A damaged run becomes a record that says why."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from growprune.engine.folder import RESULT, RunFolder
from growprune.errors import GrowpruneError
from growprune.files import json_file
from growprune.files.json_file import NUMBER
from growprune.runs.record import TUNING, Record

_RESULT: json_file.Names = {
    **{"recipe.task.name": str, "recipe.method": str, "recipe.sparsity": NUMBER, "recipe.options": dict},
    **{"recipe.seed": int, "recipe.accumulate?": int, "seed": int, "metric": str, "lower_is_better": bool},
    **{"environment": dict, "origin": dict, "origin.source?": str, "origin.settings?": dict},
    **{"data?": dict, "data?.num_batches": int, "validation": dict, "validation.*": NUMBER},
    **{"history": list, "history.*.loss?": NUMBER, "history.*.iteration?": int, "history.*.validation?": dict},
    **{"sparsity.rows": list, "sparsity.rows.*.name": str, "sparsity.rows.*.size": int},
    **{"sparsity.rows.*.target?": NUMBER, "sparsity.rows.*.sparsity": NUMBER, "sparsity.totals.sparsity": NUMBER},
    **{"sparsity.totals.flops_dense?": int, "sparsity.totals.flops_sparse?": int},
    **{"peak_bytes": int, "seconds": NUMBER, "training_iterations?": int, "training_examples?": int},
    **{"training_flops?": NUMBER, "peak_alive?": int, "average_alive?": NUMBER},
}
"""Fields of a result that tables and pages need, in addition to those of the engine."""
_TUNING: json_file.Names = {
    **{"row": str, "sparsity": NUMBER, "grid": dict, "grid.*": list, "size": int, "seed": int, "metric": str},
    **{"chosen?": str, "folder?": str, "points": list, "points.*.name": str, "points.*.folder": str},
    **{"points.*.status": str, "points.*.validation?": NUMBER, "points.*.error": str},
}
"""Required fields of tuning.json."""


def find_runs(paths: Sequence[Path]) -> list[Record]:
    """Find every run at or below some paths, each once, in this order.

    A path is a run folder, a folder of runs, or a result.json. A folder without runs counts as a run that has not
    started.
    """
    places: dict[Path, Path] = {}
    for place in (place for path in paths for place in _places(Path(path))):
        places.setdefault(place.resolve(), place)
    return [read_run(place, name) for place, name in zip(places.values(), _names([*places]), strict=True)]


def _places(given: Path) -> Iterator[Path]:
    if not given.exists():
        raise GrowpruneError(f"{given} does not exist. Give run folders, folders of runs, or result.json files")
    if given.is_file():
        yield given.parent if given.name == "result.json" else given  # the folder has more to show
        return
    is_empty = True
    for folder, subfolders, files in os.walk(given):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if "result.json" in files or "recipe.json" in files:
            is_empty = False
            subfolders.clear()  # what lies in a run belongs to it, such as its earlier results
            yield Path(folder)
    if is_empty:
        yield given


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest paths that distinguish the runs."""
    folders = [place.parent if place.is_file() else place for place in places]
    if len(set(folders)) < len(folders):  # several files of a folder
        folders = list(places)
    common = Path(os.path.commonpath(folders)) if len(folders) > 1 else Path(*folders).parent
    return [folder.relative_to(common).as_posix() for folder in folders]


def read_run(place: Path, name: str = "") -> Record:
    """Read a run from its folder, or from a result file."""
    try:
        return _read(place, name)
    except (GrowpruneError, OSError) as error:
        return Record(place, name, damage=" ".join(str(error).split()))


def _read(place: Path, name: str) -> Record:
    folder = RunFolder(place)
    file = place if place.is_file() else folder.result
    remedy = "remove it and resume the run to write it again, or leave it out"
    result = json_file.read(file, {**_RESULT, **RESULT}, remedy) if file.exists() else None
    origin = folder.read_origin() if folder.recipe.exists() else {}
    tuning = _read_tuning(file.parent)
    if result is not None:
        return Record(place, name, result["recipe"], origin or result["origin"], result, tuning=tuning)
    recipe = folder.read_recipe()["recipe"] if folder.recipe.exists() else {}
    return Record(place, name, recipe, origin, tuning=tuning)


def _read_tuning(folder: Path) -> dict[str, Any]:
    """Read tuning.json of the row of a run, if the run is a point of a grid."""
    file = folder.parent.parent / TUNING
    if not file.exists():
        return {}
    return json_file.read(file, _TUNING, "remove it and run growprune compare again to write it again")
