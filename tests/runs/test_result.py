"""result.json: one schema for writer and readers, and what tables say of who made the results."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from report_runs import finished, history, recipe, result, write_bare
from toy import cyclic

from growprune import GrowpruneError, engine
from growprune.compare import of_runs
from growprune.runs import Result, read_run
from growprune.runs.result import FORMAT


def strict(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_numbers_that_are_not_finite_are_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    rows = history([1000])
    rows[0] |= {"loss": math.inf, "validation": {"accuracy": math.nan}}
    made = result(recipe("gmp", 0.9, 0), math.nan, rows, best={"stage": 0, "test": {"accuracy": -math.inf}})
    Result.from_dict(made).write(tmp_path / "result.json")
    stored = strict(tmp_path / "result.json")
    assert (stored["format"], stored["test"]) == (FORMAT, {"loss": 0.25, "accuracy": None})
    found = Result.read(tmp_path / "result.json")
    assert math.isnan(found.test["accuracy"]) and found.test["loss"] == 0.25
    assert found.history[0]["loss"] is None and math.isnan(found.history[0]["validation"]["accuracy"])
    assert found.best is not None and math.isnan(found.best["test"]["accuracy"])


def test_a_run_writes_what_the_schema_says_and_reading_it_gives_the_same(tmp_path: Path) -> None:
    returned = engine.train(cyclic(), tmp_path)
    assert strict(tmp_path / "result.json") == json.loads(json.dumps(returned))
    assert Result.read(tmp_path / "result.json").to_dict() == returned


def test_results_of_before_are_read_and_those_of_a_newer_version_refused(tmp_path: Path) -> None:
    old = ROOT / "experiments" / "translation-multi30k" / "dense" / "seed0" / "result.json"
    if old.exists():
        assert "format" not in json.loads(old.read_text()) and read_run(old).is_finished
    path = write_bare(tmp_path / "result.json", result(recipe("gmp", 0.9, 0), 90.0, history([1000]), format=FORMAT + 1))
    with pytest.raises(GrowpruneError, match=rf"format {FORMAT + 1}, this version reads {FORMAT}"):
        Result.read(path)


def made_by(folder: Path, seed: int, **environment: str) -> None:
    base = {"growprune": "0.1.0", "device": "cpu"}
    finished(folder / str(seed), "gmp", 0.9, seed, 90.0, environment={**base, **environment})


@pytest.mark.parametrize(
    "environments, note",
    [
        ([{"commit": "abc"}, {"commit": "abc"}], None),
        ([{"commit": "abc"}, {"commit": "def"}], "different versions of growprune: commit abc (1 run); commit def"),
        ([{"commit": "abc-dirty", "source": "12"}] * 2, None),
        ([{"commit": "", "source": "12"}, {"commit": "", "source": "34"}], "source 12 (1 run); source 34 (1 run)"),
        ([{"commit": "abc-dirty"}] * 2, "commit abc-dirty with local changes that are unknown (2 runs)"),
        ([{"commit": ""}] * 2, "made by growprune: commit unknown (2 runs)"),
    ],
)
def test_a_table_says_which_versions_made_its_runs_unless_it_is_one_that_is_known(
    environments: list[dict[str, str]], note: str | None, tmp_path: Path
) -> None:
    for seed, environment in enumerate(environments):
        made_by(tmp_path, seed, **environment)
    notes = [text for text in of_runs([tmp_path]).notes if "made by" in text]
    assert notes == [] if note is None else note in notes[0]


def test_a_table_says_if_the_users_own_code_differs(tmp_path: Path) -> None:
    for seed, digest in enumerate(("aa", "aa", "bb")):
        origin = {"source": "own.py:recipe", "files": {"own.py": digest, "same.py": "cc"}}
        write_bare(
            tmp_path / str(seed) / "result.json", result(recipe("gmp", 0.9, seed), 90.0, history([1000]), origin=origin)
        )
    assert "own.py is not the same in all runs" in of_runs([tmp_path]).notes
    assert not [note for note in of_runs([tmp_path]).notes if "same.py" in note]
