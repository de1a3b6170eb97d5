"""More baselines of grow-and-prune (see test_baselines.py), each against its paper's formula worked out by hand."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from few_weights import Eight, alive, pass_one, still
from plan_cases import adamw, all_of, check_same_bits, loss_of, sgd, small_net, train_step
from test_baselines import ALL, S, counts, layers
from torch import nn

from growprune.errors import GrowpruneError
from growprune.masks.allocation import num_kept
from growprune.masks.partition import Partition
from growprune.methods import dsr, gmp, granet, grasp, iterative, iterative_admm, rigl, set_, snfs, snip
from growprune.methods.admm import Admm
from growprune.plan import By, Phase, Spread, grow, prune
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

# Stairs


def test_iterative_pruning_climbs_the_stairs_of_the_paper() -> None:
    """65 epochs dense, then 65 on each of 50, 70, 80, 87.5, 90 %: 390 in all."""
    assert list(iterative(S, sparsity=0.9, iterations=390)) == [
        Phase(iterations=65),
        Phase(prune(ALL, to=0.5), iterations=65, restart=True),
        Phase(prune(ALL, to=0.7), iterations=65, restart=True),
        Phase(prune(ALL, to=0.8), iterations=65, restart=True),
        Phase(prune(ALL, to=0.875), iterations=65, restart=True),
        Phase(prune(ALL, to=0.9), iterations=65, restart=True),
    ]


@pytest.mark.parametrize(
    ("sparsity", "stairs"),
    [
        (0.3, [0.3]),
        (0.5, [0.5]),
        (0.75, [0.5, 0.7, 0.75]),
        (0.8, [0.5, 0.7, 0.8]),
        (0.95, [0.5, 0.7, 0.8, 0.875, 0.9, 0.95]),
    ],
)
def test_stairs_end_at_the_sparsity_and_those_above_it_are_left_out(sparsity: float, stairs: list[float]) -> None:
    plan = list(iterative(S, sparsity=sparsity, iterations=13, restart=False))
    assert [stage.edits[0].to for stage in plan[1:]] == stairs
    assert sum(stage.iterations for stage in plan) == 13
    assert max(stage.iterations for stage in plan) - min(stage.iterations for stage in plan) <= 1
    assert not any(stage.restart for stage in plan)


@pytest.mark.parametrize("method", [iterative, iterative_admm])
def test_stairs_that_do_not_rise_are_refused(method: Any) -> None:
    with pytest.raises(GrowpruneError, match=r"stages must rise from each to the next, got \(0.7, 0.7\)"):
        method(S, sparsity=0.9, iterations=10, stages=(0.7, 0.7))
    with pytest.raises(GrowpruneError, match=r"sparsity must be in .*, got 1.5"):
        method(S, sparsity=0.9, iterations=10, stages=(0.5, 1.5))


def test_iterative_admm_has_the_phases_of_the_paper() -> None:
    """750 epochs to 80 %, 1250 to 90 %, 250 of each kind."""
    to_80 = [
        Phase(iterations=250),
        Phase(iterations=250, restart=True, rule=Admm(ALL, to=0.8, rho=0.1, every=7)),
        Phase(prune(ALL, to=0.8), iterations=250, restart=True),
    ]
    to_90 = [
        Phase(iterations=250, restart=True, rule=Admm(ALL, to=0.9, rho=0.1, every=7)),
        Phase(prune(ALL, to=0.9), iterations=250, restart=True),
    ]
    assert list(iterative_admm(S, sparsity=0.8, iterations=750, rho=0.1, every=7)) == to_80
    assert list(iterative_admm(S, sparsity=0.9, iterations=1250, rho=0.1, every=7)) == to_80 + to_90


def test_the_second_admm_pulls_what_is_alive_and_leaves_the_dead_dead() -> None:
    """After a prune to half, Z of 3/4 keeps 4 and 3; so 2 and 1 are pulled by rho w, and nothing else."""
    model = Eight(0.5, 1.0, 2.0, 3.0, 4.0, 0.25, 0.125, 0.0625)
    sparse = SparseModel(model, sparsity=0.75)
    plan = iterative_admm(S, sparsity=0.75, iterations=5, stages=(0.5,), every=1, rho=0.5, restart=False)
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # dense, pulled to a half, and a half
        pass_one(model, optimizer, [0.0] * 8)
    assert alive(sparse) == [0, 1, 1, 1, 1, 0, 0, 0]
    pass_one(model, optimizer, [0.0] * 8)
    assert model.weight.grad.tolist() == [[0, 0.5, 1.0, 0, 0, 0, 0, 0]]
    assert alive(sparse) == [0, 0, 0, 1, 1, 0, 0, 0]


# Before training


class Quadratic(nn.Module):
    """Two layers of four weights; loss = sum of h w^2 / 2 + c w."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Eight(1.0, -2.0, 3.0, -4.0), Eight(0.5, 0.5, -0.5, 1.0)

    def forward(self, h: float, c: list[float]) -> torch.Tensor:
        w = torch.cat([self.a.weight[0], self.b.weight[0]])
        return (h * w.square() / 2 + torch.tensor(c) * w).sum()


