"""Rows of small dense models: how wide they are, by hand, and how they stand beside sparse ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_runs
import toy
from paths import TOY as TOY_FILE

from growprune import methods
from growprune.compare import Request, of_runs
from growprune.compare.rows import make_small, parse_rows, size_of
from growprune.engine.recipe import Recipe, describe
from growprune.errors import GrowpruneError
from growprune.report import page
from growprune.runs import find_runs
from growprune.runs.record import say_small
from growprune.tasks import TASKS, Task
from growprune.tasks.classification import Classification
from growprune.tasks.digits import Digits
from growprune.tasks.language import Language


def recipe(task: Task, **more: Any) -> Recipe:
    return Recipe(task, methods.dense, {"epochs": 1}, **{"keep_dense": (), **more})


def small(task: Task, sparsity: float = 0.9, equal: str = "nonzeros", **more: Any) -> Recipe:
    return make_small(recipe(task, **more), sparsity, equal)


def test_a_small_dense_digits_model_has_as_many_weights_as_the_sparse_one_has_non_zeros() -> None:
    # 9 w + 18 w^2 + 36 w^2 + 320 w: 65,824 of width 32, of which 6,582 are a tenth; 6,088 of width 8, 7,335 of 9
    made = small(Digits(width=32))
    assert made.task == Digits(width=8)
    assert size_of(made, made.task).weights == 6088
    noted = made.options["small"]
    assert (noted["task"], noted["of"], noted["equal"]) == ({"width": 8}, {"width": 32}, "nonzeros")
    assert noted["weights"] == 6088 / 65824
    assert noted["target"] == pytest.approx(0.1)


def test_a_small_dense_digits_model_of_equal_flops_is_wider() -> None:
    # 64 * 2 * (9 w + 18 w^2) + 16 * 2 * 36 w^2 + 2 * 320 w = 3,456 w^2 + 1,792 w: 3,596,288 of width 32
    made = small(Digits(width=32), equal="flops")
    assert made.task == Digits(width=10)  # 363,520; width 9 has 296,064
    assert made.options["small"]["flops"] == 363_520 / 3_596_288


def test_the_small_resnet_of_the_pilot_has_width_10() -> None:
    # 2,724 w^2 + 107 w: 2,792,800 of width 32, 273,470 of 10, 330,781 of 11
    made = small(Classification(model="resnet18", stem="cifar", width=32, num_classes=10, image_size=32))
    assert made.task.width == 10  # type: ignore[attr-defined]
    assert made.options["small"]["weights"] == 273_470 / 2_792_800
    assert say_small(made.options["small"]) == "width 10: 9.79 % of the weights"


def test_heads_divide_the_width_of_a_small_language_model_and_ffn_goes_with_it() -> None:
    # 72 d^2: of multiples of 6, 120 has 0.0977 of 384's weights and 126 has 0.1077
    made = small(Language())
    assert made.task == Language(d_model=120, ffn=480)
    assert made.options["small"]["weights"] == (120 / 384) ** 2


@pytest.mark.parametrize("name", list(TASKS))
def test_every_task_has_narrower_ones_up_to_itself(name: str) -> None:
    task = TASKS[name]()
    narrower = task.narrower()
    assert len(narrower) > 30
    assert narrower[-1] == task
    ends = [size_of(recipe(each), each).weights for each in (narrower[0], narrower[1], narrower[-2], narrower[-1])]
    assert ends == sorted(ends)


def test_where_no_width_is_near_the_nearest_is_taken_and_said() -> None:
    noted = small(Digits(width=4), 0.99).options["small"]
    # 383 of width 1, of 2,180 in all
    assert say_small(noted, at_length=True) == (
        "width 1 instead of 4: 17.6 % of the weights, target 1 %; the nearest possible, 1657% off"
    )


def test_a_task_without_a_width_keeps_its_model_and_says_so() -> None:
    made = small(toy.Toy(), 0.5)
    assert made.task == toy.Toy()
    assert say_small(made.options["small"], at_length=True) == (
        "the full width: 100 % of the weights, target 50 %; the nearest possible, 100% off"
    )


def test_layers_that_are_kept_dense_do_not_count() -> None:
    # 54 w^2 + 9 w without the head: 55,584 of width 32; 5,490 of width 10, 6,633 of 11
    made = small(Digits(width=32), keep_dense=("head",))
    assert made.task == Digits(width=10)
    assert made.options["small"]["weights"] == 5490 / 55584


def test_a_recipe_that_begins_with_weights_has_no_small_model() -> None:
    with pytest.raises(GrowpruneError, match="small_dense trains a narrower model, so it cannot start from"):
        small(Digits(), weights="model.safetensors")


def test_the_rows_are_named_and_parsed() -> None:
    rows = parse_rows("small_dense,small_dense:flops,small_dense optimizer.lr=0.2")
    assert [row.name for row in rows] == ["small_dense", "small_dense:flops", "small_dense optimizer.lr=0.2"]
    assert [row.folder for row in rows[:2]] == ["small_dense", "small_dense-flops"]
    assert parse_rows("small_dense:nonzeros") == rows[:1]
    with pytest.raises(GrowpruneError, match="the row must be small_dense:nonzeros or small_dense:flops"):
        parse_rows("small_dense:erk")


def asked(out: Path, **more: Any) -> Request:
    rows = "dense,rigl,small_dense,small_dense:flops"
    return Request.parse(["digits/dense"], rows, "0.8,0.9", "0,1", 2, out, ["task.width=16"], **more)


SCORES = {"dense": 95.0, "rigl:erk": 90.0, "small_dense": 99.0, "small_dense:flops": 85.0}


def fake(out: Path) -> Request:
    request = asked(out)
    for job in request.jobs():
        plain = json.loads(json.dumps(describe(job.recipe)))
        content = report_runs.result(plain, SCORES[job.row.name], report_runs.history([1000, 1000]))
        small_one = job.recipe.options.get("small")
        if small_one:  # 1,000 weights and 2,000 FLOPs are those of its own model
            content |= {"peak_alive": 1000, "training_examples": 10, "training_flops": 3 * 2000 * 10}
        report_runs.write_bare(job.folder / "result.json", content)
    return request


def test_a_small_dense_row_is_compared_with_the_best_method_and_is_nobodys_reference_or_baseline(
    tmp_path: Path,
) -> None:
    request = fake(tmp_path)
    for comparison in (request.table(request.jobs()), of_runs([tmp_path])):
        rows = {(row.name.split(" ")[0], row.sparsity): row for row in comparison.rows}
        assert comparison.minus_dense(rows["dense", 0.0]) is None
        small_one, rigl = rows["small_dense", 0.9], rows["rigl:erk", 0.9]
        ours, theirs = comparison.summary(small_one), comparison.summary(rigl)
        assert (ours["baseline"], theirs["baseline"]) == (rigl.name, None)
        assert (ours["minus_baseline"]["mean"], ours["minus_dense"]["mean"]) == (9.0, 4.0)
        assert theirs["minus_dense"]["mean"] == -5.0


def test_its_costs_are_shares_of_the_full_model_and_its_width_stands_in_the_table(tmp_path: Path) -> None:
    request = fake(tmp_path)
    comparison = request.table(request.jobs())
    row = next(row for row in comparison.rows if (row.name, row.sparsity) == ("small_dense", 0.9))
    # 2,180 weights of width 4, of 19,088 of width 16; 62,464 FLOPs of 913,408
    assert comparison.cells(row)["sparsity"] == "0.9 (width 4: 11.4 % of the weights)"
    assert row.mean("peak_alive") == pytest.approx(2180 / 19088)
    assert row.mean("inference_flops") == pytest.approx(62_464 / 913_408)
    assert row.mean("training_flops") == pytest.approx(62_464 / 913_408)
    said = "small_dense 0.9: width 4 instead of 16: 11.4 % of the weights, target 10 %; the nearest possible, 14% off"
    assert said in comparison.notes


def test_the_page_shows_it_beside_the_others(tmp_path: Path) -> None:
    fake(tmp_path)
    text = page.render(find_runs([tmp_path]), "")
    assert "<td>0.9 (width 4: 11.4 % of the weights)</td>" in text
    assert text.count("<h3>Results</h3>") == 1  # one task, one group
    assert "Not all of these runs can be compared" not in text


def test_with_equal_flops_a_small_model_trains_for_as_many_flops_as_the_full_one(tmp_path: Path) -> None:
    jobs = asked(tmp_path, budget_kind="flops", max_epochs=1000).jobs()
    epochs = {(job.row.name, job.sparsity): job.epochs for job in jobs}
    assert epochs["dense", 0.0] == 2
    assert epochs["small_dense", 0.9] == 29  # 2 * 913,408 / 62,464 = 29.2


def test_a_printed_command_trains_the_small_model(tmp_path: Path) -> None:
    job = next(job for job in asked(tmp_path).jobs() if job.row.equal == "flops" and job.sparsity == 0.9)
    assert job.settings["task.width"] == "5"
    assert job.recipe.task == replace(Digits(), width=5)
    assert job.recipe.method is methods.dense


def test_a_pattern_of_blocks_means_nothing_to_a_small_dense_model(tmp_path: Path) -> None:
    request = Request.parse([f"{TOY_FILE}:cyclic"], "small_dense", "0.8", "0", 6, tmp_path, ["pattern=1x2"])
    assert [job.recipe.pattern for job in request.jobs()] == ["unstructured"]
