"""Deploying on a GPU: what needs none (choosing, swapping, refusing, saving), and on one, decoding."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app
from growprune.deployment import api
from growprune.deployment.api import checked_device, deploy_on_gpu
from growprune.deployment.cuda import graphed
from growprune.deployment.cuda.products import SparseLinear, Tile
from growprune.deployment.deployed import Deployed
from growprune.deployment.example import Example
from growprune.deployment.layer_table import Row

CPU = torch.device("cpu")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """On the CPU products are dense, but all else is the same."""
    return torch.device(request.param)


class Decoder(nn.Module):
    """One token at a time, over a cache of those before."""

    def __init__(self, d: int = 64, context: int = 8) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, d), nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
        self.head, self.unused = nn.Linear(d, 50, bias=False), nn.Linear(d, d)
        self.register_buffer("cache", torch.zeros(2, 1, context, d))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token)
        query, *fresh = self.qkv(x).unsqueeze(1).chunk(3, -1)
        self.cache.index_copy_(2, self.position, torch.stack(fresh))
        x = x + self.out(F.scaled_dot_product_attention(query, self.cache[0], self.cache[1])).squeeze(1)
        self.position.add_(1)
        return self.head(F.layer_norm(x, x.shape[-1:]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_runs_in_its_own_dtype(dtype: torch.dtype, device: torch.device) -> None:
    sparse, x = sparse_mlp(dtype=dtype), torch.randn(3, 64, dtype=dtype)
    fast = deploy_on_gpu(sparse, Example.of(x), device=device, seconds=0, known={})
    assert fast.module[0].matrix.values.dtype == dtype
    bound = 3e-2 if dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(fast(x.to(device)).cpu(), sparse.model(x), atol=bound, rtol=bound)


def sparse_mlp(storage: str = "masked", dtype: torch.dtype = torch.float32) -> gp.SparseModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)).to(dtype)
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage, keep_dense=["4.weight"])
    sparse.prune()
    return sparse


def deployed_mlp(device: torch.device, seconds: float = 0, storage: str = "masked") -> Deployed:
    example = Example.of(torch.randn(2, 64))
    return deploy_on_gpu(sparse_mlp(storage), example, device=device, seconds=seconds, known={})


def pretend(monkeypatch: pytest.MonkeyPatch, sparse: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Let `choose` find layers with these numbers of columns faster sparse. Returns the calls: columns, batch."""
    calls = []

    def chosen(row: Row, entries: Any, *, bias: Tensor | None, batch: int, seconds: float) -> Row:
        calls.append((entries.columns, batch))
        if entries.columns in sparse:
            return replace(row, dense_ms=0.02, sparse_ms=0.005, choice="sparse", tile=Tile(2))
        return replace(row, dense_ms=0.02, sparse_ms=0.03, choice="dense")

    monkeypatch.setattr("growprune.deployment.cuda.tuning.choose", chosen)
    return calls


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_sparse_linear_layers_are_swapped_and_the_model_is_left_as_it_is(storage: str, device: torch.device) -> None:
    sparse, x = sparse_mlp(storage), torch.randn(2, 64)
    before = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    kinds = [type(part) for part in sparse.model]
    found = deploy_on_gpu(sparse, Example.of(x), device=device, seconds=0, known={})
    assert [type(part) for part in found.module] == [SparseLinear, nn.ReLU, SparseLinear, nn.ReLU, nn.Linear]
    assert [type(part) for part in sparse.model] == kinds
    assert all(torch.equal(tensor, before[name]) for name, tensor in sparse.model.state_dict().items())
    expected = sparse.model(x)
    torch.testing.assert_close(found.module(x.to(device)).cpu(), expected, atol=1e-4, rtol=1e-4)


def test_layers_of_one_kind_are_timed_once_for_the_samples_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, sparse=(64,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 32))
    sparse = gp.SparseModel(model, sparsity=0.9)
    sparse.prune()
    x = torch.randn(3, 2, 64)
    fast = deploy_on_gpu(sparse, Example.of(x), device=CPU, seconds=1, known={})
    assert calls == [(64, 6), (64, 6), (32, 6)]
    assert [(row.layer, row.shape, row.choice) for row in fast.table] == [
        ("0", "64x64 x 6", "sparse"),
        ("1", "64x64 x 6", "sparse"),
        ("2", "32x64 x 6", "sparse"),
        ("3", "32x32 x 6", "dense"),
    ]
    assert (fast.table[1].dense_ms, fast.table[1].sparse_ms) == (0.02, 0.005)
    assert fast.module[1].tile == Tile(2)
    assert type(fast.module[3]) is nn.Linear
    assert torch.equal(fast.module[3].weight, model[3].weight)
    torch.testing.assert_close(fast(x), model(x))
    assert str(fast.table).splitlines()[1] == "0      64x64 x 6  0.8999    0.020     0.005      sparse"


