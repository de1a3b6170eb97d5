"""Learning rates that follow density, while an optimizer steps and at no other time."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from plan_cases import check_same_bits, small_net, train_step
from torch import nn

import growprune as gp
from growprune import GrowpruneError

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def two_layers(storage: str, lr_scaling: float) -> gp.SparseModel:
    """A layer of density 0.25 (4 of 16 weights) and a dense one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    sparse = gp.SparseModel(model, sparsity=0.75, keep_dense=["1"], storage=storage, lr_scaling=lr_scaling)
    sparse.prune()
    return sparse


def stepped(sparse: gp.SparseModel, optimizer: torch.optim.Optimizer) -> tuple[float, float, float]:
    """What a step with gradients of 1 makes of a live weight, its bias, and a dense weight, which all were 1."""
    for parameter in sparse.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    first, second = sparse.model[0], sparse.model[1]  # type: ignore[index]
    live = next(iter(sparse.masks.values()))
    weight = sparse.model.state_dict()["0.weight"][live] if first.weight.shape == live.shape else first.weight
    assert len({round(value, 5) for value in weight.tolist()}) == 1
    return tuple(float(tensor.detach().view(-1)[0]) for tensor in (weight, first.bias, second.weight))  # type: ignore[return-value]


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    "lr_scaling, moved", [(0.0, 0.01), (0.5, 0.02), (1.0, 0.04)], ids=["none", "square-root", "whole"]
)
def test_a_layer_of_density_a_quarter_takes_longer_steps(storage: str, lr_scaling: float, moved: float) -> None:
    sparse = two_layers(storage, lr_scaling)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.01))
    assert stepped(sparse, optimizer) == pytest.approx((1 - moved, 0.99, 0.99))


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("lr_scaling, rate", [(0.5, 0.02), (1.0, 0.04)])
def test_adamw_scales_its_step_and_its_weight_decay(storage: str, lr_scaling: float, rate: float) -> None:
    sparse = two_layers(storage, lr_scaling)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.01, weight_decay=0.1))
    expected = (1 - rate * 0.1 - rate, 1 - 0.01 * 0.1 - 0.01, 1 - 0.01 * 0.1 - 0.01)  # the first step has size lr
    assert stepped(sparse, optimizer) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_the_exponent_rises_over_a_share_of_the_plan_and_resumes(storage: str) -> None:
    def begun(**ramp: float) -> tuple[nn.Linear, torch.optim.SGD, gp.Sparsifier]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        how: dict[str, Any] = {"sparsity": 0.75, "iterations": 10, "keep_dense": (), "lr_scaling": 1.0, **ramp}
        return model, optimizer, gp.sparsify(model, optimizer, "static_random", storage=storage, **how)

    def moves(model: nn.Linear, optimizer: torch.optim.SGD, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            weight = next(model.parameters())  # of compact storage, the live values
            before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
            optimizer.step()
            found.append(float((before - weight.detach()).max()))
        return found

    model, optimizer, sparsifier = begun(lr_ramp=0.4)
    expected = [0.01 * 4**share for share in (0, 0.25, 0.5, 0.75, *[1] * 6)]
    assert moves(model, optimizer, 2) == pytest.approx(expected[:2], rel=1e-5)
    state = copy.deepcopy(sparsifier.state_dict())
    assert moves(model, optimizer, 8) == pytest.approx(expected[2:], rel=1e-5)
    again, its_optimizer, resumed = begun(lr_ramp=0.4)
    resumed.load_state_dict(state)
    cursor = gp.Cursor(resumed.sparse, resumed.plan)  # which has not begun when it is loaded, as those of trainers
    cursor.load_state_dict(state["cursor"])
    assert cursor.progress == 0.2
    cursor.attach(its_optimizer)
    assert moves(again, its_optimizer, 8) == pytest.approx(expected[2:], rel=1e-5)
    assert moves(*begun(lr_ramp=0.0)[:2], 10) == pytest.approx([0.04] * 10, rel=1e-5)
    with pytest.raises(GrowpruneError, match=r"lr_ramp=0\.4"):
        begun(lr_ramp=0.2)[2].load_state_dict(state)
    with pytest.raises(GrowpruneError, match=r"lr_ramp.*1\.5"):
        begun(lr_ramp=1.5)


def test_a_rate_is_at_most_ten_times_as_high() -> None:
    model = nn.Linear(10, 100)
    sparse = gp.SparseModel(model, sparsity=0.99, lr_scaling=1.0)
    sparse.prune()
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.01))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    live = sparse.masks["weight"]
    torch.testing.assert_close((before - model.weight)[live], torch.full((10,), 0.1))


