"""Habits of every PyTorch user: loading, copying, sharing, retrying. Each test once gave a wrong model silently."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp

STORAGES = pytest.mark.parametrize("storage", ["masked", "compact"])
X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)

Optimizer = torch.optim.Optimizer
State = dict[str, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def begun(
    make: Callable[[nn.Module], Optimizer] = adam, method: str = "gradual_gap", **settings: Any
) -> tuple[nn.Sequential, Optimizer, gp.Sparsifier]:
    model = net()
    optimizer = make(model)
    return model, optimizer, gp.sparsify(model, optimizer, method, **{"sparsity": 0.8, "iterations": 20, **settings})


def backward(model: nn.Module) -> None:
    model.zero_grad()
    F.cross_entropy(model(X), Y).backward()


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()


def state_of(model: nn.Module) -> State:
    return copy.deepcopy(model.state_dict())


def is_same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def num_zeros(state: State) -> int:
    """Zeros in the layers that are pruned."""
    return sum(int((state[name] == 0).sum()) for name in ("0.weight", "2.weight"))


def num_dead(model: nn.Module, masks: State) -> int:
    """Pruned weights that are not zero."""
    return sum(int(model.state_dict()[name][~mask].count_nonzero()) for name, mask in masks.items())


ZEROS = round(0.8 * (16 * 32 + 32 * 32))
"""In a model that is pruned to the end."""


# Loading weights


@STORAGES
def test_weights_of_other_masks_are_refused_at_once(storage: str) -> None:
    model, optimizer, _ = begun(method="rigl", every=3, storage=storage)
    train(model, optimizer, 15)
    saved, saved_layer = state_of(model), state_of(model[2])
    model, optimizer, sparsifier = begun(method="rigl", every=3, storage=storage)
    before, place = state_of(model), sparsifier.cursor.state_dict()
    with pytest.raises(gp.GrowpruneError, match=r"0\.weight"):
        model.load_state_dict(saved)
    with pytest.raises(gp.GrowpruneError, match=r" weight"):
        model[2].load_state_dict(saved_layer)
    assert is_same(state_of(model), before)
    assert sparsifier.cursor.state_dict() == place
    train(model, optimizer, 20)
    assert num_zeros(model.state_dict()) == ZEROS


@STORAGES
def test_weights_whose_masks_are_lost_are_adopted_with_their_zeros(storage: str) -> None:
    model, optimizer, _ = begun(storage=storage)
    train(model, optimizer, 20)
    best = state_of(model)
    model, optimizer, sparsifier = begun(storage=storage)
    train(model, optimizer, 3)
    with pytest.raises(gp.GrowpruneError, match=r"2\.weight"):
        model.load_state_dict(best)
    sparsifier.sparse.adopt_zeros(best)
    assert is_same(state_of(model), best)
    assert sparsifier.sparsity == pytest.approx(0.8, abs=1e-3)
    masks = sparsifier.sparse.masks
    del sparsifier, optimizer
    with pytest.warns(UserWarning, match="iteration 3 of 20"):
        train(model, torch.optim.AdamW(model.parameters(), 0.01), 5)
    assert num_dead(model, masks) == 0
    assert not is_same(state_of(model), best)


@pytest.mark.parametrize("is_first", [False, True])
def test_the_state_of_an_optimizer_may_be_loaded_before_or_after_the_masks(is_first: bool) -> None:
    model, optimizer, sparsifier = begun()
    train(model, optimizer, 8)
    saved = copy.deepcopy((sparsifier.state_dict(only_masks=True), model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 12)
    expected = state_of(model)
    model, optimizer, sparsifier = begun()
    if is_first:
        optimizer.load_state_dict(saved[2])
    sparsifier.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    if not is_first:
        optimizer.load_state_dict(saved[2])
    train(model, optimizer, 12)
    assert is_same(state_of(model), expected)


WRONG: dict[str, Callable[[State], Any]] = {
    "4.bias": lambda state: state.update({"4.bias": torch.zeros(7)}),
    "0.weight": lambda state: state.update({"0.weight": torch.zeros(3, 16)}),
    "2.weight": lambda state: state.pop("2.weight"),
    "more": lambda state: state.update(more=torch.zeros(1)),
}


@STORAGES
@pytest.mark.parametrize("name", WRONG)
def test_weights_of_another_model_are_not_adopted(name: str, storage: str) -> None:
    model, optimizer, sparsifier = begun(storage=storage)
    train(model, optimizer, 20)
    before, masks, state = state_of(model), sparsifier.sparse.masks, state_of(model)
    state["0.weight"].zero_()
    WRONG[name](state)
    with pytest.raises(gp.GrowpruneError, match=name):
        sparsifier.sparse.adopt_zeros(state)
    assert is_same(state_of(model), before)
    assert is_same(sparsifier.sparse.masks, masks)


@pytest.mark.filterwarnings("ignore:deployed, the model takes")
def test_weights_written_past_the_masks_are_noticed_by_all_that_reads_them(tmp_path: Path) -> None:
    model, optimizer, sparsifier = begun(method="gmp", every=3)
    train(model, optimizer, 5)
    best = state_of(model)
    train(model, optimizer, 15)
    masks, said = sparsifier.sparse.masks, repr(sparsifier)
    uses: list[Callable[[], Any]] = [
        sparsifier.summary,
        lambda: gp.deploy(model, X[:1], seconds=0.01),
        lambda: gp.deploy(sparsifier.sparse, X[:1], seconds=0.01),
        lambda: gp.save(sparsifier.sparse, tmp_path / "model.safetensors"),
        lambda: sparsifier.save(tmp_path / "model.safetensors"),
        lambda: gp.save_pretrained(sparsifier.sparse, tmp_path / "folder"),
        sparsifier.to_dense_,
    ]
    for name, parameter in model.named_parameters():
        parameter.data.copy_(best[name])
    wrong = num_dead(model, masks)
    assert wrong > 0
    assert f"{wrong:,}" in repr(sparsifier)
    assert f"{wrong:,}" in repr(sparsifier.sparse)
    for use in uses:
        with pytest.raises(gp.GrowpruneError, match=r"0\.weight"):
            use()
    assert not list(tmp_path.rglob("*.safetensors"))
    sparsifier.sparse.enforce()
    assert repr(sparsifier) == said
    for use in uses:
        use()
    assert num_zeros(model.state_dict()) == ZEROS


def test_a_second_sparse_model_of_other_layers_is_refused_because_the_zeros_of_the_first_would_come_alive() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32)), nn.Linear(32, 4))
    gp.SparseModel(model, 0.5, keep_dense=["1"]).prune()  # without a handle that is kept
    before = state_of(model)
    for keep in (["0.0"], ["0.*"]):
        with pytest.raises(gp.GrowpruneError, match=r"0\.0\.weight belongs to another SparseModel"):
            gp.SparseModel(model, 0.9, keep_dense=keep)
    gp.SparseModel(model[1], 0.9).prune()  # a module of its own is none of the first one's business
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 2)
    assert torch.equal(model[0][0].weight == 0, before["0.0.weight"] == 0)
    assert int((model[1].weight != 0).sum()) == 13


# New optimizers


def no_bias(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


NEW: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    "Muon": lambda model: torch.optim.Muon(no_bias(model), 0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), 0.01, centered=True, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 0.01),
}


@pytest.mark.parametrize("name", NEW)
def test_zeros_outlive_the_handle_and_the_optimizer(name: str) -> None:
    model, optimizer, sparsifier = begun()
    train(model, optimizer, 20)
    masks = sparsifier.sparse.masks
    del sparsifier, optimizer
    gc.collect()
    before = state_of(model)
    optimizer = NEW[name](model)
    for _ in range(20):
        train(model, optimizer, 1)
        assert num_dead(model, masks) == 0
    assert not torch.equal(model[0].weight, before["0.weight"])


@STORAGES
def test_zeros_of_prune_pretrained_need_no_attach(storage: str) -> None:
    model = net()
    masks = gp.prune_pretrained(model, [X], sparsity=0.5, by="wanda", storage=storage).masks
    gc.collect()
    train(model, torch.optim.AdamW(model.parameters(), 0.01), 5)
    assert num_dead(model, masks) == 0


@STORAGES
def test_a_new_optimizer_in_the_middle_of_a_plan_is_warned_of_once(storage: str) -> None:
    model, optimizer, sparsifier = begun(storage=storage)
    train(model, optimizer, 5)
    new = torch.optim.AdamW(model.parameters(), 0.01)
    with pytest.warns(UserWarning, match="AdamW") as seen:
        train(model, new, 3)
    assert len(seen) == 1
    assert sparsifier.cursor.iteration == 5
    assert num_dead(model, sparsifier.sparse.masks) == 0
    sparsifier.cursor.attach(new)
    train(model, new, 15)
    assert sparsifier.is_finished


def test_weights_are_not_replaced_by_load_state_dict() -> None:
    model, optimizer, sparsifier = begun()
    train(model, optimizer, 20)
    weight = model[0].weight
    with pytest.raises(gp.GrowpruneError, match="assign=True"):
        model.load_state_dict(state_of(model), assign=True)
    assert model[0].weight is weight
    train(model, torch.optim.AdamW(model.parameters(), 0.01), 5)
    assert num_dead(model, sparsifier.sparse.masks) == 0


# Two models with one optimizer


def autoencoders(storage: str, *, share: bool) -> tuple[list[nn.Module], list[Optimizer], list[gp.Sparsifier]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)
    ]
    optimizers: list[Optimizer]
    if share:
        optimizers = [torch.optim.Adam([p for model in models for p in model.parameters()], 0.01)] * 2
    else:
        optimizers = [adam(model) for model in models]
    sparsifiers = [
        gp.sparsify(model, optimizer, sparsity=0.8, iterations=20, every=3, storage=storage)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    return models, optimizers[: 1 if share else 2], sparsifiers


def train_both(models: list[nn.Module], optimizers: list[Optimizer], steps: int) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (models[1](models[0](X)) - X).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def prune_further(model: nn.Module, optimizer: Optimizer) -> gp.Sparsifier:
    settings: Any = {"iterations": 4, "every": 2, "initial_mask": "magnitude"}
    return gp.sparsify(model, optimizer, "rigl", sparsity=0.9, **settings)


def num_step_hooks(optimizer: Optimizer) -> tuple[int, int]:
    return len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)


@STORAGES
def test_two_models_with_one_adam_train_as_with_two(storage: str) -> None:
    one, two = autoencoders(storage, share=True), autoencoders(storage, share=False)
    for _ in range(24):
        train_both(one[0], one[1], 1)
        train_both(two[0], two[1], 1)
        for shared, alone in zip(one[0], two[0], strict=True):
            assert is_same(shared.state_dict(), alone.state_dict())
    (optimizer,) = one[1]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for model in one[0] for parameter in model.parameters()}
    assert [group["lr"] for group in optimizer.param_groups] == [0.01]
    assert [sparsifier.is_finished for sparsifier in one[2]] == [True, True]


@pytest.mark.parametrize("count", [1, 2])
def test_models_made_dense_can_be_made_sparse_again_with_the_same_optimizer(count: int) -> None:
    models, (optimizer,), sparsifiers = autoencoders("masked", share=True)
    assert num_step_hooks(optimizer) == (1, 1)
    train_both(models, [optimizer], 20)
    assert num_step_hooks(optimizer) == (1, 1)
    for sparsifier in sparsifiers[:count]:
        sparsifier.to_dense_()
    if count == 2:
        assert num_step_hooks(optimizer) == (1, 0), "only the hook that refuses steps is left"
    with pytest.raises(gp.GrowpruneError, match=r"to_dense_\(\)"):
        train_both(models, [optimizer], 1)
    again = [prune_further(model, optimizer) for model in models[:count]]
    assert num_step_hooks(optimizer) == (1, 1)
    train_both(models, [optimizer], 4)
    assert all(sparsifier.is_finished for sparsifier in again)


@STORAGES
def test_hooks_go_with_the_models(storage: str) -> None:
    models, (optimizer,), sparsifiers = autoencoders(storage, share=True)
    train_both(models, [optimizer], 2)
    del models, sparsifiers
    gc.collect()
    assert num_step_hooks(optimizer) == (0, 0)
    optimizer.zero_grad()
    optimizer.step()


@STORAGES
def test_a_layer_that_is_kept_does_not_keep_the_model(storage: str) -> None:
    model = net()
    sparse = gp.SparseModel(model, 0.5, storage=storage)
    sparse.prune()
    layer, gone = model[0], [weakref.ref(model), weakref.ref(sparse)]
    del model, sparse
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    layer.load_state_dict(layer.state_dict())


# A step that raises


def raise_in_a_hook(model: nn.Module, optimizer: Optimizer) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_step_pre_hook(interrupt)
    backward(model)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()


def raise_inside(model: nn.Module, optimizer: Optimizer) -> None:
    """As out of memory does."""
    parameter = model[4].bias  # type: ignore[index]
    entries = optimizer.state[parameter]
    optimizer.state[parameter] = {**entries, "exp_avg": torch.zeros(3)}
    backward(model)
    with pytest.raises(RuntimeError):
        optimizer.step()
    optimizer.state[parameter] = entries


RAISES = pytest.mark.parametrize("fail", [raise_in_a_hook, raise_inside])


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def edit(model: nn.Module, optimizer: Optimizer, sparsifier: gp.Sparsifier) -> None:
    sparsifier.sparse.grow(to=0.7)


def save_state(model: nn.Module, optimizer: Optimizer, sparsifier: gp.Sparsifier) -> None:
    saved = sparsifier.state_dict()["optimizers"][0]["param_groups"]
    assert [group["lr"] for group in saved] == [0.01]
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.01]


def load_optimizer(model: nn.Module, optimizer: Optimizer, sparsifier: gp.Sparsifier) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@RAISES
@STORAGES
@pytest.mark.parametrize("act", [edit, save_state, load_optimizer])
def test_after_a_step_that_raised_training_goes_on_with_the_users_groups(act: Any, storage: str, fail: Any) -> None:
    model, optimizer, sparsifier = begun(storage=storage, lr_scaling=1)
    train(model, optimizer, 6)
    groups = settings_of(optimizer)
    fail(model, optimizer)
    act(model, optimizer, sparsifier)
    assert settings_of(optimizer) == groups
    before = state_of(model)
    train(model, optimizer, 1)
    assert settings_of(optimizer) == groups
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def refuse_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Those of a training that is further on, by torch's own way to load them."""
    other, its, _ = begun()
    train(other, its, 12)
    with pytest.raises(gp.GrowpruneError, match=r"0\.weight"):
        model.load_state_dict(other.state_dict())


