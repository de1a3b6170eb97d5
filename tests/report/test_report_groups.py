"""Which runs a page puts together: tasks, budgets, rows and the dense reference."""

import json
from pathlib import Path
from typing import Any

from paths import ROOT
from report_runs import history, phase, recipe, row, write_run
from test_report import page_of, results, write

from growprune.report import notes
from growprune.report.groups import Group, group_runs
from growprune.runs import find_runs


def groups_of(folder: Path) -> list[Group]:
    return group_runs(find_runs([folder]))


def labels(group: Group) -> dict[str, int]:
    return {row.label: len(row.runs) for row in group.rows}


def write_epochs(folder: Path, method: str, epochs: int, score: float = 88.0, **more: Any) -> Path:
    return write(folder, method, score, rows=history([1000] * (epochs - 1) + [500]), **more)


# Tasks


def test_runs_of_different_tasks_are_apart_and_the_page_says_what_differs(tmp_path: Path) -> None:
    write(tmp_path / "a", "rigl")
    write(tmp_path / "b", "gmp", recipe={"task": {"width": 16}})
    write(tmp_path / "c", "gmp", recipe={"task": {"name": "Translation"}})
    assert [group.title for group in groups_of(tmp_path)] == ["Digits, width 16", "Translation", "Digits, width 8"]
    (note,) = notes(find_runs([tmp_path]))
    assert "Translation" in note and "task.width is 16 or 8 (Digits)" in note


def test_place_of_data_and_number_of_workers_make_no_difference(tmp_path: Path) -> None:
    for name, workers in (("a", 0), ("b", 8)):
        task = {"data": f"/disk/{name}/cifar10.npz", "workers": workers}
        write(tmp_path / name, "rigl", seed=ord(name), recipe={"task": task})
    assert notes(find_runs([tmp_path])) == []
    assert [*labels(groups_of(tmp_path)[0]).values()] == [2]


# Budgets


def test_other_budgets_are_other_groups_with_dense_in_each(tmp_path: Path) -> None:
    write(tmp_path / "dense", "dense", 90.0)
    write(tmp_path / "short", "rigl", 88.0)
    write_epochs(tmp_path / "long", "rigl", 8, 89.0)
    assert [(group.budget, [*labels(group)]) for group in groups_of(tmp_path)] == [
        ("8 epochs", ["dense", "rigl:global 0.9"]),
        ("2 epochs", ["dense", "rigl:global 0.9"]),
    ]
    assert "the budget is 2 epochs or 8 epochs" in notes(find_runs([tmp_path]))[0]


def test_runs_of_equal_flops_stay_together_when_another_is_added(tmp_path: Path) -> None:
    for method, epochs, flops in (("rigl", 8, 1.00e9), ("gmp", 3, 1.02e9), ("set", 5, 1.04e9)):
        write_epochs(tmp_path / method, method, epochs, training_flops=flops)
    (alone,) = groups_of(tmp_path)
    assert alone.budget == "equal training FLOPs (3 to 8 epochs)"
    write_epochs(tmp_path / "other", "acdc", 6, training_flops=2e9)
    write_epochs(tmp_path / "old", "acdc", 4)  # does not say
    assert {group.budget: len(group.rows) for group in groups_of(tmp_path)} == {
        "equal training FLOPs (3 to 8 epochs)": 3,
        "6 epochs": 1,
        "4 epochs": 1,
    }


def test_several_budgets_of_equal_flops_are_several_groups(tmp_path: Path) -> None:
    for n, (epochs, flops) in enumerate(((2, 1.0e9), (3, 1.05e9), (4, 1.06e9), (5, 1.1e9), (6, 3e9))):
        write_epochs(tmp_path / str(n), "rigl", epochs, seed=n, training_flops=flops)
    assert {group.budget for group in groups_of(tmp_path)} == {
        "equal training FLOPs (2 to 3 epochs)",
        "equal training FLOPs (4 to 5 epochs)",
        "6 epochs",
    }


def test_budget_of_unequal_flops_is_not_called_equal_because_one_run_is(tmp_path: Path) -> None:
    for method, epochs, flops in (("rigl", 2, 1.00e9), ("gmp", 2, 2.00e9), ("set", 4, 1.02e9)):
        write_epochs(tmp_path / method, method, epochs, training_flops=flops)
    assert {group.budget: len(group.rows) for group in groups_of(tmp_path)} == {"2 epochs": 2, "4 epochs": 1}


# Rows


def test_runs_of_one_seed_that_would_count_as_two_are_said(tmp_path: Path) -> None:
    for name, method, seed in (("a", "rigl", 0), ("b", "rigl", 0), ("c", "rigl", 1), ("d", "gmp", 0)):
        write(tmp_path / name, method, seed=seed)
    (note,) = notes(find_runs([tmp_path]))
    assert note.startswith("a and b have the same seed")


# The reference


def test_reference_is_the_dense_row_of_the_same_length(tmp_path: Path) -> None:
    write_epochs(tmp_path / "long", "dense", 100, 96.0)
    write_epochs(tmp_path / "short", "dense", 20, 90.0)
    write_epochs(tmp_path / "gmp", "gmp", 20, 90.5)
    assert results(tmp_path)["gmp:global 0.9"]["vs dense"] == "+0.50"
    assert "The dense model (dense epochs=20) has accuracy 90.00" in page_of(tmp_path)


# Unfinished and damaged runs


def write_begun(folder: Path, method: str) -> Path:
    """A run of which one epoch is done, with a tenth of the weights alive."""
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 100, validation={"accuracy": 10.0})}
    made = recipe(method, 0.9, 0, allocation="global")
    return write_run(folder, made, events=[phase(0, 0, "train", 20, 100), epoch])


def test_unfinished_seed_changes_nothing_of_finished_ones(tmp_path: Path) -> None:
    write_epochs(tmp_path / "gmp", "gmp", 4, seed=1)
    write_epochs(tmp_path / "rigl", "rigl", 4, 90.5)
    before = results(tmp_path)
    write_begun(tmp_path / "begun", "gmp")
    assert results(tmp_path) == before
    assert labels(groups_of(tmp_path)[0]) == {"gmp:global 0.9": 1, "gmp:global unfinished 0.9": 1, "rigl:global 0.9": 1}


def test_stored_results_of_this_repository_can_be_shown() -> None:
    records = find_runs([ROOT / "experiments" / "detection-bccd"])
    page = page_of(ROOT / "experiments" / "detection-bccd")
    assert len(records) == 8 and all(f"{record.test:.5g}" in page for record in records)
    assert json.dumps(records[0].recipe, indent=1)[:40].replace('"', "&quot;") in page
