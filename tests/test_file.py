"""The sparse file: what is in it byte by byte, that it comes back, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growprune import file
from growprune.plan import By
from growprune.sparse import SparseModel

EXAMPLE = Path(__file__).parent.parent / "examples" / "read_without_growprune.py"
PATTERNS = ["free", "1x1", "1x4", "3x2", "5x3", "2:4"]
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


def zoo(pattern: str = "free", dtype: torch.dtype = torch.float32, **options: Any) -> SparseModel:
    also = ["lone"] if pattern == "2:4" else ["lone", "flat"]
    options.setdefault("keep_dense", ["grouped"] if pattern == "2:4" else [])
    sparse = SparseModel(Zoo().to(dtype), sparsity=0.75, pattern=pattern, also=also, **options)
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


def tampered(path: Path, change: Callable[[dict[str, Tensor], dict[str, str], dict[str, Any]], None]) -> Path:
    """A copy of a file with changes to its tensors, its metadata and its manifest."""
    tensors, about = stored(path), metadata(path)
    manifest = json.loads(about["manifest"])
    change(tensors, about, manifest)
    if about.get("manifest", "{").startswith("{"):
        about["manifest"] = json.dumps(manifest)
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
    pattern=st.sampled_from(["free", "1x1", "1x2", "2x1", "3x5", "4x4"]),
    sparsity=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
    layout=st.sampled_from(["plain", "transposed", "channels last"]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=120)
@pytest.mark.filterwarnings("ignore:no weight lives")
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
    assert file.writer.num_bytes(compact) == file.writer.num_bytes(masked)


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


def test_what_is_read_can_be_loaded_by_torch_alone(tmp_path: Path) -> None:
    sparse = zoo("3x2")
    file.save(sparse, tmp_path / "model.safetensors")
    tensors = file.read(tmp_path / "model.safetensors")
    model = Zoo()
    model.load_state_dict(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in sparse.model.state_dict().items())
    assert tensors["same.weight"] is tensors["linear.weight"]


def test_an_unknown_storage_is_named(old: Path) -> None:
    with pytest.raises(ValueError, match="does not fit the model: storage is 'zip', but must be one of"):
        file.load(old, target(), storage="zip")


def test_the_settings_come_back(tmp_path: Path) -> None:
    options = {"allocation": "erk", "scope": "part", "seed": 5, "keep_dense": ["attention.in_proj_weight[k]", "up*"]}
    sparse = SparseModel(Zoo(), sparsity=0.8, pattern="1x2", also=["lone"], **options)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    loaded = file.load(tmp_path / "model.safetensors", Zoo())
    assert (loaded.sparsity, loaded.allocation, loaded.seed) == (0.8, "erk", 5)
    assert (loaded.pattern, loaded.scope) == (sparse.pattern, sparse.scope)
    assert (loaded.keep_dense, loaded.also, loaded.weights) == (sparse.keep_dense, sparse.also, sparse.weights)
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
    assert not loaded.model.linear.weight[~loaded.mask("linear.weight")].any()


def test_a_part_that_has_grown_is_stored_dense(tmp_path: Path) -> None:
    sparse = three_of_twelve()
    sparse.grow()
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
    assert file.load(tmp_path / "model.safetensors", nn.Linear(4, 3, bias=False)).mask("weight")[0, 0]
    assert stored(tmp_path / "model.safetensors")["weight.values"].tolist() == [0, -8, 7]


@pytest.mark.filterwarnings("ignore:no weight lives")
def test_a_layer_without_a_live_weight_comes_back(tmp_path: Path) -> None:
    sparse = linear([[1, 2]], sparsity=0.9)
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    assert stored(tmp_path / "model.safetensors")["weight.values"].shape == (0,)
    assert file.read(tmp_path / "model.safetensors")["weight"].tolist() == [[0, 0]]


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
        "version": "1",
    }
    assert json.loads(header["__metadata__"]["manifest"]) == {
        "sparsity": 0.75,
        "allocation": "global",
        "pattern": "free",
        "scope": "model",
        "keep_dense": [],
        "also": [],
        "seed": 0,
        "num_edits": 1,
        "aliases": {},
        "tensors": {
            "weight": {
                "shape": [3, 4],
                "dtype": "F32",
                "matrices": [[0, 3]],
                "transposed": False,
                "target": 0.75,
                "nnz": 3,
                "mask_sha256": hashlib.sha256(bytes([33, 8])).hexdigest(),
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


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    sparse = zoo()
    file.save(sparse, tmp_path / "a")
    file.save(sparse, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shared_tensors_are_in_the_file_once_and_passing_buffers_are_not(tmp_path: Path) -> None:
    file.save(zoo(), tmp_path / "model.safetensors")
    names = stored(tmp_path / "model.safetensors").keys()
    assert {"embedding.weight", "linear.weight.values", "norm.running_mean", "nothing"} <= names
    assert not {"tied.weight", "same.weight.values", "passing", "linear.weight"} & names
    aliases = {"same.weight": "linear.weight", "same.bias": "linear.bias", "tied.weight": "embedding.weight"}
    assert file.manifest(tmp_path / "model.safetensors")["aliases"] == aliases


def test_at_ninety_percent_a_file_is_at_most_015_of_the_dense_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(400, 500), nn.Linear(500, 300))
    safetensors.torch.save_file(model.state_dict(), tmp_path / "dense")
    sparse = SparseModel(model, sparsity=0.9)
    sparse.prune()
    file.save(sparse, tmp_path / "sparse")
    assert (tmp_path / "sparse").stat().st_size <= 0.15 * (tmp_path / "dense").stat().st_size


def test_the_manifest_lists_targets_counts_and_totals(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 100, bias=False))
    for allocation, targets in {"uniform": [0.9, 0.9], "erk": [0.08, 0.9082], "global": [None, None]}.items():
        sparse = SparseModel(model, sparsity=0.9, allocation=allocation)
        assert list(file.writer.targets(sparse).values()) == pytest.approx(targets), allocation
    sparse.prune()
    file.save(sparse, tmp_path / "model.safetensors")
    manifest = file.manifest(tmp_path / "model.safetensors")
    assert manifest["tensors"]["0.bias"] == {"shape": [10], "dtype": "F32"}
    alive = [manifest["tensors"][name]["nnz"] for name in ("0.weight", "1.weight")]
    assert alive == [sparse.alive_in(weight) for weight in sparse.weights]
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
    assert file.writer.num_bytes(sparse)[1] == len(content) - 8 - int.from_bytes(content[:8], "little")
    shared = sum(sparse.model.state_dict()[name].nbytes for name in ("same.weight", "same.bias", "tied.weight"))
    assert file.writer.num_bytes(sparse)[0] == dense - shared


# What is refused on saving


def test_a_weight_that_came_back_off_the_mask_is_refused(tmp_path: Path) -> None:
    sparse = three_of_twelve()
    with torch.no_grad():
        sparse.model.weight[0, 1] = 0.5
    with pytest.raises(ValueError, match=r"^weight is not zero everywhere .* call enforce\(\) before saving$"):
        file.save(sparse, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    sparse.enforce()
    file.save(sparse, tmp_path / "model.safetensors")


def test_a_mask_that_breaks_its_blocks_is_refused(tmp_path: Path) -> None:
    sparse = linear(THREE_BY_FOUR, sparsity=0.5, pattern="1x2")
    masks = {"weight": torch.tensor([1, 0], dtype=torch.uint8)}
    sparse.load_state_dict({**sparse.state_dict(), "masks": masks})
    with pytest.raises(ValueError, match="the mask of weight does not keep to pattern 1x2: prune it before saving"):
        file.save(sparse, tmp_path / "model.safetensors")


def test_blocks_larger_than_the_format_allows_are_refused(tmp_path: Path) -> None:
    sparse = linear(THREE_BY_FOUR, sparsity=0.5, pattern="1x1025")
    with pytest.raises(ValueError, match="pattern is 1x1025, but blocks in a file have sides of at most 1024"):
        file.save(sparse, tmp_path / "model.safetensors")


def test_a_dtype_that_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"phase is torch.complex128, which a file cannot hold"):
        file.save(SparseModel(model, sparsity=0.5), tmp_path / "model.safetensors")


def test_state_that_is_no_tensor_is_named_in_a_warning(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            del state

    with pytest.warns(UserWarning, match=r"^the extra state of the model \(Counting\) is not saved: a sparse file"):
        file.save(SparseModel(Counting(2, 2), sparsity=0.5), tmp_path / "model.safetensors")


# A save that fails


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    file.save(three_of_twelve(), path)
    return path


def assert_old_is_intact(old: Path) -> None:
    assert [path.name for path in old.parent.iterdir()] == [old.name]
    assert file.read(old)["weight"].tolist() == [[9, 0, 0, 0], [0, -8, 0, 0], [0, 0, 0, 7]]


@pytest.mark.parametrize("where", ["pathlib.Path.replace", "os.fsync"])
def test_a_failing_disk_leaves_the_old_file(where: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(where, fail)
    with pytest.raises(
        OSError, match=r"cannot write .*model.safetensors: No space left on device; make room"
    ) as caught:
        file.save(zoo(), old)
    assert caught.value.errno == errno.ENOSPC
    assert_old_is_intact(old)


def test_a_file_that_may_not_grow_so_large_leaves_the_old_file(old: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*model.safetensors: File too large"):
            file.save(zoo(), old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_old_is_intact(old)


def test_an_interrupt_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: Any, *args: object) -> None:
        handle.write(b"half of i")
        raise KeyboardInterrupt

    monkeypatch.setattr(file, "write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.save(zoo(), old)
    assert_old_is_intact(old)


def test_what_is_not_written_as_meant_never_takes_the_name(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = file.write_safetensors

    def flipped(handle: Any, tensors: Any, metadata: Any) -> None:
        honest(handle, {name: t ^ 1 if name == "lone.mask" else t for name, t in tensors.items()}, metadata)

    monkeypatch.setattr(file, "write_safetensors", flipped)
    with pytest.raises(ValueError, match="has a mask of lone whose SHA-256 is not the one in the manifest"):
        file.save(zoo(), old)
    assert_old_is_intact(old)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"cannot write .*nowhere/model: No such file or directory; make room or"
    ):
        file.save(three_of_twelve(), tmp_path / "nowhere" / "model")


def test_a_process_killed_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    script = """
import itertools, torch
from growprune import file
from growprune.sparse import SparseModel
model = torch.nn.Linear(300, 300, bias=False)
sparse = SparseModel(model, sparsity=0.5)
for number in itertools.count(1):
    torch.nn.init.constant_(model.weight, number)
    sparse.prune()
    sparse.enforce()
    file.save(sparse, "model")
    print(number, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"1\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    reported = [1, *map(int, child.stdout.read().split())]
    child.stdout.close()
    values = file.read(tmp_path / "model")["weight"]
    number = int(values.max())
    assert number in (reported[-1], reported[-1] + 1)
    assert torch.equal(values.flatten(), torch.tensor([number] * 45000 + [0] * 45000, dtype=torch.float32))


# What is refused on loading


def target() -> nn.Linear:
    return nn.Linear(4, 3, bias=False)


def refuse(path: Path, message: str, model: nn.Module | None = None) -> None:
    """Loading is refused with a message of one line, and does not touch the model."""
    model = target() if model is None else model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        file.load(path, model)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_with_another_shape_is_refused(old: Path) -> None:
    message = r"has weight with shape \(3, 4\), but the model with \(4, 3\): build the model that was saved"
    refuse(old, message, nn.Linear(3, 4, bias=False))


def test_a_model_with_more_or_other_tensors_is_refused(old: Path) -> None:
    refuse(old, "lacks bias, which the model has: build", nn.Linear(4, 3))
    refuse(old, "lacks 0.weight, which the model has: build", nn.Sequential(target()))


def test_a_model_with_fewer_tensors_is_refused(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(4, 3), sparsity=0.5)
    file.save(sparse, tmp_path / "model")
    refuse(tmp_path / "model", "has bias, which the model lacks: build")


def test_a_model_of_another_dtype_is_refused(old: Path) -> None:
    message = r"has weight as torch.float32, but the model as torch.float16: call model.to\(torch.float32\) first"
    refuse(old, message, target().half())


def test_a_model_without_memory_is_refused(old: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot fill weight, which is on the meta device: call model.to_empty"):
        file.load(old, target().to("meta"))


def test_a_model_with_other_ties_is_refused(tmp_path: Path) -> None:
    tied, untied = (nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)}) for _ in "12")
    tied["b"].weight = tied["a"].weight
    for name, model in {"tied": tied, "untied": untied}.items():
        file.save(SparseModel(model, sparsity=0.5), tmp_path / name)
    refuse(tmp_path / "tied", "b.weight and a.weight are one tensor in the file only: build", untied)
    refuse(tmp_path / "untied", "b.weight and a.weight are one tensor in the model only: build", tied)


