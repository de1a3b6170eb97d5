"""Which runs a page puts together: the dense ones, those of equal FLOPs, and those with figures that are no numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import history, phase, recipe, result, row, write_run

from growprune.report import notes
from growprune.report.chart import Styles
from growprune.report.groups import Group, group_runs
from growprune.report.over_time import charts_over_time
from growprune.report.page import render
from growprune.report.tables import means
from growprune.runs import find_runs


def write(folder: Path, method: str, sparsity: float, score: float = 88.0, seed: int = 0, **more: Any) -> Path:
    made = recipe(method, sparsity, seed, **more.pop("recipe", {}))
    epochs = more.pop("epochs", 2)
    return write_run(folder, made, result(made, score, history([1000] * (epochs - 1) + [500]), **more))


def groups_of(folder: Path) -> list[Group]:
    return group_runs(find_runs([folder]))


def labels(group: Group) -> dict[str, int]:
    return {cell.label: len(cell.records) for cell in group.cells}


def test_only_the_method_dense_is_dense_also_beside_others_at_sparsity_0(tmp_path: Path) -> None:
    write(tmp_path / "dense", "dense", 0.0, 92.0)
    for method, score in {"gmp": 80.0, "mine": 70.0}.items():
        write(tmp_path / method, method, 0.0, score)
    write(tmp_path / "rigl", "rigl", 0.9, 90.0)
    (group,) = groups_of(tmp_path)
    assert labels(group) == {"dense": 1, "gmp 0": 1, "mine 0": 1, "rigl 0.9": 1}
    assert [cell.label for cell in group.dense] == ["dense"]
    assert [line[3:5] for line in means(group)] == [
        ["92.00", ""],
        ["80.00", "-12.00"],
        ["70.00", "-22.00"],
        ["90.00", "-2.00"],
    ]
    page = render(find_runs([tmp_path]), "")
    assert "The dense model has accuracy 92.00 on test data." in page
    assert (
        "At sparsity 0, gmp (the best of 2 on validation data) reaches accuracy 80.00 on test data, 12.00 below" in page
    )


def test_dense_training_leaves_a_sparsity_of_its_recipe_aside(tmp_path: Path) -> None:
    for seed, sparsity in enumerate((0.0, 0.9)):
        write(tmp_path / str(seed), "dense", sparsity, 92.0, seed)
    assert labels(groups_of(tmp_path)[0]) == {"dense": 2}


def test_dense_runs_are_told_apart_by_what_differs_and_means_something_to_them(tmp_path: Path) -> None:
    for name, more in {"a": {"clip": 1.0}, "b": {"clip": 2.0}, "c": {"clip": 2.0, "allocation": "erk"}}.items():
        write(tmp_path / name, "dense", 0.0, 92.0, ord(name), recipe=more)
    assert labels(groups_of(tmp_path)[0]) == {"dense, clip 1.0": 1, "dense, clip 2.0": 2}


def test_runs_of_one_seed_that_would_count_as_two_are_said(tmp_path: Path) -> None:
    for name, method, seed in (("a", "rigl", 0), ("b", "rigl", 0), ("c", "rigl", 1), ("d", "gmp", 0)):
        write(tmp_path / name, method, 0.9, 88.0, seed)
    assert notes(find_runs([tmp_path])) == [
        "a and b have the same seed and settings, but count as different seeds here."
    ]


def test_sparsities_that_are_nearly_the_same_are_told_apart_in_every_chart(tmp_path: Path) -> None:
    for sparsity in (0.9, 0.90001):
        write(tmp_path / str(sparsity), "rigl", sparsity)
    (group,) = groups_of(tmp_path)
    assert labels(group) == {"rigl 0.9": 1, "rigl 0.90001": 1}
    assert all(len(chart.data) == 2 for chart in charts_over_time(group, Styles(group.cells)))


def test_who_misses_the_sparsity_is_not_the_best_at_it(tmp_path: Path) -> None:
    for method, score in {"rigl": 88.0, "gmp": 87.0, "set": 90.0}.items():
        folder = write(tmp_path / method, method, 0.9, score)
    content = json.loads((folder / "result.json").read_text())
    content["sparsity"]["totals"] |= {"alive": 200, "sparsity": 0.8}
    (folder / "result.json").write_text(json.dumps(content))
    assert "At sparsity 0.9, rigl (the best of 2 on validation data) reaches" in render(find_runs([tmp_path]), "")


# Budgets


def test_runs_of_equal_flops_stay_together_when_another_run_is_added(tmp_path: Path) -> None:
    for method, epochs, flops in (("rigl", 8, 1.00e9), ("gmp", 3, 1.02e9), ("set", 5, 1.04e9)):
        write(tmp_path / method, method, 0.9, epochs=epochs, training_flops=flops)
    write(tmp_path / "dense", "dense", 0.0, training_flops=9e9)
    (alone,) = groups_of(tmp_path)
    assert alone.budget == "equal training FLOPs (3 to 8 epochs)"
    write(tmp_path / "other", "acdc", 0.9, epochs=6, training_flops=2e9)
    write(tmp_path / "old", "acdc", 0.9, epochs=4)  # does not say
    found = {group.budget: [*labels(group)] for group in groups_of(tmp_path)}
    assert found == {
        "equal training FLOPs (3 to 8 epochs)": ["dense", "gmp 0.9", "rigl 0.9", "set 0.9"],
        "6 epochs": ["dense", "acdc 0.9"],
        "4 epochs": ["dense", "acdc 0.9"],
    }
    assert (
        "the budget is 4 epochs or 6 epochs or equal training FLOPs (3 to 8 epochs)" in notes(find_runs([tmp_path]))[0]
    )


def test_several_budgets_of_equal_flops_are_several_groups(tmp_path: Path) -> None:
    for n, (epochs, flops) in enumerate(((2, 1.0e9), (3, 1.05e9), (4, 1.06e9), (5, 1.1e9), (6, 3e9))):
        write(tmp_path / str(n), "rigl", 0.9, seed=n, epochs=epochs, training_flops=flops)
    assert {group.budget for group in groups_of(tmp_path)} == {
        "equal training FLOPs (2 to 3 epochs)",
        "equal training FLOPs (4 to 5 epochs)",
        "6 epochs",
    }


def test_runs_of_one_number_of_epochs_are_one_budget_whatever_their_flops(tmp_path: Path) -> None:
    for method, epochs, flops in (("rigl", 4, 1e9), ("gmp", 4, 2e9), ("set", 8, 2e9)):
        write(tmp_path / method, method, 0.9, epochs=epochs, training_flops=flops)
    assert {group.budget: [*labels(group)] for group in groups_of(tmp_path)} == {
        "4 epochs": ["gmp 0.9", "rigl 0.9"],
        "8 epochs": ["set 0.9"],
    }


# What is no number


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_leaves_the_page_and_the_other_rows_as_they_were(odd: float, tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / f"dense{seed}", "dense", 0.0, 92.0, seed)
        write(tmp_path / f"gmp{seed}", "gmp", 0.9, odd if seed else 91.0, seed)
        write(tmp_path / f"rigl{seed}", "rigl", 0.9, 89.0 + seed, seed)
        write(tmp_path / f"set{seed}", "set", 0.8, odd if seed else 91.0, seed)
    page = render(find_runs([tmp_path]), "")
    rows = {line[0]: line[3:5] for group in groups_of(tmp_path) for line in means(group)}
    assert rows["gmp 0.9"] == ["nan", "nan"]
    assert rows["rigl 0.9"] == ["89.50 ± 0.71", "-2.50"]
    assert "At sparsity 0.9, rigl (the best of 2 on validation data) reaches accuracy 89.50 ± 0.71" in page
    assert "At sparsity 0.8, set reaches accuracy nan on test data, which cannot be compared with dense." in page
    charts = re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)
    assert charts is not None
    json.loads(charts[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# What someone changed


def test_a_result_that_someone_changed_is_one_damaged_run_of_a_whole_page(tmp_path: Path) -> None:
    write(tmp_path / "whole", "rigl", 0.9)
    write(tmp_path / "wrong", "gmp", 0.9, seconds="long")
    records = find_runs([tmp_path])
    assert "rigl 0.9" in render(records, "") and "1 damaged" in notes(records)[-1]


@pytest.mark.parametrize("where", ["recipe", "origin"])
def test_data_that_are_named_by_more_than_a_path_are_shown(where: str, tmp_path: Path) -> None:
    """A task of one's own may have a list of files."""
    made = recipe("rigl", 0.9, 0, task={"data": ["/disk/a", "/disk/b"]} if where == "recipe" else {})
    origin = {"source": "digits/dense", "settings": {"task.data": 5} if where == "origin" else {}}
    folder = write_run(tmp_path / "run", made)
    (folder / "recipe.json").unlink()
    (folder / "result.json").write_text(json.dumps(result(made, 88.0, history([1000]), origin=origin)))
    assert "--data" in render(find_runs([folder]), "")