def masks_of(method: Any, allocation: str, h: float, c: list[float], storage: str = "masked") -> list[list[int]]:
    model = Quadratic()
    sparse = SparseModel(model, sparsity=0.5, allocation=allocation, storage=storage)
    asked: list[By] = []

    def score(by: By) -> None:
        asked.append(by)
        sparse.score(by, [lambda: model(h, c)])

    cursor = Cursor(sparse, method(Partition.contiguous(model, 1), sparsity=0.5, iterations=3), score=score)
    cursor.advance(0)
    assert len(asked) == 1
    before = {name: mask.clone() for name, mask in sparse.masks.items()}
    cursor.advance(2)
    assert all(torch.equal(mask, before[name]) for name, mask in sparse.masks.items())
    return [mask.int().flatten().tolist() for mask in sparse.masks.values()]


LINEAR = [4.0, -1.0, 0.5, 0.1, 20.0, -1.0, 6.0, 0.1]
"""Times the weights: 4, 2, 1.5, -0.4 and 10, -0.5, -3, 0.1."""


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    ("allocation", "c", "expected"),
    [
        # of 4, 2, 1.5, 0.4, 10, 0.5, 3, 0.1 the four largest are 10, 4, 3, 2
        ("global", LINEAR, [[1, 1, 0, 0], [1, 0, 1, 0]]),
        ("uniform", [0.1, -0.1, 0.1, -0.1, *LINEAR[4:]], [[0, 0, 1, 1], [1, 0, 1, 0]]),  # the first: 0.1, 0.2, 0.3, 0.4
    ],
)
def test_snip_keeps_the_largest_gradient_times_weight(
    allocation: str, c: list[float], expected: list[list[int]], storage: str
) -> None:
    assert masks_of(snip, allocation, 0.0, c, storage) == expected


def test_grasp_keeps_the_largest_weight_times_hessian_times_gradient() -> None:
    """With h = 1, g = w + c and H g = g, so that a weight's score is w (w + c).

    w is 1, -2, 3, -4, 0.5, 0.5, -0.5, 1; w + c is 2, 2, 0, -1, 10, -1, 0, -3; so 2, -4, 0, 4, 5, -0.5, 0, -3. The
    largest stay, whatever their magnitude: 5, 4, 2, and of two zeros the first.
    """
    c = [1.0, 4.0, -3.0, 3.0, 9.5, -1.5, 0.5, -4.0]
    assert masks_of(grasp, "global", 1.0, c) == [[1, 0, 1, 1], [1, 0, 0, 0]]


