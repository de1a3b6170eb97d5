"""Object detection: SSD300 on data in the format of COCO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.tasks.classification.resnet import Name, initialise
from growprune.tasks.detection import distortions
from growprune.tasks.detection.coco import Album, Scene, album, coco_numbers, cocoeval, load
from growprune.tasks.detection.ssd import IMAGE_SIZE, SSD, Convolution, default_boxes, detect, multibox_loss
from growprune.tasks.images import ImageTask
from growprune.tasks.task import Split, Task, check_fields, with_channels

Batch = tuple[Tensor, Tensor, Tensor]
"""Images (B, 3, 300, 300), corners of their objects as fractions of the image (B, M, 4), and labels (B, M), 0: none."""


@dataclass(frozen=True)
class Detection(ImageTask):
    """Find objects in images."""

    data: str = ""
    """The data folder. coco.py describes its layout."""
    num_classes: int = 80
    """Categories of the data, without the background."""
    depth: Name = "resnet50"
    """The backbone."""
    width: int = 64
    """Channels of the first convolution. All others scale with it."""
    batch_size: int = 32
    """Maximum batch size. The images of an epoch are split evenly."""
    num_validation: int = 2000
    """Training images used for validation if there is no labelled test split. `val` is then the test split."""
    zoom_out: float = 1.0
    """Half of the training images are placed on a canvas up to this many times as large per side. 1: no zoom."""
    workers: int = 4
    """Processes that decode images, if they do not fit in memory."""

    metric = "map"
    initialises_modules = True

    def __post_init__(self) -> None:
        least = {"num_classes": 1, "width": 1, "batch_size": 2, "zoom_out": 1, "workers": 0}
        check_fields(self, least=least)

    def build_model(self) -> nn.Module:
        return SSD(self.depth, width=self.width, num_classes=self.num_classes)

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, Convolution):
            module.reset_parameters()
        else:  # the backbone
            initialise(module)

    def narrower(self) -> Sequence[Task]:
        return with_channels(self, "width")

    def example(self) -> Tensor:
        return torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE)

    def num_batches(self) -> int:
        cocoeval()  # raise now if pycocotools is missing, not after an epoch
        for split in ("validation", "test"):
            self.album(split)  # the same for missing pictures
        number = len(self.album("train").scenes)
        if number < 2:
            raise GrowpruneError(f"{self.data}: training needs at least 2 readable images, got 1")
        # Batch norm cannot normalise a batch of one image where the feature map has one cell.
        return min(-(-number // self.batch_size), number // 2)

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Batch]:
        train = self.album("train")
        order = np.random.default_rng(seed).permutation(len(train.scenes))
        batches = np.array_split(order, self.num_batches())
        all_boxes, all_labels = train.targets
        found = train.pictures(batches[start:], device, self._used)
        for number, (pixels, sizes, good) in enumerate(found, start=start):
            indices = torch.from_numpy(batches[number])
            labels = all_labels[indices].where(good.unsqueeze(1), 0)
            most = max(1, int((labels > 0).sum(1).max()))
            boxes, labels = all_boxes[indices, :most], labels[:, :most]
            generator = np.random.default_rng((seed, number))
            views = distortions.draw_views(generator, boxes, labels, zoom_out=self.zoom_out)
            mirrored = torch.from_numpy(generator.random(len(boxes)) < 0.5)
            colours = distortions.draw_colours(generator, len(boxes))
            boxes, labels = distortions.crop_boxes(boxes, labels, views, mirrored)
            views, mirrored, colours, boxes, labels = (
                tensor.to(device, non_blocking=True) for tensor in (views, mirrored, colours, boxes, labels)
            )
            images = distortions.show(pixels, sizes, views, mirrored)
            yield distortions.normalise(distortions.colour(images, colours)), boxes, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, boxes, labels = batch
        offsets, logits = model(images)
        return multibox_loss(offsets, logits, boxes, labels, default_boxes(images.device))

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        held_out = self.album(split)
        indices = np.arange(len(held_out.scenes))
        batches = np.array_split(indices, -(-len(indices) // self.batch_size))
        scenes: list[Scene] = []
        found: list[npt.NDArray[np.float64]] = []
        for batch, pictures in zip(batches, held_out.pictures(batches, device), strict=True):
            whole = torch.tensor((0.0, 0.0, 1.0, 1.0), device=device).expand(len(batch), -1)
            mirrored = torch.zeros(len(batch), dtype=torch.bool, device=device)
            images = distortions.normalise(distortions.show(pictures.pixels, pictures.sizes, whole, mirrored))
            offsets, logits = model(images)
            detections = detect(offsets, logits, default_boxes(device))
            columns = (tensor.double().cpu().numpy() for tensor in detections)
            for index, good, corners, score, label in zip(batch, pictures.good, *columns, strict=True):
                if good:
                    scene, kept = held_out.scenes[index], score > 0
                    boxes = corners[kept] * (scene.width, scene.height, scene.width, scene.height)
                    boxes[:, 2:] -= boxes[:, :2]
                    found.append(np.column_stack((boxes, score[kept], label[kept])))
                    scenes.append(scene)
        known = load(self.data, num_classes=self.num_classes, num_validation=self.num_validation)[split]
        skipped = len(known) - len(scenes)
        numbers = coco_numbers(scenes, found, num_classes=self.num_classes)
        return {**numbers, **({"skipped": skipped} if skipped else {})}

    def album(self, split: str) -> Album:
        options = {"num_classes": self.num_classes, "num_validation": self.num_validation, "workers": self.workers}
        return album(self.data, split, **options)
