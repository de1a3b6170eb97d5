"""`growprune compare` as a person types it: what it runs, resumes, keeps and shows."""

import contextlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from paths import ROOT
from paths import TOY as TOY_FILE
from typer.testing import CliRunner

from growprune import engine
from growprune.cli import app
from growprune.compare import Request, of_runs
from growprune.compare.jobs import Job, Working, last_words
from growprune.runs import comparison
from growprune.runs.table import TOLERANCE

TOY = f"{TOY_FILE}:cyclic"
BROKEN = "rigl optimizer.lr=1e30,static_random"
ROWS = "dense,rigl,cyclic_gap:global restart=false"


def request(out: Path, methods: str = ROWS, seeds: str = "0,1", **more: Any) -> Request:
    return Request.parse([TOY], methods, "0.8", seeds, out=out, **{"epochs": 6, **more})


def typed(out: Path, *more: str, methods: str = ROWS, seeds: str = "0,1") -> list[str]:
    settings = ["--methods", methods, "--sparsities", "0.8", "--seeds", seeds, "--epochs", "6", "--out", str(out)]
    return ["compare", TOY, *settings, *more]


def here(job: Job) -> dict[str, Any]:
    """Carry a job out in this process, which has torch already."""
    return engine.train(job.recipe, job.folder, origin={"source": job.source, "settings": job.settings})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison whose runs are all done."""
    out = tmp_path_factory.mktemp("comparison")
    for job in request(out).jobs():
        here(job)
    return out


def test_when_all_runs_are_there_the_command_shows_the_table_and_runs_nothing(finished: Path) -> None:
    done = CliRunner().invoke(app, typed(finished), env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "6 of 6 runs are finished already" in done.stderr
    assert "started" not in done.stderr
    for text in (
        "test accuracy",
        "at sparsity 0.8, 6 epochs",
        "rigl:erk",
        "cyclic_gap:global restart=false",
        "budget: 6 epochs",
        "best baseline",
    ):
        assert text in " ".join(done.stdout.split()), done.stdout


def test_comparison_json_has_the_raw_values_of_every_seed_and_what_they_sum_up_to(finished: Path) -> None:
    assert CliRunner().invoke(app, typed(finished)).exit_code == 0
    found = json.loads((finished / "comparison.json").read_text())
    assert (found["format"], found["metric"]) == (2, "accuracy")
    assert found["budget"] == {"kind": "epochs", "epochs": 6, "max_epochs": 30}
    assert [row["name"] for row in found["rows"]] == ["dense", "rigl:erk", "cyclic_gap:global restart=false"]
    dense, rigl, cyclic = found["rows"]
    tests = [json.loads((Path(run["folder"]) / "result.json").read_text())["test"]["accuracy"] for run in rigl["runs"]]
    assert [run["test"] for run in rigl["runs"]] == tests
    assert rigl["summary"]["test"]["mean"] == pytest.approx(sum(tests) / 2)
    assert rigl["summary"]["test"]["deviation"] == pytest.approx(abs(tests[0] - tests[1]) / 2**0.5)
    gaps = [a["test"] - b["test"] for a, b in zip(rigl["runs"], cyclic["runs"], strict=True)]
    assert rigl["summary"]["baseline"] == cyclic["name"]
    assert rigl["summary"]["minus_baseline"]["mean"] == pytest.approx(sum(gaps) / 2)
    assert rigl["summary"]["minus_baseline"]["standard_error"] == pytest.approx(abs(gaps[0] - gaps[1]) / 2)
    assert (dense["summary"]["baseline"], dense["summary"]["minus_dense"]) == (None, None)


def test_cost_shares_are_relative_to_the_dense_run(finished: Path) -> None:
    dense, rigl, cyclic = request(finished).table(request(finished).jobs()).rows
    assert [dense.mean(name) for name in comparison.SHARES] == [1.0] * 4
    for name in comparison.SHARES:  # ERK at 80 % is a fifth of the weights, though not of the FLOPs of a convolution
        assert rigl.mean(name) == pytest.approx(0.2, abs=0.01)
    assert 0.2 < (cyclic.mean("average_alive") or 0) < (cyclic.mean("peak_alive") or 0) < 1
    assert cyclic.reached == pytest.approx(0.8, abs=TOLERANCE)


def test_compare_prints_markdown_when_asked(finished: Path) -> None:
    done = CliRunner().invoke(app, typed(finished, "--markdown"))
    assert done.stdout == (finished / "comparison.md").read_text()
    assert done.stdout.splitlines()[3].startswith("| rigl:erk | 0.8 | 6 | ")


def test_a_row_that_ends_at_another_sparsity_says_so(finished: Path, tmp_path: Path) -> None:
    path = finished / "rigl-erk" / "0.8" / "seed0" / "result.json"
    content = json.loads(path.read_text())
    totals = content["sparsity"]["totals"]
    totals["alive"] = totals["prunable"] // 4
    (tmp_path / "result.json").write_text(json.dumps(content))
    comparison = of_runs([tmp_path])
    assert comparison.cells(comparison.rows[0])["sparsity"] == "0.8 (reached 0.75)"
    assert "rigl:erk every=1 missed sparsity 0.8: it reached 0.75" in comparison.notes


def test_folders_of_runs_are_found_anywhere_below_and_one_without_a_result_is_unfinished(
    finished: Path, tmp_path: Path
) -> None:
    job = request(tmp_path / "other", "rigl drop=0.2").jobs()[0]
    stop = iter([False] * 3)
    with pytest.raises(engine.Interrupted):
        engine.train(job.recipe, job.folder, should_stop=lambda: next(stop, True))
    (tmp_path / "empty").mkdir()
    rows = {row.name: row for row in of_runs([finished, tmp_path]).rows}
    assert len(rows["rigl:erk every=1"].finished) == 2
    assert [run.status for run in rows["rigl:erk every=1 drop=0.2"].runs] == ["unfinished"]
    assert not of_runs([tmp_path / "empty"]).rows[0].finished
    shown = CliRunner().invoke(app, ["compare", str(finished), str(tmp_path / "other"), str(tmp_path / "empty")])
    assert shown.exit_code == 1, shown.output
    assert "0, 1 unfinished" in shown.stdout and "seed 0 is unfinished: interrupted after epoch 1" in shown.stdout


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "nothing to compare. Give run folders, or a recipe with --methods"),
        (["nowhere"], "nowhere does not exist. Give run folders"),
        (["digits/dense", "--methods", "rigl"], "--out is missing"),
        (["digits/dnse", "--methods", "rigl", "--out", "x"], "unknown recipe 'digits/dnse'. Did you mean digits/dense"),
    ],
)
def test_nothing_to_compare_is_one_clear_line(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["compare", *arguments])
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_print_jobs_prints_a_command_for_each_run_that_is_left_and_runs_nothing(finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, typed(tmp_path / "new", "--print-jobs"))
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["growprune", "resume"]] * 6
    assert all([path.name for path in Path(line[2]).iterdir()] == ["recipe.json"] for line in lines)
    assert CliRunner().invoke(app, typed(finished, "--print-jobs")).stdout == ""


def test_a_printed_command_makes_the_run_that_the_comparison_wants_and_can_be_given_again(tmp_path: Path) -> None:
    job = request(tmp_path, "cyclic_gap:global restart=false").jobs()[0]
    words = shlex.split(CliRunner().invoke(app, typed(tmp_path, "--print-jobs", seeds="0")).stdout.splitlines()[2])
    assert CliRunner().invoke(app, words[1:]).exit_code == 0
    made = (job.folder / "result.json").read_bytes()
    assert request(tmp_path, "cyclic_gap:global restart=false", "0").jobs()[0].is_finished
    assert CliRunner().invoke(app, words[1:]).exit_code == 0  # a scheduler that starts it once more
    assert (job.folder / "result.json").read_bytes() == made
    assert CliRunner().invoke(app, ["resume", str(job.folder)]).exit_code == 0


def fork(command: list[str], *, stdout: Any, env: Any, **_: Any) -> forked.Command:
    """In place of Popen: a process that has torch already. The test below starts a real one, too."""
    return forked.Command(command[1:], Path(stdout.name), Path(stdout.name), environment=env)


@pytest.mark.slow
def test_a_run_that_fails_is_kept_and_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", fork)
    command = typed(tmp_path, "--allow", "optimizer.lr", "--workers", "2", methods=BROKEN, seeds="0")
    first = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert first.exit_code == 1, first.stderr
    assert "rigl:erk optimizer.lr=1e30 0.8 seed 0 failed: the loss became" in first.stdout
    assert "0, 1 failed" in first.stdout
    assert "static_random:erk 0.8 seed 0: finished" in first.stderr
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1
    assert "started" not in again.stderr
    assert "failed: the loss became" in again.stdout
    begun: list[str] = []
    monkeypatch.setattr(Working, "_begin", lambda self, job: begun.append(job.name))
    CliRunner().invoke(app, [*command, "--retry"])
    assert "rigl:erk optimizer.lr=1e30 0.8 seed 0" in begun


@pytest.mark.slow
def test_a_comparison_that_is_stopped_saves_all_its_runs_which_then_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = iter((subprocess.Popen, fork))
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **settings: next(starts)(*command, **settings))
    endless = request(tmp_path, "dense,rigl", "0", settings=["task.pause=0.1"], epochs=1000)
    jobs = endless.jobs()
    endless.prepare(jobs)
    logs = [job.folder / "log.jsonl" for job in jobs]
    told: list[str] = []

    def are_all_training() -> bool:
        return all(log.exists() and '"epoch"' in log.read_text() for log in logs)

    is_done = Working(jobs, 2, lambda job, event: told.append(event)).carry_out(are_all_training)
    assert not is_done
    assert told == ["started", "started", "stopped", "stopped"]
    for job, log in zip(jobs, logs, strict=True):
        assert '"interrupted"' in log.read_text()
        assert job.error == ""
        with pytest.raises(engine.Interrupted):
            engine.resume(job.recipe, job.folder, should_stop=lambda: True)
        assert '"resumed"' in log.read_text()


def test_a_run_that_somebody_else_makes_is_left_to_them(tmp_path: Path) -> None:
    (job,) = request(tmp_path, "rigl", "0").jobs()
    job.folder.mkdir(parents=True)
    told: list[str] = []
    with engine.RunFolder(job.folder).locked():
        Working([job], 1, lambda job, event: told.append(event), itertools.count().__next__).carry_out(lambda: False)
    assert told == ["in use"]
    assert not job.failure.exists()


def test_a_run_that_a_killed_comparison_is_still_saving_is_trained_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = request(tmp_path, "rigl", "0").jobs()
    job.folder.mkdir(parents=True)
    told: list[str] = []
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: begin([sys.executable, "-c", ""], **how))
    with contextlib.ExitStack() as lock:
        lock.enter_context(engine.RunFolder(job.folder).locked())
        looks = iter([lambda: None, lambda: None, lock.close])

        def look() -> bool:
            next(looks, lambda: None)()
            return False

        Working([job], 1, lambda job, event: told.append(event), lambda: 0.0).carry_out(look)
    assert told == ["started", "failed"]  # the process did nothing


def test_a_run_that_somebody_else_began_in_the_same_moment_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = request(tmp_path, "rigl", "0").jobs()
    told: list[str] = []
    begin, refused = subprocess.Popen, [sys.executable, "-c", "raise SystemExit(2)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **settings: begin(refused, **settings))

    def tell(job: Job, event: str) -> None:
        told.append(event)
        if event == "started":  # and the other process was a little faster
            job.folder.mkdir(parents=True)
            stack.enter_context(engine.RunFolder(job.folder).locked())

    with contextlib.ExitStack() as stack:
        Working([job], 1, tell).carry_out(lambda: False)
    assert told == ["started", "in use"]
    assert not job.failure.exists()


def test_the_last_words_of_a_run_are_its_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("epoch 1: loss 2\ngrowprune: sparsity is 2\ngrowprune: warning: mind\n\n")
    assert last_words(log, 2) == "sparsity is 2"
    assert last_words(log, -9) == "killed by signal 9 (out of memory?)"
    log.write_text("")
    assert last_words(log, 3) == "ended with exit code 3"


def test_the_page_names_options_that_there_are() -> None:
    page = (ROOT / "docs" / "comparing.md").read_text()
    helps = CliRunner().invoke(app, ["compare", "--help"]).stdout + CliRunner().invoke(app, ["train", "--help"]).stdout
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert len(named) > 10
    assert sorted(option for option in named if option not in helps) == []
