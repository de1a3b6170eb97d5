"""Weights in 8 bits on a GPU: formats in plain torch, kernels through Triton's interpreter, folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_decode_kernels import MAKERS, ROUNDING, TILES, device, random_weight, uneven_weight
from test_deploy_cuda import pretend, sparse_mlp, without_a_gpu
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cuda.formats import Entries, from_dense, to_int8
from growprune.deployment.cuda.linear import SparseLinear
from growprune.deployment.cuda.products import product
from growprune.deployment.cuda.tuning import FORMATS, make
from growprune.deployment.deployed import Deployed
from growprune.deployment.example import Example
from growprune.errors import GrowpruneError

__all__ = ["device", "without_a_gpu"]
CPU = torch.device("cpu")


def int8_of(weight: Tensor) -> Entries:
    return to_int8(from_dense(weight), "weight")[0]


# Formats


def test_entries_have_one_scale_for_each_row() -> None:
    entries, error = to_int8(from_dense(torch.tensor([[254.0, 0, -2.0], [0, 0, 0], [0, 0.9, 127.0]])), "weight")
    assert entries.values.tolist() == [127, -1, 1, 127]
    assert entries.scales is not None
    assert entries.scales[[0, 2]].tolist() == [2, 1]
    assert entries.dense().tolist() == [[254, 0, -2], [0, 0, 0], [0, 1, 127]]
    assert error == pytest.approx(0.1 / (254**2 + 4 + 0.81 + 127**2) ** 0.5)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_formats_give_the_rounded_matrix_back(kind: str, dtype: torch.dtype) -> None:
    for weight in (uneven_weight().to(dtype), random_weight(20, 900, 0.9, dtype), random_weight(0, 9, 0.5, dtype)):
        entries = int8_of(weight)
        matrix = MAKERS[kind](entries)
        assert matrix.values.dtype == torch.int8
        assert matrix.dense().dtype == dtype
        assert torch.equal(matrix.dense(), entries.dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_again_changes_nothing_in_16_bits(dtype: torch.dtype) -> None:
    for seed in range(20):
        once = int8_of(random_weight(64, 64, 0.5, dtype, seed))
        again = int8_of(once.dense())
        assert torch.equal(again.dense(), once.dense())
        assert torch.equal(again.scales, once.scales)


def test_bytes_a_weight_are_two_where_they_were_three() -> None:
    entries = int8_of(random_weight(256, 4096, 0.9))
    bytes_each = {kind: make(entries).num_bytes / entries.values.numel() for kind, make in FORMATS.items()}
    assert bytes_each == pytest.approx({"offsets": 2.2, "columns": 3.05, "bitmask": 3.65}, abs=0.06)


# Kernels


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("dtype", "batch"), [(torch.bfloat16, 1), (torch.bfloat16, 16), (torch.float16, 3)])
def test_a_product_is_that_of_the_rounded_matrix(kind: str, dtype: torch.dtype, batch: int, device: str) -> None:
    check_int8_product(uneven_weight().to(dtype), kind, batch, device)


@pytest.mark.parametrize("kind", MAKERS)
def test_float32_inputs_are_multiplied_with_int8(kind: str, device: str) -> None:
    check_int8_product(random_weight(9, 130, 0.7, torch.float32), kind, 2, device)


def check_int8_product(weight: Tensor, kind: str, batch: int, device: str) -> None:
    """Sums are those of float64, with scales as they are: the kernel does not round weights to the dtype of x."""
    x = random_weight(batch, weight.shape[1], 0.0, weight.dtype, seed=5)
    entries = int8_of(weight.to(device))
    exact = entries.dense() if weight.dtype == torch.float32 else int8_of(weight.float()).dense()
    expected = F.linear(x.double(), exact.cpu().double())
    matrix = MAKERS[kind](entries)
    for tile in TILES[kind.split(",")[0]]:
        found = product(matrix, x.to(device), tile)
        assert (found.dtype, found.shape) == (weight.dtype, expected.shape)
        rounding = ROUNDING[weight.dtype] * (2 if device == "cpu" else 1)  # the interpreter rounds towards zero
        bound = rounding * expected.abs() + 2**-20 * expected.abs().amax().clamp(min=1e-3)
        assert bool(((found.cpu().double() - expected).abs() <= bound).all()), (kind, tile)
    assert torch.equal(product(matrix, x.to(device), tile), found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_large_int8_products_on_a_gpu(kind: str, batch: int) -> None:
    check_int8_product(random_weight(1027, 4100, 0.9), kind, batch, "cuda")


def test_x_must_have_the_dtype_of_the_model() -> None:
    matrix = MAKERS["bitmask"](int8_of(random_weight(4, 8, 0.5)))
    with pytest.raises(GrowpruneError, match=r"got torch.float32 and torch.bfloat16: convert one of them"):
        product(matrix, torch.ones(1, 8))


# Deploying


def deployed(dtype: torch.dtype = torch.bfloat16, seconds: float = 0) -> Deployed:
    x = torch.randn(2, 64, dtype=dtype)
    return deploy_on_gpu(sparse_mlp(dtype=dtype), Example.of(x), device=CPU, seconds=seconds, known={}, values="int8")


def test_sparse_layers_are_int8_and_the_table_shows_their_error() -> None:
    fast = deployed()
    assert [fast.module[i].matrix.values.dtype for i in (0, 2)] == [torch.int8] * 2
    assert type(fast.module[4]) is nn.Linear  # which is dense, and stays as it is
    assert all(0 < row.error < 0.01 for row in fast.table)
    assert "int8 error" in str(fast.table)
    sparse, x = sparse_mlp(dtype=torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(fast(x), sparse.model(x), atol=4e-2, rtol=4e-2)
    assert not torch.equal(fast.module[0].dense_weight(), sparse.model[0].weight)  # type: ignore[index]


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize("kind", ["offsets", "columns", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_folder_keeps_int8_and_gives_the_same_outputs(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pretend(monkeypatch, {64: kind, 96: kind})
    sparse, x = sparse_mlp(dtype=dtype), torch.randn(2, 64, dtype=dtype)
    fast = gp.deploy(sparse, x, device="cuda", seconds=1, values="int8")
    fast.save(tmp_path / "fast")
    assert json.loads((tmp_path / "fast" / "deployed.json").read_text())["values"] == "int8"
    kept = gp.manifest(tmp_path / "fast" / "model.safetensors")["tensors"]
    assert ["scales_sha256" in kept[name] for name in ("0.weight", "2.weight", "4.weight")] == [True, True, False]
    again = gp.load_deployed(tmp_path / "fast", sparse_mlp(dtype=dtype).model)
    assert torch.equal(again(x), fast(x))
    assert again.table == fast.table


def test_a_layer_of_int8_is_copied_with_its_scales() -> None:
    layer = SparseLinear(FORMATS["offsets"](int8_of(random_weight(6, 40, 0.5))))
    assert {"matrix_values", "matrix_scales"} <= {name for name, _ in layer.named_buffers()}
    layer.matrix_values = layer.matrix_values.clone()  # as if it were moved
    assert torch.equal(layer.dense_weight(), int8_of(random_weight(6, 40, 0.5)).dense())


def test_layers_whose_weights_are_not_finite_are_named() -> None:
    sparse = sparse_mlp()
    with torch.no_grad():
        sparse.model[2].weight[sparse.masks["2.weight"]] = torch.inf  # type: ignore[index,operator]
    with pytest.raises(GrowpruneError, match=r"^2.weight has values that are not finite"):
        deploy_on_gpu(sparse, Example.of(torch.randn(2, 64)), device=CPU, seconds=0, known={}, values="int8")


def test_int8_is_refused_on_a_cpu_and_other_names_everywhere() -> None:
    with pytest.raises(GrowpruneError, match="values='int8' needs device='cuda': the CPU kernels only support float32"):
        gp.deploy(sparse_mlp(), torch.randn(2, 64), values="int8")
    with pytest.raises(GrowpruneError, match="values must be 'int8', or None"):
        gp.deploy(sparse_mlp(), torch.randn(2, 64), values="int4")


def test_making_dense_a_layer_that_was_chosen_dense_gives_the_rounded_weight() -> None:
    entries = int8_of(random_weight(6, 40, 0.5))
    assert torch.equal(make(entries, "dense").dense_weight(), entries.dense())  # type: ignore[operator]