def explicit(model: nn.Module, make: Any, factor: float) -> torch.optim.Optimizer:
    """An optimizer whose user has written the scaled rate into a group of its own."""
    sparse_ones, others = [model[0].weight], [model[0].bias, *model[1].parameters()]  # type: ignore[index]
    return make([{"params": sparse_ones, "lr": 0.01 * factor}, {"params": others, "lr": 0.01}])  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_explicit_groups_under_a_scheduler(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = two_layers("masked", 1.0), two_layers("masked", 0.0)
    make = OPTIMIZERS[name]
    optimizers = (ours.attach(make(ours.model.parameters())), theirs.attach(explicit(theirs.model, make, 4.0)))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in optimizers]
    for number in range(10):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        for sparse, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            sparse.model(x).square().sum().backward()
            optimizer.step()
            scheduler.step()
    check_same_bits(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


def test_schedulers_loggers_and_checkpoints_see_the_users_groups() -> None:
    sparse = two_layers("masked", 1.0)
    groups = [{"params": sparse.model[0].parameters()}, {"params": sparse.model[1].parameters(), "lr": 0.5}]  # type: ignore[index]
    optimizer = sparse.attach(torch.optim.SGD(groups, lr=0.01, momentum=0.9))
    own = optimizer.param_groups
    seen: list[list[float]] = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append([group["lr"] for group in o.param_groups]))
    stepped(sparse, optimizer)
    assert optimizer.param_groups == own
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, own, strict=True))
    assert seen == [[0.01, 0.5]]
    assert [group["lr"] for group in optimizer.state_dict()["param_groups"]] == [0.01, 0.5]


def test_a_closure_sees_the_users_groups_also_if_it_raises() -> None:
    sparse = two_layers("masked", 1.0)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.01))
    seen: list[int] = []

    def closure() -> torch.Tensor:
        seen.append(len(optimizer.param_groups))
        optimizer.zero_grad()
        loss = sparse.model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    def failing() -> torch.Tensor:
        raise RuntimeError("out of data")

    optimizer.step(closure)
    with pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(failing)
    assert (seen, len(optimizer.param_groups)) == ([1], 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_nothing_and_a_skipped_step_leaves_the_groups(fused: bool) -> None:
    sparse = two_layers("masked", 1.0)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameter in sparse.model.parameters():
        parameter.grad = torch.full_like(parameter, 4.0)
    scaler.scale(torch.ones(()))  # which makes its state
    scaler.step(optimizer)
    scaler.update()
    weight = sparse.model[0].weight.detach()  # type: ignore[index]
    torch.testing.assert_close(weight[sparse.masks["0.weight"]], torch.full((4,), 0.96))
    sparse.model[1].weight.grad.fill_(torch.inf)  # type: ignore[index]
    scaler.step(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01]
    torch.testing.assert_close(weight[sparse.masks["0.weight"]], torch.full((4,), 0.96))


STEPS = {"iterations": 24, "every": 4}
METHODS = {"gradual_gap": STEPS, "gmp": STEPS, "rigl": STEPS, "cyclic_gap": {"steps": 4, "epochs": 4, "finetune": 8}}


def trained(method: str, storage: str, *, lr_scaling: float = 1.0, stop: int | None = None) -> dict[str, Any]:
    plan = gp.methods.METHODS[method](gp.Partition.balanced(small_net(), 2), sparsity=0.75, **METHODS[method])

    def begin() -> tuple[gp.SparseModel, gp.Cursor, torch.optim.Optimizer]:
        fresh = small_net()
        sparse = gp.SparseModel(fresh, sparsity=0.75, allocation="global", storage=storage, lr_scaling=lr_scaling)
        cursor = gp.Cursor(sparse, plan, iterations_per_epoch=1)
        return sparse, cursor, cursor.attach(torch.optim.AdamW(fresh.parameters(), lr=0.01))

    sparse, cursor, optimizer = begin()
    for iteration in range(24):
        if iteration == stop:
            states = copy.deepcopy(
                (sparse.state_dict(), dict(sparse.model.state_dict()), optimizer.state_dict(), cursor.state_dict())
            )
            sparse, cursor, optimizer = begin()
            sparse.load_state_dict(states[0])
            sparse.model.load_state_dict(states[1])
            optimizer.load_state_dict(states[2])
            cursor.load_state_dict(states[3])
        train_step(sparse.model, optimizer, iteration)
    return {"weights": dict(sparse.model.state_dict()), "masks": dict(sparse.masks)}


@pytest.mark.parametrize("method", METHODS)
def test_storages_agree_and_a_resumed_training_has_the_same_bits(method: str) -> None:
    masked = trained(method, "masked")
    check_same_bits(trained(method, "compact"), masked)
    check_same_bits(trained(method, "masked", stop=13), masked)
    check_same_bits(trained(method, "compact", stop=13), masked)
    plain = trained(method, "masked", lr_scaling=0.0)
    assert not torch.equal(plain["weights"]["0.weight"], masked["weights"]["0.weight"])


@pytest.mark.parametrize("given", [-1, 2.5, True, "1", float("nan")])
def test_other_exponents_are_refused(given: Any) -> None:
    with pytest.raises(GrowpruneError, match=r"^lr_scaling must be 'auto' or an exponent in \[0, 2\], got "):
        gp.SparseModel(nn.Linear(4, 4), sparsity=0.5, lr_scaling=given)


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            raise NotImplementedError

    model = nn.Linear(4, 4)
    sparse = gp.SparseModel(model, sparsity=0.5, lr_scaling=1.0)
    with pytest.raises(GrowpruneError, match=r"^lr_scaling=1 needs a learning rate, but Plain has none"):
        sparse.attach(Plain(model.parameters()))
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GrowpruneError, match=r"^lr_scaling=1 needs a learning rate, but Plain has none"):
        gp.sparsify(model, Plain(model.parameters()), sparsity=0.75, iterations=8, lr_scaling=1)
    check_same_bits(before, model.state_dict())


