"""Versions of the sparse file, and its two digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_cases import tampered
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.importers import read
from growprune.sparse.model import SparseModel


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sparse = SparseModel(nn.Linear(16, 8), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


READERS: list[Callable[[Path], Any]] = [file.read, file.manifest, file.contents, read]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("1", "which was never released and is no longer read: save it again"),
        ("5", "this growprune reads '2', '3', '4': update growprune"),
    ],
)
def test_a_version_that_is_not_read_is_named_with_what_to_do(saved: Path, version: str, said: str) -> None:
    other = tampered(saved, lambda tensors, about, manifest: about.update(version=version))
    for reader in READERS:
        with pytest.raises(GrowpruneError, match=f"has version '{version}' of the format, {said}$") as caught:
            reader(other)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("tensor", "key"), [("weight", "crc32"), ("weight", "mask_crc32"), ("bias", "crc32")])
def test_a_file_without_crc_32_is_refused(saved: Path, tensor: str, key: str) -> None:
    other = tampered(saved, lambda tensors, about, manifest: manifest["tensors"][tensor].pop(key))
    with pytest.raises(GrowpruneError, match=rf"has an invalid manifest \(KeyError: '{key}'\)"):
        file.read(other)


def test_looking_at_a_file_checks_its_sha_256_too(saved: Path) -> None:
    def other_digest(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        manifest["tensors"]["weight"]["sha256"] = "0" * 64

    other = tampered(saved, other_digest)
    assert [tensor.state for tensor in file.contents(other)] == ["damaged", "ok"]
    file.load(other, nn.Linear(16, 8))
