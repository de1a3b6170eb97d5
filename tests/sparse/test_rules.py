"""Rules of training (DPF, STR, DeepR, ADMM): by hand, against plain loops, and under the engine."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from few_weights import Eight, pass_one
from plan_cases import ForkCursor, check_same_bits, frozen, loss_of, sgd, small_net, train_step
from torch import Tensor, nn
from torch.func import functional_call
from toy import cyclic

from growprune import engine, methods
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.methods.admm import Admm
from growprune.methods.deepr import Deepr, deepr
from growprune.methods.dpf import Dpf, dpf
from growprune.methods.str_ import Str, str_
from growprune.plan import Branch, By, Fork, Part, Parts, Phase, Rule, Stage, fold, method, prune, walk
from growprune.recipes.digits import dense
from growprune.sparse.model import SparseModel
from growprune.sparse.rules import AdmmRule, DpfRule, StrRule
from growprune.tasks.digits import Digits

ALL = Part("all", ("weight",))
S = Partition((ALL,))


def ruled(rule: Rule, *values: float, lr: float = 0.5, to: float = 0.5, first: Any = (), **settings: Any) -> Any:
    """A model of a few numbers under a rule for four iterations, then pruned."""
    model = Eight(*(values or (4.0, -3.0, 2.0, 1.0)))
    sparse = SparseModel(model, **({"sparsity": to} | settings))
    plan = [Phase(*first, iterations=4, rule=rule), Phase(prune(ALL, to=to), iterations=1)]
    cursor = ForkCursor(sparse, plan)
    return model, sparse, cursor.attach(torch.optim.SGD(model.parameters(), lr=lr))


def step(model: Eight, optimizer: torch.optim.Optimizer, *gradient: float) -> list[float]:
    """One iteration; what the model has after it."""
    pass_one(model, optimizer, list(gradient))
    return model.weight[0].tolist()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-3)


every_optimizer = pytest.mark.parametrize("optimize", [sgd, adam], ids=["sgd", "adam"])

RULES: dict[str, Callable[[Part], Rule]] = {
    "dpf": lambda part: Dpf(part, to=0.75, rise=6, every=2),
    "str": lambda part: Str(part, s_init=-3.0, s_decay=0.1),
    "deepr": lambda part: Deepr(part, iterations=20, l1=1e-3, temperature=1e-4),
    "admm": lambda part: Admm(part, to=0.75, rho=0.1, every=2),
}
every_rule = pytest.mark.parametrize("name", RULES)


def under(
    name: str, model: nn.Sequential, *optimizers: Any, iterations: int = 99, **settings: Any
) -> tuple[SparseModel, list[torch.optim.Optimizer]]:
    """A model in a phase that has a rule, and the optimizers that train it, each made of its own parameters."""
    sparse = SparseModel(model, **({"sparsity": 0.75} | settings))
    whole = Partition.per_layer(model).whole
    edits = (prune(whole, to=0.75, by=By.RANDOM),) if name == "deepr" else ()
    cursor = ForkCursor(sparse, [Phase(*edits, iterations=iterations, rule=RULES[name](whole))])
    return sparse, [cursor.attach(optimizer) for optimizer in optimizers]


# DPF


def test_dpf_by_hand() -> None:
    """m keeps two of four and is made anew every second iteration; the learning rate is 1/2."""
    model, sparse, optimizer = ruled(Dpf(ALL, to=0.5, every=2))
    assert model.weight[0].tolist() == [4, -3, 0, 0]
    # w = 4 -3 2 1, of which the third becomes the largest, though it is not in the mask
    assert step(model, optimizer, 0, 0, -8, 0) == [4, -3, 0, 0]
    assert sparse.rule.w["weight"][0].tolist() == [4, -3, 6, 1]
    assert step(model, optimizer, 8, 0, 0, 0) == [0, -3, 6, 0]
    assert sparse.rule.w["weight"][0].tolist() == [0, -3, 6, 1]
    assert sparse.masks["weight"].all()
    # w = -2 -3 6 1, then -2 -4 6 1, of which the next phase prunes what the model has
    assert step(model, optimizer, 4, 0, 0, 0) == [0, -3, 6, 0]
    assert step(model, optimizer, 0, 2, 0, 0) == [0, -4, 6, 0]
    assert sparse.rule is None
    assert sparse.masks["weight"].tolist() == [[False, True, True, False]]
    assert step(model, optimizer, 1, 1, 1, 1) == [0, -4.5, 5.5, 0]


def test_the_sparsity_of_dpf_rises_with_gmps_cubic() -> None:
    rule = Dpf(ALL, to=0.8, rise=4)
    assert [rule.target(t) for t in range(6)] == pytest.approx([0, 0.4625, 0.7, 0.7875, 0.8, 0.8])
    assert rule.target(4) == 0.8
    assert Dpf(ALL, to=0.8).target(0) == 0.8


def test_dpf_is_dense_then_ruled_then_pruned() -> None:
    assert list(dpf(S, sparsity=0.75, iterations=20, every=2, begin=0.1, masks_until=0.8)) == [
        Phase(iterations=2),
        Phase(iterations=14, rule=Dpf(ALL, to=0.75, rise=13, every=2)),
        Phase(prune(ALL, to=0.75), iterations=4),
    ]
    assert list(dpf(S, sparsity=0.75, iterations=20)) == [
        Phase(iterations=0),
        Phase(iterations=20, rule=Dpf(ALL, to=0.75, rise=15, every=16)),
        Phase(prune(ALL, to=0.75), iterations=0),
    ]


def top(w: Tensor, sparsity: float) -> Tensor:
    """The mask of the largest, by sorting."""
    order = w.detach().abs().flatten().argsort(descending=True)
    mask = torch.zeros(w.numel())
    mask[order[: round((1 - sparsity) * w.numel())]] = 1
    return mask.view(w.shape)


class Pruned(torch.autograd.Function):
    """m * w forwards, and straight through backwards."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, m: Tensor) -> Tensor:
        return w * m

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Straight(nn.Module):
    """A network that computes with weights made of its own."""

    def __init__(self, inner: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.make = inner, make

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.inner.named_parameters())
        made = {name: self.make(name, p) if p.dim() > 1 else p for name, p in own.items()}
        return functional_call(self.inner, made, (x,))