@STORAGES
@pytest.mark.parametrize("fail", [raise_in_a_hook, refuse_weights])
def test_a_checkpoint_is_loaded_after_a_failure_and_resumes_to_the_same_bits(fail: Any, storage: str) -> None:
    model, optimizer, sparsifier = begun(storage=storage)
    train(model, optimizer, 6)
    saved = copy.deepcopy(sparsifier.state_dict())
    train(model, optimizer, 14)
    expected = state_of(model)
    model, optimizer, sparsifier = begun(storage=storage)
    train(model, optimizer, 9 if fail is raise_in_a_hook else 0)
    fail(model, optimizer)
    sparsifier.load_state_dict(saved)
    train(model, optimizer, 14)
    assert is_same(state_of(model), expected)


def weights_first(model: nn.Module) -> Optimizer:
    """A group of pruned weights only, and one of all others."""
    pruned = [model[0].weight, model[2].weight]  # type: ignore[index]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in pruned)]
    return torch.optim.Adam([{"params": pruned}, {"params": others}], 0.01)


@RAISES
@pytest.mark.parametrize("make", [adam, weights_first])
@pytest.mark.parametrize("how", ["by hand", "scheduler"])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
def test_a_rate_that_is_set_after_a_step_that_raised_is_obeyed(how: str, make: Any, fail: Any) -> None:
    states = []
    for fails in (True, False):
        model, optimizer, _ = begun(make, lr_scaling=1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.25)
        train(model, optimizer, 6)
        if fails:
            fail(model, optimizer)
        if how == "scheduler":
            scheduler.step()
        for group in optimizer.param_groups if how == "by hand" else ():
            group["lr"] = 0.0025
        train(model, optimizer, 1)
        assert {group["lr"] for group in optimizer.param_groups} == {0.0025}
        assert len(optimizer.param_groups) == (1 if make is adam else 2)
        states.append(state_of(model))
    assert fail is raise_inside or is_same(*states)  # Adam counts a step that raised inside


