"""Random models from sparse files to others and back: none is refused, and nothing of it changes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import growprune as gp
from growprune.files.convert import convert
from growprune.plan import By

NAMES = (
    "a",
    "weight",
    "0",
    "größe",
    "层",
    "layer[0]",
    "x*y",
    "a b",
    "q?",
    "mask",
    "values",
    "gaps",
    "module",
    "_orig_mod",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SETTINGS = (
    ("unstructured", 0.0),
    ("unstructured", 0.5),
    ("unstructured", 0.99),
    ("1x2", 0.5),
    ("2x1", 0.7),
    ("1x8", 0.9),
)


class Net(nn.Module):
    """A few layers of any kind, under any names, some of them twice; the first can be pruned."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first = nn.Linear(draw.choice((1, 3, 8)), draw.choice((1, 2, 8)))
        for name in draw.sample(NAMES, draw.randint(1, 4)):
            parent: nn.Module = self
            if draw.random() < 0.3:
                parent = nn.Module()
                self.add_module(name, parent)
            parent.add_module(draw.choice(NAMES) if parent is not self else name, self._layer(draw))
        self.register_buffer("empty", torch.zeros(0, 3) if draw.random() < 0.3 else torch.arange(4))
        self.one = nn.Parameter(torch.ones(1, draw.choice((0, 1))))

    def _layer(self, draw: random.Random) -> nn.Module:
        kinds: tuple[Callable[[], nn.Module], ...] = (
            lambda: self.first,
            lambda: nn.Linear(draw.choice((1, 4, 5)), 4, bias=False),
            lambda: nn.Conv2d(2, 4, draw.choice((1, 3))),
            lambda: nn.Conv1d(4, 4, 3, groups=2),
            lambda: nn.ConvTranspose2d(3, 2, 2),
            lambda: nn.Embedding(5, 3),
            lambda: nn.MultiheadAttention(8, 2),
            lambda: nn.BatchNorm1d(3),
            lambda: nn.GRU(2, 3),
        )
        return draw.choice(kinds)()


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net(random.Random(seed))


def is_same(path: Path, other: Path) -> bool:
    found, wanted = gp.read(path), gp.read(other)
    is_equal = all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )
    return found.keys() == wanted.keys() and is_equal


def masks_of(path: Path) -> dict[str, int]:
    return {name: about.get("nnz") for name, about in gp.manifest(path)["tensors"].items()}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore")  # of layers without a live weight, say
def test_any_model_comes_through(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    (pattern, sparsity), dtype = draw.choice(SETTINGS), draw.choice(DTYPES)
    one, two, folder = tmp_path / "one.safetensors", tmp_path / "two.safetensors", tmp_path / "folder"
    sparse = gp.SparseModel(build(seed).to(dtype), sparsity=sparsity, pattern=pattern)
    sparse.prune(by=By.RANDOM)
    gp.save(sparse, one)
    convert(one, two, to="sparse")
    assert one.read_bytes() == two.read_bytes()
    for model in (build(seed).to(dtype), build(seed)):  # whose dtype that of the file need not be
        convert(one, two, to="sparse", model=model, force=True)
        assert is_same(two, one)
        assert masks_of(two) == masks_of(one)
    convert(one, tmp_path / "dense.safetensors")
    convert(tmp_path / "dense.safetensors", two, force=True)
    assert is_same(two, one)
    convert(one, folder)
    convert(folder, two, to="sparse", force=True)
    assert is_same(two, one)
