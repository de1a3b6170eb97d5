"""Masks as gaps: what their bytes are, when they are used, and what is refused."""

import json
import runpy
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from file_cases import (
    EXAMPLE,
    FLOATS,
    Change,
    assert_same,
    both,
    entry,
    header_of,
    metadata,
    settings_of,
    stored,
    tampered,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.reader import bytes_of
from growprune.files.sparse_file import contents
from growprune.masks.bits import from_gaps, pack, to_gaps, unpack
from growprune.sparse.model import SparseModel


def layer(alive: list[int], shape: tuple[int, ...] = (32, 64), dtype: torch.dtype = torch.float32) -> SparseModel:
    """A layer of which these live, the first with value 1, the next with 2, and so on."""
    model = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        model.weight.zero_().view(-1)[torch.tensor(alive)] = torch.arange(1.0, len(alive) + 1)
    return SparseModel.from_zeros(model.to(dtype), sparsity=0.9)


def like(sparse: SparseModel) -> nn.Linear:
    weight = sparse.model.weight
    return nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)


ALIVE = [0, 1, 10, 310, 566, 1500]
GAPS = [0, 0, 8, 255, 44, 255, 0, 255, 255, 255, 168]
"""299 dead ones before 310, 255 before 566, 933 before 1500."""


@pytest.fixture
def few(tmp_path: Path) -> Path:
    path = tmp_path / "few.safetensors"
    file.save(layer(ALIVE), path)
    return path


# What the bytes are


def test_a_file_with_gaps_is_as_specified(few: Path) -> None:
    assert stored(few)["weight.gaps"].tolist() == GAPS
    assert stored(few)["weight.values"].tolist() == [1, 2, 3, 4, 5, 6]
    assert stored(few).keys() == {"weight.gaps", "weight.values"}
    about = json.loads(metadata(few)["manifest"])["tensors"]["weight"]
    assert about["gaps"] == ["U8", 11]
    assert about["mask_crc32"] == zlib.crc32(bytes(GAPS))
    assert header_of(few)["weight.gaps"]["dtype"] == "U8"


def test_gaps_of_two_bytes_are_used_where_they_are_shorter(tmp_path: Path) -> None:
    sparse = layer([*range(1, 301), 65_299, 65_300, 196_372], shape=(256, 1024))
    file.save(sparse, tmp_path / "model")
    gaps = stored(tmp_path / "model")["weight.gaps"]
    assert gaps.dtype == torch.uint16
    assert gaps.tolist() == [1] + [0] * 299 + [64_998, 0, 65_535, 65_535, 1]  # 131,071 dead before the last
    assert_same(sparse, file.load(tmp_path / "model", like(sparse)))


def test_gaps_are_used_where_they_take_at_most_half_the_bytes_of_bits(tmp_path: Path) -> None:
    half = list(range(0, 2048, 16))  # 128, and there are 256 bytes of bits
    file.save(layer(half), tmp_path / "half")
    assert stored(tmp_path / "half").keys() == {"weight.gaps", "weight.values"}
    file.save(layer([0, 1, *half[1:]]), tmp_path / "more")
    assert stored(tmp_path / "more").keys() == {"weight.mask", "weight.values"}


def test_blocks_have_bits_however_few_live(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(64, 64, bias=False), sparsity=0.99, pattern="1x8")
    sparse.prune()
    file.save(sparse, tmp_path / "model")
    assert stored(tmp_path / "model")["weight.mask"].shape == (64,)


def test_a_mask_too_empty_for_gaps_has_bits(tmp_path: Path) -> None:
    sparse = layer([5], shape=(128, 128))  # 4 bytes and a gap of 1 are less than a thousandth of 65,536
    file.save(sparse, tmp_path / "model")
    assert stored(tmp_path / "model").keys() == {"weight.mask", "weight.values"}
    assert_same(sparse, file.load(tmp_path / "model", like(sparse)))