@every_optimizer
@pytest.mark.parametrize(("batches", "clip"), [(1, None), (2, None), (1, 0.01)])
def test_dpf_equals_a_plain_straight_through_loop_bit_for_bit(optimize: Any, batches: int, clip: float | None) -> None:
    rule = RULES["dpf"](ALL)
    plain, masks = small_net(), {}
    straight = Straight(plain, lambda name, w: Pruned.apply(w, masks[name]))  # type: ignore[no-untyped-call]
    theirs = optimize(plain.parameters())
    model = small_net()
    sparse, (ours,) = under("dpf", model, optimize(model.parameters()))
    for t in range(20):
        if t % 2 == 0:
            masks = {name: top(p, rule.target(t)) for name, p in plain.named_parameters() if p.dim() > 1}
        train_step(straight, theirs, t, batches=batches, clip=clip)
        train_step(model, ours, t, batches=batches, clip=clip)
    assert isinstance(sparse.rule, DpfRule)
    check_same_bits(sparse.rule.w, {name: p.data for name, p in plain.named_parameters() if p.dim() > 1})
    check_same_bits(model[0].bias, plain[0].bias)
    x = torch.randn(2, 4, 3, 3)
    masks = {name: top(p, 0.75) for name, p in plain.named_parameters() if p.dim() > 1}  # 20 is even: a new one
    assert torch.equal(model(x), straight(x))


@pytest.mark.parametrize(("allocation", "alive"), [("uniform", [72, 288, 16]), ("global", None)])
def test_between_steps_of_dpf_the_model_is_as_sparse_as_its_mask(allocation: str, alive: list[int] | None) -> None:
    model = small_net()
    sparse, (optimizer,) = under("dpf", model, sgd(model.parameters()), allocation=allocation)
    zeros = [288 + 1152 + 64 - sparse.num_alive]
    for t in range(8):
        train_step(model, optimizer, t)
        zeros.append(sum(int((model[i].weight == 0).sum()) for i in (0, 3, 5)))
        assert sparse.num_alive == 1504  # what is zero may come back
    assert zeros == sorted(zeros)
    assert zeros[:2] == [0, 0]
    assert zeros[6:] == [1128] * 3
    if alive is not None:
        assert [int(model[i].weight.count_nonzero()) for i in (0, 3, 5)] == alive


def test_dpf_keeps_to_blocks() -> None:
    model, _, optimizer = ruled(Dpf(ALL, to=0.5, every=1), pattern="1x2")
    assert model.weight[0].tolist() == [4, -3, 0, 0]
    assert step(model, optimizer, 8, -4, -3, -3) == [0, 0, 3.5, 2.5]


def test_a_weight_that_is_zero_can_be_in_the_mask_of_dpf() -> None:
    model, _, optimizer = ruled(Dpf(ALL, to=0.5, every=4), 0.0, 0.0, 0.0, 0.0)
    assert step(model, optimizer, -2, -4, -6, -8) == [1, 2, 0, 0]


# STR


def soft(w: float, s: float) -> float:
    return math.copysign(max(0.0, abs(w) - 1 / (1 + math.exp(-s))), w)