def test_a_phase_without_iterations_is_no_division_by_zero(tmp_path: Path) -> None:
    made = recipe("rigl", 0.9, 0)
    odd = {**phase(0, 0, "train", 20, 1000), "iterations": 0}
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 1000), "epoch": 0}
    write_run(tmp_path / "run", made, events=[odd, epoch])
    assert render(find_runs([tmp_path]), "")


def test_runs_of_unequal_flops_are_not_called_equal_because_one_of_them_is(tmp_path: Path) -> None:
    for method, epochs, flops in (("rigl", 2, 1.00e9), ("gmp", 2, 2.00e9), ("set", 4, 1.02e9)):
        write(tmp_path / method, method, 0.9, epochs=epochs, training_flops=flops)
    assert {group.budget: labels(group) for group in groups_of(tmp_path)} == {
        "2 epochs": {"gmp 0.9": 1, "rigl 0.9": 1},
        "4 epochs": {"set 0.9": 1},
    }


def test_the_dense_runs_of_the_same_length_are_the_reference_and_are_named(tmp_path: Path) -> None:
    write(tmp_path / "long", "dense", 0.0, 96.0, epochs=100)
    write(tmp_path / "short", "dense", 0.0, 90.0, epochs=20)
    write(tmp_path / "gmp", "gmp", 0.9, 90.5, epochs=20)
    (group,) = groups_of(tmp_path)
    assert {line[0]: line[4] for line in means(group)}["gmp 0.9"] == "+0.50"
    page = render(find_runs([tmp_path]), "")
    assert "The dense model (dense, epochs 20) has accuracy 90.00 on test data." in page
    assert "gmp reaches accuracy 90.50 on test data, 0.50 above dense." in page