def test_a_model_whose_layers_are_of_another_kind_is_refused(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Conv2d(4, 4, 3), sparsity=0.5)
    sparse.prune()
    file.save(sparse, tmp_path / "model")
    message = "prunes weight otherwise than the model allows: build the model that was saved"
    refuse(tmp_path / "model", message, nn.ConvTranspose2d(4, 4, 3))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=f"{path.name} is not a file: give the path of a file"):
            file.load(path, target())


def test_plain_safetensors_are_refused_with_the_way_to_load_them(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3, 4)}, tmp_path / "plain")
    refuse(tmp_path / "plain", r"is not a growprune file: load plain safetensors with safetensors.torch.load_file")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, b"PK\x03\x04" + bytes(100), b"{}" * 50])
def test_garbage_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(content)
    refuse(tmp_path / "garbage", r"is not a safetensors file, or not all of it \(.*\): fetch or save it again")


def test_a_file_cut_short_anywhere_is_refused(old: Path) -> None:
    content = old.read_bytes()
    cut = old.with_name("cut")
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match="is not a safetensors file, or not all of it"):
            file.load(cut, target())


def test_a_file_with_any_byte_changed_is_refused_or_loads_whole(old: Path) -> None:
    content = old.read_bytes()
    changed = old.with_name("changed")
    model = target()
    loaded = []
    for place in range(len(content)):
        for bit in (0x01, 0x20, 0x80):
            other = bytearray(content)
            other[place] ^= bit
            changed.write_bytes(other)
            try:
                sparse = file.load(changed, model)
            except ValueError as error:
                assert str(error).startswith(str(changed))
            else:
                loaded.append(place)
                assert sparse.num_alive == 3
                assert not model.weight[~sparse.mask("weight")].any()
    assert not set(range(len(content) - 2, len(content))) & set(loaded), "a change of the mask went unseen"


