"""`growprune compare --tune`: every row gets the same grid, and validation data choose."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import report_runs
from paths import TOY as TOY_FILE
from typer.testing import CliRunner

from growprune import engine
from growprune.cli import app
from growprune.compare import Request, of_runs
from growprune.compare.jobs import Job
from growprune.engine.recipe import describe
from growprune.engine.trainer import TrainingDiverged
from growprune.errors import GrowpruneError
from growprune.report import page
from growprune.runs import find_runs

TOY = f"{TOY_FILE}:cyclic"
GRID = ("optimizer.lr=x1,x2", "lr_scaling=0,1")


def request(out: Path, methods: str = "dense,rigl,gmp", seeds: str = "0,1", tune: Any = GRID, **more: Any) -> Request:
    return Request.parse([TOY], methods, "0.8", seeds, 6, out, tune=tune, **more)


def typed(out: Path, *more: str, methods: str = "dense,rigl,gmp", tune: tuple[str, ...] = GRID) -> list[str]:
    settings = ["--methods", methods, "--sparsities", "0.8", "--seeds", "0,1", "--epochs", "6", "--out", str(out)]
    return ["compare", TOY, *settings, *(word for axis in tune for word in ("--tune", axis)), *more]


def fake(job: Job, validation: float, test: float) -> None:
    """A result as if the run had been trained."""
    recipe = json.loads(json.dumps(describe(job.recipe)))
    rows = report_runs.history([1000] * 6)
    scores = {"validation": {"accuracy": validation}, "test": {"accuracy": test}}
    report_runs.write_bare(job.folder / "result.json", report_runs.result(recipe, test, rows, **scores))


def fail(job: Job, why: str) -> None:
    report_runs.write_bare(job.folder / "recipe.json", {"format": 1})
    (job.folder / "recipe.json").unlink()
    job.failure.write_text(why)


def fake_all(asked: Request, scores: Callable[[Job], tuple[float, float]]) -> list[Job]:
    """Both phases of a comparison."""
    for _ in range(2):
        jobs = asked.jobs()
        for job in [job for job in jobs if not job.is_finished]:
            fake(job, *scores(job))
    asked.write_choices()
    return jobs


def test_every_row_gets_every_point_of_the_grid_with_the_first_seed(tmp_path: Path) -> None:
    jobs = request(tmp_path, "rigl,gmp").jobs()
    points = ["optimizer.lr=0.05 lr_scaling=0", "optimizer.lr=0.05 lr_scaling=1"]
    points += ["optimizer.lr=0.1 lr_scaling=0", "optimizer.lr=0.1 lr_scaling=1"]
    assert [(job.row.source, job.point.name, job.seed) for job in jobs] == [
        (method, point, 0) for method in ("rigl", "gmp") for point in points
    ]
    assert [(job.recipe.optimizer.lr, job.recipe.lr_scaling) for job in jobs[:4]] == [
        (0.05, 0.0),
        (0.05, 1.0),
        (0.1, 0.0),
        (0.1, 1.0),
    ]


def test_points_that_are_the_same_run_of_a_dense_model_are_trained_once_and_that_is_said(tmp_path: Path) -> None:
    asked = request(tmp_path)
    dense = [job for job in asked.jobs() if job.row.name == "dense"]
    assert [job.point.name for job in dense] == ["optimizer.lr=0.05 lr_scaling=0", "optimizer.lr=0.1 lr_scaling=0"]
    comparison = asked.table(fake_all(asked, lambda job: (50.0, 50.0)))
    assert "dense: the 4 points give 2 different runs" in comparison.notes
    assert [row.tuning["size"] for row in comparison.rows if row.tuning] == [4, 4, 4]


def test_validation_chooses_and_test_does_not(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl")
    by_rate = {0.05: (90.0, 10.0), 0.1: (80.0, 99.0)}  # where test is best, validation is not
    jobs = fake_all(asked, lambda job: by_rate[job.recipe.optimizer.lr])
    (row,) = asked.table(jobs).rows
    assert row.tuning["chosen"] == "optimizer.lr=0.05 lr_scaling=0"  # of equals, the first
    assert [(run.seed, run.test) for run in row.runs] == [(0, 10.0), (1, 10.0)]
    assert len(jobs) == 4 + 1  # the point that is chosen has its first seed already


def own_task(folder: Path, setting: str) -> str:
    """The recipe of a task of one's own, which differs from the toy in one setting."""
    source = folder / "own.py"
    source.write_text(
        "from dataclasses import dataclass, replace\nfrom toy import Toy, cyclic\n\n"
        f"@dataclass(frozen=True)\nclass Own(Toy):\n    {setting}\n\n"
        "def recipe():\n    return replace(cyclic(), task=Own())\n"
    )
    return f"{source}:recipe"


