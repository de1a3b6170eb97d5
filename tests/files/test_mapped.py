"""Files that are loaded into compact storage without a copy, and what keeps them and the model apart."""

from pathlib import Path

import pytest
import torch
from file_cases import assert_same
from torch import nn

from growprune.files import sparse_file as file
from growprune.sparse.model import SparseModel


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 5), nn.Conv2d(8, 8, 3))  # 2048 bits are whole blocks, 160 not


@pytest.fixture(params=[("unstructured", 0.6), ("unstructured", 0.97), ("1x8", 0.5), ("8x1", 0.5)], ids=str)
def sparse(request: pytest.FixtureRequest) -> SparseModel:
    pattern, sparsity = request.param
    torch.manual_seed(0)
    sparse = SparseModel(build(), sparsity=sparsity, pattern=pattern)
    sparse.prune()
    return sparse


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_loaded_is_what_was_saved(sparse: SparseModel, mapped: bool, tmp_path: Path) -> None:
    file.save(sparse, tmp_path / "model.safetensors")
    assert_same(sparse, file.load(tmp_path / "model.safetensors", build(), storage="compact", mapped=mapped))


def test_training_and_pruning_a_mapped_model_leaves_its_file_alone(sparse: SparseModel, tmp_path: Path) -> None:
    file.save(sparse, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    mapped = file.load(tmp_path / "model.safetensors", build(), storage="compact", mapped=True)
    with torch.no_grad():
        for parameter in mapped.model.parameters():
            parameter.mul_(2)
    assert torch.equal(mapped.model[0].weight, 2 * sparse.model[0].weight)  # type: ignore[index,operator]
    mapped.grow()
    mapped.prune()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_file_saved_over_does_not_reach_a_mapped_model(sparse: SparseModel, tmp_path: Path) -> None:
    file.save(sparse, tmp_path / "model.safetensors")
    mapped = file.load(tmp_path / "model.safetensors", build(), storage="compact", mapped=True)
    expected = sparse.model[0].weight.clone()  # type: ignore[index,operator,union-attr]
    with torch.no_grad():
        for parameter in sparse.model.parameters():
            parameter.mul_(3)
    file.save(sparse, tmp_path / "model.safetensors")
    assert torch.equal(mapped.model[0].weight, expected)  # type: ignore[index,arg-type]


def test_a_file_written_into_does_not_reach_a_model_that_is_not_mapped(sparse: SparseModel, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file.save(sparse, path)
    loaded = file.load(path, build(), storage="compact")
    with path.open("r+b") as opened:
        opened.seek(-min(4000, path.stat().st_size), 2)
        opened.write(bytes(range(250)) * 16)
    assert_same(sparse, loaded)
