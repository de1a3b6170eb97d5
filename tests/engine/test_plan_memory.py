"""What `growprune plan` says a run will hold."""

from dataclasses import replace

from toy import Toy, plain

from growprune import methods
from growprune.engine.cost import estimate
from growprune.engine.recipe import OptimizerConfig
from growprune.masks.partition import contiguous


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
    memory = estimate(recipe).memory  # dense at first
    assert (memory.shared, memory.masks) == (4 * 4 * (400 + 35), 400 // 8 + 4)
    assert memory.per_rank(3) == 2320 + 54
    sgd = estimate(replace(recipe, optimizer=OptimizerConfig(kind="sgd", momentum=0.9), storage="masked"))
    assert (sgd.memory.per_rank(), sgd.can_be_sharded) == (4 * 3 * 435 + 400, False)


def test_the_peak_of_a_plan_that_is_never_dense_counts() -> None:
    recipe = replace(plain(), task=Toy(is_plain=True), method=methods.static_random, options={"epochs": 1})
    recipe = replace(recipe, parts=contiguous(1), keep_dense=(), sparsity=0.75, storage="compact")
    recipe = replace(recipe, optimizer=OptimizerConfig(kind="sgd"))
    assert estimate(recipe).memory.shared == 4 * 2 * (100 + 35)