def test_where_a_lower_metric_is_better_the_lowest_is_chosen(tmp_path: Path) -> None:
    source = own_task(tmp_path, "lower_is_better = True")
    asked = Request.parse([source], "rigl", "0.8", "0", 6, tmp_path / "out", tune=["optimizer.lr=x2,x1,x4"])
    jobs = fake_all(asked, lambda job: (job.recipe.optimizer.lr, 0.0))
    assert asked.table(jobs).rows[0].tuning["chosen"] == "optimizer.lr=0.05"  # type: ignore[index]


def test_the_other_seeds_are_known_only_when_every_point_of_a_row_is_done(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl,gmp")
    for job in asked.jobs()[:7]:  # all of rigl, all but one of gmp
        fake(job, 50.0, 50.0)
    jobs = asked.jobs()
    assert [job.name for job in jobs[8:]] == ["rigl:erk 0.8 optimizer.lr=0.05 lr_scaling=0 seed 1"]
    asked.write_choices()
    rigl, gmp = asked.table(jobs).rows
    assert [run.status for run in rigl.runs] == ["finished", "unfinished"]
    assert [run.status for run in gmp.runs] == ["unfinished"]
    assert gmp.tuning is not None and gmp.tuning["chosen"] is None


def test_a_point_that_fails_or_is_no_number_is_shown_and_not_chosen(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl")
    first, second, third, fourth = asked.jobs()
    fail(first, "the loss became nan")
    fake(second, float("nan"), 99.0)
    fake(third, 20.0, 20.0)
    fake(fourth, 10.0, 30.0)
    done = CliRunner().invoke(app, typed(tmp_path, "--print-jobs", methods="rigl"))
    assert [shlex.split(line)[2] for line in done.stdout.splitlines()] == [
        str(first.folder),  # to be tried again by whoever likes to
        str(third.folder.with_name("seed1")),
    ]
    fake(asked.jobs()[-1], 21.0, 21.0)
    done = CliRunner().invoke(app, typed(tmp_path, methods="rigl"), env={"COLUMNS": "200"})
    assert done.exit_code == 1
    name = "rigl:erk 0.8 optimizer.lr=0.05"
    assert f"{name} lr_scaling=0 seed 0 failed in tuning: the loss became nan" in done.stdout
    assert f"{name} lr_scaling=1 seed 0 failed in tuning: its validation accuracy is nan" in done.stdout
    assert "20.50 ± 0.71" in done.stdout


def test_a_row_of_which_no_point_finishes_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl,gmp", seeds="0")
    for job in asked.jobs():
        fail(job, "diverged") if job.row.source == "rigl" else fake(job, 50.0, 40.0)
    command = [word if word != "0,1" else "0" for word in typed(tmp_path, methods="rigl,gmp")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 1, done.output
    assert "rigl:erk 0.8 has no result: no point of its grid finished" in done.stdout
    assert done.stdout.count("diverged") == 4
    assert "none: all 4 runs failed" in done.stdout
    assert "40.00" in done.stdout


def test_the_table_says_what_was_chosen_and_what_was_spent(tmp_path: Path) -> None:
    asked = request(tmp_path)
    fake_all(asked, lambda job: (job.recipe.optimizer.lr, 50.0))
    done = CliRunner().invoke(app, typed(tmp_path, "--markdown"))
    assert done.exit_code == 0, done.output
    assert "| gmp:global 0.8 | optimizer.lr=0.1 lr_scaling=0 | 0.100 | 4 | 4 | 0 |" in done.stdout.splitlines()
    assert "| dense | optimizer.lr=0.1 lr_scaling=0 | 0.100 | 4 | 2 | 0 |" in done.stdout.splitlines()
    assert (
        "- every row was tuned over the same grid of 4 points (optimizer.lr=x1,x2 lr_scaling=0,1), chosen by "
        "validation accuracy with seed 0: 10 runs for 3 rows. The 3 chosen runs are the results of that seed"
    ) in done.stdout.splitlines()
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["tuning"]["chosen"] for row in found["rows"]] == ["optimizer.lr=0.1 lr_scaling=0"] * 3


def test_runs_that_are_there_make_the_same_table_and_the_page_shows_how_they_were_tuned(tmp_path: Path) -> None:
    asked = request(tmp_path)
    fake_all(asked, lambda job: (job.recipe.optimizer.lr, 50.0 + job.seed))
    again = of_runs([tmp_path])
    assert [(row.method, len(row.finished)) for row in again.rows] == [("dense", 2), ("gmp", 2), ("rigl", 2)]
    assert "10 runs for 3 rows" in " ".join(again.notes)
    text = page.render(find_runs([tmp_path]), "")
    assert "<h2>Tuning</h2>" in text
    assert "<td>optimizer.lr=0.1 lr_scaling=0</td>" in text
    assert "finished: tuning run, not chosen" in text
    assert "have one seed and the same settings" not in text


def test_a_run_that_was_not_tuned_does_not_stand_beside_those_that_were(tmp_path: Path) -> None:
    tuned = request(tmp_path / "tuned", "rigl")
    fake_all(tuned, lambda job: (50.0, 50.0))
    for job in request(tmp_path / "plain", "gmp", tune=()).jobs():
        fake(job, 50.0, 50.0)
    with pytest.raises(GrowpruneError, match=r"none in gmp.*; optimizer.lr=x1,x2 lr_scaling=0,1 in rigl"):
        of_runs([tmp_path])
    assert len(of_runs([tmp_path], ["tuning"]).rows) == 2


def test_print_jobs_prints_phase_one_and_says_that_more_will_come(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, typed(tmp_path, "--print-jobs", methods="rigl"))
    assert len(done.stdout.splitlines()) == 4
    assert "run this command again to get the remaining seeds of each row" in " ".join(done.stderr.split())
    for job in request(tmp_path, "rigl").jobs():
        fake(job, 50.0, 50.0)
    done = CliRunner().invoke(app, typed(tmp_path, "--print-jobs", methods="rigl"))
    assert [line.split("resume ")[1] for line in done.stdout.splitlines()] == [
        f"{tmp_path}/rigl-erk/0.8/optimizer.lr=0.05-lr_scaling=0/seed1"
    ]
    assert done.stderr == ""


def test_a_point_that_a_scheduler_ran_and_that_failed_is_not_waited_for(tmp_path: Path) -> None:
    asked = request(tmp_path, "rigl", tune=("optimizer.lr=x1,1e30",))
    good, bad = asked.jobs()
    fake(good, 50.0, 50.0)
    with pytest.raises(TrainingDiverged):
        engine.train(bad.recipe, bad.folder)
    assert asked.is_tuned()
    assert [job.name for job in asked.jobs()[2:]] == ["rigl:erk 0.8 optimizer.lr=0.05 seed 1"]


def test_a_larger_grid_takes_the_points_that_are_done(tmp_path: Path) -> None:
    fake_all(request(tmp_path, "rigl"), lambda job: (50.0, 50.0))
    wider = request(tmp_path, "rigl", tune=("optimizer.lr=0.05,x2,x4", "lr_scaling=0,1"))
    assert [job.point.name for job in wider.jobs() if not job.is_finished] == [
        "optimizer.lr=0.2 lr_scaling=0",
        "optimizer.lr=0.2 lr_scaling=1",
    ]


def test_points_of_a_grid_that_was_larger_once_are_left_out(tmp_path: Path) -> None:
    fake_all(request(tmp_path, "rigl"), lambda job: (50.0, 50.0))
    asked = request(tmp_path, "rigl", tune=("optimizer.lr=x1,x2", "lr_scaling=1"))
    jobs = fake_all(asked, lambda job: (50.0, 50.0))
    (row,) = of_runs([tmp_path]).rows
    assert row.tuning is not None and row.tuning["chosen"] == "optimizer.lr=0.05 lr_scaling=1"
    assert [str(run.folder) for run in row.runs] == [str(jobs[0].folder), str(jobs[-1].folder)]


def test_runs_that_are_there_cannot_be_tuned(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(tmp_path), "--tune", "optimizer.lr=x1,x2"])
    assert done.exit_code == 2
    assert "--tune needs a recipe and --methods" in done.stderr


@pytest.mark.parametrize(
    "tune, says",
    [
        (("optimizer.lr",), "--tune must be KEY=VALUE,VALUE,..., such as optimizer.lr=x1,x1.5,x2, got 'optimizer.lr'"),
        (("optimizer.lr=",), "--tune has an empty value, got 'optimizer.lr='"),
        (("optimizer.lr=x1,x1",), "--tune has a value twice"),
        (("optimizer.lr=x1,x2", "optimizer.lr=3"), "--tune has optimizer.lr twice"),
        (("optimizer.lr=x1",), "--tune needs two or more points, got one: optimizer.lr=x1"),
        (("optimizer.lr=x1,x-2",), "--tune optimizer.lr: a factor must be x and a number > 0, such as x1.5, got x-2"),
        (("optimizer.lr=x1,x1.5.2",), "a factor must be x and a number > 0, such as x1.5, got x1.5.2"),
        (("optimizer.kind=x1,x2",), "which is not a number to multiply. Give values instead"),
        (("optimizer.rate=x1,x2",), "--tune optimizer.rate: the row 'dense' has no such setting (it has kind"),
        (("options.until=0.5,0.75",), "--tune options.until: the row 'dense' has no such setting"),
        (("lr_scaling=0,1",), "all 2 points give the same run of dense, so this row would not be tuned"),
        (("optimizer.lr=x1,-3",), "dense, optimizer.lr=-3: "),
        (("optimizer.lr=x1,fast",), "dense, optimizer.lr=fast: --tune optimizer.lr must be a number, got fast"),
        (("task.batch_size=8,16",), "all rows share task, model and data"),
        (("seed=1,2",), "--tune seed: it belongs to rows. Use --methods"),
        (("options=1,2",), "or tune an option, as in options.until"),
    ],
)
def test_a_grid_that_cannot_be_is_one_clear_line_before_anything_is_trained(
    tmp_path: Path, tune: tuple[str, ...], says: str
) -> None:
    done = CliRunner().invoke(app, typed(tmp_path / "out", tune=tune))
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_option_that_all_rows_take_can_be_tuned_and_multiplied(tmp_path: Path) -> None:
    jobs = request(tmp_path, "gmp,gradual_gap control=peak", tune=("options.until=x1,x1.2",)).jobs()
    assert [job.recipe.options["until"] for job in jobs] == [0.75, 0.9, 0.75, 0.9]


def test_a_row_that_sets_for_itself_what_is_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"the row sets optimizer\.lr, but --tune tunes it for all rows"):
        request(tmp_path, "rigl optimizer.lr=0.2", allow=["optimizer.lr"]).jobs()