# "auto"


@pytest.mark.parametrize(
    "make, rate",
    [
        (lambda p: torch.optim.AdamW(p, 0.01), 0.04),
        (lambda p: torch.optim.NAdam(p, 0.01), 0.04),
        (lambda p: torch.optim.SGD(p, 0.01), 0.01),
        (lambda p: torch.optim.RMSprop(p, 0.01), 0.01),
    ],
    ids=["adamw", "nadam", "sgd", "rmsprop"],
)
def test_auto_scales_the_rates_of_adam_like_optimizers_only(make: Any, rate: float) -> None:
    model = nn.Linear(8, 4, bias=False)
    sparse = gp.SparseModel(model, sparsity=0.75, lr_scaling="auto")
    sparse.prune()
    optimizer = sparse.attach(make(model.parameters()))
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda stepping, *_: seen.extend(g["lr"] for g in stepping.param_groups))
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert seen[-1] == pytest.approx(rate)
    assert optimizer.param_groups[0]["lr"] == 0.01


def seen_rates(model: nn.Module, method: str = "gradual_gap", optimizer: Any = torch.optim.AdamW, **more: Any) -> Any:
    """The factors of all learning rates in the last of 8 iterations, and the densities of the layers then."""
    made = optimizer(model.parameters(), 0.01)
    sparsifier = gp.sparsify(model, made, method, sparsity=0.75, iterations=8, keep_dense=(), **more)
    seen: list[float] = []
    made.register_step_pre_hook(
        lambda stepping, *_: seen.append(max(group["lr"] / 0.01 for group in stepping.param_groups))
    )
    for _ in range(8):
        made.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        made.step()
    return seen, sparsifier


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])


def test_auto_follows_density_where_sparsity_rises_from_a_random_mask() -> None:
    seen, sparsifier = seen_rates(fresh())
    assert seen[-1] == pytest.approx(1 / min(float(mask.float().mean()) for mask in sparsifier.sparse.masks.values()))


@pytest.mark.parametrize(
    "more",
    [
        {"initial_mask": "magnitude"},
        {"method": "rigl"},
        {"method": "cyclic_gap", "allocation": "uniform"},
        {"method": "gmp"},
        {"optimizer": torch.optim.SGD},
        {"lr_scaling": 0},
    ],
    ids=str,
)
def test_auto_leaves_all_other_trainings_alone(more: dict[str, Any]) -> None:
    assert seen_rates(fresh(), **more)[0] == [1.0] * 8


def test_a_resumed_training_scales_as_it_began() -> None:
    """By then the model looks trained, so "auto" would choose another first mask."""
    _, begun = seen_rates(fresh())
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()  # its state is a sign of training
    with pytest.warns(UserWarning, match="already trained"):
        again = gp.sparsify(model, optimizer, sparsity=0.75, iterations=8, keep_dense=())
    assert again.sparse.lr_scaling == 0
    again.load_state_dict(begun.state_dict())
    assert again.sparse.lr_scaling == "auto"


def test_an_optimizer_that_calls_its_closure_twice_scales_rates_once() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            rates.append(sorted({group["lr"] for group in self.param_groups}))
            return super().step()

    torch.manual_seed(0)
    rates: list[list[float]] = []
    model = nn.Linear(8, 8, bias=False)
    optimizer = Twice(model.parameters(), 0.1)
    sparse = gp.SparseModel(model, 0.75, lr_scaling=1)
    sparse.attach(optimizer)
    sparse.prune()
    for _ in range(2):
        optimizer.step(lambda: model(torch.ones(1, 8)).sum().backward())
    assert rates[0] == rates[1]
    assert max(rates[0]) == pytest.approx(0.4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