def test_what_does_not_run_in_the_example_or_is_no_linear_layer_stays_in_torch() -> None:
    torch.manual_seed(0)
    sparse = gp.SparseModel(Decoder(), sparsity=0.8)
    sparse.prune()
    fast = deploy_on_gpu(sparse, Example.of(torch.tensor([3])), device=CPU, seconds=0, known={})
    assert {row.layer: row.choice for row in fast.table} == dict.fromkeys(("qkv", "out", "head"), "sparse") | {
        "unused": "torch"
    }
    assert fast.table.in_torch == ("unused (the example does not call it)",)
    assert torch.equal(fast.module.unused.weight, sparse.model.unused.weight)


def test_a_weight_that_an_embedding_shares_stays_in_torch() -> None:
    model = Decoder()
    with torch.no_grad():
        for layer in (model.head, model.out):
            layer.weight[torch.rand_like(layer.weight) < 0.8] = 0
    model.embed.weight = model.head.weight
    fast = deploy_on_gpu(model, Example.of(torch.tensor([3])), device=CPU, seconds=0, known={})
    assert [row.layer for row in fast.table] == ["out"]
    assert fast.module.embed.weight is fast.module.head.weight


class Twice(nn.Module):
    """A layer under two names, or two layers with one weight."""

    def __init__(self, is_one_layer: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second = self.first if is_one_layer else nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.second(F.relu(self.first(x))))
        return found


@pytest.mark.parametrize("is_one_layer", [True, False])
def test_a_layer_or_a_weight_with_two_names_stays_in_torch(is_one_layer: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice(is_one_layer).eval(), torch.randn(4, 64)
    with torch.no_grad():
        for layer in (model.first, model.last):
            layer.weight[torch.rand_like(layer.weight) < 0.8] = 0
        expected = model(x)
    fast = deploy_on_gpu(model, Example.of(x), device=CPU, seconds=0, known={})
    assert [row.layer for row in fast.table] == ["last"]
    assert torch.allclose(fast(x), expected, atol=1e-5)
    fast.save(tmp_path)
    loaded = gp.load(tmp_path / "model.safetensors", Twice(is_one_layer))
    assert torch.allclose(loaded.model(x), expected, atol=1e-5)


def test_a_model_without_sparse_layers_works_and_says_so() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 4)
    with pytest.warns(UserWarning, match="no sparse linear layers: it stays in torch"):
        fast = deploy_on_gpu(model, Example.of(x), device=CPU, seconds=1, known={})
    assert fast.is_in_torch and torch.equal(fast(x), model(x))


def test_weights_are_on_the_device_only_once() -> None:
    fast = deployed_mlp(CPU)
    plain = [one.module.weight for one in fast._swapped.replaced]
    assert [weight.untyped_storage().nbytes() for weight in plain] == [4, 4]  # of the shape, and all one zero


def test_conv1d_of_transformers_is_a_linear_layer() -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model, x = nn.Sequential(pytorch_utils.Conv1D(24, 16)), torch.randn(2, 16)
    nn.init.normal_(model[0].weight)
    sparse = gp.SparseModel(model, sparsity=0.75)
    sparse.prune()
    fast = deploy_on_gpu(sparse, Example.of(x), device=CPU, seconds=0, known={})
    assert isinstance(fast.module[0], SparseLinear)
    torch.testing.assert_close(fast(x), model(x))
    fast.stay_in_torch()
    assert torch.equal(fast.module[0].weight, model[0].weight)


