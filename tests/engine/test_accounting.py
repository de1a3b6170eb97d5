"""What a run cost, in live weights and FLOPs: by hand, after a resume, and on any number of processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import Toy, cyclic, plain

from growprune import engine, methods
from growprune.engine.cost import estimate
from growprune.engine.recipe import OptimizerConfig, Recipe
from growprune.masks.partition import contiguous
from growprune.plan import By, Phase, method, prune

FIGURES = ("training_flops", "training_iterations", "training_examples", "peak_alive", "average_alive")

# the plain toy: Linear 6 x 16, 16 x 16 and 16 x 3, 50 examples in 4 batches
SIZES = (96, 256, 48)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in FIGURES}


def short(recipe: Recipe, method: Any, **options: Any) -> Recipe:
    return replace(recipe, method=method, options=options, parts=contiguous(3))


def test_dense_training_costs_six_flops_for_each_weight_and_example(tmp_path: Path) -> None:
    result = engine.train(replace(short(plain(), methods.dense, epochs=2), sparsity=0.0), tmp_path / "run")
    assert figures(result) == {
        "training_flops": 2 * 50 * 3 * 2 * 400,
        "training_iterations": 8,
        "training_examples": 100,
        "peak_alive": 400,
        "average_alive": 400.0,
    }


def test_a_cyclic_run_is_charged_for_the_part_that_is_dense_in_each_step(tmp_path: Path) -> None:
    result = engine.train(short(plain(), methods.cyclic_gap, steps=3, epochs=1, finetune=2), tmp_path / "run")
    sparse = [19, 51, 10]  # a fifth of each, rounded half to even
    alive = [sum(sparse) - sparse[i] + SIZES[i] for i in range(3)]
    assert alive == [157, 285, 118]
    assert result["peak_alive"] == 285
    assert result["average_alive"] == (157 + 285 + 118 + 2 * 80) / 5
    # a forward pass has two operations for each live weight
    assert result["training_flops"] == 50 * 3 * 2 * (157 + 285 + 118 + 2 * 80)


def test_phases_that_end_within_an_epoch_are_charged_by_the_examples_they_had(tmp_path: Path) -> None:
    result = engine.train(short(plain(), methods.gmp, iterations=4, every=1, begin=0.5, until=0.5), tmp_path / "run")
    # batches of 16, 16 dense; 16 and 2 at 80 %
    assert result["training_flops"] == 3 * 2 * (32 * 400 + 18 * 80)
    assert result["average_alive"] == (400 + 80) / 2


def test_accumulated_batches_count_all_their_examples(tmp_path: Path) -> None:
    recipe = replace(short(plain(), methods.dense, epochs=1), sparsity=0.0, accumulate=3)
    result = engine.train(recipe, tmp_path / "run")
    assert (result["training_iterations"], result["training_examples"]) == (2, 50)


def test_a_dense_model_that_only_gave_its_gradients_counts_in_the_peak(tmp_path: Path) -> None:
    def snip(S: Any, *, sparsity: float) -> Any:
        yield Phase(prune(S.whole, to=sparsity, by=By.SNIP), epochs=1)

    result = engine.train(short(plain(), method(snip)), tmp_path / "run")
    assert (result["peak_alive"], result["average_alive"]) == (400, 80.0)


def test_the_branches_of_a_fork_add_up(tmp_path: Path) -> None:
    recipe = short(replace(plain(), task=Toy(is_plain=True)), methods.parallel_gap, steps=1, epochs=1, finetune=1)
    result = engine.train(recipe, tmp_path / "run")
    assert result["training_examples"] == (3 + 1) * 50
    assert result["training_flops"] == 50 * 3 * 2 * (157 + 285 + 118 + 80)
    assert result["peak_alive"] == 285


@pytest.mark.parametrize(
    ("allocation", "peak"),
    [
        ("uniform", 285),  # each part is pruned before it is returned
        ("global", 400),  # one ranking needs all of them dense
    ],
)
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_what_lives_where_branches_are_put_together_counts_in_the_peak(
    allocation: str, peak: int, storage: str, tmp_path: Path
) -> None:
    recipe = short(replace(plain(), task=Toy(is_plain=True)), methods.parallel_gap, steps=1, epochs=1, finetune=1)
    recipe = replace(recipe, allocation=allocation, storage=storage)
    assert engine.train(recipe, tmp_path / "run")["peak_alive"] == peak
    found = estimate(recipe)
    assert found.peak_density == pytest.approx(peak / 400, abs=0.003)
    assert found.merged_density == pytest.approx(1.0 if allocation == "global" else 0.2)
    assert max(cost.density for cost in found.costs) < 0.75  # of what is trained


def test_runs_of_one_seed_see_the_same_data_whatever_their_method(tmp_path: Path) -> None:
    first = engine.train(cyclic(), tmp_path / "cyclic")["data"]
    assert first["num_batches"] == 4
    assert engine.train(short(cyclic(), methods.rigl, epochs=1), tmp_path / "rigl")["data"] == first
    assert engine.train(replace(cyclic(), seed=1), tmp_path / "seed")["data"] != first
    assert engine.train(replace(cyclic(), task=Toy(num_examples=60)), tmp_path / "more")["data"] != first


def test_a_plan_knows_what_each_rank_will_hold() -> None:
    recipe = replace(
        plain(),
        task=Toy(is_plain=True),  # 96 + 256 + 48 prunable weights, 35 biases
        method=methods.one_shot,
        options={"epochs": 1, "finetune": 1},
        parts=contiguous(1),
        keep_dense=(),
        sparsity=0.75,
        storage="compact",
        optimizer=OptimizerConfig(kind="adamw"),
    )
    found = estimate(recipe)  # dense at first
    assert (found.state_bytes, found.mask_bytes) == (4 * 4 * (400 + 35), 400 // 8 + 4)
    assert found.bytes_per_rank(3) == 2320 + 54
    sgd = estimate(replace(recipe, optimizer=OptimizerConfig(kind="sgd", momentum=0.9), storage="masked"))
    assert (sgd.bytes_per_rank(), sgd.can_be_sharded) == (4 * 3 * 435 + 400, False)


def test_the_peak_of_a_plan_that_is_never_dense_counts() -> None:
    recipe = replace(plain(), task=Toy(is_plain=True), method=methods.static_random, options={"epochs": 1})
    recipe = replace(recipe, parts=contiguous(1), keep_dense=(), sparsity=0.75, storage="compact")
    recipe = replace(recipe, optimizer=OptimizerConfig(kind="sgd"))
    assert estimate(recipe).state_bytes == 4 * 2 * (100 + 35)
