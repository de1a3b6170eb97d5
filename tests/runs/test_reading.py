"""Runs read from their folders: which are found, what became of them, and what is wrong with their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import finished, history, phase, recipe, result, row, write_bare, write_run
from toy import Toy, cyclic

from growprune import engine
from growprune.runs import find_runs, read_run
from growprune.runs.record import Json


def test_runs_are_found_in_folders_of_folders_and_each_only_once(tmp_path: Path) -> None:
    one = finished(tmp_path / "study/a/seed0", "rigl", 0.9, 0, 88.0)
    made = recipe("gmp", 0.9, 0)
    write_bare(one / "earlier/1/result.json", result(made, 1.0, history([1000])))
    bare = write_bare(tmp_path / "bare.json", result(made, 87.0, history([1000])))
    records = find_runs([tmp_path / "study", one, bare, bare])
    assert [(record.name, record.method, record.test) for record in records] == [
        ("study/a/seed0", "rigl", 88.0),
        (".", "gmp", 87.0),
    ]


def test_lines_of_a_log_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    odd = [3, {"event": "epoch"}, {"event": ["epoch"]}, {"event": "phase", "index": "x"}, {"event": "failed"}]
    write_run(tmp_path / "a", recipe("rigl", 0.9, 0), events=odd)
    (record,) = find_runs([tmp_path / "a"])
    assert (record.status, record.history) == ("failed", [])


def test_an_epoch_that_was_trained_again_after_a_kill_counts_once(tmp_path: Path) -> None:
    epochs = [
        {"event": "epoch", "index": 0, **row(n, 0, 1000, loss=loss)} for n, loss in ((1, 3.0), (2, 2.0), (2, 1.5))
    ]
    write_run(tmp_path / "a", recipe("rigl", 0.9, 0), events=[phase(0, 0, "train", 20, 1000), *epochs])
    log = tmp_path / "a/log.jsonl"
    log.write_text(log.read_text() + '{"event": "epo')  # where it was killed
    (record,) = find_runs([tmp_path / "a"])
    assert [(each["epoch"], each["loss"]) for each in record.history] == [(1, 3.0), (2, 1.5)]


def test_branches_of_other_processes_are_read_from_their_logs(tmp_path: Path) -> None:
    own = {"event": "epoch", "index": 1, **row(1, 1, 400, branch=0)}
    other = {"event": "epoch", "index": 2, **row(1, 1, 700, branch=1)}
    shared = {"event": "epoch", "index": 3, **row(2, 2, 100)}
    folder = write_run(tmp_path / "a", recipe("parallel_gap", 0.9, 0), events=[own, shared])
    (folder / "log-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (other, shared)))
    (record,) = find_runs([folder])
    assert [(each["epoch"], each["branch"], each["alive"]) for each in record.history] == [
        (1, 0, 400),
        (1, 1, 700),
        (2, None, 100),
    ]


CHANGES: list[tuple[Json, str]] = [
    ({"seconds": "long"}, "its seconds is 'long'"),
    ({"peak_bytes": 10**400}, "its peak_bytes is 1000"),
    ({"history": 3}, "its history is 3"),
    ({"metric": None}, "its metric is None"),
    ({"data": {"num_batches": "x"}}, "its data.num_batches is 'x'"),
    ({"validation": {"accuracy": "x"}}, "its validation.* is 'x'"),
    ({"recipe": {"method": "rigl", "sparsity": 0.9}}, "it has no recipe.task.name"),
    ({"recipe": recipe("rigl", 0.9, 0) | {"seed": "a"}}, "its recipe.seed is 'a'"),
    ({"sparsity": {"rows": [{"name": 3}], "totals": {"alive": 1, "prunable": 2}}}, "its sparsity.rows.*.name is 3"),
    ({"sparsity": {"rows": [], "totals": {"sparsity": "x"}}}, "its sparsity.totals.sparsity is 'x'"),
]


@pytest.mark.parametrize("change, says", CHANGES, ids=[says for _, says in CHANGES])
def test_a_result_that_someone_changed_is_damaged_and_says_what_is_wrong(
    change: Json, says: str, tmp_path: Path
) -> None:
    path = finished(tmp_path / "wrong", "rigl", 0.9, 0, 88.0) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (run,) = find_runs([tmp_path])
    assert run.status == "damaged" and run.why.startswith(f"{path} is damaged ({says}") and "\n" not in run.why


def test_a_recipe_that_someone_changed_is_damaged_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe("gmp", 0.9, 0) | {"seed": "a"})
    assert "recipe.json is damaged (its recipe.seed is 'a'" in read_run(folder).why


def test_the_failure_that_a_comparison_kept_is_why_a_run_failed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "seed0", recipe("gmp", 0.9, 0), events=[])
    (tmp_path / "seed0.failed").write_text("killed by signal 9 (out of memory?)")
    assert (read_run(folder).status, read_run(folder).why) == ("failed", "killed by signal 9 (out of memory?)")


def test_epochs_that_a_kill_took_back_do_not_stand(tmp_path: Path) -> None:
    epochs = [{"event": "epoch", "index": 0, **row(n, 0, 1000)} for n in (1, 2, 3)]
    back = {"event": "resumed", "stage": 0, "branch": None, "iteration": 10}
    folder = write_run(tmp_path / "run", recipe("gmp", 0.9, 0), events=[*epochs, back])
    assert [each["epoch"] for each in read_run(folder).history] == [1]


def test_an_epoch_without_batches_is_no_division_by_zero(tmp_path: Path) -> None:
    folder = finished(tmp_path, "gmp", 0.9, 0, 90.0, data={"num_batches": 0}, training_iterations=3)
    assert read_run(folder).epochs == 3


@pytest.mark.parametrize(
    "name, value",
    [("loss", "x"), ("validation", [1]), ("branch", []), ("explored", "a"), ("alive", 10**400), ("time", "x")],
    ids=["loss", "validation", "branch", "explored", "alive", "time"],
)
def test_a_line_of_a_log_that_someone_changed_is_passed_over(name: str, value: Any, tmp_path: Path) -> None:
    whole = {"event": "epoch", "index": 0, **row(1, 0, 1000)}
    wrong = {"event": "epoch", "index": 0, **row(2, 0, 1000), name: value}
    write_run(tmp_path / "run", recipe("rigl", 0.9, 0), events=[phase(0, 0, "train", 20, 1000), whole, wrong])
    (record,) = find_runs([tmp_path])
    assert [each["epoch"] for each in record.history] == [1]


def test_a_run_that_diverged_has_failed(tmp_path: Path) -> None:
    with pytest.raises(engine.TrainingDiverged):
        engine.train(replace(cyclic(), task=Toy(poison=1)), tmp_path / "run")
    (record,) = find_runs([tmp_path / "run"])
    assert record.status == "failed" and "the loss became nan" in record.why