def test_a_task_without_validation_data_is_not_tuned(tmp_path: Path) -> None:
    words = typed(tmp_path / "out")
    done = CliRunner().invoke(app, [words[0], own_task(tmp_path, "has_validation_data = False"), *words[2:]])
    assert done.exit_code == 2
    assert "--tune needs validation data, but the task Own has none. Leave --tune out" in done.stderr


class Killed(BaseException):
    """The end of a process that nobody asked."""


DIGITS = [
    *("compare", "digits/dense", "--methods", "dense,rigl,gmp", "--sparsities", "0.8", "--seeds", "0,1"),
    *("--epochs", "2", "--set", "task.width=4", "--set", "task.batch_size=400", "--set", "device=cpu"),
    *("--tune", "optimizer.lr=x1,x2", "--workers", "2"),
]


def test_a_comparison_of_digits_is_tuned_and_resumed_after_a_kill_and_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def fork(command: list[str], *, stdout: Any, env: Any, **_: Any) -> forked.Command:
        if len(begun) == 3:
            begun.append("killed")
            raise Killed
        begun.append(Path(stdout.name).with_suffix("").relative_to(tmp_path).as_posix())
        return forked.Command(command[1:], Path(stdout.name), Path(stdout.name), environment=env)

    monkeypatch.setattr(subprocess, "Popen", fork)
    command = [*DIGITS, "--out", str(tmp_path)]
    with pytest.raises(Killed):
        CliRunner().invoke(app, command, catch_exceptions=False)
    done_before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in done_before} == done_before
    results = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("result.json"))
    assert len(results) == 3 * 2 + 3  # two points of three rows, and a second seed of each choice
    assert sum(path.endswith("seed1") for path in results) == 3
    for name in ("dense", "rigl:erk", "gmp:global"):
        assert name in again.stdout
    begun.clear()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert begun == []