def test_snip_in_one_s_own_loop_says_what_to_call() -> None:
    model = Quadratic()
    plan = snip(Partition.contiguous(model, 1), sparsity=0.5, iterations=3)
    with pytest.raises(GrowpruneError, match=r"or call SparseModel.score\(\) with losses first"):
        next(iter(Cursor(SparseModel(model, sparsity=0.5, allocation="uniform"), plan)))


# GraNet


def test_granet_rises_with_a_cubic_and_swaps_a_falling_share() -> None:
    """From 0.5 to 0.9 over 12 of 16: 0.9 - 0.4 (1 - t / 12)^3 at t = 3, 6, 9, 12; 0.25 (1 + cos(pi t / 16))."""
    plan = list(granet(S, sparsity=0.9, iterations=16, every=3, until=0.75))
    assert plan[0] == Phase(prune(ALL, to=0.5, by=By.RANDOM, spread=Spread.ERK), iterations=3)
    rising, shares = [0.73125, 0.85, 0.89375, 0.9, 0.9], [0.45786740, 0.34567086, 0.20122742, 0.07322330, 0.00480368]
    for stage, to, share in zip(plan[1:], rising, shares, strict=True):
        prune_to, drop, regrow = stage.edits
        assert prune_to == prune(ALL, to=prune_to.to)
        assert regrow == grow(ALL, to=prune_to.to, by=By.GRADIENT, spread=Spread.LOST)
        assert (prune_to.to, drop.share) == (pytest.approx(to, abs=1e-12), pytest.approx(share, abs=1e-8))
    assert [stage.iterations for stage in plan] == [3, 3, 3, 3, 3, 1]
    assert plan[-1].edits[0].to == plan[-2].edits[0].to == 0.9


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_granet_prunes_then_swaps_eight_weights(storage: str) -> None:
    """To 5/8: three stay, 0.9, 0.8, 0.7; a share of 1/3 of them is dropped, 0.7, and the largest gradient grows."""
    model = Eight(0.9, -0.1, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
    sparse = SparseModel(model, sparsity=0.625, storage=storage, allocation="uniform")
    plan = granet(
        S, sparsity=0.625, iterations=3, every=1, start=0.0, drop=0.68, until=0.0
    )  # 0.68 (1 + 0.5) / 2 = 0.51
    assert plan[1].edits[1].share == pytest.approx(0.51)  # type: ignore[union-attr]
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(still(model))
    assert alive(sparse) == [1] * 8
    pass_one(model, optimizer, [1, -7, 2, 5, 3, 2, 1, 0])
    assert alive(sparse) == [1, 1, 1, 0, 0, 0, 0, 0]  # 0.51 x 3 is one: 0.7 goes, and |-7| comes
    assert model.weight.tolist() == [[pytest.approx(0.9), 0, pytest.approx(0.8), 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "options", [{"iterations": 5}, {"iterations": 5, "until": 0.0}, {"iterations": 5, "until": 1.0}]
)
@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize("begin", [0.0, 0.9])
def test_granet_reaches_its_sparsity_whatever_its_times(options: dict[str, Any], every: int, begin: float) -> None:
    begin = min(begin, options.get("until", 0.3))
    plan = list(granet(S, sparsity=0.9, every=every, begin=begin, **options))
    assert sum(stage.iterations for stage in plan) == 5
    assert plan[-1].edits[-1].to == 0.9
    targets = [stage.edits[-1].to for stage in plan]
    assert targets == sorted(targets)
    assert list(granet(S, sparsity=0.9, iterations=0))[-1].edits[-1].to == 0.9


@pytest.mark.parametrize("method", [gmp, granet])
def test_a_start_above_the_sparsity_is_refused(method: Any) -> None:
    with pytest.raises(GrowpruneError, match=r"^start must be <= sparsity, got start=0.9 and sparsity=0.8$"):
        method(S, sparsity=0.8, start=0.9, iterations=16)


def test_where_erk_has_made_a_layer_give_one_growth_to_the_same_sparsity_takes_nothing_back() -> None:
    model = layers((5, 4), (6, 3), (6, 3), (4, 3))
    sparse = SparseModel(model, sparsity=0.2647, allocation="erk")
    whole = Partition.contiguous(model, 1).whole
    sparse.prune(to=0.25)
    sparse.apply(prune(whole, to=0.2647), grow(whole, to=0.2647))  # ERK says 13, 13, 13, 11 (see test_baselines.py)
    assert counts(sparse) == [14, 13, 13, 10]
    sparse.apply(prune(whole, share=0.1), grow(whole, to=0.2647))  # one of each goes, and as many come
    assert counts(sparse) == [13, 13, 13, 11]


# DSR and SNFS (what they do to the masks is in test_spread.py)


def test_the_time_between_two_edits_of_dsr_doubles_with_each_quarter() -> None:
    plan = list(dsr(S, sparsity=0.9, iterations=80, every=2, until=0.75))
    assert [stage.iterations for stage in plan] == [*[2] * 10, *[4] * 5, *[8] * 3, 16]  # 0, 20, 40, 64 (of 60 to 80)
    assert [len(stage.edits) for stage in plan] == [1, *[2] * 17, 0]


def test_snfs_drops_a_share_that_falls_with_a_cosine() -> None:
    ours, rigls = (
        list(method(S, sparsity=0.5, iterations=16, every=3, drop=0.5, until=0.75)) for method in (snfs, rigl)
    )
    assert [stage.edits[:1] for stage in ours] == [stage.edits[:1] for stage in rigls]
    assert {stage.edits[1] for stage in ours[1:4]} == {grow(ALL, to=0.5, by=By.MOMENTUM, spread="momentum")}  # type: ignore[arg-type]


# What all keep to


def score_of(sparse: SparseModel) -> Any:
    return lambda by: sparse.score(by, [lambda: loss_of(sparse.model, 77)])


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "2:4"])
@pytest.mark.parametrize("method", [rigl, set_, dsr, snfs, snip, grasp])
def test_the_number_of_live_weights_is_exact_at_every_iteration(method: Any, pattern: str, allocation: str) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.75, allocation=allocation, pattern=pattern)
    options = {} if method in (snip, grasp) else {"every": 2, "drop": 0.5}
    plan = method(Partition.per_layer(model), sparsity=0.75, iterations=24, **options)
    cursor = Cursor(sparse, plan, score=score_of(sparse))
    optimizer = cursor.attach(sgd(model.parameters()))
    seen = [{name: mask.clone() for name, mask in sparse.masks.items()}]
    for iteration in range(24):
        assert sparse.num_alive == 376  # of 288 + 1152 + 64
        assert sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1) <= 376
        train_step(model, optimizer, iteration)
        seen.append({name: mask.clone() for name, mask in sparse.masks.items()})
    assert (cursor.is_over, sparse.num_alive) == (True, 376)
    by_layer = {tuple(int(mask.sum()) for mask in masks.values()) for masks in seen}
    if method not in (rigl, set_):
        assert (len(by_layer) > 1) is bool(options)  # layers trade weights
    masks = [torch.cat([mask.flatten() for mask in one.values()]) for one in seen]
    assert any(not torch.equal(masks[0], mask) for mask in masks[1:]) is bool(options)


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
@pytest.mark.parametrize("method", [gmp, granet, iterative, iterative_admm])
def test_a_rising_sparsity_is_exact_at_every_iteration(method: Any, allocation: str) -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.9, allocation=allocation)
    options = {"every": 2, "until": 0.5} if method in (gmp, granet) else {}
    plan = method(Partition.per_layer(model), sparsity=0.9, iterations=24, **options)
    targets = [0.0]
    for stage in plan:
        targets += [next((edit.to for edit in stage.edits if edit.to is not None), targets[-1])] * stage.iterations
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(sgd(model.parameters()))
    sizes = [w.numel for w in sparse.weights] if allocation == "uniform" else [sparse.num_prunable]
    for iteration in range(24):
        assert sparse.num_alive == sum(num_kept(targets[iteration + 1], size) for size in sizes)
        train_step(model, optimizer, iteration)
    assert cursor.is_over
    assert sparse.num_alive == sum(num_kept(0.9, size) for size in sizes)


