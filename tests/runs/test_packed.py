"""One file with the results of many runs, in place of their folders."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from report_runs import finished, write_bare

from growprune.compare import of_runs
from growprune.errors import GrowpruneError
from growprune.runs import find_runs
from growprune.runs.record import RESULTS, read_packed

pack = runpy.run_path(str(ROOT / "experiments" / "run.py"))["pack"]

POINT = {"name": "lr=1", "folder": "lr=1", "status": "finished", "validation": 88.0, "error": ""}
TUNING = {"row": "gmp:global", "sparsity": 0.9, "grid": {"lr": ["1"]}, "size": 1, "seed": 0, "metric": "accuracy"}
TUNING |= {"chosen": "lr=1", "folder": "lr=1", "points": [POINT]}


@pytest.fixture
def contents(tmp_path: Path) -> dict[str, Any]:
    """The results of four runs, whose folders lie in `runs`, by folder."""
    for seed in (0, 1):
        finished(tmp_path / f"runs/dense/0/seed{seed}", "dense", 0.0, seed, 90.0 + seed)
        made = {"options": {"every": 5}, "allocation": "global"}
        finished(tmp_path / f"runs/gmp/0.9/lr=1/seed{seed}", "gmp", 0.9, seed, 88.0 - seed, recipe=made)
    write_bare(tmp_path / "runs/gmp/0.9/tuning.json", TUNING)
    files = sorted((tmp_path / "runs").rglob("result.json"))
    return {file.parent.relative_to(tmp_path / "runs").as_posix(): json.loads(file.read_text()) for file in files}


@pytest.fixture
def packed(contents: dict[str, Any], tmp_path: Path) -> Path:
    write_bare(tmp_path / "packed" / RESULTS, pack(contents, {"gmp/0.9": TUNING}))
    return tmp_path / "packed"


def test_what_was_packed_is_read_again(contents: dict[str, Any], packed: Path) -> None:
    runs, tunings = read_packed(packed / RESULTS)
    assert tunings == {"gmp/0.9": TUNING}
    assert runs == contents
    stored = (packed / RESULTS).read_text()
    assert stored.count('"torch"') == 1  # the environment is that of all runs


def test_tables_of_packed_runs_are_those_of_their_folders(packed: Path, tmp_path: Path) -> None:
    whole, again, file = (of_runs([path], ["tuning"]) for path in (tmp_path / "runs", packed, packed / RESULTS))
    expected = whole.to_markdown()
    assert again.to_markdown() == file.to_markdown() == expected
    assert "lr=1" in expected


def test_results_file_stands_for_folders(packed: Path) -> None:
    assert [run.seed for run in find_runs([packed / "dense"])] == [0, 1]
    (run,) = find_runs([packed / "gmp" / "0.9" / "lr=1" / "seed1"])
    assert (run.status, run.test, run.tuning["chosen"], run.path.name) == ("finished", 87.0, "lr=1", "seed1")
    with pytest.raises(GrowpruneError, match="rigl does not exist"):
        find_runs([packed / "rigl"])


def test_curves_and_layers_may_be_left_out(contents: dict[str, Any], tmp_path: Path) -> None:
    content = contents["dense/0/seed0"]
    content["history"] = [{"epoch": entry["epoch"], "alive": entry["alive"]} for entry in content["history"]]
    content["sparsity"]["rows"] = []
    write_bare(tmp_path / "packed" / RESULTS, pack(contents, {}))
    first, *_ = find_runs([tmp_path / "packed"])
    assert [(entry["epoch"], entry["alive"]) for entry in first.history] == [(1, 1000), (2, 500)]
    assert first.result is not None and first.result.sparsity["rows"] == []


def test_damaged_results_file_is_a_damaged_run(packed: Path) -> None:
    text = (packed / RESULTS).read_text()
    (packed / RESULTS).write_text(text[: len(text) // 2])
    (run,) = find_runs([packed])
    assert run.status == "damaged" and RESULTS in run.why
    (packed / RESULTS).write_text(text.replace('"seconds": 30.0', '"seconds": "long"'))
    assert {run.status for run in find_runs([packed])} == {"damaged"}
    (packed / RESULTS).write_text(text.replace('"format": 1', '"format": 99'))
    assert "99" in find_runs([packed])[0].why
