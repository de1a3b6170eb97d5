"""Image classification: ResNet-50 on ImageNet, ResNet-18 on small images, or your own class folders.

Data is a folder `DIR/train/<class>/*.jpg`, `DIR/val/<class>/*.jpg` (jpg, jpeg or png), or one packed file `FILE.npz`
(see images.py). As usual with ImageNet, `val` is the test split; the validation split is taken from `train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import check_split
from growprune.tasks.classification import images
from growprune.tasks.classification.resnet import KINDS, Name, ResNet, Stem, initialise
from growprune.tasks.images import Array, ImageTask, read
from growprune.tasks.task import Split, Task, check_fields, with_channels

UNREADABLE = -100
"""The label of an image that cannot be read; its loss is 0."""

Batch = tuple[Tensor, ...]
"""Images and labels; with mixup also the labels of the mixed-in images, and the fraction of each image."""


@dataclass(frozen=True)
class Classification(ImageTask):
    """Classify images. The defaults are for ResNet-50 on ImageNet."""

    data: str = ""
    """A folder with train/<class>/ and val/<class>/, or a packed .npz."""
    model: Name = "resnet50"
    stem: Stem = "imagenet"
    """Stem of the model: "imagenet" for large images, "cifar" for images of about 32 x 32 pixels."""
    width: int = 64
    """Channels of the first convolution; the others have multiples of it."""
    num_classes: int = 1000
    image_size: int = 224
    batch_size: int = 256
    crop: Literal["resized", "padded"] = "resized"
    """"resized": train on random parts of images, evaluate their centres. "padded": for images that have `image_size`;
    shift them by up to 4 pixels in training, evaluate them whole."""
    min_scale: float = 0.08
    """Smallest area of a resized crop, as a fraction of the image."""
    mixup: float = 0.0
    """The alpha of mixup; 0 for none."""
    label_smoothing: float = 0.1
    num_validation: int = 10_000
    """Number of training images used for validation."""
    in_memory: bool = False
    """Decode all images once and keep them on the device. For small images of one size, with crop="padded"."""
    workers: int = 16
    """Processes that decode images, at most one per core. 0: decode in the training process."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of each channel, for values in [0, 1]."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)

    metric = "top1"
    initialises_modules = True

    def __post_init__(self) -> None:
        for name, known in (("model", tuple(KINDS)), ("stem", ("imagenet", "cifar")), ("crop", ("resized", "padded"))):
            if getattr(self, name) not in known:
                raise GrowpruneError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.in_memory and self.crop != "padded":
            raise GrowpruneError(f"in_memory needs crop='padded', got {self.crop!r}. Set task.in_memory=false")
        # Batch norm cannot normalise a batch of one image.
        least = {"width": 1, "num_classes": 2, "image_size": 1, "batch_size": 2, "workers": 0}
        check_fields(self, least=least, rates=("label_smoothing",))
        if not 0 < self.min_scale <= 1:
            raise GrowpruneError(f"min_scale must be in (0, 1], got {self.min_scale}")
        if self.mixup < 0:
            raise GrowpruneError(f"mixup must be >= 0 (0: no mixup), got {self.mixup}")
        if min(self.std) <= 0:
            raise GrowpruneError(f"std must be > 0, got {self.std}")

    def build_model(self) -> nn.Module:
        return ResNet(self.model, stem=self.stem, width=self.width, num_classes=self.num_classes)

    def initialise(self, module: nn.Module) -> None:
        initialise(module)

    def narrower(self) -> Sequence[Task]:
        return with_channels(self, "width")

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.image_size, self.image_size)

    def num_batches(self) -> int:
        images = len(self._indices("train"))
        if images < 2:
            raise GrowpruneError(f"{self.data}: training needs at least 2 readable images, got 1")
        full, rest = divmod(images, self.batch_size)
        return full + (rest > 1)  # batch norm cannot normalise a last batch of one image

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Batch]:
        train = self._indices("train")
        order = train[np.random.default_rng(seed).permutation(len(train))]
        groups = self._groups(order)[start : self.num_batches()]
        if not groups:  # the epoch may start at its end
            return
        for number, (pixels, labels) in enumerate(self._read(groups, seed, device), start):
            count, random = len(pixels), images.generator(device, seed, number)
            pixels = images.flipped(pixels, torch.rand(count, generator=random, device=device) < 0.5)
            if self.crop == "padded":
                end = 2 * images.PADDING + 1
                pixels = images.shifted(pixels, torch.randint(end, (count, 2), generator=random, device=device))
            values = images.normalised(pixels, self.mean, self.std)
            if self.mixup:
                share = float(np.random.default_rng((seed, number)).beta(self.mixup, self.mixup))
                shares = torch.full((count,), share, device=device)
                yield _inputs(images.mixed(values, share)), labels, labels.roll(1), shares
            else:
                yield _inputs(values), labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels, labels, *mixture = batch
        logits = model(pixels).float()
        losses = partial(
            F.cross_entropy, ignore_index=UNREADABLE, label_smoothing=self.label_smoothing, reduction="none"
        )
        if not mixture:
            return losses(logits, labels).mean()
        other_labels, share = mixture
        return (share * losses(logits, labels) + (1 - share) * losses(logits, other_labels)).mean()

    def evaluate(self, model: nn.Module, split: Split, *, device: torch.device) -> dict[str, float]:
        groups = self._groups(self._indices(split))
        sums, count = torch.zeros(3, dtype=torch.float64, device=device), 0
        for pixels, labels in self._read(groups, None, device):
            is_good = labels != UNREADABLE
            pixels, labels = pixels[is_good], labels[is_good]
            inputs = _inputs(images.normalised(pixels, self.mean, self.std))
            sums += score(model(inputs).float(), labels)
            count += len(labels)
        check_split(count, self.data, split)
        top1, top5, loss = (sums / count).tolist()
        skipped = len(images.splits(self.data, self.num_classes, self.num_validation)[split]) - count
        return {"top1": 100 * top1, "top5": 100 * top5, "loss": loss, **({"skipped": skipped} if skipped else {})}

    def _indices(self, split: str) -> Array:
        if self.in_memory:
            return images.readable(self.data, self.num_classes, self.num_validation, self.workers)[split]
        return images.splits(self.data, self.num_classes, self.num_validation)[split]

    def _groups(self, indices: Array) -> list[Array]:
        return [indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]

    def _read(self, groups: list[Array], seed: int | None, device: torch.device) -> Iterator[Batch]:
        """Yield pixels (B, H, W, 3), cropped to image_size, and labels. Crops are random if there is a seed."""
        source = images.load(self.data, self.num_classes)
        size = self.image_size, self.image_size
        if self.in_memory:
            held = images.held(self.data, self.num_classes, self.workers)
            height, width = held.pixels.shape[1:3]
            if (height, width) != size:
                raise GrowpruneError(
                    f"crop='padded' needs images of size task.image_size, but {self.data} has images of {width} x "
                    f"{height}. Set task.image_size"
                )
            found = held.batches(groups, device)
        else:
            boxes: images.Boxes | None = None
            if self.crop == "resized":
                random = partial(images.random_box, seed=seed or 0, min_scale=self.min_scale)
                boxes = images.centre_box if seed is None else random
            decoder = images.Decoder(source, size, boxes)
            report = images.report_bad(self.data, self.num_classes)
            used = None if seed is None else self._used
            found = read(decoder, groups, report, workers=self.workers, device=device, used=used, size=size)
        for group, (pixels, _, good) in zip(groups, found, strict=True):
            # a bad image stays in its batch without a label, so that all replicas have the same batch
            labels = torch.from_numpy(source.labels[group]).masked_fill(~good, UNREADABLE)
            yield pixels, labels.to(device, non_blocking=True)

    def _used(self, batch_size: int) -> Array:
        """Return a mask of the images of a batch that this replica uses; with mixup, also the image before each."""
        mine = super()._used(batch_size)
        return mine | np.roll(mine, -1) if self.mixup else mine


def _inputs(values: Tensor) -> Tensor:
    inputs = values.permute(0, 3, 1, 2)  # (B, 3, H, W) in channels-last order, which suits tensor cores
    # On a CPU, torch 2.13 may crash in the backward pass of narrow convolutions in channels-last order.
    return inputs if inputs.is_cuda else inputs.contiguous()


def score(logits: Tensor, labels: Tensor) -> Tensor:
    """Count correct top-1 and top-5 predictions, and add up the losses."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    is_right = guesses == labels[:, None]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([is_right[:, 0].sum().double(), is_right.sum().double(), loss.double()])