@RAISES
def test_a_group_that_is_added_after_a_step_that_raised_is_kept(fail: Any) -> None:
    model, optimizer, _ = begun(lr_scaling=1)
    train(model, optimizer, 6)
    fail(model, optimizer)
    more = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [more], "lr": 0.5})
    train(model, optimizer, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert optimizer.param_groups[1]["params"][0] is more


def test_a_deepcopy_trains_at_the_same_rates() -> None:
    model, optimizer, sparsifier = begun(initial_mask="magnitude", iterations=2000)
    clone = copy.deepcopy(sparsifier.sparse)
    other = clone.attach(adam(clone.model))
    train(model, optimizer, 1)
    train(clone.model, other, 1)
    assert is_same(model.state_dict(), clone.model.state_dict())


# Optimizers with numbers of the whole training in their groups


class Averaging(torch.optim.Optimizer):
    """Writes a sum over the training into each group, as schedule-free optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.01, name: str = "weight_sum") -> None:
        self.name = name
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), name: 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group[self.name] += group["lr"] ** 2
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] ** 3 / group[self.name])


class Estimating(torch.optim.SGD):
    """Estimates one distance for all, as Prodigy does, and refuses different rates as it does."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group |= {"betas": (0.9, 0.999), "d": 1e-6}

    def step(self, closure: Any = None) -> Any:
        if len({group["lr"] for group in self.param_groups}) > 1:
            raise RuntimeError("one rate for all")
        return super().step(closure)


@pytest.mark.parametrize("kind", [Averaging, Estimating])
def test_auto_leaves_rates_alone_where_an_optimizer_needs_one(kind: Any) -> None:
    states = []
    for lr_scaling in ("auto", 0):
        model, optimizer, _ = begun(lambda model: kind(model.parameters()), lr_scaling=lr_scaling)
        train(model, optimizer, 10)
        states.append(state_of(model))
    assert is_same(*states)


@pytest.mark.parametrize("kind", [Averaging, Estimating])
def test_scaled_rates_are_refused_where_an_optimizer_needs_one(kind: Any) -> None:
    model = net()
    optimizer, before = kind(model.parameters()), state_of(model)
    with pytest.raises(gp.GrowpruneError, match=kind.__name__):
        gp.sparsify(model, optimizer, sparsity=0.8, iterations=20, lr_scaling=1)
    assert is_same(state_of(model), before)
    assert num_step_hooks(optimizer) == (0, 0)


def test_adafactor_is_not_refused_for_its_hyperparameter_d() -> None:
    model, optimizer, sparsifier = begun(NEW["Adafactor"], lr_scaling=1)
    train(model, optimizer, 20)
    assert sparsifier.is_finished


def test_numbers_that_differ_between_the_parts_of_a_group_are_refused() -> None:
    average = lambda model: Averaging(model.parameters(), name="travelled")  # noqa: E731
    model, optimizer, _ = begun(average, lr_scaling=1, lr_ramp=0)
    with pytest.raises(gp.GrowpruneError, match=r"Averaging.*'travelled'"):
        train(model, optimizer, 1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01]


# States that were changed


def forge(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        if to is None:
            del state[path[-1]]
        else:
            state[path[-1]] = to

    return change


FIRST = ("optimizers", 0, "state", 0)
FORGED = {
    "dpf rule": ("dpf", forge("cursor", "rule", "m", to="x")),
    "admm rule": ("admm", forge("cursor", "rule", to={})),
    "admm U": ("admm", forge("cursor", "rule", "U", to={})),
    "no step": ("gmp", forge(*FIRST, "step", to=None)),
    "step": ("gmp", forge(*FIRST, "step", to="x")),
    "bias": ("gmp", forge("optimizers", 0, "state", 1, "exp_avg", to=torch.zeros(3))),
    "weight": ("gmp", forge(*FIRST, "exp_avg", to=torch.zeros(3))),
    "seed": ("gmp", forge("sparse", "settings", "seed", to=torch.zeros(3))),
}


COMPACT = [(name, "compact") for name, (method, _) in FORGED.items() if method == "gmp"]


@pytest.mark.parametrize(("name", "storage"), [(name, "masked") for name in FORGED] + COMPACT)
def test_a_forged_state_is_refused_and_changes_nothing(name: str, storage: str) -> None:
    method, change = FORGED[name]
    model, optimizer, sparsifier = begun(method=method, storage=storage)
    train(model, optimizer, 9)
    state = copy.deepcopy(sparsifier.state_dict())
    change(state)
    model, optimizer, sparsifier = begun(method=method, storage=storage)
    untouched, its, _ = begun(method=method, storage=storage)
    train(model, optimizer, 2)
    train(untouched, its, 2)
    with pytest.raises(gp.GrowpruneError):
        sparsifier.load_state_dict(state)
    train(model, optimizer, 18)
    train(untouched, its, 18)
    assert is_same(state_of(model), state_of(untouched))


# Mixed precision


@STORAGES
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_step_that_a_grad_scaler_skips_does_not_stop_rigl(set_to_none: bool, storage: str) -> None:
    model, optimizer, sparsifier = begun(NEW["SGD"], "rigl", every=5, storage=storage)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    tries = 0
    while not sparsifier.is_finished:
        tries += 1
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(X), Y) * (math.inf if tries == 5 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert tries == 21
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


# Replicas


def replica(rank: int, meeting: str, of_rank: str, method: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = net(rank if of_rank == "weights" else 0)
    optimizer = adam(model)
    settings: Any = {"seed": rank if of_rank == "seed" else 0}
    settings |= {"initial_mask": "magnitude"} if of_rank == "weights" else {}
    gp.sparsify(model, optimizer, method, sparsity=0.8, iterations=20, **settings)
    wrapped = model if of_rank == "gradients" else nn.parallel.DistributedDataParallel(model)
    raised = ""
    try:
        for _ in range(14):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(X if rank else -X), Y).backward()  # without DDP, nobody averages gradients
            optimizer.step()
    except Exception as error:
        raised = type(error).__name__
    results.put((rank, raised))
    results.close()
    results.join_thread()
    dist.barrier()  # the other may not be ready
    dist.destroy_process_group()


@pytest.mark.parametrize("of_rank, method", [("seed", "rigl"), ("weights", "gradual_gap"), ("gradients", "deepr")])
def test_replicas_with_different_masks_are_refused(of_rank: str, method: str, tmp_path: Path) -> None:
    """At the first step; after DeepR has rewired them, at the next."""
    context = forked.context()
    results = context.Queue()
    arguments = (str(tmp_path / "meeting"), of_rank, method, results)
    processes = [context.Process(target=replica, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=forked.HANG_SECONDS) for _ in processes)
    for process in processes:
        process.join()
    assert found == [(0, "GrowpruneError"), (1, "GrowpruneError")]


# Refusals change nothing


REFUSED: dict[str, dict[str, Any]] = {
    "pattern": {"pattern": "1:4", "start": 0.5},
    "impossible pattern": {"pattern": "2:5"},
    "allocation": {"allocation": "eagle"},
    "without losses": {"method": "snip"},
    "no parameter of the model": {},
    "LBFGS": {"initial_mask": "wanda", "calibration": [X]},
}


@STORAGES
@pytest.mark.parametrize("name", REFUSED)
def test_after_a_refused_sparsify_the_corrected_one_trains(name: str, storage: str) -> None:
    model = net()
    optimizer = adam(net()) if name == "no parameter of the model" else adam(model)
    optimizer = torch.optim.LBFGS(model.parameters()) if name == "LBFGS" else optimizer
    attributes = [(module, sorted(vars(module))) for module in model.modules()]
    before = state_of(model)
    with pytest.raises(gp.GrowpruneError) as kept:  # a notebook keeps the last traceback
        gp.sparsify(model, optimizer, sparsity=0.8, iterations=20, storage=storage, **REFUSED[name])
    assert num_step_hooks(optimizer) == (0, 0)
    assert is_same(state_of(model), before)
    assert [(module, sorted(vars(module))) for module in model.modules()] == attributes
    optimizer = adam(model) if name in ("no parameter of the model", "LBFGS") else optimizer
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.8, iterations=20, storage=storage)
    train(model, optimizer, 20)
    assert sparsifier.is_finished
    assert num_zeros(model.state_dict()) == ZEROS
    del kept


@pytest.mark.parametrize("keep_dense", [["4"], ("4",)])
def test_the_same_names_in_a_list_or_a_tuple_fit_a_model_that_was_built_sparse(keep_dense: Any) -> None:
    sparse = gp.sparse_init(net, sparsity=0.5, keep_dense=["4"], allocation="global")
    sparsifier = gp.sparsify(sparse, adam(sparse.model), sparsity=0.8, iterations=20, keep_dense=keep_dense)
    assert "4.weight" not in sparsifier.sparse.masks


def test_a_refused_state_leaves_the_rates() -> None:
    """It says that its training began with a random mask, where "auto" scales learning rates."""
    state, states = begun()[2].state_dict(), []
    for loads in (True, False):
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        optimizer = adam(model)
        with pytest.warns(UserWarning, match="initial_mask"):
            sparsifier = gp.sparsify(model, optimizer, sparsity=0.8, iterations=20, every=3)
        if loads:
            with pytest.raises(gp.GrowpruneError):
                sparsifier.load_state_dict(state)
        train(model, optimizer, 10)
        states.append(state_of(model))
    assert is_same(*states)