def test_str_by_hand() -> None:
    """The threshold is 1/2 at first; the learning rate is 1/2, and the weight decay of s is 1/4."""
    model, sparse, optimizer = ruled(Str(ALL, s_init=0.0, s_decay=0.25), 2.0, -1.0, 0.25, -0.5)
    rule = sparse.rule
    assert model.weight[0].tolist() == [1.5, -0.5, 0, 0]
    assert not model.weight.signbit()[0, 3]
    # the gradient of w counts where the model is not zero: 2 1 0 0; that of s is -(2 - 1) sigmoid' = -1/4
    after = step(model, optimizer, 2, 1, 8, 8)
    assert rule.w["weight"][0].tolist() == [1, -1.5, 0.25, -0.5]
    assert float(rule.s["weight"]) == 0.125
    assert after == pytest.approx([soft(w, 0.125) for w in (1, -1.5, 0.25, -0.5)])
    # s falls: its gradient is -(0 - 4) t (1 - t), and it decays
    t = 1 / (1 + math.exp(-0.125))
    after = step(model, optimizer, 0, 4, 0, 0)
    s = 0.125 - 0.5 * (4 * t * (1 - t) + 0.25 * 0.125)
    assert rule.w["weight"][0].tolist() == [1, -3.5, 0.25, -0.5]
    assert float(rule.s["weight"]) == pytest.approx(s)
    assert after == pytest.approx([soft(w, s) for w in (1, -3.5, 0.25, -0.5)])
    assert rule.figures() == {"sparsity": 0.25}  # sigmoid(s) is below 1/2 now
    for _ in range(2):
        before = step(model, optimizer, 0, 0, 0, 0)
    assert sparse.rule is None
    assert [w != 0 for w in before] == [True, True, False, False]
    assert sparse.masks["weight"].tolist() == [[True, True, False, False]]


def test_str_is_ruled_then_pruned() -> None:
    assert list(str_(S, sparsity=0.75, iterations=20, s_decay=0.8)) == [
        Phase(iterations=15, rule=Str(ALL, s_init=-5.0, s_decay=0.8)),
        Phase(prune(ALL, to=0.75), iterations=5),
    ]
    assert str_(S, sparsity=0.75, iterations=20, until=0.5, s_init=-9, s_decay=0.1)[0] == Phase(
        iterations=10, rule=Str(ALL, s_init=-9, s_decay=0.1)
    )


@pytest.mark.parametrize("lr", [0.01, 0.5])
def test_str_ends_where_the_sparsity_says_at_any_learning_rate_unless_the_loss_resists(lr: float) -> None:
    rule = str_(S, sparsity=0.875, iterations=8, until=0.5, s_init=-4.0)[0].rule  # type: ignore[union-attr]
    assert (rule.s_decay, rule.s_shrink) == (0, pytest.approx(1 - 0.5**0.25))
    for gradient, expected in ((0.0, -2.0), (1.0, None)):  # -4 times the cube root of 1/8
        model, sparse, optimizer = ruled(rule, 2.0, -1.0, 0.25, -0.5, lr=lr)
        running = sparse.rule
        for _ in range(4):
            step(model, optimizer, -gradient, gradient, 0, 0)  # which is for larger weights
        if expected is None:
            assert -4 < float(running.s["weight"]) < -2.001
        else:
            assert float(running.s["weight"]) == pytest.approx(expected)


@every_optimizer
@pytest.mark.parametrize("batches", [1, 2])
def test_str_equals_a_plain_loop_that_has_s_as_a_parameter(optimize: Any, batches: int) -> None:
    plain = small_net(torch.float64)
    weights = [name for name, p in plain.named_parameters() if p.dim() > 1]
    s = {name: torch.tensor(-3.0, dtype=torch.float64, requires_grad=True) for name in weights}

    def shrunk(name: str, w: Tensor) -> Tensor:
        return w.sign() * torch.relu(w.abs() - torch.sigmoid(s[name]))

    straight, theirs = Straight(plain, shrunk), optimize(plain.parameters())
    rate = theirs.param_groups[0]["lr"]
    of_s = torch.optim.SGD(s.values(), lr=rate, weight_decay=0.1)
    model = small_net(torch.float64)
    sparse, (ours,) = under("str", model, optimize(model.parameters()))
    for t in range(20):
        for parameter in s.values():
            parameter.grad = None
        train_step(straight, theirs, t, batches=batches)
        of_s.step()
        train_step(model, ours, t, batches=batches)
    assert isinstance(sparse.rule, StrRule)
    for name, value in s.items():
        assert abs(float(value.detach()) + 3) > 0.01  # it moved
        torch.testing.assert_close(sparse.rule.s[name], value.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sparse.rule.w[name], plain.get_parameter(name).data, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            model.get_parameter(name).data, shrunk(name, plain.get_parameter(name)).data, rtol=1e-9, atol=1e-9
        )
    assert 0 < sparse.rule.figures()["sparsity"] < 1


# DeepR


