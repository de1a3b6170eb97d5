"""Every row of the paper's tables in miniature: a few channels, seconds on a CPU, with the data of small_data.py."""

from dataclasses import replace

from growprune.engine.recipe import LRSchedule
from growprune.recipes import classification, detection, language, segmentation, translation
from growprune.recipes.study import Study, recipes
from growprune.tasks.language import Language
from growprune.tasks.segmentation import PartSegmentation

SHORT = {"steps": 2, "rounds": 1, "epochs": 1, "finetune": 1, "pretrain": 1}
ON_CPU = {"precision": "fp32", "device": "cpu"}


def _classification() -> Study:
    """A ResNet-18 of 8 channels on 16 x 16 pixels."""
    small = {"width": 8, "image_size": 16, "batch_size": 16, "num_classes": 2, "num_validation": 8, "workers": 0}
    task, study = replace(classification.SMALL, **small), classification.cifar10()
    dense = replace(study.dense, task=task, options={"epochs": 1}, **ON_CPU)
    return replace(study, dense=dense, budget=2, every=2, long={"task": replace(task, mixup=0.2)}, **SHORT)


def _detection() -> Study:
    task, study = replace(detection.SMALL, width=2, batch_size=4, workers=0), detection.bccd()
    dense = replace(study.dense, task=task, options={"epochs": 1}, **ON_CPU)
    return replace(study, dense=dense, budget=3, every=1, **SHORT)


def _segmentation() -> Study:
    task, study = PartSegmentation(num_points=64, width=0.125, detail=0.0625, batch_size=4), segmentation.subset()
    dense = replace(study.dense, task=task, options={"epochs": 1}, **ON_CPU)
    return replace(study, dense=dense, budget=3, every=1, **SHORT)


def _translation() -> Study:
    small = {"vocab_size": 320, "d_model": 16, "ffn": 32, "heads": 2, "max_tokens": 256, "max_length": 32, "beam": 2}
    task, study = replace(translation.SMALL, **small), translation.multi30k()
    dense = replace(study.dense, task=task, options={"epochs": 1}, **ON_CPU)
    return replace(study, dense=dense, **SHORT)


def _language() -> Study:
    task = Language(context=8, d_model=16, ffn=64, heads=2, layers=3, batch_size=16)
    schedule, study = LRSchedule("cosine", warmup_iterations=2), language.shakespeare()
    dense = replace(study.dense, task=task, options={"epochs": 2}, lr_schedule=schedule, evaluate_every=1, **ON_CPU)
    return replace(study, dense=dense, parts=language.cut(1, 1, 1), epochs=1, finetune=1, budget=2, every=1)


TINY = {
    **recipes("classification-tiny", _classification(), classification.ROWS),
    **recipes("detection-tiny", _detection(), detection.ROWS),
    **recipes("segmentation-tiny", _segmentation(), segmentation.ROWS),
    **recipes("translation-tiny", _translation(), translation.ROWS),
    **recipes("language-tiny", _language(), language.ROWS),
}