def test_of_dense_runs_of_one_length_the_best_on_validation_data_is_the_reference(tmp_path: Path) -> None:
    for rate, score in {0.1: 92.0, 0.5: 60.0, 0.05: 91.0}.items():
        write(tmp_path / str(rate), "dense", 0.0, score, recipe={"optimizer": {"lr": rate}})
    write(tmp_path / "gmp", "gmp", 0.9, 90.0, recipe={"optimizer": {"lr": 0.5}})
    (group,) = groups_of(tmp_path)
    assert group.reference is not None and group.reference.label == "dense, optimizer.lr 0.1"
    assert {line[0]: line[4] for line in means(group)}["gmp 0.9"] == "-2.00"


def write_begun(folder: Path, method: str, seed: int) -> Path:
    """A run of which one epoch is done, with a tenth of the weights alive."""
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 100, validation={"accuracy": 10.0})}
    return write_run(folder, recipe(method, 0.9, seed), events=[phase(0, 0, "train", 20, 100), epoch])


def test_a_seed_that_is_not_finished_changes_nothing_of_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "off", "gmp", 0.9, 99.0, seed=1, epochs=4)
    off = tmp_path / "off" / "result.json"
    changed = json.loads(off.read_text())
    changed["sparsity"]["totals"] |= {"alive": 500, "sparsity": 0.5}
    off.write_text(json.dumps(changed))
    write(tmp_path / "rigl", "rigl", 0.9, 90.5, epochs=4)
    (alone,) = groups_of(tmp_path)
    write_begun(tmp_path / "begun", "gmp", 0)
    (beside,) = groups_of(tmp_path)
    assert means(beside) == means(alone)
    assert {line[0]: (line[2], line[5]) for line in means(beside)}["gmp 0.9"] == ("4", "0.5 (target 0.9)")
    assert labels(beside) == {"gmp 0.9": 1, "gmp, unfinished 0.9": 1, "rigl 0.9": 1}
    assert "At sparsity 0.9, rigl reaches accuracy 90.50" in render(find_runs([tmp_path]), "")


def test_curves_of_finished_seeds_are_whole_and_those_of_unfinished_ones_stand_beside(tmp_path: Path) -> None:
    write(tmp_path / "whole", "rigl", 0.9, seed=1, epochs=3)
    write_begun(tmp_path / "begun", "rigl", 0)
    (group,) = groups_of(tmp_path)
    quality = next(iter(charts_over_time(group, Styles(group.cells))))
    assert quality.columns[1:] == ["rigl 0.9", "rigl, unfinished 0.9"]
    assert quality.rows == [[1, 51.0, 10.0], [2, 52.0, None], [3, 53.0, None]]
