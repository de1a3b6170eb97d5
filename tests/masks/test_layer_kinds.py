"""Layers that are stored otherwise than Linear: patterns along their inputs, storages, files and random builds."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune.masks.layers import REGISTERED, Weight, prunable_weights
from growprune.plan import By
from growprune.sparse.cursor import Cursor


class Conv1D(nn.Module):
    """Like that of transformers: a Linear stored (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.empty(nf))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Paired(nn.Bilinear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


class Experts(nn.Module):
    """Like those of transformers; each example goes to the expert of its number."""

    def __init__(self, *, is_transposed: bool, count: int = 3) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = count, is_transposed
        shapes = [(8, 12), (12, 8)] if is_transposed else [(12, 8), (8, 12)]
        self.up, self.down = (nn.Parameter(torch.empty(count, *shape)) for shape in shapes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up)
        nn.init.normal_(self.down)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_transposed:
            rows = x.view(self.num_experts, -1, 8)
            return torch.bmm(torch.bmm(rows, self.up).relu(), self.down).reshape(-1, 8)
        parts = x.chunk(self.num_experts)
        return torch.cat([F.linear(F.linear(p, self.up[i]).relu(), self.down[i]) for i, p in enumerate(parts)])


class Own(nn.Module):
    """A layer of one's own, of no kind that is known: one matrix stored (in, out), and a stack of two (out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.heads = nn.Parameter(torch.empty(8, 12)), nn.Parameter(torch.empty(2, 8, 12))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.kernel)
        nn.init.normal_(self.heads)

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.kernel).relu()
        return F.linear(y, self.heads[0]) + F.linear(y, self.heads[1])


gp.register_layer(Own, kernel="in out", heads="stack out in")


KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "conv1d": (lambda: nn.Sequential(Conv1D(12, 8), nn.ReLU(), Conv1D(8, 12)), 2),
    "bilinear": (lambda: Paired(8, 8, 8), 1),
    "experts": (lambda: Experts(is_transposed=False), 6),
    "experts stored (in, out)": (lambda: Experts(is_transposed=True), 6),
    "one expert": (lambda: Experts(is_transposed=True, count=1), 2),
    "registered": (lambda: nn.Sequential(Own(), Own()), 6),
}
"""By name: how to build it, and how many matrices it has."""

every_kind = pytest.mark.parametrize("kind", KINDS)
every_pattern = pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1x4", "2x4"])
both_storages = pytest.mark.parametrize("storage", ["masked", "compact"])


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind][0]()


def pruned(kind: str, **options: Any) -> gp.SparseModel:
    sparse = gp.SparseModel(build(kind), **({"sparsity": 0.5} | options))
    sparse.prune()
    return sparse


def train(sparse: gp.SparseModel) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.1))
    losses = []
    for number in range(4):
        if number == 2:
            sparse.grow()
            sparse.prune()
        optimizer.zero_grad()
        losses.append(sparse.model(torch.randn(12, 8)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return losses


def matrices(sparse: gp.SparseModel) -> list[Tensor]:
    """The mask of every matrix, as (out, in)."""
    masks = [weight.of(sparse.masks[weight.parameter]) for weight in sparse.weights]
    return [m.t() if w.transposed else m for m, w in zip(masks, sparse.weights, strict=True)]


@every_kind
@every_pattern
def test_compact_and_masked_storage_train_the_same_bits(kind: str, pattern: str) -> None:
    masked, compact = (pruned(kind, pattern=pattern, storage=storage) for storage in ("masked", "compact"))
    assert len(masked.weights) == KINDS[kind][1]
    assert [x.item() for x in train(masked)] == [x.item() for x in train(compact)]
    states = masked.model.state_dict(), compact.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert masked.num_alive == compact.num_alive == masked.num_prunable // 2
    assert any(p.dim() == 1 and "bias" not in n for n, p in compact.model.named_parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bilinear"])
@pytest.mark.parametrize(("pattern", "rows", "alive"), [("2:4", 1, {2}), ("1x4", 1, {0, 4}), ("2x4", 2, {0, 8})])
def test_groups_have_outputs_down_and_inputs_across(kind: str, pattern: str, rows: int, alive: set[int]) -> None:
    for mask in matrices(pruned(kind, pattern=pattern)):
        cells = mask.view(len(mask) // rows, rows, -1, 4).permute(0, 2, 1, 3).reshape(-1, 4 * rows).sum(1)
        assert set(cells.tolist()) == alive


def test_every_expert_has_the_sparsity_that_is_asked_for() -> None:
    sparse = pruned("experts", sparsity=0.75)
    assert [int(mask.sum()) for mask in matrices(sparse)] == [24] * 6
    assert [row.shape for row in sparse.summary().rows] == [(12, 8)] * 3 + [(8, 12)] * 3


@every_kind
@every_pattern
@both_storages
def test_a_file_brings_back_weights_and_masks(kind: str, pattern: str, storage: str, tmp_path: Path) -> None:
    sparse = pruned(kind, pattern=pattern, storage=storage)
    gp.save(sparse, tmp_path / "model")
    loaded = gp.load(tmp_path / "model", KINDS[kind][0](), storage=storage)
    expected = sparse.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in gp.read(tmp_path / "model").items())
    assert all(torch.equal(mask, sparse.masks[name]) for name, mask in loaded.masks.items())


@every_kind
@every_pattern
def test_a_file_is_read_without_growprune(kind: str, pattern: str, tmp_path: Path) -> None:
    sparse = pruned(kind, pattern=pattern)
    gp.save(sparse, tmp_path / "model")
    example = ROOT / "examples" / "read_without_growprune.py"
    arrays = runpy.run_path(str(example))["read"](tmp_path / "model")
    assert all((arrays[name] == tensor.numpy()).all() for name, tensor in sparse.model.state_dict().items())


@every_kind
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1x4"])
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_model_built_sparse_is_that_of_a_random_prune(kind: str, pattern: str, allocation: str) -> None:
    options = {"sparsity": 0.75, "pattern": pattern, "allocation": allocation, "seed": 3, "rescale": True}
    torch.manual_seed(0)
    built = gp.sparse_init(KINDS[kind][0], **options)  # type: ignore[arg-type]
    expected = gp.SparseModel(build(kind), **options)  # type: ignore[arg-type]
    expected.prune(by=By.RANDOM)
    assert all(torch.equal(mask, built.masks[name]) for name, mask in expected.masks.items())
    found = built.model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.model.state_dict().items())


def test_a_global_random_mask_is_the_same_whatever_the_order_layers_are_filled_in() -> None:
    def attention() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16)  # out_proj lies inside of attention, but comes after it

    for dtype in (torch.float32, torch.float64):
        built = gp.sparse_init(lambda d=dtype: attention().to(d), sparsity=0.8, allocation="global", seed=5)  # type: ignore[misc]
        expected = gp.SparseModel(attention().to(dtype), sparsity=0.8, allocation="global", seed=5)
        expected.prune(by=By.RANDOM)
        assert all(torch.equal(mask, built.masks[name]) for name, mask in expected.masks.items())


@both_storages
def test_parts_of_experts_grow_in_turn(storage: str) -> None:
    model = nn.Sequential(Experts(is_transposed=False), Experts(is_transposed=True))
    sparse = gp.SparseModel(model, sparsity=0.5, storage=storage)
    S = gp.Partition.per_layer(model)
    assert [part.tensors for part in S] == [("0.up", "0.down"), ("1.up", "1.down")]
    plan = gp.methods.cyclic_gap(S, sparsity=0.5, steps=2, epochs=1, finetune=1)
    alive = [sparse.num_alive for _ in Cursor(sparse, plan)]
    assert alive == [576, 864, 864, 576]


FLOPS = {
    "conv1d": [2 * 12 * 96] * 2,
    "bilinear": [2 * 12 * 512],
    "experts": [2 * 4 * 96] * 6,  # 4 of 12 examples each
    "experts stored (in, out)": [2 * 4 * 96] * 6,
    "one expert": [2 * 12 * 96] * 2,
    "registered": [2 * 12 * 96] * 6,
}
"""By hand, for 12 examples: two operations for each element of a matrix that an example goes through."""


@every_kind
@both_storages
def test_flops_are_charged_to_each_matrix_by_what_lives(kind: str, storage: str) -> None:
    sparse = pruned(kind, storage=storage)
    flops = gp.count_flops(sparse.model, torch.zeros(12, 8))
    assert [flops.by_weight[weight.name] for weight in sparse.weights] == FLOPS[kind]
    assert flops.dense == sum(FLOPS[kind])
    assert flops.at({weight.name: 0.5 for weight in sparse.weights}) == sum(FLOPS[kind]) // 2


@every_kind
def test_partitions_count_the_weights_of_every_layer(kind: str) -> None:
    model = build(kind)
    S = gp.Partition.per_layer(model)
    assert sum(S.sizes) == gp.SparseModel(model, sparsity=0.5).num_prunable
    assert [name for part in S for name in part.tensors] == [name for name, _ in model.named_parameters()]


# Kinds of one's own


class Kernel(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(4))
        self.register_parameter("gate", None)


@pytest.fixture
def _forget() -> Iterator[None]:
    known = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(known)


@pytest.mark.usefixtures("_forget")
def test_a_class_derived_from_a_registered_one_is_of_its_kind_unless_it_is_registered_itself() -> None:
    class Turned(Kernel):
        pass

    gp.register_layer(Kernel, kernel="in out", gate="out in")  # which is None, and so not there
    assert prunable_weights(Turned(8, 4)) == (Weight("kernel", "kernel", (8, 4), transposed=True),)
    gp.register_layer(Turned, kernel="out in ...")
    assert prunable_weights(Turned(8, 4, 3)) == (Weight("kernel", "kernel", (8, 4, 3)),)
    assert prunable_weights(Kernel(8, 4))[0].transposed


@pytest.mark.usefixtures("_forget")
def test_a_linear_layer_that_stores_its_inputs_first_can_say_so() -> None:
    class Turned(nn.Linear):
        pass

    assert not prunable_weights(Turned(8, 4))[0].transposed
    gp.register_layer(Turned, weight="in out")
    assert prunable_weights(Turned(8, 4))[0].transposed


@pytest.mark.parametrize(
    ("kind", "axes", "message"),
    [
        (Kernel(8, 4), {"kernel": "in out"}, "needs a subclass of nn.Module, got"),
        (int, {"kernel": "in out"}, "needs a subclass of nn.Module, got"),
        (Kernel, {}, r"register_layer\(Kernel\) needs the axes of a weight"),
        (Kernel, {"kernel": "rows columns"}, "kernel must be one of 'out in', 'in out', .*, got 'rows columns'"),
        (Kernel, {"kernel": ("in", "out")}, r"kernel must be one of .*, got \('in', 'out'\)"),
        (Own, {"kernel": "out in"}, "Own is already registered, with"),
    ],
)
@pytest.mark.usefixtures("_forget")
def test_a_wrong_entry_is_refused(kind: Any, axes: dict[str, Any], message: str) -> None:
    with pytest.raises(gp.GrowpruneError, match=message):
        gp.register_layer(kind, **axes)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        ({"kernle": "in out"}, (8, 4), "kernle='in out', but has no parameter kernle .* its parameters: kernel, bias"),
        ({"bias": "in out"}, (8, 4), "bias='in out', but has no parameter bias with 2 or more dimensions"),
        ({"kernel": "in out"}, (8, 4, 3), r"kernel has shape \(8, 4, 3\): name all of its axes"),
        ({"kernel": "stack in out"}, (8, 4), r"kernel has shape \(8, 4\): name all of its axes"),
    ],
)
@pytest.mark.usefixtures("_forget")
def test_an_entry_that_does_not_fit_the_module_is_refused(axes: Any, shape: tuple[int, ...], message: str) -> None:
    gp.register_layer(Kernel, **axes)
    with pytest.raises(gp.GrowpruneError, match=message):
        gp.SparseModel(Kernel(*shape), sparsity=0.5)
