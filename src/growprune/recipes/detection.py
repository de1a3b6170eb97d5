"""Object detection (Table 2): SSD300 on COCO, and on blood cells."""

from dataclasses import replace

from growprune import methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.recipes.study import Row, Study, recipes
from growprune.tasks.detection import Detection

PARTS = (
    ("backbone.conv1", "backbone.bn1", "backbone.layer1"),
    ("backbone.layer2",),
    ("backbone.layer3",),
    ("additional_blocks", "loc", "conf"),
)
"""Three of the backbone, one of the head."""


SMALL = Detection(num_classes=3, depth="resnet18", batch_size=16, zoom_out=2.0)


def coco() -> Study:
    """COCO 2017 in batches of 512, here eight of 64. From scratch; the paper's backbone knows ImageNet."""
    dense = Recipe(
        keep_dense=(),  # rankings and allocations decide, as in the paper
        task=Detection(batch_size=64, workers=8),
        method=methods.dense,
        options={"epochs": 65},
        optimizer=OptimizerConfig("sgd", lr=0.0416, momentum=0.9, weight_decay=5e-4),
        lr_schedule=LRSchedule("step", warmup_iterations=300, milestones=(43 / 65, 54 / 65)),
        accumulate=8,
        precision="bf16",
    )
    return Study(dense, PARTS, steps=40, rounds=10, epochs=32, finetune=65, pretrain=65, keep_dense=("loc.*", "conf.*"))


def bccd() -> Study:
    """Red and white blood cells and platelets, 205 images to train on. Every method trains for 120 epochs in total."""
    dense = replace(
        coco().dense,
        task=SMALL,
        options={"epochs": 120},
        optimizer=OptimizerConfig("adamw", lr=1e-3, weight_decay=1e-2),
        lr_schedule=LRSchedule("cosine", warmup_epochs=2),
        accumulate=1,
        evaluate_every=10,
    )
    return replace(coco(), dense=dense, steps=8, rounds=2, epochs=6, finetune=72, pretrain=48, budget=120)


ROWS: dict[str, Row] = {
    "dense": "Table 2, dense: AP 25.2",
    "one-shot-90-uniform": "Table 2, prune-from-dense 90 %: AP 22.0 pruned once, as here; 24.3 step by step",
    "iterative-90-uniform": "Table 2, prune-from-dense 90 %: AP 24.3",
    "cyclic-80-uniform": "C-GaP 80 %, not in the paper",
    "cyclic-90-uniform": "Table 2, C-GaP 90 %: AP 25.9",
    "parallel-80-uniform": "P-GaP 80 %, not in the paper",
}

MEASURED = {
    "detection-bccd/dense": "map 57.86",
    "detection-bccd/cyclic-80-uniform": "map 58.39",
    "detection-bccd/cyclic-90-uniform": "map 57.54",
    "detection-bccd/parallel-80-uniform": "map 57.27",
}
"""Our own results. A test compares them with experiments/."""

RECIPES = recipes("detection-coco", coco(), ROWS)
RECIPES |= recipes("detection-bccd", bccd(), ROWS, like="Like {}, on bccd/", measured=MEASURED)
