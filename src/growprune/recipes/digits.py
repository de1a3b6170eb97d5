"""Handwritten digits: seconds on a laptop. All methods train for 40 epochs in total, for a fair comparison."""

from dataclasses import replace

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.masks.partition import balanced, contiguous
from growprune.tasks.digits import Digits


def dense() -> Recipe:
    """The dense baseline."""
    return Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=Digits(),
        method=methods.dense,
        options={"epochs": 40},
        optimizer=OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
    )


def cyclic_90() -> Recipe:
    """C-GaP at 90 %: two rounds of four steps, then fine-tuning."""
    return replace(
        dense(),
        method=methods.cyclic_gap,
        options={"steps": 8, "epochs": 2, "finetune": 24},
        sparsity=0.9,
        parts=contiguous(4),
    )


def parallel_90() -> Recipe:
    """P-GaP at 90 %: four branches that are combined twice. The epochs of all branches count."""
    return replace(cyclic_90(), method=methods.parallel_gap, options={"steps": 2, "epochs": 2, "finetune": 24})


def gradual_90() -> Recipe:
    """Grow-and-prune to 90 % with rising sparsity, in the same number of epochs.

    One layer has more than half of the weights, so by default the plan would begin at 90 %.
    """
    recipe = replace(dense(), method=methods.gradual_gap, sparsity=0.9, options={"epochs": 40, "start": 0.5})
    return replace(recipe, parts=balanced(4), allocation="global")


def one_shot_90() -> Recipe:
    """Train dense, prune once, fine-tune."""
    return replace(cyclic_90(), method=methods.one_shot, options={"epochs": 16, "finetune": 24})


def tiny() -> Recipe:
    """C-GaP in a second, for a first look and for tests."""
    return replace(
        cyclic_90(),
        task=Digits(width=4, batch_size=256),
        options={"steps": 3, "epochs": 1, "finetune": 1},
        parts=contiguous(3),
    )


RECIPES = {
    f"digits/{recipe.__name__.replace('_', '-')}": recipe
    for recipe in (dense, cyclic_90, gradual_90, parallel_90, one_shot_90, tiny)
}
