"""Tables that come from stored runs of the laptop suite, and the suite itself."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from growprune import engine
from growprune.errors import GrowpruneError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("defaults")


def test_the_tables_of_the_second_edition_are_those_of_the_stored_runs(defaults: Any) -> None:
    assert defaults.PAGE.read_text() == defaults.page(), "run python experiments/defaults.py --write"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("suite")


def a_run(suite: Any, row: str = "gradual_gap", seed: int = 0) -> Any:
    return suite.all_runs(["digits-90"], [row], [seed])[0]


def test_a_row_has_the_settings_that_were_best_in_validation(suite: Any) -> None:
    cells = {cell.name: cell for cell in suite.CELLS}
    rows = {row.name: row for row in cells["cifar10-90"].rows}
    assert suite.tuned(cells["cifar10-90"], rows["gmp"]).settings == {"optimizer.lr": "0.4"}  # 72.9; 0.8 has 72.0
    assert suite.tuned(cells["cifar10-90"], rows["gmp"]).at_edge == []
    at_edge = suite.Tuned({"optimizer.lr": "0.8"}, {"optimizer.lr": ["0.1", "0.4", "0.8"]}).at_edge
    assert at_edge == ["optimizer.lr"]
    small = suite.tuned(cells["cifar10-90"], rows["small dense, equal operations"])
    assert small.settings == {"optimizer.lr": "0.4"}  # of the model with 0.39 of the operations, not of that with 0.1
    assert suite.tuned(cells["digits-90"], rows["gmp"]) is None


def test_a_run_is_missing_unless_there_is_a_result_of_the_same_settings(suite: Any) -> None:
    runs = suite.all_runs(["digits-90"], ["gmp"])
    line = {"asked": runs[1].asked, "seed": 1}
    assert suite.missing(runs, [line]) == [runs[0], *runs[2:]]
    assert suite.missing(runs, [{**line, "asked": {**runs[1].asked, "epochs": 5}}]) == runs


def test_a_stopped_run_is_resumed_and_its_command_gives_the_same_numbers(suite: Any, tmp_path: Path) -> None:
    run = a_run(suite)
    job = run.job(Path(), tmp_path / "runs")
    job.write_recipe()
    countdown = iter([False] * 30)
    with pytest.raises(engine.Interrupted):
        engine.resume(job.recipe, job.folder, should_stop=lambda: next(countdown, True))
    assert suite.train(run, Path(), tmp_path / "runs", tmp_path / "results.jsonl")
    line = suite.read_lines(tmp_path / "results.jsonl")[0]
    assert (line["status"], line["row"], line["asked"]) == ("finished", "gradual_gap", run.asked)
    assert line["peak"] == pytest.approx(0.6, abs=0.01)
    assert 0.2 < line["grown"] < 0.8

    words = [sys.executable, "-m", *shlex.split(line["command"]), "--out", str(tmp_path / "again")]
    subprocess.run(words, check=True, capture_output=True)
    again = json.loads((tmp_path / "again/result.json").read_text())
    assert (again["test"], again["validation"]) == (line["test"], line["validation"])
    assert suite.missing([run], [line]) == []


def test_data_that_is_missing_is_named(suite: Any, tmp_path: Path) -> None:
    runs = suite.all_runs(["shakespeare-90", "multi30k-80"])
    (tmp_path / "multi30k").mkdir()
    with pytest.raises(GrowpruneError, match=r"has no tinyshakespeare/input\.txt\."):
        suite.check_data(runs, tmp_path)
    with pytest.raises(GrowpruneError, match="--data"):
        suite.check_data(runs, None)
    assert suite.check_data(suite.all_runs(["digits-90"]), None) == Path()


# Pages


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("suite_pages")


def lines_of(suite: Any, cell: str, row: str, scores: list[float], **figures: Any) -> list[dict[str, Any]]:
    """Results of a row, a seed each."""
    found = []
    for seed, score in enumerate(scores):
        run = suite.all_runs([cell], [row], [seed])[0]
        line = {"cell": cell, "row": row, "seed": seed, "asked": run.asked, "cpu_seconds": 36.0, "status": "finished"}
        line |= {"validation": {run.cell.metric: score}, "test": {run.cell.metric: score + 1}}
        line |= {"data": {"first_batch": str(seed)}, "commit": "abc", "torch": "2.0", "machine": "a CPU"}
        line |= {"operations": 0.3, "reached": 0.9, "peak": 0.6, "average": 0.3, "grown": 0.5, **figures}
        found.append(line)
    return found


def find(suite: Any, pages: Any, cell: str, lines: list[dict[str, Any]]) -> Any:
    return pages.find(next(each for each in suite.CELLS if each.name == cell), lines)


def test_pages_of_the_suite_are_those_of_the_stored_results(pages: Any) -> None:
    for path, text in pages.files().items():
        assert path.read_text() == text, "run python experiments/suite_pages.py --write"


def test_rows_are_compared_seed_by_seed_above_zero_where_ours_is_better(suite: Any, pages: Any) -> None:
    ours = lines_of(suite, "shakespeare-90", "gradual_gap", [2.0, 2.1])
    theirs = lines_of(suite, "shakespeare-90", "gmp", [2.1, 2.4, 9.0])  # less is better
    rows = find(suite, pages, "shakespeare-90", [*theirs, *ours])
    table = [line.split(" | ") for line in pages.table(rows).splitlines()]
    assert table[2][:3] == ["| gradual_gap", "3.050 ± 0.050", ""]
    assert table[3][2] == "+0.200 ± 0.100"
    assert table[3][-1] == "3, 2 failed |"
    assert pages.ahead(*find(suite, pages, "cifar10-90", cifar(suite)), pages.METRICS["top1"]) == [1.0]


def cifar(suite: Any) -> list[dict[str, Any]]:
    return [*lines_of(suite, "cifar10-90", "gradual_gap", [70]), *lines_of(suite, "cifar10-90", "gmp", [69])]


def test_a_seed_that_broke_off_or_is_far_behind_has_failed(suite: Any, pages: Any) -> None:
    lines = lines_of(suite, "cifar10-90", "gmp", [70, 67, 65])
    lines.append({**lines[0], "seed": 3, "status": "failed", "why": "the loss is nan"})
    assert find(suite, pages, "cifar10-90", lines)[0].failed == [2, 3]


def test_runs_of_other_settings_or_data_are_refused_by_name(suite: Any, pages: Any) -> None:
    lines = [*lines_of(suite, "cifar10-90", "gradual_gap", [70]), *lines_of(suite, "cifar10-90", "gmp", [69])]
    other = {**lines[1], "asked": {**lines[1]["asked"], "epochs": 77}}
    with pytest.raises(GrowpruneError, match="gmp, seed 0 has epochs 77 instead of"):
        find(suite, pages, "cifar10-90", [lines[0], other])
    other = {**lines[1], "data": {"first_batch": "else"}}
    with pytest.raises(GrowpruneError, match="gmp and gradual_gap have other data with seed 0"):
        find(suite, pages, "cifar10-90", [lines[0], other])


def test_different_commits_and_missing_seeds_are_named(suite: Any, pages: Any) -> None:
    lines = lines_of(suite, "shakespeare-90", "gradual_gap", [70, 71])
    lines += lines_of(suite, "shakespeare-90", "static random", [69], commit="def")
    tuned, fewer, commits = pages.notes(find(suite, pages, "shakespeare-90", lines))
    assert tuned == "Tuned: all rows."
    assert fewer == "Fewer seeds than 2: static random."
    assert commits == "Commits: abc (2 runs), def (1 runs)."