def test_deepr_by_hand() -> None:
    """Two of four live; no noise; the pull is 1/2, and so is the learning rate."""
    rule = Deepr(ALL, iterations=4, l1=0.5, temperature=0.0)
    model, sparse, optimizer = ruled(rule, first=[prune(ALL, to=0.5)])
    assert model.weight[0].tolist() == [4, -3, 0, 0]
    # 4 - (10 + 1/2) / 2 is negative: it dies. -3 + 1/4 lives
    assert step(model, optimizer, 10, 0, 7, 7) == [0, -2.75, 0, 0]
    mask = sparse.masks["weight"][0]
    assert int(mask.sum()) == 2
    assert mask[1]
    new = int(mask.to(torch.int8).argmax()) if mask[0] else 2 + int(mask[3])
    # one that is zero is not pulled, and its first step gives it its sign
    after = step(model, optimizer, -4, -4, -4, -4)
    assert after[new] == 2
    assert after[1] == -2.75 + 2 + 0.25
    assert sparse.masks["weight"][0].tolist() == mask.tolist()
    # 2 - (4.5 + 1/2) / 2 has another sign
    after = step(model, optimizer, 4.5, 4.5, 4.5, 4.5)
    assert after[new] == 0
    assert after[1] == -0.5 - 2.25 + 0.25
    assert int(sparse.masks["weight"].sum()) == 2


def test_deepr_begins_at_random_and_stops_rewiring() -> None:
    assert list(deepr(S, sparsity=0.75, iterations=20, l1=1e-3)) == [
        Phase(prune(ALL, to=0.75, by=By.RANDOM), iterations=15, rule=Deepr(ALL, iterations=15, l1=1e-3)),
        Phase(iterations=5),
    ]


def test_what_comes_to_zero_exactly_dies_too() -> None:
    rule = Deepr(ALL, iterations=4, l1=0.0, temperature=0.0)
    model, sparse, optimizer = ruled(rule, first=[prune(ALL, to=0.75)], to=0.75)
    assert model.weight[0].tolist() == [4, 0, 0, 0]
    places = set()
    for _ in range(4):
        weight = step(model, optimizer, *([8.0] * 4 if model.weight.any() else [-8.0] * 4))
        places.add(tuple(sparse.masks["weight"][0].tolist()))
        assert sum(map(bool, weight)) <= 1
    assert len(places) > 1
    assert all(sum(place) == 1 for place in places)


def test_where_all_live_what_dies_lives_again_from_zero() -> None:
    model = Eight(4.0, -3.0, 2.0, 1.0)
    sparse = SparseModel(model, sparsity=0.5)
    cursor = ForkCursor(sparse, [Phase(iterations=9, rule=Deepr(ALL, iterations=4, l1=0.0, temperature=0.0))])
    optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    assert step(model, optimizer, 8, 0, 0, 0.5) == [0, -3, 2, 0.5]
    assert sparse.masks["weight"].all()
    assert optimizer.state[model.weight]["momentum_buffer"][0].tolist() == [0, 0, 0, 0.5]


def test_the_noise_of_deepr_has_its_temperature_and_leaves_the_dead_alone() -> None:
    rule = Deepr(Part("all", ("weight",)), iterations=10, l1=0.0, temperature=1e-3)
    model = nn.Linear(200, 100, bias=False)
    nn.init.ones_(model.weight)
    sparse = SparseModel(model, sparsity=0.5)
    cursor = ForkCursor(sparse, [Phase(prune(rule.part, to=0.5), iterations=9, rule=rule)])
    optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=0.2))
    mask, moved = sparse.masks["weight"], []
    for _ in range(2):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model.weight * 0).sum().backward()
        optimizer.step()
        assert torch.equal(sparse.masks["weight"], mask)
        assert not model.weight[~mask].any()
        moved.append((model.weight - before)[mask].detach())
    for t, noise in enumerate(moved):
        assert float(noise.std()) == pytest.approx(math.sqrt(2 * 0.2 * rule.temperature_at(t)), rel=0.03)
        assert abs(float(noise.mean())) < 0.03 * math.sqrt(2 * 0.2 * 1e-3)
    assert abs(float(torch.corrcoef(torch.stack(moved))[0, 1])) < 0.05  # each iteration draws its own
    assert rule.temperature_at(0) == 1e-3
    assert rule.temperature_at(10) == pytest.approx(1e-13)


@every_optimizer
@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
def test_deepr_keeps_the_count_of_each_layer_and_what_is_new_has_no_past(optimize: Any, allocation: str) -> None:
    model = small_net()
    sparse, (optimizer,) = under("deepr", model, optimize(model.parameters()), allocation=allocation)
    counts, swapped = list(sparse.alive_by_weight().values()), 0
    assert sum(counts) == 376
    for t in range(20):
        before = sparse.masks
        train_step(model, optimizer, t)
        assert list(sparse.alive_by_weight().values()) == counts
        assert sparse.is_at_target
        for name, mask in sparse.masks.items():
            parameter = model.get_parameter(name)
            new, gone = mask & ~before[name], before[name] & ~mask
            swapped += int(gone.sum())
            for tensor in (parameter, *(x for x in optimizer.state[parameter].values() if x.shape == parameter.shape)):
                assert not tensor[~mask].any()
                assert not tensor[new].any()
    assert swapped > 20


