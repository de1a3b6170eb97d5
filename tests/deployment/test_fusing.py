"""Layers that read the same tensor, computed as one: on the CPU, and their kernels through Triton's interpreter."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decode_int8 import int8_of
from test_decode_kernels import MAKERS, interpret, random_weight, uneven_weight
from test_deploy_cuda import without_a_gpu
from torch import Tensor, nn
from torch.nn import functional as F
from triton_interpreter import on_the_gpu

import growprune as gp
from growprune.deployment.api import deploy_on_gpu
from growprune.deployment.cuda import graphed
from growprune.deployment.cuda.formats import from_dense
from growprune.deployment.cuda.fusing import Siblings, alike, stacked, views
from growprune.deployment.cuda.linear import SparseLinear
from growprune.deployment.cuda.products import LaneTile, Matrix, Tile, product
from growprune.deployment.cuda.tuning import Choice, make
from growprune.deployment.deployed import Deployed
from growprune.deployment.example import Example

__all__ = ["without_a_gpu"]
CPU = torch.device("cpu")


class Block(nn.Module):
    """A decoder's block, without its attention: q, k and v read one tensor, gate and up another."""

    def __init__(self, d: int = 64, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, 24, bias=False), nn.Linear(d, 24)
        self.o, self.gate, self.up = nn.Linear(d, d), nn.Linear(d, 80, bias=False), nn.Linear(d, 80, bias=False)
        self.down = nn.Linear(80, d)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + self.o(q + torch.cat([k, v, k[..., :16]], -1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Steps(nn.Module):
    """Three layers that a function calls."""

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(32, 16), nn.Linear(32, 8), nn.Linear(32, 16)
        self.step = step

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def pruned(model: nn.Module, **settings: Any) -> nn.Module:
    sparse = gp.SparseModel(model, sparsity=0.8, **settings)
    sparse.prune()
    return sparse.to_dense_().eval().requires_grad_(False)


def block(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return pruned(Block(dtype=dtype))


def all_three(m: Any, x: Tensor) -> list[Tensor]:
    return [m.a(x), m.b(x), m.c(x)]


def deployed(model: nn.Module, x: Tensor, device: str = "cpu", **settings: Any) -> Deployed:
    options: Any = {"seconds": 0, "known": {}} | settings
    return deploy_on_gpu(model, Example.of(x), device=torch.device(device), **options)


def three(**settings: Any) -> Any:
    """Three layers that are computed as one. The model is called in any way by setting `step`."""
    fast = deployed(pruned(Steps(all_three)), torch.randn(1, 32), **settings)
    assert [row.choice for row in fast.table] == ["fused"] * 3
    return fast.module


def siblings_of(module: Any) -> Siblings:
    found: Siblings = module.a.together.func.__self__
    return found


def alone(module: Any, name: str, x: Tensor) -> Tensor:
    layer = module.get_submodule(name)
    return F.linear(x, layer.dense_weight(), layer.bias)


@pytest.fixture(params=["plain", "interpreted", pytest.param("cuda", marks=on_the_gpu)])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a GPU, or on the CPU: by a dense copy, or by the kernels in Triton's interpreter."""
    if request.param == "cuda":
        return "cuda"
    if request.param == "interpreted":
        interpret(monkeypatch)
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return "cpu"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each product has that is computed."""
    found = []

    def noted(matrix: Matrix, x: Tensor, tile: Tile | None = None) -> Tensor:
        found.append(matrix.rows)
        return product(matrix, x, tile)

    monkeypatch.setattr("growprune.deployment.cuda.linear.product", noted)
    return found


# A model


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1), torch.float32), ((3, 1), torch.bfloat16), ((20,), torch.float16), ((65, 1), torch.float32)],
    ids=str,
)
@torch.no_grad()
def test_a_block_gives_what_it_gives_dense(shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    model = block(dtype)
    fast = deployed(model, torch.randn(1, 1, 64, dtype=dtype), where)
    x = torch.randn(*shape, 64, dtype=dtype)
    bound = {torch.bfloat16: 5e-2, torch.float16: 8e-3, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(fast(x.to(where)).cpu(), model(x), atol=bound, rtol=bound)


def test_q_k_v_are_one_product_and_gate_and_up_another(rows: list[int]) -> None:
    x = torch.randn(2, 1, 64)
    fast = deployed(block(), x)
    assert {row.layer: row.choice for row in fast.table} == {
        **dict.fromkeys(("q", "k", "v", "gate", "up"), "fused"),
        **dict.fromkeys(("o", "down"), "sparse"),
    }
    fast(x)
    assert rows == [64 + 24 + 24, 64, 80 + 80, 64]
    assert "fused" in str(fast.table)
    rows.clear()
    deployed(block(), x, fuse=False)(x)
    assert rows == [64, 24, 24, 64, 80, 80, 64]


def test_more_samples_than_the_example_has_are_one_product_up_to_64(rows: list[int]) -> None:
    fast, together = three(), []
    siblings_of(fast).register_forward_hook(lambda module, inputs, outputs: together.append(len(inputs[0])))
    for samples, expected in ((17, [40, 40]), (64, [40] * 4), (65, [])):  # then weights are made dense for the call
        rows.clear()
        x = torch.randn(samples, 32)
        for name, found in zip("abc", fast(x), strict=True):
            torch.testing.assert_close(found, alone(fast, name, x))
            assert found.is_contiguous()
        assert rows == expected
    assert together == [17, 64]  # then one weight is dense at a time


def test_weights_are_held_once() -> None:
    fast = three()
    for name in ("values", "index", "bases"):
        storages = [fast.get_submodule(layer)._buffers[f"matrix_{name}"].untyped_storage() for layer in "abc"]
        held = sum(len(fast.get_submodule(layer)._buffers[f"matrix_{name}"]) for layer in "abc")
        whole = siblings_of(fast).whole._buffers[f"matrix_{name}"]
        assert {storage.data_ptr() for storage in storages} == {whole.data_ptr()}
        assert len(whole) == held and storages[0].nbytes() == whole.nbytes


def test_layers_with_and_without_a_bias_keep_theirs() -> None:
    model = block()
    fast = deployed(model, torch.randn(1, 64)).module
    assert [fast.get_submodule(name).bias is None for name in "qkv"] == [False, True, False]
    for name in ("q", "k", "v"):
        layer, plain = fast.get_submodule(name), model.get_submodule(name)
        assert plain.bias is None or torch.equal(layer.bias, plain.bias)
        assert torch.equal(layer.weight, plain.weight)


# What is computed as one


def choices(model: nn.Module) -> list[str]:
    return [row.choice for row in deployed(model, torch.randn(1, 32)).table]


def test_a_layer_that_is_dense_stays_out() -> None:
    assert choices(pruned(Steps(all_three), keep_dense=["a"])) == ["fused", "fused"]


def test_layers_of_several_formats_are_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(("offsets", "columns", "offsets"))

    def chosen(entries: Any, *, bias: Tensor | None, batch: int, seconds: float) -> Choice:
        kind = next(kinds)
        return Choice(make(entries, kind, bias=bias), kind, 20.0, 5.0)

    monkeypatch.setattr("growprune.deployment.cuda.swapping.choose", chosen)
    monkeypatch.setattr("growprune.deployment.cuda.swapping._key", id)
    monkeypatch.setattr(Siblings, "tune", lambda self, batch, seconds: 9.9)
    fast = deployed(pruned(Steps(all_three)), torch.randn(1, 32), seconds=1)
    assert [row.choice for row in fast.table] == ["fused", "sparse", "fused"]
    for name, found in zip("abc", fast(x := torch.randn(2, 32)), strict=True):
        torch.testing.assert_close(found, alone(fast.module, name, x))


def test_a_bias_or_a_matrix_of_another_dtype_stays_out() -> None:
    half = from_dense(random_weight(8, 16, 0.5, torch.float16))
    layers = {
        "a": make(half, "offsets"),
        "b": make(half, "offsets", bias=torch.zeros(8, dtype=torch.float16)),
        "c": make(half, "offsets", bias=torch.zeros(8)),
        "d": make(from_dense(random_weight(8, 16, 0.5)), "offsets"),
        "e": make(int8_of(random_weight(8, 16, 0.5, torch.float16)), "offsets"),
        "f": make(half, "dense"),
    }
    assert [list(group) for group in alike(layers)] == [["a", "b"]]


STEPS: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "a change in place between them": (lambda m, x: [m.a(x), m.b(x.add_(1)), m.c(x)], ["sparse", "fused", "fused"]),
    "equal tensors": (lambda m, x: [m.a(x), m.b(x.clone()), m.c(x.clone())], ["sparse"] * 3),
    "views": (lambda m, x: [m.a(x[:]), m.b(x[:]), m.c(x)], ["sparse"] * 3),
    "another layer between them": (lambda m, x: [m.a(x), m.b(x + 1), m.c(x)], ["sparse"] * 3),
    "called twice": (lambda m, x: [m.a(x), m.a(x), m.b(x), m.c(x)], ["sparse", "fused", "fused"]),
    "called by keyword": (lambda m, x: [m.a(x=x), m.b(x=x), m.c(x=x)], ["fused"] * 3),
}


@pytest.mark.parametrize("name", STEPS)
def test_only_calls_with_one_unchanged_tensor_after_each_other_are_one(name: str) -> None:
    step, expected = STEPS[name]
    assert choices(pruned(Steps(step))) == expected


def test_an_example_in_inference_mode_shows_nothing() -> None:
    model = pruned(Steps(lambda m, x: all_three(m, x + 1)))
    with torch.inference_mode():
        assert choices(model) == ["sparse"] * 3


def test_layers_that_were_timed_faster_alone_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(entries: Any, *, bias: Tensor | None, batch: int, seconds: float) -> Choice:
        return Choice(make(entries, "offsets", bias=bias), "offsets", 20.0, 5.0)

    calls: list[int] = []

    def times(together: float) -> None:
        def tune(self: Siblings, batch: int, seconds: float) -> float:
            calls.append(batch)
            self.whole.tiles = {batch: LaneTile(2)}
            return together

        monkeypatch.setattr(Siblings, "tune", tune)

    monkeypatch.setattr("growprune.deployment.cuda.swapping.choose", chosen)
    model, x = pruned(nn.Sequential(Block(), Block())), torch.randn(2, 64)
    for microseconds, choice, tiles in ((14.9, "fused", {2: LaneTile(2)}), (15.0, "sparse", {})):
        times(microseconds)
        fast = deployed(model, x, seconds=1)
        rows = {row.layer: row for row in fast.table}
        assert [rows[f"{i}.{name}"].choice for i in "01" for name in "qkv"] == [choice] * 6
        assert [rows[f"{i}.{name}"].choice for i in "01" for name in ("gate", "up")] == ["sparse"] * 4
        assert rows["1.q"].tiles == fast.module[1].q.tiles == tiles
        torch.testing.assert_close(fast(x), model(x))
    assert calls == [2] * 4  # for q, k, v and for gate, up: of both blocks together


def test_siblings_that_cannot_run_as_one_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(entries: Any, *, bias: Tensor | None, batch: int, seconds: float) -> Choice:
        return Choice(make(entries, "offsets", bias=bias), "offsets", 20.0, 5.0)

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no registers")

    monkeypatch.setattr("growprune.deployment.cuda.swapping.choose", chosen)
    monkeypatch.setattr("growprune.deployment.cuda.fusing.fastest", broken)
    with pytest.warns(UserWarning, match="a and b and c were not timed as one: RuntimeError: no registers"):
        fast = deployed(pruned(Steps(all_three)), torch.randn(1, 32), seconds=1)
    assert [row.choice for row in fast.table] == ["sparse"] * 3


def test_what_is_timed_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = siblings_of(three())
    monkeypatch.setattr("growprune.deployment.cuda.fusing.time_layer", lambda layer, matrix, batch: 3.0)
    assert siblings.tune(4, 0) == 3.0
    assert list(siblings.whole.tiles) == [4]
    monkeypatch.setattr("growprune.deployment.cuda.linear.product", lambda *args: 2 * product(*args))
    with pytest.raises(RuntimeError, match="relative difference from the dense product"):
        siblings.tune(4, 0)


# Calls that are unlike the example's


def check_calls(fast: Any, step: Callable[[Any, Tensor], Any], names: str) -> None:
    """Outputs are those of each layer alone, for its input at that time."""
    inputs: list[Tensor] = []
    for layer in (fast.a, fast.b, fast.c):
        layer.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].detach().clone()))
    fast.step = step
    outputs = fast(torch.randn(2, 32))
    for name, given, found in zip(names, inputs, outputs, strict=True):
        torch.testing.assert_close(found, alone(fast, name, given))


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], str, list[int]]] = {
    "as in the example": (all_three, "abc", [40]),
    "in another order": (lambda m, x: [m.c(x), m.a(x), m.b(x)], "cab", [16, 40]),
    "not all": (lambda m, x: [m.a(x), m.c(x)], "ac", [40]),
    "without the first": (lambda m, x: [m.b(x), m.c(x)], "bc", [8, 16]),
    "twice": (lambda m, x: [m.a(x), m.b(x), m.b(x), m.a(x), m.b(x)], "abbab", [40, 8, 40]),
    "all of them twice": (lambda m, x: all_three(m, x) + all_three(m, x), "abcabc", [40, 40]),
    "other tensors": (lambda m, x: [m.a(x), m.b(x.clone()), m.c(x + 1)], "abc", [40, 8, 16]),
    "changed in place": (lambda m, x: [m.a(x), m.b(x.add_(1)), m.c(x.mul_(2))], "abc", [40, 8, 16]),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_other_calls_give_what_each_layer_gives_alone(name: str, rows: list[int]) -> None:
    step, names, expected = CALLS[name]
    check_calls(three(), step, names)
    assert rows == expected


@torch.no_grad()
def test_a_change_through_a_view_is_noticed() -> None:
    fast, x = three(), torch.randn(2, 32)
    fast.a(x)
    x.view(-1)[:32].zero_()
    torch.testing.assert_close(fast.b(x), alone(fast, "b", x))


@torch.no_grad()
def test_changing_an_output_in_place_leaves_the_others_alone() -> None:
    fast, x = three(), torch.randn(1, 32)
    expected = alone(fast, "b", x)
    fast.a(x).fill_(7)
    found = fast.b(x)
    fast.c(x).fill_(7)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_behind() -> None:
    fast, x = three(), torch.randn(1, 32)
    fast.a(x)
    with pytest.raises(gp.GrowpruneError, match="x must have shape"):
        fast.a(torch.randn(1, 31))
    with pytest.raises(gp.GrowpruneError, match="must have the same dtype"):
        fast.a(x.half())
    torch.testing.assert_close(fast.b(x), alone(fast, "b", x))


@torch.no_grad()
def test_no_activation_is_kept() -> None:
    fast = three()
    for taken in ("abc", "ab"):
        x = torch.randn(1, 32)
        outputs = [fast.get_submodule(name)(x) for name in taken]
        pending = siblings_of(fast)._pending
        outputs += [] if pending is None else pending[2].values()
        kept = [weakref.ref(x), *map(weakref.ref, outputs)]
        del x, outputs
        gc.collect()
        assert [tensor() for tensor in kept] == [None] * 4  # x and three outputs


def test_gradients_flow_through_each_layer() -> None:
    fast, x = three(), torch.randn(2, 32, requires_grad=True)
    with torch.no_grad():
        fast.a(x)
    for name in "bca":
        (found,) = torch.autograd.grad(fast.get_submodule(name)(x).sum(), x)
        torch.testing.assert_close(found, fast.get_submodule(name).weight.sum(0).expand(2, 32))


def test_in_inference_mode_where_changes_cannot_be_seen_layers_are_alone(rows: list[int]) -> None:
    fast = three()
    with torch.inference_mode():
        check_calls(fast, CALLS["changed in place"][0], "abc")
    assert rows == [16, 8, 16]


@pytest.mark.filterwarnings("ignore:Dynamo does not know how")  # of the CPU: a weight is made dense
def test_a_compiled_model_gives_the_same() -> None:
    fast, x = three(), torch.randn(2, 32)
    with torch.no_grad():
        compiled = torch.compile(fast, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), [alone(fast, name, x) for name in "abc"])


@torch.no_grad()
def test_a_copy_computes_as_one_by_itself(rows: list[int]) -> None:
    fast, x = three(), torch.randn(2, 32)
    copied = copy.deepcopy(fast)
    fast.a.matrix_values.zero_()
    expected = [alone(copied, name, x) for name in "abc"]
    torch.testing.assert_close(copied(x), expected)
    assert rows == [40]
    assert len({copied.get_submodule(name).matrix_values.untyped_storage().data_ptr() for name in "abc"}) == 1


@torch.no_grad()
def test_a_converted_model_computes_each_alone(rows: list[int]) -> None:
    fast, x = three().half(), torch.randn(2, 32).half()
    expected = [alone(fast, name, x) for name in "abc"]
    torch.testing.assert_close(fast(x), expected, atol=1e-2, rtol=1e-2)
    assert rows == [16, 8, 16]


# Matrices


@pytest.mark.parametrize(("is_int8", "batch"), [(False, 1), (True, 5)])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_stacked_matrix_has_the_rows_of_all(kind: str, is_int8: bool, batch: int, where: str) -> None:
    weights = [
        uneven_weight(),
        random_weight(9, 530, 0.8, seed=1),
        random_weight(0, 530, 0.8),
        random_weight(3, 530, 1),
    ]
    entries = [(int8_of if is_int8 else from_dense)(weight.to(where)) for weight in weights]
    matrices = [MAKERS[kind](one) for one in entries]
    whole, expected = stacked(matrices), torch.cat([one.dense() for one in entries])
    assert torch.equal(whole.dense(), expected)
    x = random_weight(batch, 530, 0.0, seed=5).to(where)
    for matrix, view in zip(matrices, views(whole, matrices), strict=True):
        assert torch.equal(view.dense(), matrix.dense())
        assert view.values.untyped_storage().data_ptr() == whole.values.untyped_storage().data_ptr()
        assert torch.equal(product(view, x), product(matrix, x))
    found = torch.cat([product(matrix, x) for matrix in matrices], 1)
    torch.testing.assert_close(product(whole, x), found, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["offsets", "columns", "bitmask"])
def test_siblings_are_their_layers(kind: str, where: str) -> None:
    weights = [random_weight(rows, 300, 0.8, torch.float32, seed=rows) for rows in (5, 30)]
    layers: list[Any] = [make(from_dense(weight.to(where)), kind) for weight in weights]
    x = random_weight(3, 300, 0.0, torch.float32).to(where)
    siblings = Siblings(layers)
    expected = [layer(x) for layer in layers]
    siblings.adopt(layers)
    for found in (siblings(x), [layer(x) for layer in layers], [layer(x) for layer in layers[::-1]][::-1]):
        torch.testing.assert_close(list(found), expected)
    assert isinstance(layers[0], SparseLinear) and torch.equal(layers[1].weight.cpu(), weights[1])


def test_int8_layers_are_one_product(rows: list[int]) -> None:
    model, x = block(torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    fast, single = (deployed(model, x, values="int8", fuse=fuse) for fuse in (True, False))
    torch.testing.assert_close(fast(x), single(x), atol=5e-2, rtol=5e-2)
    assert rows[:4] == [112, 64, 160, 64]


# Folders


@pytest.mark.usefixtures("without_a_gpu")
@pytest.mark.parametrize("values", [None, "int8"])
def test_a_folder_says_what_is_one(values: str | None, tmp_path: Path, rows: list[int]) -> None:
    x = torch.randn(2, 64)
    fast = gp.deploy(block(), x, device="cuda", seconds=0, values=values)
    expected = fast(x)
    fast.save(tmp_path)
    assert torch.equal(fast(x), expected)
    rows.clear()
    again = gp.load_deployed(tmp_path, Block())
    assert again.table == fast.table
    torch.testing.assert_close(again(x), expected, atol=1e-2 if values else 1e-5, rtol=1e-5)
    assert rows == [112, 64, 160, 64]


@pytest.mark.usefixtures("without_a_gpu")
def test_a_folder_of_layers_that_are_faster_alone_stays_so(tmp_path: Path, rows: list[int]) -> None:
    x = torch.randn(2, 64)
    fast = gp.deploy(block(), x, device="cuda", seconds=0)
    fast.table = type(fast.table)(tuple(type(row)(**{**vars(row), "choice": "sparse"}) for row in fast.table))
    fast.save(tmp_path)
    gp.load_deployed(tmp_path, Block())(x)
    assert rows == [64, 24, 24, 64, 80, 80, 64]


def test_layers_can_be_made_dense_again() -> None:
    model, x = block(), torch.randn(2, 64)
    fast = deployed(model, x)
    fast.stay_in_torch()
    assert all(torch.equal(fast.module.get_submodule(name).weight, model.get_submodule(name).weight) for name in "qkv")
    torch.testing.assert_close(fast(x), model(x))


# On a GPU


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=on_the_gpu)])
@torch.no_grad()
def test_a_graph_of_a_block_gives_what_it_gives_dense(cuda: str) -> None:
    model = block().to(cuda)
    for seconds in (0, 1):
        fast = deployed(model, torch.randn(1, 64), cuda, seconds=seconds)
        step = graphed(fast.module, torch.randn(1, 64, device=cuda))
        for _ in range(3):
            x = torch.randn(1, 64, device=cuda)
            torch.testing.assert_close(step(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=on_the_gpu)])
@torch.no_grad()
def test_a_graph_takes_nothing_that_was_computed_before_it(cuda: str) -> None:
    fast, x = three(device=cuda), torch.randn(1, 32, device=cuda)
    fast.b(x)
    fast.a(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fast.b(x)
    x.copy_(torch.randn(1, 32))
    graph.replay()
    torch.testing.assert_close(found, alone(fast, "b", x), atol=1e-4, rtol=1e-4)
