"""Round trips through the sparse file, and what its bytes are."""

import json
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from file_cases import EXAMPLE, FLOATS, PATTERNS, Zoo, assert_same, stored, three_of_twelve, zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from growprune.files import sparse_file as file
from growprune.plan import By
from growprune.sparse.model import SparseModel
from growprune.sparse.summary import summarise, targets

# Round trips


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_model_of_every_pattern_and_dtype_comes_back(pattern: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sparse = zoo(pattern, dtype)
    file.save(sparse, tmp_path / "model.safetensors")
    loaded = file.load(tmp_path / "model.safetensors", Zoo().to(dtype))
    assert_same(sparse, loaded)
    assert loaded.num_alive == sparse.num_alive < sparse.num_prunable
    assert loaded.model.tied.weight is loaded.model.embedding.weight


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_file_is_read_without_growprune(pattern: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sparse = zoo(pattern, dtype)
    file.save(sparse, tmp_path / "model.safetensors")
    arrays = runpy.run_path(str(EXAMPLE))["read"](tmp_path / "model.safetensors")
    state = sparse.model.state_dict()
    assert arrays.keys() == state.keys()
    for name, tensor in state.items():
        expected = tensor.float() if dtype == torch.bfloat16 and tensor.is_floating_point() else tensor
        np.testing.assert_array_equal(arrays[name], expected.numpy(), strict=True)


def test_the_example_runs_where_torch_and_growprune_cannot_be_imported(tmp_path: Path) -> None:
    file.save(three_of_twelve(), tmp_path / "model.safetensors")
    script = (
        f"import sys; sys.modules.update(torch=None, growprune=None); sys.argv = {['', 'model.safetensors', 'a.npz']}"
    )
    script += f"; import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "weight: float32 [3, 4], 3 non-zero\n"
    assert np.load(tmp_path / "a.npz")["weight"].tolist() == [[9, 0, 0, 0], [0, -8, 0, 0], [0, 0, 0, 7]]


@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    pattern=st.sampled_from(["unstructured", "1x1", "1x2", "2x1", "3x5", "4x4"]),
    sparsity=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    layout=st.sampled_from(["plain", "transposed", "channels last"]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=120)
@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
def test_weights_of_any_shape_come_back(
    shape: list[int], pattern: str, sparsity: float, layout: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def build() -> nn.Module:
        kind = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d}[len(shape)]
        transposed = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d}.get(len(shape), kind)
        kind = transposed if layout == "transposed" else kind
        model = kind(shape[1], shape[0]) if len(shape) == 2 else kind(shape[1], shape[0], tuple(shape[2:]))
        return model.to(memory_format=torch.channels_last) if layout == "channels last" and len(shape) == 4 else model

    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    sparse = SparseModel(build(), sparsity=sparsity, pattern=pattern, seed=seed)
    sparse.prune(by=By.RANDOM)
    file.save(sparse, path)
    assert_same(sparse, file.load(path, build()))
    assert torch.equal(file.read(path)["weight"], sparse.model.weight)
    np.testing.assert_array_equal(runpy.run_path(str(EXAMPLE))["read"](path)["weight"], sparse.model.weight.detach())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_file_does_not_show_how_the_model_was_held(pattern: str, tmp_path: Path) -> None:
    keep = ["linear", "grouped"]  # compact storage holds no tied weights
    masked = zoo(pattern, keep_dense=keep)
    file.save(masked, tmp_path / "masked")
    compact = file.load(tmp_path / "masked", Zoo(), storage="compact")
    assert compact.storage == "compact"
    assert compact.model.conv._parameters["weight"].dim() == 1
    assert_same(masked, compact)
    file.save(compact, tmp_path / "compact")
    assert (tmp_path / "compact").read_bytes() == (tmp_path / "masked").read_bytes()
    assert_same(compact, file.load(tmp_path / "compact", Zoo()))
    assert summarise(compact) == summarise(masked)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_model_on_the_gpu_comes_back_bit_for_bit(pattern: str, tmp_path: Path) -> None:
    sparse = zoo(pattern)
    file.save(sparse, tmp_path / "cpu")
    sparse.model.cuda()
    file.save(sparse, tmp_path / "gpu")
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()
    assert_same(sparse, file.load(tmp_path / "gpu", Zoo().cuda()))


def test_the_settings_come_back(tmp_path: Path) -> None:
    options = {"allocation": "erk", "seed": 5, "keep_dense": ["attention.in_proj_weight[k]", "up*"]}
    sparse = SparseModel(Zoo(), sparsity=0.8, pattern="1x2", include=["lone"], **options)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    loaded = file.load(tmp_path / "model.safetensors", Zoo())
    assert (loaded.target_sparsity, loaded.allocation, loaded.seed) == (0.8, "erk", 5)
    assert loaded.pattern == sparse.pattern
    assert (loaded.keep_dense, loaded.include, loaded.weights) == (sparse.keep_dense, sparse.include, sparse.weights)
    assert_same(sparse, loaded)


def test_a_loaded_model_goes_on_as_the_saved_one_would(tmp_path: Path) -> None:
    sparse = zoo()
    file.save(sparse, tmp_path / "model.safetensors")
    loaded = file.load(tmp_path / "model.safetensors", Zoo())
    for each in (sparse, loaded):
        torch.manual_seed(0)
        each.grow(to=0.5, by=By.RANDOM)
        optimizer = each.attach(torch.optim.SGD(each.model.parameters(), lr=0.1))
        each.model.linear(torch.randn(3, 8)).square().sum().backward()
        optimizer.step()
        each.prune(by=By.MAGNITUDE)
    assert_same(sparse, loaded)
    assert not loaded.model.linear.weight[~loaded.masks["linear.weight"]].any()


def test_a_part_that_has_grown_is_stored_dense(tmp_path: Path) -> None:
    sparse = three_of_twelve()
    sparse.grow()
    with pytest.warns(UserWarning, match="^the saved model has sparsity 0, not at its target"):
        file.save(sparse, tmp_path / "model.safetensors")
    assert stored(tmp_path / "model.safetensors").keys() == {"weight"}
    loaded = file.load(tmp_path / "model.safetensors", nn.Linear(4, 3, bias=False))
    assert loaded.num_alive == 12
    assert file.manifest(tmp_path / "model.safetensors")["tensors"]["weight"]["nnz"] == 12


def test_a_live_weight_that_is_zero_stays_alive(tmp_path: Path) -> None:
    sparse = three_of_twelve()
    with torch.no_grad():
        sparse.model.weight[0, 0] = 0
    file.save(sparse, tmp_path / "model.safetensors")
    assert file.load(tmp_path / "model.safetensors", nn.Linear(4, 3, bias=False)).masks["weight"][0, 0]
    assert stored(tmp_path / "model.safetensors")["weight.values"].tolist() == [0, -8, 7]


# What the bytes are


def test_a_tiny_file_is_as_specified(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    file.save(three_of_twelve(), path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert header["weight.values"] == {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    assert header["weight.mask"] == {"dtype": "U8", "shape": [2], "data_offsets": [12, 14]}
    # positions 0 and 5 are bits 0 and 5 of the first byte, position 11 is bit 3 of the second
    assert content[8 + size :] == np.array([9, -8, 7], "<f4").tobytes() + bytes([0b00100001, 0b00001000])
    assert {key: value for key, value in header["__metadata__"].items() if key != "manifest"} == {
        "format": "growprune",
        "version": "5",
        "manifest_crc32": str(zlib.crc32(header["__metadata__"]["manifest"].encode())),
    }
    assert json.loads(header["__metadata__"]["manifest"]) == {
        "sparsity": 0.75,
        "allocation": "global",
        "pattern": "unstructured",
        "keep_dense": [],
        "include": [],
        "seed": 0,
        "num_edits": 1,
        "aliases": {},
        "tensors": {
            "weight": {
                "shape": [3, 4],
                "dtype": "F32",
                "crc32": zlib.crc32(np.array([9, -8, 7], "<f4").tobytes()),
                "matrices": [[0, 3]],
                "transposed": False,
                "target": 0.75,
                "nnz": 3,
                "mask_crc32": zlib.crc32(bytes([33, 8])),
            }
        },
    }


def test_a_block_has_one_bit_and_runs_along_the_inputs(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 2, (1, 2), bias=False)
    with torch.no_grad():  # (out, in, 1, kernel): the second kernel position of output 0, the first of output 1
        model.weight.copy_(torch.tensor([[[[0.1, 5]], [[0.1, 6]]], [[[7, 0.1]], [[8, 0.1]]]]))
    sparse = SparseModel(model, sparsity=0.5, pattern="1x2")
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    tensors = stored(tmp_path / "model.safetensors")
    assert tensors["weight.values"].tolist() == [5, 6, 7, 8]
    assert tensors["weight.mask"].tolist() == [0b0110]


def test_transposed_convolutions_are_folded_with_their_outputs_first(tmp_path: Path) -> None:
    model = nn.ConvTranspose1d(2, 3, 1, bias=False)
    with torch.no_grad():  # stored (in, out, kernel)
        model.weight.copy_(torch.tensor([[[1], [9], [1]], [[1], [9], [1.0]]]))
    sparse = SparseModel(model, sparsity=0.67, pattern="1x2")
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    assert stored(tmp_path / "model.safetensors")["weight.mask"].tolist() == [0b010]


def test_the_bits_of_q_k_and_v_follow_one_another_without_a_gap(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(2, 1, bias=False)
    with torch.no_grad():
        model.in_proj_weight.copy_(torch.tensor([[1, 1], [2, 2], [4, 4], [3, 3], [5, 5], [6, 6]]))
    sparse = SparseModel(model, sparsity=0.5, pattern="1x2", keep_dense=["out_proj"])
    sparse.prune()
    path = tmp_path / "model.safetensors"
    file.save(sparse, path)
    assert stored(path)["in_proj_weight.mask"].tolist() == [0b100110]
    assert stored(path)["in_proj_weight.values"].tolist() == [2, 2, 4, 4, 6, 6]
    assert file.manifest(path)["tensors"]["in_proj_weight"]["matrices"] == [[0, 2], [2, 4], [4, 6]]


def test_rows_that_are_kept_dense_have_no_bits(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(2, 1, bias=False)
    with torch.no_grad():
        model.in_proj_weight.copy_(torch.tensor([[1, 9], [1, 9], [2, 3], [4, 5], [9, 1], [9, 1]]))
    sparse = SparseModel(model, sparsity=0.5, keep_dense=["out_proj", "in_proj_weight[k]"])
    sparse.prune()
    path = tmp_path / "model.safetensors"
    file.save(sparse, path)
    assert stored(path)["in_proj_weight.mask"].tolist() == [0b01011010]
    assert stored(path)["in_proj_weight.values"].tolist() == [9, 9, 2, 3, 4, 5, 9, 9]
    assert_same(sparse, file.load(path, nn.MultiheadAttention(2, 1, bias=False)))
    totals = file.manifest(path)["totals"]
    assert (totals["prunable"], totals["prunable_nnz"]) == (8, 4)


def test_shared_tensors_are_in_the_file_once_and_passing_buffers_are_not(tmp_path: Path) -> None:
    file.save(zoo(), tmp_path / "model.safetensors")
    names = stored(tmp_path / "model.safetensors").keys()
    assert {"embedding.weight", "linear.weight.values", "norm.running_mean", "nothing"} <= names
    assert not {"tied.weight", "same.weight.values", "passing", "linear.weight"} & names
    aliases = {"same.weight": "linear.weight", "same.bias": "linear.bias", "tied.weight": "embedding.weight"}
    assert file.manifest(tmp_path / "model.safetensors")["aliases"] == aliases


def test_the_manifest_lists_targets_counts_and_totals(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 100, bias=False))
    for allocation, expected in {"uniform": [0.9, 0.9], "erk": [0.08, 0.9082], "global": [None, None]}.items():
        sparse = SparseModel(model, sparsity=0.9, allocation=allocation)
        assert list(targets(sparse).values()) == pytest.approx(expected), allocation
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    manifest = file.manifest(tmp_path / "model.safetensors")
    crc32 = zlib.crc32(model[0].bias.detach().numpy().tobytes())
    assert manifest["tensors"]["0.bias"] == {"shape": [10], "dtype": "F32", "crc32": crc32}
    alive = [manifest["tensors"][name]["nnz"] for name in ("0.weight", "1.weight")]
    assert alive == list(sparse.alive_by_weight().values())
    assert manifest["totals"] == {
        "elements": 10110,
        "prunable": 10100,
        "prunable_nnz": 1010,
        "bytes": (tmp_path / "model.safetensors").stat().st_size,
        "dense_bytes": 40440,
    }


def test_the_bytes_of_a_model_are_those_its_file_takes_behind_the_header(tmp_path: Path) -> None:
    sparse = zoo("3x2", torch.bfloat16)
    file.save(sparse, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    dense = sum(tensor.nbytes for tensor in sparse.model.state_dict().values())
    assert summarise(sparse).bytes_sparse == len(content) - 8 - int.from_bytes(content[:8], "little")
    shared = sum(sparse.model.state_dict()[name].nbytes for name in ("same.weight", "same.bias", "tied.weight"))
    assert summarise(sparse).bytes_dense == dense - shared
