"""Files of older versions, written by the code of their time, are read as ever."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_cases import EXAMPLE, tampered
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.contents import contents
from growprune.masks.allocation import Scope
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

DATA = Path(__file__).parent / "data"
FREE, BLOCKS = DATA / "version-1-free.safetensors", DATA / "version-1-blocks.safetensors"
"""Saved at commit 2b06fda: the models below, pruned once by magnitude."""


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.same = self.linear
        self.lone = nn.Parameter(torch.zeros(2, 4))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(2, 3, 1, bias=False)
        self.attention = nn.MultiheadAttention(2, 1, bias=False)


PLAIN_TENSORS = {
    "lone": torch.tensor([[0.0, 0, 0, 0], [0, 0, 7, -8]]),
    "linear.weight": torch.tensor([[9.0, 0, 0, 0], [0, -8, 0, 0], [0, 0, 0, 7]]),
    "linear.bias": torch.tensor([1.0, 2, 3]),
    "same.weight": torch.tensor([[9.0, 0, 0, 0], [0, -8, 0, 0], [0, 0, 0, 7]]),
    "same.bias": torch.tensor([1.0, 2, 3]),
    "counts": torch.tensor([0, 1, 2]),
}
BLOCK_TENSORS = {
    "up.weight": torch.tensor([[[0], [9], [0]], [[0], [9], [0]]], dtype=torch.bfloat16),
    "attention.in_proj_weight": torch.tensor(
        [[2, 3], [7, 7], [4, 5], [6, 4], [8, 8], [0, 0]], dtype=torch.bfloat16
    ),  # rows 2 and 3, those of k, are kept dense
    "attention.out_proj.weight": torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16),
}


def assert_tensors(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].tolist() == tensor.tolist(), name


def test_a_file_of_version_1_is_read() -> None:
    assert_tensors(file.read(FREE), PLAIN_TENSORS)
    assert_tensors(file.read(BLOCKS), BLOCK_TENSORS)


@pytest.mark.parametrize(("path", "tensors"), [(FREE, PLAIN_TENSORS), (BLOCKS, BLOCK_TENSORS)])
def test_a_file_of_version_1_is_read_without_growprune(path: Path, tensors: dict[str, Tensor]) -> None:
    arrays = runpy.run_path(str(EXAMPLE))["read"](path)
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(arrays[name], expected.numpy(), strict=True)


def test_a_model_of_version_1_is_loaded_with_its_settings() -> None:
    sparse = file.load(FREE, Plain())
    assert_tensors(sparse.model.state_dict(), PLAIN_TENSORS)
    assert (sparse.sparsity, internals(sparse).allocation, internals(sparse).pattern.name) == (
        0.75,
        "uniform",
        "unstructured",
    )
    assert (internals(sparse).scope, internals(sparse).keep_dense, internals(sparse).include) == (
        Scope.MODEL,
        (),
        ("lone",),
    )
    assert (internals(sparse).seed, internals(sparse).editor.num_edits, sparse.num_alive) == (7, 1, 5)


def test_blocks_of_version_1_are_loaded_with_their_settings() -> None:
    sparse = file.load(BLOCKS, Blocks().bfloat16(), storage="compact")
    assert_tensors(sparse.model.state_dict(), BLOCK_TENSORS)
    assert (sparse.sparsity, internals(sparse).allocation, internals(sparse).pattern.name) == (0.5, "global", "1x2")
    assert (internals(sparse).scope, internals(sparse).include, internals(sparse).seed) == (Scope.PART, (), 0)
    assert internals(sparse).keep_dense == ("attention.in_proj_weight[k]", "attention.out_proj")
    assert sparse.masks["up.weight"].flatten().tolist() == [False, True, False, False, True, False]


def test_the_manifest_of_version_1_is_told_in_the_words_of_version_2() -> None:
    manifest = file.manifest(FREE)
    tensors = manifest.pop("tensors")
    assert manifest == {
        "format": "growprune",
        "version": "1",
        "sparsity": 0.75,
        "allocation": "uniform",
        "pattern": "unstructured",
        "scope": "model",
        "keep_dense": [],
        "include": ["lone"],
        "seed": 7,
        "num_edits": 1,
        "aliases": {"same.weight": "linear.weight", "same.bias": "linear.bias"},
        "totals": {"elements": 26, "prunable": 20, "prunable_nnz": 5, "bytes": 1395, "dense_bytes": 116},
    }
    assert tensors["counts"] == {"shape": [3], "dtype": "I64", "sha256": None}
    assert tensors["lone"] == {
        "shape": [2, 4],
        "dtype": "F32",
        "matrices": [[0, 2]],
        "transposed": False,
        "target": 0.75,
        "nnz": 2,
        "mask_sha256": "e4ff5e7d7a7f08e9800a3e25cb774533cb20040df30b6ba10f956f9acd0eb3f7",
        "sha256": None,
    }


def test_a_model_of_version_1_is_saved_with_digests(tmp_path: Path) -> None:
    sparse = file.load(FREE, Plain())
    file.save(sparse, tmp_path / "new.safetensors")
    assert file.manifest(tmp_path / "new.safetensors")["version"] == "2"
    assert_tensors(file.read(tmp_path / "new.safetensors"), PLAIN_TENSORS)


@pytest.mark.parametrize("tensor", ["weight.values", "weight.mask", "bias"])
def test_files_from_before_crc_32_are_checked_by_sha_256(tmp_path: Path, tensor: str) -> None:
    sparse = SparseModel(nn.Linear(16, 8), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")

    def without(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        for entry in manifest["tensors"].values():
            entry.pop("crc32")
            entry.pop("mask_crc32", None)

    def damaged(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        tensors[tensor] = tensors[tensor].flip(0)

    older = tampered(tmp_path / "model.safetensors", without)
    assert torch.equal(file.read(older)["weight"], sparse.model.get_parameter("weight"))
    with pytest.raises(GrowpruneError, match="whose SHA-256 is not the one in the manifest"):
        file.load(tampered(older, damaged), nn.Linear(16, 8), storage="compact")


def test_looking_at_a_file_checks_its_sha_256_too(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(16, 8), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")

    def other_digest(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        manifest["tensors"]["weight"]["sha256"] = "0" * 64

    other = tampered(tmp_path / "model.safetensors", other_digest)
    assert [tensor.state for tensor in contents(other)] == ["damaged", "ok"]
    file.load(other, nn.Linear(16, 8))
