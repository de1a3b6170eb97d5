"""Image classification (Table 1; the ablations of appendix A and B): ResNet-50 on ImageNet, ResNet-18 on CIFAR-10."""

from dataclasses import replace

from growprune import methods
from growprune.engine.optim import LRSchedule, OptimizerConfig
from growprune.engine.partitions import contiguous
from growprune.engine.recipe import Recipe
from growprune.recipes.study import Row, Study, measured, recipes, to_see_that_it_runs
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
    """As in the paper: batches of 2048, here eight of 256."""
    dense = Recipe(
        task=Classification(mixup=0.2),
        method=methods.dense,
        options={"epochs": 250},
        optimizer=OptimizerConfig("sgd", lr=2.048, momentum=0.875, weight_decay=3.05e-5),
        lr_schedule=LRSchedule("cosine", warmup_epochs=2),
        accumulate=8,
        precision="bf16",
    )
    return Study(dense, PARTS, steps=28, rounds=8, epochs=30, finetune=150, pretrain=250, keep_dense=("conv1", "fc"))


def cifar10() -> Study:
    """The packed copy of CIFAR-10, all of it on the GPU. Every method trains for 60 epochs in all."""
    dense = replace(
        imagenet().dense,
        task=SMALL,
        options={"epochs": 60},
        optimizer=OptimizerConfig("sgd", lr=0.4, momentum=0.9, nesterov=True, weight_decay=5e-4),
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
        accumulate=1,
    )
    return replace(imagenet(), dense=dense, steps=8, rounds=2, epochs=3, finetune=36, pretrain=24)


def tiny() -> Study:
    """A ResNet-18 of 8 channels on 16 x 16 pixels: seconds on a CPU."""
    task = replace(SMALL, width=8, image_size=16, batch_size=16, num_classes=2, num_validation=8, workers=0)
    dense = replace(cifar10().dense, task=task, options={"epochs": 1}, precision="fp32", device="cpu")
    return replace(cifar10(), dense=dense, steps=2, rounds=1, epochs=1, finetune=1, pretrain=1)


ROWS: dict[str, Row] = {
    "dense": ("Table 1, dense: top-1 78.2", lambda s: s.dense),
    "one-shot-80-uniform": (
        "Table 1, prune-from-dense 80 %: top-1 77.1, there by ADMM; here pruned once",
        lambda s: s.one_shot(0.8),
    ),
    "one-shot-90-uniform": (
        "Table 1, prune-from-dense 90 %: top-1 75.8, there by ADMM; here pruned once",
        lambda s: s.one_shot(0.9),
    ),
    "cyclic-80-uniform": ("Table 1, C-GaP uniform 80 %: top-1 77.9", lambda s: s.cyclic(0.8)),
    "cyclic-90-uniform": ("Table 1, C-GaP uniform 90 %: top-1 76.3", lambda s: s.cyclic(0.9)),
    "parallel-80-uniform": (
        "Table 1, P-GaP uniform 80 %: top-1 77.5",
        lambda s: s.parallel(0.8),
    ),
    "parallel-90-uniform": (
        "Table 1, P-GaP uniform 90 %: top-1 76.1",
        lambda s: s.parallel(0.9),
    ),
    "cyclic-80-global": (
        "Table 1, C-GaP non-uniform 80 %: top-1 78.1",
        lambda s: s.cyclic(0.8, allocation="global"),
    ),
    "cyclic-90-global": (
        "Table 1, C-GaP non-uniform 90 %: top-1 77.9",
        lambda s: s.cyclic(0.9, allocation="global"),
    ),
    "cyclic-90-uniform-kappa1": (
        "Ablation of the number of parts, kappa = 1: top-1 75.9",
        lambda s: s.cyclic(0.9, partition=contiguous(1)),
    ),
    "random-90-global": (
        "Ablation of the partition, random: top-1 77.8",
        lambda s: s.random(0.9, allocation="global"),
    ),
    "cyclic-80-uniform-sparse-fc": (
        "Ablation of the last layer, sparse: top-1 77.8",
        lambda s: s.cyclic(0.8, keep_dense=("conv1",)),
    ),
    "cyclic-90-uniform-sparse-fc": (
        "Ablation of the last layer, sparse: top-1 76.4",
        lambda s: s.cyclic(0.9, keep_dense=("conv1",)),
    ),
}

MEASURED = {
    "dense": "top1 91.19",
    "cyclic-80-uniform": "top1 89.95",
    "cyclic-90-uniform": "top1 89.07",
    "parallel-80-uniform": "top1 89.07",
    "cyclic-80-global": "top1 90.37",
}

RECIPES = (
    recipes("classification-imagenet", imagenet(), ROWS)
    | recipes("classification-cifar10", cifar10(), ROWS, measured("cifar10.npz", MEASURED), "one GPU")
    | recipes("classification-tiny", tiny(), ROWS, to_see_that_it_runs, "one CPU core")
)