def run_plan(method: Any, storage: str, *, batches: int, **settings: Any) -> dict[str, Any]:
    """30 iterations, all that there is after every fifth."""
    model = small_net()
    sparse = SparseModel(model, sparsity=0.75, storage=storage, **settings)
    swaps = {"rigl": {"every": 5, "drop": 0.5, "until": 1.0}, "granet": {"every": 3, "until": 1.0, "drop": 0.1}}
    takes = {**swaps, "dsr": {"every": 2, "drop": 0.3}}.get(method.__name__, {})
    plan = method(Partition.per_layer(model), sparsity=0.75, iterations=30, **takes)
    cursor = Cursor(sparse, plan, score=score_of(sparse))
    optimizer = cursor.attach((sgd if batches == 1 else adamw)(model.parameters()))
    seen = {}
    for iteration in range(30):
        train_step(model, optimizer, iteration, batches=batches, clip=None if batches == 1 else 0.01)
        if iteration % 5 == 4:
            seen[str(iteration)] = all_of(sparse, optimizer)
    return seen


@pytest.mark.parametrize(
    ("method", "batches", "pattern", "allocation"),
    [  # each method with each pattern, and one ranking or several
        (rigl, 1, "unstructured", "erk"),
        (rigl, 1, "2:4", "global"),
        (rigl, 2, "1x4", "uniform"),
        (granet, 1, "unstructured", "erk"),
        (granet, 1, "unstructured", "global"),
        (granet, 1, "1x4", "global"),
        (granet, 2, "unstructured", "global"),
        (granet, 2, "1x4", "uniform"),
        (dsr, 1, "unstructured", "erk"),
        (dsr, 1, "1x4", "global"),
        (snip, 1, "unstructured", "global"),
        (snip, 1, "1x4", "uniform"),
        (iterative, 1, "unstructured", "erk"),
        (iterative, 1, "1x4", "global"),
    ],
)
def test_compact_storage_gives_the_bits_of_masks(method: Any, batches: int, pattern: str, allocation: str) -> None:
    settings: dict[str, Any] = {"batches": batches, "pattern": pattern, "allocation": allocation}
    check_same_bits(run_plan(method, "compact", **settings), run_plan(method, "masked", **settings))


