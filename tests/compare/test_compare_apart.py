"""Runs that are not alike are not averaged into one row, and a baseline or a reference is not chosen by luck."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from report_runs import history, recipe, result, write_bare, write_run

from growprune import GrowpruneError
from growprune.compare import Comparison, of_runs
from growprune.runs.result import Metric
from growprune.runs.table import best_baseline

ACCURACY = Metric("accuracy")


def write(folder: Path, method: str, seed: int, score: float, *, data: Any = None, **fields: Any) -> None:
    """A finished run of two epochs, or as many as its options say."""
    sparsity = 0.0 if method == "dense" else 0.9
    made = recipe(method, sparsity, seed, **{"allocation": "erk", **fields})
    length = made["options"].get("epochs", 2)
    outcome = result(made, score, history([1000] * length), **({} if data is None else {"data": data}))
    write_bare(folder / f"{method}-{seed}-{score}" / "result.json", outcome)


def scores(comparison: Comparison) -> dict[str, tuple[float, int]]:
    """By row, the mean of its test scores, and how many they are."""
    return {row.name: (row.mean("test"), len(row.finished)) for row in comparison.rows}


@pytest.mark.parametrize("metric", [ACCURACY, Metric("loss", lower_is_better=True)], ids=["more", "less"])
def test_a_baseline_that_lacks_the_hard_seeds_is_not_the_best_for_that(metric: Metric) -> None:
    sign = -1 if metric.lower_is_better else 1
    gmp, rigl, lucky = {0: 80.0, 1: 90.0, 2: 91.0}, {0: 81.0, 1: 91.0, 2: 92.0}, {1: 91.5}
    validation = [{seed: sign * score for seed, score in row.items()} for row in (gmp, rigl, lucky)]
    others = [{n: scores for n, scores in enumerate(validation) if n != row} for row in range(3)]
    assert [best_baseline(validation[row], others[row], metric) for row in range(3)] == [1, 0, 1]


def test_baselines_of_different_seeds_are_compared_by_how_much_they_are_ahead() -> None:
    ours, ahead_on_hard, behind_on_easy = {0: 50.0, 1: 90.0}, {0: 52.0}, {1: 89.0}
    assert best_baseline(ours, {"easy": behind_on_easy, "hard": ahead_on_hard}, ACCURACY) == "hard"


def test_a_row_without_a_number_still_has_a_baseline() -> None:
    assert best_baseline({0: float("nan"), 1: 5.0}, {1: {0: 1.0, 1: 4.0}, 2: {0: 9.0, 1: 4.0}}, ACCURACY) == 2


def test_of_several_dense_rows_the_best_by_validation_is_the_reference_and_is_named(tmp_path: Path) -> None:
    for rate, dense, sparse in ((0.5, 60.0, 62.0), (0.1, 90.0, 88.0)):
        write(tmp_path, "dense", 0, dense, optimizer={"lr": rate})
        write(tmp_path, "gmp", 0, sparse, optimizer={"lr": rate})
    found = of_runs([tmp_path], ["optimizer.lr"])
    gaps = {row.name: found.minus_dense(row) for row in found.rows}
    assert {name: gap and gap.mean for name, gap in gaps.items()} == {
        "dense optimizer.lr=0.1": None,
        "dense optimizer.lr=0.5": -30.0,
        "gmp:erk optimizer.lr=0.1": -2.0,
        "gmp:erk optimizer.lr=0.5": -28.0,
    }
    assert "vs dense compares with dense optimizer.lr=0.1, the best dense row by validation" in found.notes


PARTS = {"contiguous(4)": ("Contiguous", 4), "contiguous(2)": ("Contiguous", 2), "balanced(2)": ("Balanced", 2)}


def cut(name: str) -> dict[str, Any]:
    kind, kappa = PARTS[name]
    return {"name": kind, "kappa": kappa}


def test_runs_that_are_cut_into_other_parts_are_other_rows(tmp_path: Path) -> None:
    for seed, (parts, score) in enumerate({"contiguous(4)": 90.0, "contiguous(2)": 80.0, "balanced(2)": 70.0}.items()):
        write(tmp_path, "cyclic_gap", seed, score, parts=cut(parts))
    write(tmp_path, "cyclic_gap", 1, 92.0, parts=cut("contiguous(4)"))
    assert scores(of_runs([tmp_path])) == {
        "cyclic_gap:erk parts=contiguous(4)": (91.0, 2),
        "cyclic_gap:erk parts=contiguous(2)": (80.0, 1),
        "cyclic_gap:erk parts=balanced(2)": (70.0, 1),
    }


def test_parts_are_named_only_where_they_tell_rows_apart(tmp_path: Path) -> None:
    write(tmp_path, "cyclic_gap", 0, 90.0, parts=cut("contiguous(4)"))
    write(tmp_path, "random_gap", 0, 80.0, parts={"name": "PerLayer"})
    write(tmp_path, "random_gap", 1, 82.0, parts={"name": "PerLayer"})
    assert scores(of_runs([tmp_path])) == {"cyclic_gap:erk": (90.0, 1), "random_gap:erk": (81.0, 2)}


def test_an_unfinished_seed_is_of_its_row_where_epochs_may_differ(tmp_path: Path) -> None:
    for length, seed in ((2, 0), (4, 0)):
        write(tmp_path / str(length), "gmp", seed, 90.0 + length, options={"epochs": length})
    write_run(tmp_path / "begun", recipe("gmp", 0.9, 1, allocation="erk", options={"epochs": 4}))
    found = {row.name: [run.status for run in row.runs] for row in of_runs([tmp_path], ["epochs"]).rows}
    assert found == {"gmp:erk epochs=2": ["finished"], "gmp:erk epochs=4": ["finished", "unfinished"]}


def data(num_batches: int = 40, first: str = "a") -> Mapping[str, Any]:
    return {"num_batches": num_batches, "first_batch": first}


def test_other_data_under_another_name_are_refused_though_no_seed_is_common(tmp_path: Path) -> None:
    write(tmp_path, "gmp", 0, 90.0, data=data(first="a"), task={"data": "cifar10"})
    write(tmp_path, "gmp", 1, 50.0, data=data(first="b"), task={"data": "cifar100"})
    with pytest.raises(GrowpruneError, match=r"task\.data differs: cifar10 in .*; cifar100 in .*--allow task\.data"):
        of_runs([tmp_path])


def test_other_data_of_the_same_name_are_refused_where_an_epoch_has_other_batches(tmp_path: Path) -> None:
    write(tmp_path, "gmp", 0, 90.0, data=data(391), task={"data": "here/cifar10"})
    write(tmp_path, "gmp", 1, 50.0, data=data(40), task={"data": "there/cifar10"})
    with pytest.raises(GrowpruneError, match=r"data differ: num_batches 391 in .*; num_batches 40 in "):
        of_runs([tmp_path])


def test_the_same_data_may_have_two_names_if_a_common_seed_shows_it(tmp_path: Path) -> None:
    write(tmp_path, "gmp", 0, 90.0, data=data(), task={"data": "cifar10"})
    write(tmp_path, "rigl", 0, 80.0, data=data(), task={"data": "cifar-10"})
    write(tmp_path, "rigl", 1, 82.0, data=data(first="b"), task={"data": "cifar-10"})
    assert scores(of_runs([tmp_path])) == {"gmp:erk": (90.0, 1), "rigl:erk": (81.0, 2)}


def test_a_folder_called_earlier_hides_only_what_lies_in_runs(tmp_path: Path) -> None:
    folder = tmp_path / "earlier" / "study"
    write(folder, "gmp", 0, 90.0)
    write(folder / "gmp-0-90.0" / "earlier", "gmp", 0, 10.0)
    assert scores(of_runs([folder])) == {"gmp:erk": (90.0, 1)}
