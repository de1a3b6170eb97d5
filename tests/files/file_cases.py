"""Models and damages for the tests of the sparse file."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from paths import ROOT
from torch import Tensor, nn

from growprune.files import sparse_file as file
from growprune.plan import By
from growprune.sparse.model import SparseModel

EXAMPLE = ROOT / "examples" / "read_without_growprune.py"
PATTERNS = ["unstructured", "1x1", "1x4", "3x2", "5x3", "2:4"]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Zoo(nn.Module):
    """One of each: convolutions, transposed and grouped, attention, norms with buffers, tied layers, a lone matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 10, 3)
        self.grouped = nn.Conv1d(8, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(4, 6, 2)
        self.up_grouped = nn.ConvTranspose1d(8, 4, 3, groups=2)
        self.attention = nn.MultiheadAttention(12, 2)
        self.norm = nn.BatchNorm2d(10)
        self.linear = nn.Linear(8, 5)
        self.same = self.linear
        self.embedding = nn.Embedding(7, 8)
        self.tied = nn.Linear(8, 7)
        self.tied.weight = self.embedding.weight
        self.lone = nn.Parameter(torch.randn(9, 4))
        self.flat = nn.Parameter(torch.randn(12))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("passing", torch.randn(2), persistent=False)


def zoo(pattern: str = "unstructured", dtype: torch.dtype = torch.float32, **options: Any) -> SparseModel:
    options.setdefault("keep_dense", ["grouped"] if pattern == "2:4" else [])
    sparse = SparseModel(Zoo().to(dtype), sparsity=0.75, pattern=pattern, include=["lone"], **options)
    sparse.prune(by=By.RANDOM)
    return sparse


def linear(weight: list[list[float]], **options: Any) -> SparseModel:
    model = nn.Linear(len(weight[0]), len(weight), bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weight))
    return SparseModel(model, **options)


THREE_BY_FOUR = [[9, 0.1, 0.2, 0.3], [0.4, -8, 0.5, 0.6], [0.7, 0.8, 0.9, 7]]


def three_of_twelve() -> SparseModel:
    sparse = linear(THREE_BY_FOUR, sparsity=0.75, allocation="global")
    sparse.prune()
    return sparse


def stored(path: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(path)


def metadata(path: Path) -> dict[str, str]:
    with safetensors.safe_open(path, "pt") as opened:
        return dict(opened.metadata())


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert isinstance(header, dict)
    return header


def with_header(path: Path, header: dict[str, Any], text: str | None = None) -> Path:
    """A copy of a file with the same bytes of tensors behind another header."""
    content = path.read_bytes()
    new = (json.dumps(header) if text is None else text).encode()
    other = path.with_name("other_header.safetensors")
    other.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + int.from_bytes(content[:8], "little") :])
    return other


Change = Callable[[dict[str, Tensor], dict[str, str], dict[str, Any]], None]
"""Changes the tensors of a file, its metadata and its manifest."""


def tensor(name: str, value: Tensor | None) -> Change:
    """Another tensor, or none."""
    return lambda tensors, *_: tensors.pop(name, None) if value is None else tensors.update({name: value})  # type: ignore[return-value]


def header(**values: str | None) -> Change:
    """Other metadata; None removes it."""

    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        about |= {name: value for name, value in values.items() if value is not None}
        for name in [name for name, value in values.items() if value is None]:
            del about[name]

    return change


def settings_of(**values: Any) -> Change:
    return lambda tensors, about, manifest: manifest.update(values)


def entry(without: str = "", **values: Any) -> Change:
    """Another entry of the tensor `weight` in the manifest."""

    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        manifest["tensors"]["weight"].pop(without, None)
        manifest["tensors"]["weight"].update(values)

    return change


def both(*changes: Change) -> Change:
    return lambda *content: [change(*content) for change in changes] and None  # type: ignore[func-returns-value]


def tampered(path: Path, change: Change) -> Path:
    """A copy of a file with changes to its tensors, its metadata and its manifest, whose digest is made to fit."""
    tensors, about = stored(path), metadata(path)
    manifest, digest = json.loads(about["manifest"]), about.get("manifest_crc32")
    change(tensors, about, manifest)
    if about.get("manifest", "{").startswith("{"):
        about["manifest"] = json.dumps(manifest)
    if digest is not None and about.get("manifest_crc32") == digest:
        about["manifest_crc32"] = str(zlib.crc32(about["manifest"].encode()))
    other = path.with_name("tampered.safetensors")
    safetensors.torch.save_file(tensors, other, about)
    return other


def assert_same(a: SparseModel, b: SparseModel) -> None:
    first, second = a.model.state_dict(), b.model.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype
        assert torch.equal(second[name], tensor), name
    assert a.masks.keys() == b.masks.keys()
    for name, mask in a.masks.items():
        assert torch.equal(b.masks[name], mask), name


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    file.save(three_of_twelve(), path)
    return path


def target() -> nn.Linear:
    return nn.Linear(4, 3, bias=False)
