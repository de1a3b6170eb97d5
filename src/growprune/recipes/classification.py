"""Image classification (Table 1; the ablations of appendix A and B): ResNet-50 on ImageNet, ResNet-18 on CIFAR-10."""

from dataclasses import replace
from typing import Any

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.recipes.study import Baseline, Row, Study, recipes, rows_of
from growprune.tasks.classification import Classification

PARTS = (("conv1", "bn1", "layer1"), ("layer2",), ("layer3",), ("layer4", "fc"))
"""Cut at the last three downsampling stages."""


SMALL = Classification(
    model="resnet18",
    stem="cifar",
    num_classes=10,
    image_size=32,
    batch_size=512,
    crop="padded",
    num_validation=1000,
    in_memory=True,
    mean=(0.4917, 0.4826, 0.4472),
    std=(0.2452, 0.2427, 0.2606),
)


def imagenet() -> Study:
    """ResNet-50 as in the paper: batches of 2048, here eight of 256."""
    dense = Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=Classification(mixup=0.2),
        method=methods.dense,
        options={"epochs": 250},
        optimizer=OptimizerConfig("sgd", lr=2.048, momentum=0.875, weight_decay=3.05e-5),
        lr_schedule=LRSchedule("cosine", warmup_epochs=2),
        accumulate=8,
        precision="bf16",
    )
    lengths: dict[str, Any] = {"steps": 28, "rounds": 8, "epochs": 30, "finetune": 150, "pretrain": 250}
    short = {"task": Classification(), "optimizer": rigl_optimizer(0.8)}
    short["lr_schedule"] = LRSchedule("step", warmup_epochs=5, milestones=(0.3, 0.7, 0.9))
    long = {"optimizer": rigl_optimizer(1.2), "lr_schedule": LRSchedule("cosine", warmup_epochs=10)}
    return Study(dense, PARTS, keep_dense=("conv1", "fc"), short=short, long=long, **lengths)


def rigl_optimizer(lr: float) -> OptimizerConfig:
    """Optimizer of RigL and its baselines: a step schedule for 100 epochs, or, as in the paper, a cosine for more."""
    return OptimizerConfig("sgd", lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def cifar10() -> Study:
    """The packed copy of CIFAR-10, kept on the GPU. Every method trains for 60 epochs in total."""
    dense = replace(
        imagenet().dense,
        task=SMALL,
        options={"epochs": 60},
        optimizer=OptimizerConfig("sgd", lr=0.4, momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
        accumulate=1,
    )
    study = replace(imagenet(), dense=dense, steps=8, rounds=2, epochs=3, finetune=36, pretrain=24)
    return replace(study, budget=60, short={}, long={"task": replace(SMALL, mixup=0.2)})


ROWS: dict[str, Row] = {
    "dense": "Table 1, dense: top-1 78.2",
    "one-shot-80-uniform": "Table 1, prune-from-dense 80 %: top-1 77.1, there by ADMM; here pruned once",
    "one-shot-90-uniform": "Table 1, prune-from-dense 90 %: top-1 75.8, there by ADMM; here pruned once",
    "iterative-admm-80-uniform": "Table 1, prune-from-dense 80 %: top-1 77.1",
    "iterative-admm-90-uniform": "Table 1, prune-from-dense 90 %: top-1 75.8",
    "cyclic-80-uniform": "Table 1, C-GaP uniform 80 %: top-1 77.9",
    "cyclic-90-uniform": "Table 1, C-GaP uniform 90 %: top-1 76.3",
    "parallel-80-uniform": "Table 1, P-GaP uniform 80 %: top-1 77.5",
    "parallel-90-uniform": "Table 1, P-GaP uniform 90 %: top-1 76.1",
    "cyclic-80-global": "Table 1, C-GaP non-uniform 80 %: top-1 78.1",
    "cyclic-90-global": "Table 1, C-GaP non-uniform 90 %: top-1 77.9",
    "cyclic-90-uniform-kappa1": "Ablation of the number of parts, kappa = 1: top-1 75.9",
    "random-90-global": "Ablation of the partition, random: top-1 77.8",
    "cyclic-80-uniform-sparse-fc": "Ablation of the last layer, sparse: top-1 77.8",
    "cyclic-90-uniform-sparse-fc": "Ablation of the last layer, sparse: top-1 76.4",
}

LONG = {"until": 0.8}
"""Options of the paper's own runs of RigL and SET."""

BASELINES = (
    Baseline("snip", methods.snip, "uniform", 100, ("72.0", "67.2")),
    Baseline("set", methods.set_, "uniform", 100, ("72.9", "69.6")),
    Baseline("set", methods.set_, "uniform", 1200, ("76.4", "74.5"), times=12, options=LONG),
    Baseline("rigl", methods.rigl, "uniform", 100, ("74.6, and 74.6 in the authors' run", "72.0, and 72.5 in theirs")),
    Baseline(
        "rigl",
        methods.rigl,
        "uniform",
        500,
        ("76.6, and 76.9 in the authors' run", "75.7, and 75.6 in theirs"),
        5,
        LONG,
    ),
    Baseline("rigl", methods.rigl, "uniform", 1200, ("77.1", "76.0"), times=12, options=LONG),
    Baseline("gmp", methods.gmp, "global", 135, ("76.5", "75.0")),
    Baseline("snip", methods.snip, "global", 100, ("69.7", "61.9")),
    Baseline("grasp", methods.grasp, "global", 150, ("72.1", "68.1")),
    Baseline("set", methods.set_, "erk", 100, ("72.6", "70.4")),
    Baseline("dsr", methods.dsr, "global", 100, ("73.3", "71.6")),
    Baseline("rigl", methods.rigl, "erk", 100, ("75.1, and 75.4 in the authors' run", "73.0, and 73.9 in theirs")),
    Baseline(
        "rigl", methods.rigl, "erk", 500, ("77.1, and 77.4 in the authors' run", "76.4, and 76.3 in theirs"), 5, LONG
    ),
    Baseline("rigl", methods.rigl, "erk", 1200, ("77.4", "76.8"), times=12, options=LONG),
    Baseline("static", methods.static_random, "erk", 100),
    Baseline("snfs", methods.snfs, "global", 100),
    Baseline("granet", methods.granet, "global", 100),
    Baseline("acdc", methods.acdc, "global", 100),
    Baseline("deepr", methods.deepr, "global", 100, ("71.7", "70.2")),
    Baseline("dpf", methods.dpf, "global", 90, ("75.1", None)),
    Baseline("str", methods.str_, "global", 100),
)
ROWS |= rows_of(BASELINES, table="Table 1", metric="top-1")

MEASURED = {
    "classification-cifar10/dense": "top1 91.19",
    "classification-cifar10/cyclic-80-uniform": "top1 89.95",
    "classification-cifar10/cyclic-90-uniform": "top1 89.07",
    "classification-cifar10/parallel-80-uniform": "top1 89.07",
    "classification-cifar10/cyclic-80-global": "top1 90.37",
}
"""Our own results. A test compares them with experiments/."""

RECIPES = recipes("classification-imagenet", imagenet(), ROWS)
RECIPES |= recipes("classification-cifar10", cifar10(), ROWS, like="Like {}, on cifar10.npz", measured=MEASURED)