def test_another_seed_rewires_otherwise() -> None:
    masks = []
    for seed in (0, 0, 1):
        model = small_net()
        sparse, (optimizer,) = under("deepr", model, sgd(model.parameters()), seed=seed)
        sparse.grow()
        with torch.no_grad():  # small, so that signs change soon
            for weight, other in zip(model.parameters(), small_net().parameters(), strict=True):
                weight.copy_(other / 20)
        sparse.prune()  # the same mask for all
        for t in range(5):
            train_step(model, optimizer, t)
        masks.append(torch.cat([mask.flatten() for mask in sparse.masks.values()]))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


# ADMM


def of_rule(sparse: SparseModel) -> tuple[list[float], list[float]]:
    assert isinstance(sparse.rule, AdmmRule)
    return sparse.rule.Z["weight"][0].tolist(), sparse.rule.U["weight"][0].tolist()


def added(model: Eight, optimizer: torch.optim.Optimizer, *gradient: float) -> list[float]:
    """One iteration; what the rule added to the gradient."""
    pass_one(model, optimizer, list(gradient))
    return (model.weight.grad[0] - torch.tensor(gradient)).tolist()


def test_two_updates_of_admm_by_hand() -> None:
    """Z = project(W + U), U = U + W - Z; the gradient has rho (W - Z + U) added; rho and the learning rate are 1/2."""
    model, sparse, optimizer = ruled(Admm(ALL, to=0.5, rho=0.5, every=1))
    # W = 4 -3 2 1; Z = 4 -3 0 0, U = 0
    assert added(model, optimizer, 0, 4, 0, 0) == [0, 0, 1, 0.5]
    assert of_rule(sparse) == ([4, -3, 0, 0], [0, 0, 0, 0])
    assert model.weight.tolist() == [[4, -5, 1.5, 0.75]]
    # W + U = 4 -5 1.5 0.75; Z = 4 -5 0 0, U = 0 0 1.5 0.75; W - Z + U = 0 0 3 1.5
    assert added(model, optimizer, 8, 0, 0, 0) == [0, 0, 1.5, 0.75]
    assert of_rule(sparse) == ([4, -5, 0, 0], [0, 0, 1.5, 0.75])
    assert model.weight.tolist() == [[0, -5, 0.75, 0.375]]
    # W + U = 0 -5 2.25 1.125; Z = 0 -5 2.25 0, U = 0 0 0 1.125; W - Z + U = 0 0 -1.5 1.5
    assert added(model, optimizer, 0, 0, 0, 0) == [0, 0, -0.75, 0.75]
    assert of_rule(sparse) == ([0, -5, 2.25, 0], [0, 0, 0, 1.125])
    assert model.weight.tolist() == [[0, -5, 1.125, 0]]


def test_between_updates_z_and_u_stay() -> None:
    model, sparse, optimizer = ruled(Admm(ALL, to=0.5, rho=0.5, every=2))
    assert added(model, optimizer, 0, 4, 0, 0) == [0, 0, 1, 0.5]
    assert added(model, optimizer, 8, 0, 0, 0) == [0, -1, 0.75, 0.375]  # W = 4 -5 1.5 0.75, Z = 4 -3 0 0, U = 0
    assert of_rule(sparse) == ([4, -3, 0, 0], [0, 0, 0, 0])
    assert model.weight.tolist() == [[0, -4.5, 1.125, 0.5625]]
    added(model, optimizer, 0, 0, 0, 0)
    assert of_rule(sparse) == ([0, -4.5, 1.125, 0], [0, 0, 0, 0.5625])


def test_admm_projects_onto_blocks() -> None:
    model, sparse, optimizer = ruled(Admm(ALL, to=0.5, rho=0.5, every=1), pattern="1x2")
    added(model, optimizer, 0, 0, 0, 0)
    assert of_rule(sparse)[0] == [4, -3, 0, 0]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[4.0, 0.0, 3.0, 3.0]]))
    added(model, optimizer, 0, 0, 0, 0)
    assert of_rule(sparse)[0] == [0, 0, 3, 3]


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
def test_a_rule_may_be_of_one_part(allocation: str) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.5, allocation=allocation)
    part = Partition.per_layer(model)[1]
    cursor = ForkCursor(sparse, [Phase(iterations=2, rule=Admm(part, to=0.5, every=1))])
    optimizer = cursor.attach(sgd(model.parameters()))
    train_step(model, optimizer, 0)
    assert isinstance(sparse.rule, AdmmRule)
    assert set(sparse.rule.Z) == {"3.weight"}
    alive = int(sparse.rule.Z["3.weight"].count_nonzero())
    assert alive == 576 if allocation == "uniform" else 0 < alive < 1152


