"""Copies of a sparse model: moving averages, pickles, deep copies, and the plain model that it becomes."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import growprune as gp
from growprune import GrowpruneError, SparseModel
from growprune.plan import By


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(torch.relu(self.down(x)).mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 8)),
    "cnn": (SmallCNN, (2, 3, 9, 9)),
}


def made(name: str, storage: str) -> tuple[SparseModel, Tensor]:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    sparse = SparseModel(build().eval(), sparsity=0.75, storage=storage)
    sparse.prune()
    return sparse, torch.randn(shape)


# Moving averages


def averaged(storage: str) -> tuple[SparseModel, AveragedModel, Any]:
    torch.manual_seed(0)
    sparse = SparseModel(nn.Linear(8, 16), sparsity=0.75, storage=storage)
    sparse.prune()
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    average = AveragedModel(sparse.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    step(sparse, average, optimizer)
    return sparse, average, optimizer


def step(sparse: SparseModel, average: AveragedModel, optimizer: Any) -> None:
    optimizer.zero_grad()
    sparse.model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    average.update_parameters(sparse.model)


def test_a_masked_average_that_was_updated_across_an_edit_is_made_as_sparse_as_the_model() -> None:
    sparse, average, optimizer = averaged("masked")
    sparse.prune(share=0.5)
    sparse.grow(to=0.75)
    step(sparse, average, optimizer)
    before, mask = copy.deepcopy(average.module), sparse.masks["weight"]
    assert int(before.weight.count_nonzero()) > 32, "weights of both masks"
    sparse.mask_copy(average)
    assert torch.equal(average.module.weight, torch.where(mask, before.weight, 0))
    assert torch.equal(average.module.bias, before.bias)
    assert int(average.module.weight.count_nonzero()) == 32


def test_a_compact_average_is_accepted_with_the_same_mask_and_refused_with_another_of_the_same_count() -> None:
    sparse, average, _ = averaged("compact")
    before = average.module.state_dict()["weight"].clone()
    sparse.mask_copy(average)
    assert torch.equal(average.module.state_dict()["weight"], before)
    assert int(before.count_nonzero()) == 32
    sparse.prune(share=0.5)
    sparse.grow(to=0.75, by=By.RANDOM)
    assert sum(p.numel() for p in average.module.parameters()) == sum(p.numel() for p in sparse.model.parameters())
    with pytest.raises(GrowpruneError, match="weight of the copy is compact and has another mask"):
        sparse.mask_copy(average)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_compact_copy_of_another_count_is_refused_and_nothing_changes(storage: str) -> None:
    sparse, x = made("mlp", storage)
    other, _ = made("mlp", "compact")
    other.grow(gp.Part("first", ("0.weight",)))
    other.prune(gp.Part("last", ("2.weight",)), to=0.9)
    before = other.model(x)
    with pytest.raises(GrowpruneError, match=r"2.weight of the copy is compact and has another mask"):
        sparse.mask_copy(other.model)
    assert torch.equal(other.model(x), before)


# Pickling


@pytest.mark.parametrize("name", MODELS)
def test_pickling_a_compact_model_says_what_to_do(name: str) -> None:
    sparse, _ = made(name, "compact")
    for write in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(GrowpruneError, match=r"compact storage, .*: call sparse\.to_dense_\(\)"):
            write(sparse.model)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_pickling_a_sparse_model_or_a_cursor_says_what_to_do(storage: str) -> None:
    sparse, _ = made("mlp", storage)
    cursor = gp.Cursor(sparse, gp.methods.dense(gp.Partition.contiguous(sparse.model, 1), epochs=1))
    for thing in (sparse, cursor):
        with pytest.raises(GrowpruneError, match=r"a SparseModel cannot be pickled: save its state_dict\(\)"):
            pickle.dumps(thing)
        assert copy.deepcopy(thing) is not thing


@pytest.mark.parametrize("name", MODELS)
def test_copies_of_a_compact_model_compute_the_same_and_deep_ones_are_independent(name: str) -> None:
    sparse, x = made(name, "compact")
    expected = sparse.model(x)
    deep, shallow = copy.deepcopy(sparse.model), copy.copy(sparse.model)
    assert torch.equal(deep(x), expected)
    assert torch.equal(shallow(x), expected)
    with torch.no_grad():
        for parameter in deep.parameters():
            parameter.zero_()
    assert torch.equal(sparse.model(x), expected)
    assert copy.copy(next(m for m in sparse.model.modules() if type(m).__name__.startswith("Compact"))) is not None


def test_a_module_that_occurs_twice_does_so_in_a_copy() -> None:
    sparse, _ = made("mlp", "compact")
    both = nn.ModuleList([sparse.model[0], sparse.model[0]])
    clone = copy.deepcopy(both)
    assert clone[0] is clone[1]
    assert clone[0] is not both[0]


# Deep copies of masked weights


def attached() -> tuple[SparseModel, Tensor]:
    sparse, x = made("mlp", "masked")
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    return sparse, x


def train(model: nn.Module, x: Tensor, make: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
    optimizer = make(model.parameters(), **({"lr": 0.05} | options))
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        optimizer.step()


def alive(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() != 0 for name, p in model.named_parameters() if p.dim() > 1}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_attached", [True, False])
def test_a_deepcopy_keeps_its_zeros_under_a_plain_optimizer(optimizer: str, is_attached: bool) -> None:
    sparse, x = attached() if is_attached else made("mlp", "masked")
    before = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    clone = copy.deepcopy(sparse.model)
    make, options = OPTIMIZERS[optimizer]
    train(clone, x, make, **options)
    assert same(alive(clone), sparse.masks)
    assert not torch.equal(clone[0].weight, before["0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in sparse.model.state_dict().items())


def test_copies_keep_the_masks_of_when_they_were_made_also_without_the_sparse_model() -> None:
    sparse, x = attached()
    masks, clone = sparse.masks, copy.deepcopy(sparse.model)
    again = copy.deepcopy(clone)
    sparse.grow()
    del sparse
    for model in (clone, again):
        train(model, x)
        assert same(alive(model), masks)


def test_a_layer_can_be_copied_by_itself_and_a_frozen_one_unfrozen_later() -> None:
    sparse, x = attached()
    sparse.model.requires_grad_(False)
    layer = copy.deepcopy(sparse.model[0])
    assert not layer.weight.requires_grad
    train(layer.requires_grad_(True), x)
    assert torch.equal(layer.weight != 0, sparse.masks["0.weight"])


def test_a_copy_that_is_masked_anew_trains_what_lives_now() -> None:
    sparse, x = attached()
    clone = copy.deepcopy(sparse.model)
    sparse.prune(share=0.5)
    sparse.grow(to=0.75, by=By.RANDOM)
    sparse.mask_copy(clone)
    train(clone, x)
    train(clone, x)
    assert same({n: m & sparse.masks[n] for n, m in alive(clone).items()}, alive(clone))
    assert int(alive(clone)["0.weight"].sum()) > 20  # 16 outlived the prune, and grown ones have moved


def test_a_sparse_model_of_a_copy_decides_from_then_on() -> None:
    sparse, x = attached()
    clone = copy.deepcopy(sparse.model)
    second = SparseModel(clone, sparsity=0.5)
    second.grow()  # all of it, zeros included, as it is meant here
    optimizer = second.attach(torch.optim.SGD(clone.parameters(), lr=0.05))
    (clone(x) - 1).square().sum().backward()
    optimizer.step()
    assert int(clone[2].weight.count_nonzero()) > 48
    second.prune()
    assert second.num_alive == 96
    third = copy.deepcopy(second.to_dense_())
    train(third, x)
    assert int(third[2].weight.count_nonzero()) > 48


def test_a_deepcopy_of_a_sparse_model_follows_its_own_edits() -> None:
    sparse, x = attached()
    clone = copy.deepcopy(sparse)
    clone.grow(to=0.5, by=By.RANDOM)
    train(clone.model, x)
    assert same({n: m & clone.masks[n] for n, m in alive(clone.model).items()}, alive(clone.model))
    assert clone.num_alive == 96
    assert sparse.num_alive == 48
    assert int(clone.model[2].weight.count_nonzero()) > 16


def test_a_tied_weight_is_tied_and_sparse_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    sparse = SparseModel(model, sparsity=0.75)
    sparse.prune()
    clone = copy.deepcopy(model)
    assert clone[0].weight is clone[1].weight
    train(clone, torch.randn(6, 8))
    assert torch.equal(clone[0].weight != 0, sparse.masks["0.weight"])


def test_pickles_of_a_masked_model_and_of_its_copy_are_plain_models() -> None:
    sparse, x = attached()
    train(clone := copy.deepcopy(sparse.model), x)
    for model in (sparse.model, clone):
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(copy.deepcopy(loaded)(x), model(x))
        assert b"growprune.s" not in pickle.dumps(model)


# A plain model


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_dense_is_plain_and_computes_the_same(name: str, storage: str) -> None:
    sparse, x = made(name, storage)
    expected, alive = sparse.model(x), sparse.masks
    assert sparse.to_dense_() is sparse.model
    assert torch.equal(sparse.model(x), expected)
    plain = MODELS[name][0]()
    assert [type(m) for m in sparse.model.modules()] == [type(m) for m in plain.modules()]
    assert [m.__dict__.keys() for m in sparse.model.modules()] == [m.__dict__.keys() for m in plain.modules()]
    assert [p.shape for p in sparse.model.parameters()] == [p.shape for p in plain.parameters()]
    for parameter, mask in alive.items():
        assert type(sparse.model.get_parameter(parameter)) is nn.Parameter
        assert torch.equal(sparse.model.get_parameter(parameter) != 0, mask)
    assert not [hook for m in sparse.model.modules() for hook in m._state_dict_hooks.values()]
    assert not [hook for m in sparse.model.modules() for hook in m._load_state_dict_pre_hooks.values()]


def test_a_layer_of_several_compact_weights_becomes_a_plain_one() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
    sparse = SparseModel(model, sparsity=0.75, storage="compact")
    sparse.prune()
    before, alive = {name: tensor.clone() for name, tensor in model.state_dict().items()}, sparse.num_alive
    sparse.to_dense_()
    assert type(model) is nn.MultiheadAttention and sparse.num_alive == alive
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_made_dense_can_be_pickled_traced_and_exported(name: str) -> None:
    sparse, x = made(name, "compact")
    expected = sparse.model(x)
    model = sparse.to_dense_()
    written = pickle.dumps(model)
    assert b"growprune" not in written
    assert torch.equal(pickle.loads(written)(x), expected)
    assert torch.equal(torch.jit.trace(model, (x,))(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_what_lives_in_a_model_made_dense_can_be_asked_and_saved(storage: str, tmp_path: Path) -> None:
    sparse, x = made("mlp", storage)
    gp.save(sparse, tmp_path / "before.safetensors")
    expected, alive = sparse.model(x), sparse.num_alive
    sparse.to_dense_()
    assert sparse.num_alive == alive == 48
    gp.save(sparse, tmp_path / "after.safetensors")
    loaded = gp.load(tmp_path / "after.safetensors", mlp())
    assert torch.equal(loaded.model(x), expected)
    assert (tmp_path / "after.safetensors").read_bytes() == (tmp_path / "before.safetensors").read_bytes()


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_model_made_dense_is_edited_no_more_and_its_optimizers_do_not_step(storage: str) -> None:
    sparse, x = made("mlp", storage)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    state, snapshot = sparse.state_dict(), sparse.snapshot()
    sparse.to_dense_()
    whole = gp.Partition.contiguous(sparse.model, 1)
    calls: list[Callable[[], object]] = [
        sparse.prune,
        sparse.grow,
        sparse.to_dense_,
        lambda: sparse.load_state_dict(state),
        lambda: sparse.restore(snapshot),
        lambda: sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1)),
        lambda: gp.Cursor(sparse, gp.methods.one_shot(whole, sparsity=0.5, epochs=1, finetune=1)),
    ]
    for call in calls:
        with pytest.raises(GrowpruneError, match=r"the model was made dense by to_dense_\(\)"):
            call()
    sparse.model(x).sum().backward()
    with pytest.raises(GrowpruneError, match=r"the model was made dense by to_dense_\(\): create a new optimizer"):
        optimizer.step()


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_model_made_dense_trains_freely_and_can_be_made_sparse_again(storage: str) -> None:
    sparse, x = made("mlp", storage)
    sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    model = sparse.to_dense_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    assert int(model[2].weight.count_nonzero()) > 16
    again = SparseModel(model, sparsity=0.5, storage=storage)
    again.prune()
    assert again.num_alive == 96