def test_at_95_percent_a_file_takes_two_bits_a_weight(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(1000, 1000, bias=False), sparsity=0.95)
    sparse.prune()
    file.save(sparse, tmp_path / "model")
    assert sparse.summary().bytes_sparse == sum(t.nbytes for t in stored(tmp_path / "model").values())
    assert 2.0e6 / 8 <= sparse.summary().bytes_sparse < 2.01e6 / 8


# Round trips


@given(
    alive=st.sets(st.integers(0, 2**19 - 1), min_size=1, max_size=300),
    dtype=st.sampled_from([torch.uint8, torch.uint16]),
)
@settings(deadline=None, max_examples=100)
def test_gaps_of_any_mask_come_back(alive: set[int], dtype: torch.dtype) -> None:
    mask = torch.zeros(2**19, dtype=torch.bool)
    mask[torch.tensor(sorted(alive))] = True
    gaps = to_gaps(pack(mask), len(alive))
    assert gaps is not None
    assert torch.equal(from_gaps(gaps, mask.numel()), pack(mask))
    wide = torch.tensor([0, 3, 2], dtype=dtype)
    assert unpack(from_gaps(wide, 9), (9,)).nonzero().flatten().tolist() == [0, 4, 7]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep", [[], ["in_proj_weight[k]"]])
def test_attention_with_gaps_comes_back_everywhere(dtype: torch.dtype, keep: list[str], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.MultiheadAttention(48, 2).to(dtype)

    sparse = SparseModel(build(), sparsity=0.97, keep_dense=["out_proj", *keep])
    sparse.prune()
    path = tmp_path / "model"
    file.save(sparse, path)
    assert any(name.endswith(".gaps") for name in stored(path))
    assert_same(sparse, file.load(path, build()))
    assert_same(sparse, file.load(path, build(), storage="compact"))
    state = sparse.model.state_dict()
    assert all(torch.equal(found, state[name]) for name, found in file.read(path).items())
    arrays = runpy.run_path(str(EXAMPLE))["read"](path)
    for name, exact in state.items():
        np.testing.assert_array_equal(arrays[name], (exact.float() if dtype == torch.bfloat16 else exact).numpy())


def test_what_a_tensor_with_gaps_takes_is_told(few: Path) -> None:
    (found,) = contents(few)
    assert (found.alive, found.num_bytes, found.state) == (6, 6 * 4 + 11, "ok")


# What is refused


def with_gaps(gaps: list[int]) -> Change:
    """Other gaps, with the digest and the manifest made to fit."""
    stored = torch.tensor(gaps, dtype=torch.uint8)
    return both(tensor("weight.gaps", stored), entry(gaps=["U8", len(gaps)], mask_crc32=zlib.crc32(bytes_of(stored))))


REFUSED: dict[str, tuple[Change, str]] = {
    "gaps beyond the end": (with_gaps([*GAPS[:-1], 255, 255, 206]), "bit 2049 of 2048"),
    "too many alive": (with_gaps([*GAPS[:7], 0, 0]), "7 live weights, but 6 values"),
    "no gaps": (with_gaps([]), "0 live weights, but 6 values"),
    "other bytes": (tensor("weight.gaps", torch.tensor([1, *GAPS[1:]], dtype=torch.uint8)), "mask of weight"),
    "another length": (entry(gaps=["U8", 10]), r"weight\.gaps .*\[11\].*\[10\]"),
    "gaps that are no pair": (entry(gaps=None), "manifest"),
    "gaps of a layer that is all alive": (entry(nnz=2048), "weight has gaps"),
    "gaps of blocks": (settings_of(pattern="1x8"), "gaps for weight"),
    "few gaps for a large tensor": (entry(shape=[32, 10**12]), "128000000000000 when dense, more than 1000 times"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_gaps_that_are_not_as_saved_are_refused(what: str, few: Path) -> None:
    change, message = REFUSED[what]
    path = tampered(few, change)
    for reader in (file.read, lambda p: file.load(p, nn.Linear(64, 32, bias=False))):
        with pytest.raises(GrowpruneError, match=message) as caught:
            reader(path)
        assert "\n" not in str(caught.value)
