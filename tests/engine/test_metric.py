"""Which score is better, and that best models, comparisons and reports go by it."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import history, phase, recipe, result, row, write_run
from torch import nn

from growprune import SparseModel
from growprune.engine.observers import Best
from growprune.report.page import render
from growprune.runs import find_runs
from growprune.runs.result import Metric, decimals
from growprune.runs.table import best_baseline

HIGHER, LOWER = Metric("accuracy"), Metric("bits", lower_is_better=True)


@pytest.mark.parametrize(
    "metric, scores, kept",
    [
        (HIGHER, [2.0, 3.0, 1.0], 1),
        (LOWER, [2.0, 3.0, 1.0], 2),
        (HIGHER, [3.0, 3.0], 1),  # of equals, the one trained longer
        (LOWER, [3.0, 3.0, 4.0], 1),
        (LOWER, [math.nan, 5.0, math.nan], 1),
        (HIGHER, [math.nan, -5.0, math.nan], 1),
        (LOWER, [0.0, -1.0, math.inf], 1),
    ],
)
def test_the_best_model_is_the_one_with_the_best_score(
    metric: Metric, scores: list[float], kept: int, tmp_path: Path
) -> None:
    sparse = SparseModel(nn.Linear(4, 4), sparsity=0.5)
    best = Best(tmp_path / "best.safetensors", metric, is_writer=True)
    for number, score in enumerate(scores):
        with torch.no_grad():
            sparse.model.bias.fill_(number)
        best.consider(sparse, {metric.name: score}, epoch=number)
    assert best.found == {"validation": {metric.name: scores[kept]}, "epoch": kept}
    best.put_into(sparse)
    assert sparse.model.bias.tolist() == [kept] * 4


def test_the_best_baseline_is_the_one_with_the_best_mean() -> None:
    own, others = {0: 5.0, 1: 5.0}, {"a": {0: 1.0, 1: 4.0}, "b": {0: 3.0, 1: 3.0}}
    assert (best_baseline(own, others, HIGHER), best_baseline(own, others, LOWER)) == ("b", "a")
    assert LOWER.best({}) is None
    assert LOWER.best({"a": 1.0, "b": 1.0}) == "a"
    assert [metric.best({"a": math.nan, "b": 2.0, "c": math.nan}) for metric in (LOWER, HIGHER)] == ["b", "b"]
    assert HIGHER.best({"a": math.nan}) is None


def test_small_scores_are_shown_with_one_more_decimal() -> None:
    assert [decimals(score) for score in (None, 39.3, -12.0, 9.99, 1.47, 0.0)] == [2, 2, 2, 3, 3, 3]


def of_bits(folder: Path, method: str, sparsity: float, bits: float, validation: float = 0.0) -> Path:
    made = recipe(method, sparsity, 0, task={"name": "Language"})
    scores: dict[str, Any] = {"metric": "bits", "lower_is_better": True}
    scores |= {"validation": {"bits": validation or bits}, "test": {"bits": bits}}
    return write_run(folder, made, result(made, 0.0, history([1000, 500]), **scores))


def test_a_report_calls_the_lowest_the_best_and_says_so(tmp_path: Path) -> None:
    for method, bits in {"rigl": 2.25, "gmp": 2.125, "set": 2.5}.items():
        of_bits(tmp_path / method, method, 0.9, bits)
    of_bits(tmp_path / "dense", "dense", 0.0, 2.0)
    page = render(find_runs([tmp_path]), "/* drawn by nobody */")
    assert "The dense model has bits (lower is better) 2.000 on test data." in page
    assert re.search(r"At sparsity 0\.9, gmp\S* \(the best of 3 .*\) reaches bits 2\.125 \(\+0\.125", page)
    assert "bits, test (lower is better)" in page


def test_a_report_of_an_unfinished_run_goes_by_its_log(tmp_path: Path) -> None:
    scores = {"validation": {"loss": 1.5, "bits": 2.0}, "metric": "bits", "lower_is_better": True}
    events = [phase(0, 0, "train", 10, 1000), {"event": "epoch", **row(1, 0, 1000, **scores)}]
    write_run(tmp_path / "run", recipe("dense", 0.0, 0, task={"name": "Language"}), None, events)
    (record,) = find_runs([tmp_path])
    assert record.metric == LOWER
    assert "lower is better" in render([record], "/* drawn by nobody */")


def test_a_report_lets_validation_and_not_test_data_say_who_is_best(tmp_path: Path) -> None:
    for method, (validation, test) in {"rigl": (1.0, 3.0), "gmp": (2.0, 1.5)}.items():
        of_bits(tmp_path / method, method, 0.9, test, validation)
    page = render(find_runs([tmp_path]), "/* drawn by nobody */")
    assert re.search(r"At sparsity 0\.9, rigl\S* \(the best of 2 .*\) reaches bits 3\.000", page)