def test_a_cursor_that_is_loaded_after_its_end_leaves_no_rule_behind() -> None:
    plan = [Phase(iterations=4, rule=Admm(ALL, to=0.5)), Phase(prune(ALL, to=0.5), iterations=1)]
    over, middle = (ForkCursor(SparseModel(Eight(4.0, -3.0, 2.0, 1.0), sparsity=0.5), plan) for _ in range(2))
    over.advance(5)
    assert over.is_over
    middle.advance(0)
    assert middle.sparse.rule is not None
    middle.load_state_dict(over.state_dict())
    assert middle.sparse.rule is None


# All four


@every_rule
def test_parameters_stay_where_they_are(name: str) -> None:
    """So that what is compiled or captured around them goes on working."""
    model = small_net()
    _, (optimizer,) = under(name, model, sgd(model.parameters()))
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    for t in range(4):
        train_step(model, optimizer, t)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before


@every_rule
def test_two_optimizers_that_share_a_model_do_as_one_does(name: str) -> None:
    ends = []
    for split in (False, True):
        model = small_net()
        groups = [list(layer.parameters()) for layer in model if list(layer.parameters())]
        groups = groups if split else [[p for group in groups for p in group]]
        sparse, optimizers = under(name, model, *map(sgd, groups), allocation="global")
        for t in range(7):
            model.zero_grad()
            loss_of(model, t).backward()
            for optimizer in optimizers:
                optimizer.step()
        ends.append((dict(model.state_dict()), sparse.masks, sparse.rule.state_dict()))
    check_same_bits(ends[0], ends[1])


@every_rule
def test_a_step_with_a_closure_does_as_one_without(name: str) -> None:
    ends = []
    for has_closure in (False, True):
        model = small_net()
        sparse, (optimizer,) = under(name, model, sgd(model.parameters()))

        def closure(model: nn.Module = model, optimizer: Any = optimizer, t: int = 0) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, t)
            loss.backward()
            return loss

        for _ in range(5):
            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        ends.append((dict(model.state_dict()), sparse.masks))
    check_same_bits(ends[0], ends[1])


@every_rule
@every_optimizer
def test_a_rule_goes_on_bit_for_bit_from_every_iteration(name: str, optimize: Any) -> None:
    often = {"dpf": {"every": 3}, "admm": {"every": 2, "begin": 0.2, "until": 0.9, "rho": 0.1}}.get(name, {})

    def fresh() -> tuple[SparseModel, ForkCursor]:
        model = small_net()
        sparse = SparseModel(model, sparsity=0.75, allocation="global")
        plan = methods.METHODS[name](Partition.per_layer(model), sparsity=0.75, iterations=10, **often)
        return sparse, ForkCursor(sparse, plan)

    sparse, cursor = fresh()
    optimizer, saved = cursor.attach(optimize(sparse.model.parameters())), []
    for t in range(10):
        taken = cursor.state_dict()
        copies = copy.deepcopy([x.state_dict() for x in (sparse.model, sparse, cursor, optimizer)])
        saved.append((taken, *copies))
        train_step(sparse.model, optimizer, t, clip=0.1)
    for stop, (of_cursor, of_model, of_sparse, kept, of_optimizer) in enumerate(saved):
        resumed, cursor = fresh()
        resumed.model.load_state_dict(of_model)
        resumed.load_state_dict(of_sparse)
        cursor.load_state_dict(of_cursor)
        again = cursor.attach(optimize(resumed.model.parameters()))
        again.load_state_dict(of_optimizer)
        for t in range(stop, 10):
            train_step(resumed.model, again, t, clip=0.1)
        check_same_bits(resumed.model.state_dict(), sparse.model.state_dict(), f"from {stop}")
        check_same_bits(resumed.masks, sparse.masks)
        check_same_bits(of_cursor, kept)  # neither later steps nor those after loading write to a state


@every_rule
@pytest.mark.filterwarnings("ignore:.* training will make them non-zero")  # the zeros of a rule are no mask's
def test_a_rule_is_released_with_its_phase(name: str) -> None:
    model = small_net()
    sparse, (optimizer,) = under(name, model, sgd(model.parameters()), iterations=3)
    for t in range(3):
        assert sparse.rule is not None
        train_step(model, optimizer, t)
    assert sparse.rule is None
    plain = small_net()
    plain.load_state_dict(model.state_dict())
    twin = SparseModel(plain, sparsity=0.75)
    twin.load_state_dict({**sparse.state_dict(), "cursor": None})
    other = twin.attach(sgd(plain.parameters()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for t in range(3, 6):
        train_step(model, optimizer, t)
        train_step(plain, other, t)
    check_same_bits(model.state_dict(), plain.state_dict())


@every_rule
def test_a_frozen_layer_stays_as_it_is(name: str) -> None:
    model = small_net()
    trained = [p for layer in (model[0], model[5]) for p in layer.parameters()]
    sparse, (optimizer,) = under(name, model, sgd(trained))

    def frozen() -> Tensor:
        aside = sparse.rule.state_dict().get("w", {}) if sparse.rule is not None else {}
        return aside.get("3.weight", model[3].weight.detach()).clone()  # type: ignore[no-any-return]

    before = frozen()
    for t in range(4):
        train_step(model, optimizer, t)
    assert torch.equal(frozen(), before)


# Where they do not go


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Dpf(ALL, to=0.5), "DPF needs all weights dense: use storage='masked', not 'compact'"),
        (Str(ALL, s_init=0, s_decay=0), "STR needs all weights dense: use storage='masked', not 'compact'"),
        (Admm(ALL, to=0.5), "ADMM needs all weights dense: use storage='masked', not 'compact'"),
        (Deepr(ALL, iterations=1), "DeepR edits masks in every iteration: use storage='masked', not 'compact'"),
    ],
)
def test_compact_storage_is_refused_before_anything_is_done(rule: Rule, message: str) -> None:
    sparse = SparseModel(nn.Linear(4, 4, bias=False), sparsity=0.5, storage="compact")
    with pytest.raises(GrowpruneError) as error:
        ForkCursor(sparse, [Phase(prune(ALL, to=0.5)), Phase(iterations=3, rule=rule)])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert sparse.num_alive == 16


