"""Part segmentation of 3D shapes: PointNet++ predicts the part of every point of a ShapeNet object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.tasks.segmentation import shapenet
from growprune.tasks.segmentation.pointnet2 import NUM_CENTRES, PointNet2, initialise, scaled
from growprune.tasks.segmentation.shapenet import Batch
from growprune.tasks.task import Split, Task, check_fields


@dataclass(frozen=True)
class PartSegmentation(Task):
    """Segment ShapeNet objects into 50 parts of 16 categories. The category is an input of the model."""

    data: str = ""
    """The folder of the benchmark with normals, its parent, or a zip file of it; see shapenet.py."""
    num_points: int = 2048
    """Points per shape. Drawn anew in each epoch, and fixed in evaluation."""
    batch_size: int = 32
    width: float = 1.0
    """Scales the numbers of channels."""
    detail: float = 1.0
    """Scales the numbers of centres (512, then 128) and of their neighbours (32 to 128)."""
    dropout: float = 0.5
    scale: tuple[float, float] = (0.8, 1.25)
    """Range of the random scale of a shape in training."""
    shift: float = 0.1
    """Maximum random shift along each axis in training."""

    metric = "instance_miou"
    initialises_modules = True

    def __post_init__(self) -> None:
        for name in ("num_points", "batch_size", "width", "detail"):
            if not getattr(self, name) > 0:
                raise GrowpruneError(f"{name} must be > 0, got {getattr(self, name)}")
        check_fields(self, least={}, rates=("dropout",))
        if self.num_points < (centres := scaled(NUM_CENTRES[0], self.detail)):
            raise GrowpruneError(
                f"num_points must be >= {centres}, the number of centres, got {self.num_points}. Or lower detail"
            )

    def build_model(self) -> nn.Module:
        return PointNet2(self)

    def initialise(self, module: nn.Module) -> None:
        super().initialise(module)
        initialise(module)

    def narrower(self) -> Sequence[Task]:
        """Return the task at 128 widths, up to its own."""
        return [*(replace(self, width=self.width * n / 128) for n in range(1, 128)), self]

    def example(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, self.num_points, 6), torch.zeros(1, dtype=torch.long)

    def num_batches(self) -> int:
        return -(-len(shapenet.load(self.data)["train"]) // self.batch_size)

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Batch]:
        shapes = shapenet.shapes_on(self.data, "train", device)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(shapes)))
        for number, indices in list(enumerate(torch.split(order, self.batch_size)))[start:]:
            state = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]
            generator = torch.Generator(device).manual_seed(int(state >> np.uint64(1)))
            points, categories, labels = shapes.draw(indices.to(device), self.num_points, generator)
            draws = torch.rand(len(points), 1, 4, generator=generator, device=device)
            low, high = self.scale
            xyz = points[..., :3] * (low + (high - low) * draws[..., :1]) + self.shift * (2 * draws[..., 1:] - 1)
            yield torch.cat([xyz, points[..., 3:]], 2), categories, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        points, categories, labels = batch
        logits = model(points, categories).float()
        # this is deterministic on CUDA, unlike the loss of 3-D logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        whole = shapenet.evaluation_set(self.data, split, self.num_points, device)
        ious, accuracies = [], []
        for points, categories, labels in zip(*(torch.split(t, self.batch_size) for t in whole), strict=True):
            predicted = shapenet.predict(model(points, categories).float(), categories)
            ious.append(shapenet.shape_ious(predicted, labels, categories))
            accuracies.append((predicted == labels).double().mean(1))
        instance, by_class = shapenet.mean_ious(torch.cat(ious), whole[1])
        accuracy = float(torch.cat(accuracies).mean())
        return {"instance_miou": 100 * instance, "class_miou": 100 * by_class, "accuracy": 100 * accuracy}