TAMPERED = {
    "a version from the future": (
        lambda tensors, about, manifest: about.update(version="2"),
        "has version '2' of the format, this growprune reads '1': update growprune",
    ),
    "no version": (lambda tensors, about, manifest: about.pop("version"), "has version None of the format"),
    "no manifest": (lambda tensors, about, manifest: about.update(manifest="[1]"), "has no manifest that can be read"),
    "a deep manifest": (
        lambda tensors, about, manifest: about.update(manifest="[" * 100_000),
        "has no manifest that can be read",
    ),
    "a manifest without tensors": (
        lambda tensors, about, manifest: manifest.pop("tensors"),
        r"has a manifest that makes no sense \(KeyError: 'tensors'\): it is damaged, fetch or save it again",
    ),
    "a missing setting": (lambda tensors, about, manifest: manifest.pop("seed"), "does not fit the model: 'seed'"),
    "a sparsity of two": (
        lambda tensors, about, manifest: manifest.update(sparsity=2),
        "does not fit the model: sparsity is 2,",
    ),
    "a setting of the wrong type": (
        lambda tensors, about, manifest: manifest.update(keep_dense=[1]),
        "does not fit the model",
    ),
    "an unknown pattern": (
        lambda tensors, about, manifest: manifest.update(pattern="hexagons"),
        "makes no sense .ValueError: pattern is 'hexagons'",
    ),
    "a block as large as the world": (
        lambda tensors, about, manifest: manifest.update(pattern="1x999999999999"),
        "blocks in a file have sides of at most 1024",
    ),
    "another shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, 5], matrices=[[0, 3]]),
        r"has weight with shape \(3, 5\), but the model with \(3, 4\)",
    ),
    "a huge shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, 10**15]),
        r"has tensor weight.mask as U8 \[2\], but its manifest asks for U8 \[375000000000000\]",
    ),
    "a negative shape": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[3, -4]),
        "makes no sense .ValueError: -4 is not a size",
    ),
    "a shape of text": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape="34"),
        "makes no sense .ValueError: 3 is not a size",
    ),
    "a shape of very many dimensions": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[2**62] * 100_000),
        "makes no sense .ValueError: weight has more than 64 dimensions",
    ),
    "a shape of too many elements": (
        lambda tensors, about, manifest: (
            manifest["tensors"]["weight"].update(shape=[2**62] * 60),
            manifest.update(pattern="2x2"),
        ),
        "is not a size",
    ),
    "no shape at all": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(shape=[]),
        "makes no sense .IndexError",
    ),
    "matrices beyond the end": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(matrices=[[0, 4]]),
        "the matrices of weight do not fit its shape",
    ),
    "matrices that overlap": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(matrices=[[0, 2], [1, 3]]),
        "the matrices of weight do not fit its shape",
    ),
    "other matrices": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(matrices=[[0, 1], [1, 3]]),
        "prunes weight otherwise than the model allows",
    ),
    "an unknown dtype": (
        lambda tensors, about, manifest: manifest["tensors"]["weight"].update(dtype="F31"),
        "makes no sense .KeyError: 'F31'",
    ),
    "an alias of nothing": (
        lambda tensors, about, manifest: manifest.update(aliases={"a": "b"}),
        "calls b also a, which cannot be",
    ),
    "a value too few": (
        lambda tensors, about, manifest: tensors.update({"weight.values": torch.ones(2)}),
        r"has tensor weight.values as F32 \[2\], but its manifest asks for F32 \[3\]: it is damaged",
    ),
    "a value too few and a count to match": (
        lambda tensors, about, manifest: (
            tensors.update({"weight.values": torch.ones(2)}),
            manifest["tensors"]["weight"].update(nnz=2),
        ),
        "has a mask of weight with 3 alive, but 2 values: it is damaged, fetch or save it again",
    ),
    "values of another dtype": (
        lambda tensors, about, manifest: tensors.update({"weight.values": torch.ones(3).half()}),
        r"has tensor weight.values as F16 \[3\], but its manifest asks for F32 \[3\]",
    ),
    "a mask too short": (
        lambda tensors, about, manifest: tensors.update({"weight.mask": torch.zeros(1, dtype=torch.uint8)}),
        r"has tensor weight.mask as U8 \[1\], but its manifest asks for U8 \[2\]",
    ),
    "a bit moved": (
        lambda tensors, about, manifest: tensors["weight.mask"].copy_(torch.tensor([34, 8])),
        "has a mask of weight whose SHA-256 is not the one in the manifest",
    ),
    "a bit behind the end": (
        lambda tensors, about, manifest: tensors["weight.mask"].copy_(torch.tensor([33, 24])),
        "has a mask of weight with bits set behind its end",
    ),
    "a tensor lost": (lambda tensors, about, manifest: tensors.pop("weight.mask"), "lacks tensor weight.mask"),
    "a tensor added": (
        lambda tensors, about, manifest: tensors.update(extra=torch.ones(1)),
        "has tensor extra, which its manifest lacks",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_file_is_refused(what: str, old: Path) -> None:
    change, message = TAMPERED[what]
    refuse(tampered(old, change), message)


def test_a_mask_and_hash_changed_together_are_caught_by_the_count(old: Path) -> None:
    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        tensors["weight.mask"] = torch.tensor([35, 8], dtype=torch.uint8)
        manifest["tensors"]["weight"]["mask_sha256"] = hashlib.sha256(bytes([35, 8])).hexdigest()

    refuse(tampered(old, change), "has a mask of weight with 4 alive, but 3 values")


def test_a_header_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    for shape in ([10**12, 10**12], [2], [2**63 - 1]):
        header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        (tmp_path / "liar").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        refuse(tmp_path / "liar", "is not a safetensors file, or not all of it")


def test_dead_blocks_cannot_blow_a_small_file_up(old: Path) -> None:
    def change(tensors: dict[str, Tensor], about: dict[str, str], manifest: dict[str, Any]) -> None:
        tensors["weight.values"], tensors["weight.mask"] = torch.zeros(0), torch.zeros(1 << 10, dtype=torch.uint8)
        manifest["pattern"] = "1024x1024"
        digest = hashlib.sha256(bytes(1 << 10)).hexdigest()
        about_weight = {"shape": [1 << 23, 1 << 10], "matrices": [[0, 1 << 23]], "nnz": 0, "mask_sha256": digest}
        manifest["tensors"]["weight"].update(about_weight)

    huge = tampered(old, change)
    refuse(huge, "has weight with shape")
    with pytest.raises(
        ValueError, match="would take 34359738368 bytes, over 1000 times its size: load it into its model"
    ):
        file.read(huge)
    assert file.manifest(huge)["totals"]["dense_bytes"] == 34359738368  # the header can always be looked at


def test_a_manifest_is_read_from_the_header_alone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file.reader.SparseFile, "mask", None)
    monkeypatch.setattr(file.reader.SparseFile, "dense", None)
    assert file.manifest(old)["tensors"]["weight"]["nnz"] == 3