@every_rule
def test_a_run_that_cannot_be_leaves_no_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match="use storage='masked'"):
        engine.train(replace(toy(name), storage="compact"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pattern", ["1x2", "2:4"])
def test_deepr_has_no_patterns(pattern: str) -> None:
    with pytest.raises(GrowpruneError, match=r"^DeepR needs pattern='unstructured', .*, got '"):
        ruled(Deepr(ALL, iterations=4), pattern=pattern)


def test_dpf_that_would_rise_through_what_its_pattern_forbids_is_refused_at_first() -> None:
    with pytest.raises(GrowpruneError, match=r"sparsity must be >= 0.5 for pattern 2:4"):
        ruled(Dpf(ALL, to=0.5, rise=100), pattern="2:4")
    model, _, optimizer = ruled(Dpf(ALL, to=0.5), pattern="2:4")
    assert step(model, optimizer, 0, 0, 0, 0) == [4, -3, 0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda rho=rho: Admm(ALL, to=0.5, rho=rho), "rho must be a finite number > 0")
            for rho in (0, math.nan, True)
        ),
        (lambda: Admm(ALL, to=1.5), "sparsity must be in [0, 1), got 1.5"),
        (lambda: Admm(ALL, to=0.5, every=0), "every must be an integer >= 1, got 0"),
        (lambda: Dpf(ALL, to=1.5), "sparsity must be in [0, 1), got 1.5"),
        (lambda: Dpf(ALL, to=0.5, every=0), "every must be an integer >= 1, got 0"),
        (lambda: Dpf(ALL, to=0.5, rise=-1), "rise must be an integer >= 0, got -1"),
        (lambda: Str(ALL, s_init=math.nan, s_decay=0), "s_init must be a finite number, got nan"),
        (lambda: Str(ALL, s_init=0, s_decay=-1), "s_decay must be >= 0, got -1"),
        (lambda: Str(ALL, s_init=0, s_shrink=2), "s_shrink must be in [0, 1], got 2"),
        (lambda: Str(ALL, s_init=0, s_decay="a"), "s_decay must be a finite number, got 'a'"),  # type: ignore[arg-type]
        (lambda: Deepr(ALL, iterations=4, l1=-1), "l1 must be a finite number >= 0, got -1"),
        (lambda: Deepr(ALL, iterations=4, temperature=math.inf), "temperature must be a finite number >= 0, got inf"),
        (lambda: dpf(S, sparsity=0.9, iterations=10, begin=0.8, until=0.5), "begin must be <= until"),
        (lambda: dpf(S, sparsity=0.9, iterations=10, masks_until=2), "masks_until must be in [0, 1], got 2"),
        (lambda: str_(S, sparsity=0.9, iterations=10, until=2), "until must be in [0, 1], got 2"),
        (lambda: deepr(S, sparsity=0.9, iterations=10, until=2), "until must be in [0, 1], got 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(GrowpruneError) as error:
        make()
    assert str(error.value).startswith(message)


class Relative(torch.optim.SGD):
    """Finds a learning rate by itself, as transformers' Adafactor does: its groups have lr=None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        del closure
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize(("method", "who"), [("deepr", "DeepR"), ("str", "STR"), ("dpf", None), ("admm", None)])
def test_a_rule_that_goes_by_the_learning_rate_asks_for_one(method: str, who: str | None) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.5, allocation="global")
    cursor = ForkCursor(sparse, methods.METHODS[method](Partition.contiguous(model, 1), sparsity=0.5, iterations=4))
    optimizer = cursor.attach(Relative(model.parameters()))
    before = frozen(model.state_dict())
    model(torch.ones(2, 4, 3, 3)).sum().backward()
    if who is None:
        optimizer.step()
        assert cursor.iteration == 1
    else:
        with pytest.raises(GrowpruneError, match=f"^{who} needs the learning rate .* no lr for .*: set one"):
            optimizer.step()
        assert frozen(model.state_dict()) == before
    assert not any(parameter.isnan().any() for parameter in model.parameters())


# Under the engine


def toy(name: str) -> Recipe:
    """Ten epochs of four iterations."""
    return replace(cyclic(), method=methods.METHODS[name], options={"epochs": 10})


def test_a_run_tells_what_its_rule_has_reached(tmp_path: Path) -> None:
    rows = engine.train(toy("str"), tmp_path / "str")["history"]
    reached = [row["rule"]["sparsity"] for row in rows if "rule" in row]
    assert [row["epoch"] for row in rows if "rule" in row] == list(range(1, 8))  # the rule ends with iteration 30
    assert 0 < reached[0] < reached[-1] < 1
    assert all("rule" not in row for row in engine.train(toy("deepr"), tmp_path / "deepr")["history"])


def test_str_by_itself_comes_near_its_sparsity(tmp_path: Path) -> None:
    recipe = replace(dense(), task=Digits(width=24), method=str_, options={"epochs": 8}, sparsity=0.9)
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=0.1), evaluate_every=100, exploration=False)
    rows = engine.train(recipe, tmp_path / "run")["history"]
    reached = [row["rule"]["sparsity"] for row in rows if "rule" in row]
    assert reached == sorted(reached)
    assert 0.8 < reached[-1] < 0.97


def test_the_best_of_dpf_is_among_all_epochs_that_have_the_sparsity(tmp_path: Path) -> None:
    recipe = replace(toy("dpf"), options={"epochs": 10, "every": 2, "until": 0.5})
    result = engine.train(recipe, tmp_path / "run")
    rows = [row for row in result["history"] if "candidate" in row]
    assert [row["epoch"] for row in rows] == [5, 6, 7, 8, 9, 10]
    for row in rows:  # what the model has is what it would be if pruned
        assert row["rule"]["sparsity"] == 0.8
        assert row["candidate"] == row["validation"]
    assert result["best"]["validation"]["accuracy"] == max(row["candidate"]["accuracy"] for row in rows)
    assert result["test"] == result["best"]["test"] or result["best"]["epoch"] < 10
    assert result["sparsity"]["totals"]["alive"] == 80


def test_a_run_that_ends_with_an_edit_is_validated_at_its_last_iteration(tmp_path: Path) -> None:
    """Though it ends in the middle of an epoch, and nothing is trained after the prune."""
    result = engine.train(replace(toy("dpf"), options={"iterations": 6, "every": 1}), tmp_path / "run")
    assert [(row["epoch"], row["iteration"]) for row in result["history"]] == [(1, 4), (2, 6)]
    assert result["history"][-1]["candidate"] == result["validation"] == result["best"]["validation"]


def test_a_plan_shows_its_rule_beside_its_edits() -> None:
    rows = [str(row) for row in fold(walk(deepr(S, sparsity=0.75, iterations=20)))]
    assert rows == ["prune all to 0.75 by random (Deepr on all)", "train"]


@every_rule
def test_looking_at_candidates_and_validating_changes_nothing(name: str, tmp_path: Path) -> None:
    for folder, changes in (("often", {}), ("rarely", {"candidates": False, "evaluate_every": 10})):
        engine.train(replace(toy(name), **changes), tmp_path / folder)  # type: ignore[arg-type]
    models = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("often", "rarely")]
    assert models[0] == models[1]


@every_rule
def test_runs_with_accumulation_and_clipping_end_at_the_target(name: str, tmp_path: Path) -> None:
    result = engine.train(replace(toy(name), accumulate=2, clip=0.5), tmp_path / "run")
    assert result["sparsity"]["totals"]["alive"] == 80


@method
def forked(S: Parts, *, sparsity: float) -> Iterator[Stage]:
    """A rule in each branch."""
    yield Fork(
        Branch(Phase(iterations=6, rule=Dpf(S[0], to=0.5, every=2)), S[0]),
        Branch(Phase(iterations=6, rule=Admm(S[1], to=0.5, rho=0.1, every=2)), S[1]),
        Branch(Phase(iterations=6, rule=Deepr(S[2], iterations=6, temperature=1e-4)), S[2]),
    )
    yield Phase(prune(S.whole, to=sparsity), iterations=2)


def test_a_branch_that_has_a_rule_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    recipe = replace(cyclic(), method=forked, options={})
    engine.train(recipe, tmp_path / "undisturbed")
    folder, lives = tmp_path / "stopped", 0
    while not (folder / "result.json").exists():
        countdown = iter([False] * (lives % 4) + [True])
        start = engine.resume if (folder / "recipe.json").exists() else engine.train
        try:
            start(recipe, folder, should_stop=lambda it=countdown: next(it, True))  # type: ignore[misc]
        except engine.Interrupted:
            lives += 1
    assert lives > 5
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "undisturbed" / "model.safetensors").read_bytes()
