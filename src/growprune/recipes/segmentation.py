"""Part segmentation of 3D shapes (Table 3): PointNet++ on ShapeNet."""

from dataclasses import replace

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.recipes.study import Row, Study, recipes
from growprune.tasks.segmentation import PartSegmentation

PARTS = (("sa1",), ("sa2",), ("sa3",), ("fp3", "fp2", "fp1", "conv1", "bn1", "conv2"))
"""Three of the backbone, one of the head."""


def shapenet() -> Study:
    """All of ShapeNet-part. Adam, as in the code the paper builds on; its text says SGD, with Adam's learning rate."""
    dense = Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=PartSegmentation(),
        method=methods.dense,
        options={"epochs": 250},
        optimizer=OptimizerConfig("adam", lr=1e-3, weight_decay=1e-4),
        lr_schedule=LRSchedule("step", every_epochs=20, gamma=0.5, floor=0.01),
    )
    return Study(dense, PARTS, steps=40, rounds=10, epochs=25, finetune=250, pretrain=250)


def subset() -> Study:
    """Six categories, 384 shapes to train on. Every method trains for 60 epochs in total."""
    dense = replace(
        shapenet().dense,
        task=PartSegmentation(batch_size=16),
        options={"epochs": 60},
        lr_schedule=LRSchedule("cosine", warmup_epochs=1),
        precision="bf16",
        evaluate_every=4,
    )
    return replace(shapenet(), dense=dense, steps=8, rounds=2, epochs=3, finetune=36, pretrain=24, budget=60)


ONCE = ", there by ADMM; here pruned once"

ROWS: dict[str, Row] = {
    "dense": "Table 3, dense: class mIoU 82.5, instance mIoU 85.4",
    "one-shot-80-uniform": "Table 3, prune-from-dense 80 %: class mIoU 79.1, instance mIoU 84.5" + ONCE,
    "one-shot-90-uniform": "Table 3, prune-from-dense 90 %: class mIoU 77.1, instance mIoU 84.0" + ONCE,
    "iterative-admm-80-uniform": "Table 3, prune-from-dense 80 %: class mIoU 79.1, instance mIoU 84.5",
    "iterative-admm-90-uniform": "Table 3, prune-from-dense 90 %: class mIoU 77.1, instance mIoU 84.0",
    "cyclic-80-uniform": "Table 3, C-GaP 80 %: class mIoU 82.9, instance mIoU 85.8",
    "cyclic-90-uniform": "Table 3, C-GaP 90 %: class mIoU 79.5, instance mIoU 85.1",
    "parallel-80-uniform": "Table 3, P-GaP 80 %: class mIoU 80.8, instance mIoU 85.5",
    "parallel-90-uniform": "Table 3, P-GaP 90 %: class mIoU 74.0, instance mIoU 83.7",
}

MEASURED = {
    "segmentation-subset/dense": "instance_miou 81.36",
    "segmentation-subset/cyclic-80-uniform": "instance_miou 81.07",
    "segmentation-subset/cyclic-90-uniform": "instance_miou 79.61",
    "segmentation-subset/parallel-80-uniform": "instance_miou 80.56",
}
"""Our own results. A test compares them with experiments/."""

RECIPES = recipes("segmentation-shapenet", shapenet(), ROWS)
RECIPES |= recipes(
    "segmentation-subset", subset(), ROWS, like="Like {}, on shapenet_part_subset.zip", measured=MEASURED
)
