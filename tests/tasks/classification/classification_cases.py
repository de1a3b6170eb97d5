"""Images and tasks for the tests of classification."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SHARED
from torch import Tensor, nn

from growprune.tasks.classification import Classification

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")
CIFAR = SHARED / "cifar10-small.npz"
NAMES = ("ant", "bee", "cat")


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


class Fixed(nn.Module):
    """Answers with logits given beforehand."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = torch.as_tensor(logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[: len(x)]


def jpeg(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def picture(label: int, number: int, height: int = 12, width: int = 12) -> np.ndarray[Any, Any]:
    """A smooth image that no other equals."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    channels = [80 * label + 40 * x, 60 + 5 * number + 60 * y, 128 + 100 * np.sin(number + 3 * x * y)]
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def files() -> list[tuple[bytes, int, bool]]:
    """39 images to train on and 9 to test, with their labels, in the order of a folder."""
    counts = [(False, 13), (True, 3)]
    return [(jpeg(picture(c, 20 * t + i)), c, t) for t, n in counts for c in range(3) for i in range(n)]


def write_folder(root: Path, files: list[tuple[bytes, int, bool]]) -> str:
    for number, (content, label, is_test) in enumerate(files):
        folder = root / ("val" if is_test else "train") / NAMES[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.{('jpg', 'JPEG', 'jpeg')[number % 3]}").write_bytes(content)
    return str(root)


def packed(files: list[tuple[bytes, int, bool]]) -> dict[str, Any]:
    return {
        "data": np.frombuffer(b"".join(content for content, _, _ in files), dtype=np.uint8),
        "offsets": np.cumsum([0] + [len(content) for content, _, _ in files]),
        "labels": np.array([label for _, label, _ in files], dtype=np.uint8),
        "split": np.array([is_test for _, _, is_test in files], dtype=np.uint8),
        "classes": np.array(NAMES),
    }


def write_packed(path: Path, arrays: dict[str, Any]) -> str:
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture(params=["folder", "packed"])
def data(request: pytest.FixtureRequest, tmp_path: Path, files: list[tuple[bytes, int, bool]]) -> str:
    if request.param == "folder":
        return write_folder(tmp_path, files)
    return write_packed(tmp_path / "images.npz", packed(files))


def small(data: str, **settings: Any) -> Classification:
    common = dict(model="resnet18", stem="cifar", width=4, num_classes=3, image_size=12, batch_size=8, workers=0)
    return Classification(data=data, **{**common, "num_validation": 6, "crop": "padded", "in_memory": True, **settings})  # type: ignore[arg-type]


VARIANTS = [
    {"in_memory": True, "crop": "padded", "mixup": 0.0},
    {"in_memory": False, "crop": "padded", "mixup": 0.0},
    {"in_memory": False, "crop": "resized", "mixup": 0.3},
]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert len(a) == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Recorder(nn.Module):
    """Keeps the images it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += list(x)
        return torch.zeros(len(x), 3)


def shown(task: Classification, split: Any) -> set[bytes]:
    recorder = Recorder()
    task.evaluate(recorder, split, device=CPU)
    return {image.contiguous().numpy().tobytes() for image in recorder.seen}