# Folders


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to be for cuda runs on the CPU."""

    def deploy(*arguments: Any, device: torch.device, **settings: Any) -> Deployed:
        fast = deploy_on_gpu(*arguments, device=CPU, **settings)
        fast.device = device
        return fast

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    monkeypatch.setattr(api, "deploy_on_gpu", deploy)


@pytest.mark.usefixtures("without_a_gpu")
def test_a_folder_of_a_gpu_is_loaded_as_it_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, sparse=(64,))
    sparse, x = sparse_mlp(), torch.randn(2, 64)
    fast = gp.deploy(sparse, x, device="cuda", seconds=1)
    fast.save(tmp_path / "fast")
    assert not fast.is_in_torch
    monkeypatch.setattr("growprune.deployment.cuda.tuning.choose", None)  # nothing is timed again
    again = gp.load_deployed(tmp_path / "fast", sparse_mlp().model)
    assert [type(part) for part in again.module] == [SparseLinear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert again.module[0].tile == Tile(2)
    assert again.table == fast.table
    assert torch.equal(again(x), fast(x))


@pytest.mark.usefixtures("without_a_gpu")
def test_a_model_whose_layers_are_all_faster_dense_is_still_saved_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    sparse, x = sparse_mlp(), torch.randn(2, 64)
    fast = gp.deploy(sparse, x, device="cuda", seconds=1)
    fast.save(tmp_path / "fast")
    assert gp.manifest(tmp_path / "fast/model.safetensors")["totals"]["prunable_nnz"] == sparse.num_alive
    again = gp.load_deployed(tmp_path / "fast", sparse_mlp().model)
    assert again.table == fast.table
    assert torch.equal(again(x), fast(x))


@pytest.mark.usefixtures("without_a_gpu")
def test_a_folder_of_a_gpu_is_not_for_bench(tmp_path: Path) -> None:
    gp.deploy(sparse_mlp(), torch.randn(2, 64), device="cuda", seconds=0).save(tmp_path / "fast")
    bench = runpy.run_path(str(ROOT / "benchmarks" / "bench.py"))
    with pytest.raises(gp.GrowpruneError, match="deployed on cuda, but bench compares engines on the CPU"):
        bench["open_model"](str(tmp_path / "fast"), "", "")


# What is refused


@pytest.mark.parametrize("device", ["tpu", "mps", "", "meta"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=f"device must be 'cpu' or 'cuda', got '{device}'"):
        checked_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match="torch sees no CUDA device here"):
        gp.deploy(sparse_mlp(), torch.randn(2, 64), device="cuda")
    with pytest.raises(gp.GrowpruneError, match="graphed needs a GPU, but torch sees no CUDA device"):
        graphed(nn.Identity(), torch.zeros(1))
    gp.save(sparse_mlp(), tmp_path / "m.safetensors")
    arguments = ["deploy", str(tmp_path / "m.safetensors"), "--out", str(tmp_path / "out"), "--device", "cuda"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_deployed_mlp_gives_what_it_gives_dense(dtype: torch.dtype, tmp_path: Path) -> None:
    sparse, x = sparse_mlp(dtype=dtype), torch.randn(2, 64, dtype=dtype, device="cuda")
    fast = gp.deploy(sparse, x, device="cuda", seconds=1)
    print(fast.table)
    expected = sparse.model.cuda()(x)
    bound = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(fast(x), expected, atol=bound, rtol=bound)
    assert all(row.dense_ms is not None and row.sparse_ms is not None for row in fast.table)
    fast.save(tmp_path / "fast")
    again = gp.load_deployed(tmp_path / "fast", sparse_mlp(dtype=dtype).model)
    assert torch.equal(again(x), fast(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("seconds", [0, 1])
def test_a_graphed_decoder_gives_the_tokens_of_the_dense_one(seconds: float) -> None:
    torch.manual_seed(0)
    sparse = gp.SparseModel(Decoder(d=256), sparsity=0.9)
    sparse.prune()
    fast = gp.deploy(sparse, torch.tensor([3], device="cuda"), device="cuda", seconds=seconds)
    dense = sparse.model.cuda()
    step = graphed(fast.module, torch.tensor([3], device="cuda"))
    for model in (dense, fast.module):
        model.cache.zero_()
        model.position.zero_()
    token = torch.tensor([3], device="cuda")
    with torch.no_grad():
        for _ in range(6):
            expected, found = dense(token), step(token).clone()
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            token = expected.argmax(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graphed_step_refuses_other_shapes() -> None:
    step = graphed(nn.ReLU(), torch.zeros(2, 3, device="cuda"))
    with pytest.raises(gp.GrowpruneError, match=r"float32 \(1, 3\), but the step was recorded with"):
        step(torch.zeros(1, 3, device="cuda"))
