"""Copies of a sparse model: moving averages, pickles, and the plain model that it becomes for other tools."""

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
    "mlp": (mlp, (2, 8)),
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
    return sparse, average, optimizer


def train(sparse: SparseModel, average: AveragedModel, optimizer: Any) -> None:
    optimizer.zero_grad()
    sparse.model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    average.update_parameters(sparse.model)


def test_a_masked_average_that_was_updated_across_an_edit_is_made_as_sparse_as_the_model() -> None:
    sparse, average, optimizer = averaged("masked")
    train(sparse, average, optimizer)
    sparse.prune(share=0.5)
    sparse.grow(to=0.75)
    train(sparse, average, optimizer)
    assert int(average.module.weight.count_nonzero()) > 32, "weights of both masks"
    sparse.mask_copy(average)
    assert not bool(average.module.weight[~sparse.masks["weight"]].any())
    assert int(average.module.weight.count_nonzero()) == 32


def test_a_compact_average_with_the_same_mask_is_accepted() -> None:
    sparse, average, optimizer = averaged("compact")
    train(sparse, average, optimizer)
    before = average.module.state_dict()["weight"].clone()
    sparse.mask_copy(average)
    assert torch.equal(average.module.state_dict()["weight"], before)
    assert int(before.count_nonzero()) == 32


def test_a_compact_average_with_another_mask_of_the_same_count_is_refused() -> None:
    sparse, average, optimizer = averaged("compact")
    train(sparse, average, optimizer)
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
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert torch.equal(torch.jit.trace(model, (x,))(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_a_pickle_of_a_model_made_dense_is_read_without_growprune() -> None:
    sparse, _ = made("cnn", "compact")
    assert b"growprune" not in pickle.dumps(sparse.to_dense_())


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