def test_granet_under_one_ranking_leaves_every_layer_its_number_once_the_sparsity_has_risen() -> None:
    model = small_net()
    sparse = SparseModel(model, sparsity=0.9, allocation="global")
    plan = granet(Partition.per_layer(model), sparsity=0.9, iterations=24, every=2, until=0.5)
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(sgd(model.parameters()))
    seen, masks = [], []
    for iteration in range(24):
        seen.append(counts(sparse))
        masks.append(sparse.masks)
        train_step(model, optimizer, iteration)
    assert all(now <= before for a, b in pairwise(seen) for before, now in zip(a, b, strict=True))
    assert {tuple(count) for count in seen[12:]} == {tuple(seen[12])}
    assert any(not torch.equal(masks[12][name], masks[-1][name]) for name in masks[12])  # but weights are swapped


def test_stairs_prune_eight_weights() -> None:
    model = Eight(0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8)
    sparse = SparseModel(model, sparsity=0.875, allocation="uniform")
    cursor = Cursor(sparse, iterative(S, sparsity=0.875, iterations=4, stages=(0.25, 0.5)))
    masks = []
    for iteration in range(4):
        cursor.advance(iteration)
        masks.append(alive(sparse))
    assert masks == [[1] * 8, [0, 0, *[1] * 6], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]]
