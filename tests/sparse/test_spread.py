"""Growth that layers share otherwise than the allocation says, and shares of a whole model under one ranking."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from few_weights import Eight, still
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toy import cyclic

from growprune.engine.cost import estimate
from growprune.errors import GrowpruneError
from growprune.masks.allocation import shared_out
from growprune.masks.partition import Partition
from growprune.methods import dsr, granet, snfs
from growprune.plan import By, Part, Phase, Spread, fold, grow, prune, walk
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

A, B = Part("A", ("a.weight",)), Part("B", ("b.weight",))


# How a number is shared


@pytest.mark.parametrize(
    ("total", "among", "room", "shares"),
    [
        (10, [1, 1], [9, 9], [5, 5]),
        (4, [3, 1], [9, 9], [3, 1]),
        (2, [3, 1], [9, 9], [2, 0]),  # 1.5 and 0.5: the missing one goes to the earlier of equal remainders
        (5, [1, 3], [9, 9], [1, 4]),  # 1.25 and 3.75: to the larger remainder
        (2, [3, 1], [1, 9], [1, 1]),  # the first has room for one only
        (10, [8, 1, 1], [4, 1, 9], [4, 1, 5]),  # 8, 1, 1; then 3 and 3, of which the second takes one
        (3, [0, 1], [9, 9], [0, 3]),
        (4, [0, 1], [9, 3], [1, 3]),  # what nothing is in proportion to goes by the room
        (6, [0.0, 0.0], [4, 8], [2, 4]),
        (0, [1, 2], [0, 5], [0, 0]),
        (0, [], [], []),
    ],
)
def test_a_number_is_shared_in_proportion(total: int, among: list[float], room: list[int], shares: list[int]) -> None:
    assert shared_out(total, among, room) == shares


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 50)), min_size=1, max_size=8), st.data())
def test_shares_add_up_and_fit_and_are_within_one_of_the_proportion(
    layers: list[tuple[float, int]], data: st.DataObject
) -> None:
    among, room = [a for a, _ in layers], [r for _, r in layers]
    total = data.draw(st.integers(0, sum(room)))
    shares = shared_out(total, among, room)
    assert sum(shares) == total
    assert all(0 <= share <= most for share, most in zip(shares, room, strict=True))
    if sum(among) > 0 and all(total * a / sum(among) <= r for a, r in layers):
        assert all(abs(share - total * a / sum(among)) < 1 + 1e-6 for share, a in zip(shares, among, strict=True))


# What an edit may say


def test_an_edit_says_how_layers_share_it() -> None:
    assert str(prune(A, share=0.3, spread=Spread.RANKING)) == "prune 0.3 of A spread by ranking"
    assert str(grow(A, to=0.9, spread=Spread.LIVE)) == "grow A to 0.9 spread by live"
    both = grow(A, to=0.9, by=By.MOMENTUM, spread=Spread.MOMENTUM)
    assert str(both) == "grow A to 0.9 by momentum spread by momentum"
    assert grow(A, to=0.9, spread="live") == grow(A, to=0.9, spread=Spread.LIVE)  # type: ignore[arg-type]
    assert grow(A, to=0.9, spread=Spread.LIVE) != grow(A, to=0.9)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: grow(A, to=0.9, spread="live weights"), "spread must be one of ranking, live, .*, got 'live weights'"),
        (lambda: prune(A, to=0.9, spread=Spread.RANKING), "spread=ranking and to=0.9: use share= instead of to="),
        (lambda: prune(A, share=0.1, spread=Spread.LIVE), "prune got spread=live, which is for grow only: use ranking"),
        (lambda: grow(A, to=0.9, spread=Spread.ERK), "grow got spread=erk, which needs prune with to="),
        (lambda: prune(A, share=0.9, spread=Spread.ERK), "prune got spread=erk, which needs prune with to="),
        (lambda: prune(A, to=0.9, spread=Spread.LOST), "prune got spread=lost, which is for grow only: use ranking"),
        (lambda: Phase(grow(A, to=0.9, spread=Spread.LOST)), "needs a prune of A right before it in the same phase"),
        (lambda: Phase(prune(B, to=0.9), grow(A, to=0.9, spread=Spread.LOST)), "needs a prune of A right before it"),
        (lambda: grow(A, to=0.9, spread=Spread.MOMENTUM), "spread=momentum with by=random: use by=By.MOMENTUM"),
    ],
)
def test_a_spread_that_means_nothing_is_refused(make: Any, says: str) -> None:
    with pytest.raises(GrowpruneError, match=says):
        make()


# What it does to the masks

HALF = 0b00001111
"""The first four of eight live."""


def two_layers(first: list[float], second: list[float], masks: tuple[int, int], **settings: Any) -> SparseModel:
    """Two layers of up to eight weights, with these masks, of one byte each."""
    model = nn.ModuleList([Eight(*first), Eight(*second)])
    sparse = SparseModel(model, **{"sparsity": 0.5, **settings})
    state = sparse.state_dict()
    for name, mask in zip(("0.weight", "1.weight"), masks, strict=True):
        state["masks"][name] = torch.tensor([mask], dtype=torch.uint8)
    sparse.load_state_dict(state)
    return sparse


def lives(sparse: SparseModel) -> list[list[int]]:
    return [mask.int().flatten().tolist() for mask in sparse.masks.values()]


def whole(sparse: SparseModel) -> Part:
    return Partition.contiguous(sparse.model, 1).whole


def counts(sparse: SparseModel) -> list[int]:
    return [sum(mask) for mask in lives(sparse)]


FIRST, SECOND = [0.9, -0.8, 0.7, 0, 0, 0, 0, 0], [0.1, -0.2, 0.6, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("allocation", ["uniform", "erk", "global"])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_share_under_one_ranking_takes_the_smallest_wherever_they_are(allocation: str, storage: str) -> None:
    sparse = two_layers(FIRST, SECOND, (0b111, 0b111), allocation=allocation, storage=storage)
    sparse.apply(prune(whole(sparse), share=0.34, spread=Spread.RANKING))  # 2.04 of six: 0.1 and 0.2
    assert lives(sparse) == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_dsr_moves_weights_to_where_most_are_left(storage: str) -> None:
    """Of six a third goes, 0.1 and 0.2; of the four left the layers have 3 and 1, so that 1.5 and 0.5 grow."""
    sparse = two_layers(FIRST, SECOND, (0b111, 0b111), storage=storage, allocation="global")
    random, move = dsr(Partition.contiguous(sparse.model, 1), sparsity=0.625, iterations=16, every=2, drop=0.34)[:2]
    assert random == Phase(prune(whole(sparse), to=0.625, by=By.RANDOM), iterations=2)
    assert isinstance(move, Phase)
    sparse.apply(move.edits[0])
    assert lives(sparse) == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    sparse.apply(move.edits[1])
    assert counts(sparse) == [5, 1]  # the missing one goes to the earlier of two equal remainders
    assert lives(sparse)[0][:3] == [1, 1, 1]
    assert lives(sparse)[1] == [0, 0, 1, 0, 0, 0, 0, 0]
    weights = torch.cat([p.flatten() for p in sparse.model.state_dict().values()])
    assert weights.count_nonzero() == 4  # what has grown is zero


def test_where_a_layer_is_full_the_others_get_what_it_cannot_take() -> None:
    sparse = two_layers([0.9, 0.8, 0.7, 0], [0.1, 0.2, 0.6, 0], (0b0111, 0b0100))
    sparse.apply(grow(whole(sparse), to=0.25, spread=Spread.LIVE))  # 2 of 3:1 are 1.5 and 0.5
    assert counts(sparse) == [4, 2]


@pytest.mark.parametrize(("allocation", "alive"), [("uniform", 4), ("global", 5)])
def test_growth_by_live_weights_has_the_total_of_the_allocation(allocation: str, alive: int) -> None:
    five = 0.1, 0.2, 0.3, 0.4, 0.5  # uniform: 2 of 5 each, as 2.5 is rounded to even; in all, 5 of 10
    sparse = SparseModel(nn.ModuleList([Eight(*five), Eight(*five)]), sparsity=0.5, allocation=allocation)
    sparse.prune()
    sparse.apply(prune(whole(sparse), share=0.5, spread=Spread.RANKING))
    assert sparse.num_alive == alive - 2
    sparse.apply(grow(whole(sparse), to=0.5, spread=Spread.LIVE))
    assert sparse.num_alive == alive


def test_growth_that_would_have_to_prune_is_refused_and_changes_nothing() -> None:
    sparse = two_layers(FIRST, SECOND, (HALF, HALF))
    with pytest.raises(GrowpruneError, match=r"cannot grow .* to sparsity 0.75: .* 4 live weights, but 8"):
        sparse.apply(grow(whole(sparse), to=0.75, spread=Spread.LIVE))
    assert counts(sparse) == [4, 4]


def test_growth_beyond_what_a_pattern_has_room_for_is_refused() -> None:
    sparse = two_layers(FIRST, SECOND, (0b00110011, 0b00110011), pattern="2:4")
    with pytest.raises(GrowpruneError, match=r"that needs 12 live weights in 0.weight, 1.weight, .* at most 8"):
        sparse.apply(grow(whole(sparse), share=0.5, spread=Spread.LIVE))


def loss(model: nn.Module, *gradients: list[float]) -> Tensor:
    return sum(layer(gradient) for layer, gradient in zip(model.children(), gradients, strict=True))  # type: ignore[return-value]


def test_snfs_grows_where_the_momentum_of_the_live_weights_is_largest() -> None:
    """Each layer drops two of four. Those left have |momentum| 3, 1 and 1, 0 (times 0.1): means of 2 and 0.5.

    Of the four that grow 3.2 are for the first layer and 0.8 for the second; within each, the largest |momentum|.
    """
    sparse = two_layers([0.9, 0.8, 0.1, 0.2, 0, 0, 0, 0], [0.9, 0.8, 0.1, 0.2, 0, 0, 0, 0], (HALF, HALF))
    plan = snfs(Partition.contiguous(sparse.model, 1), sparsity=0.5, iterations=2, every=1, drop=1.0, until=1.0)
    swap = plan[1]
    assert isinstance(swap, Phase)
    assert swap.edits[0] == prune(whole(sparse), share=0.5)  # the cosine's middle
    cursor = Cursor(sparse, [Phase(iterations=1), swap])
    optimizer = cursor.attach(still(sparse.model))
    optimizer.zero_grad()
    loss(sparse.model, [3, -1, 0, 7, 0, -6, 0, 5], [1, 0, 9, 0, 2, 0, 0, 0]).backward()
    optimizer.step()
    assert lives(sparse) == [[1, 1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0]]


def test_a_layer_without_momentum_gets_nothing_and_nan_is_an_error() -> None:
    sparse = two_layers(FIRST, SECOND, (0b11, 0b11))
    edit = grow(whole(sparse), to=0.5, by=By.MOMENTUM, spread=Spread.MOMENTUM)

    def look(*gradients: list[float]) -> None:
        cursor = Cursor(sparse, [Phase(iterations=2), Phase(edit, iterations=1)])
        optimizer = cursor.attach(still(sparse.model))
        for _ in range(2):
            optimizer.zero_grad()
            loss(sparse.model, *gradients).backward()
            optimizer.step()

    with pytest.raises(GrowpruneError, match=r"1.weight has NaN"):
        look([1.0] * 8, [float("nan")] * 8)
    sparse.gradients.clear()
    look([0.0] * 8, [1.0] * 8)
    assert counts(sparse) == [2, 6]


LARGE_FIRST = [0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], [0.8, 0.7, 0.6, 0.5, 0.4, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    ("allocation", "masks"),
    [
        # 6 of 16 stay, 1 and 5; half of them, rounded down, are swapped: none and two, 0.4 and 0.5
        ("global", [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 0, 1]]),
        # 3 of 8 stay, and one of them is swapped
        ("uniform", [[1, 1, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 1]]),
    ],
)
def test_granet_prunes_by_one_ranking_and_returns_to_each_layer_what_it_dropped(
    allocation: str, masks: list[list[int]], storage: str
) -> None:
    settings = {"sparsity": 0.625, "allocation": allocation, "storage": storage}
    sparse = two_layers(*LARGE_FIRST, (0xFF, 0xFF), **settings)
    plan = granet(Partition.contiguous(sparse.model, 1), sparsity=0.625, iterations=2, every=1, start=0.0, drop=1.0)
    assert isinstance(plan[1], Phase)
    assert plan[1].edits[1].share == 0.5
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(still(sparse.model))
    optimizer.zero_grad()
    loss(sparse.model, [0, 1, 0, 9, 1, 1, 1, 1], [0, 0, 0, 0, 0, -2, 0, 3]).backward()
    optimizer.step()
    assert lives(sparse) == masks


def test_what_a_layer_lost_comes_back_to_it_to_the_last_weight() -> None:
    """Of 1 and 5 live ones 0 and 2 go; in proportion to those left, 1 and 3, the first would get a half, and so one."""
    for spread, after in ((Spread.LOST, [1, 5]), (Spread.LIVE, [2, 4])):
        sparse = two_layers(*LARGE_FIRST, (0b1, 0b11111), allocation="global")
        sparse.apply(prune(whole(sparse), share=0.5), grow(whole(sparse), to=0.625, spread=spread))
        assert counts(sparse) == after


def test_a_prune_that_takes_nothing_is_not_mistaken_for_the_one_before() -> None:
    sparse = two_layers(*LARGE_FIRST, (0xFF, 0xFF), allocation="global")
    part = whole(sparse)
    sparse.apply(prune(part, to=0.625), grow(part), prune(part, to=0.0))
    sparse.apply(prune(part, to=0.0), grow(part, to=0.0, spread=Spread.LOST))
    assert counts(sparse) == [8, 8]
    assert not sparse.editor.lost


@pytest.mark.parametrize(
    ("allocation", "counted"), [("global", [92, 918]), ("erk", [92, 918]), ("uniform", [10, 1000])]
)
def test_granet_begins_with_the_shares_of_erk_where_layers_have_no_count_of_their_own(
    allocation: str, counted: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(100, 100))
    sparse = SparseModel(model, sparsity=0.95, allocation=allocation)
    plan = granet(Partition.contiguous(model, 1), sparsity=0.95, iterations=4, start=0.9)
    Cursor(sparse, plan).advance(0)
    assert counts(sparse) == counted


def test_trained_weights_are_pruned_by_one_ranking_to_granets_start_and_masks_may_stay() -> None:
    sparse = two_layers(*LARGE_FIRST, (0xFF, 0xFF), sparsity=0.75, allocation="global")
    parts = Partition.contiguous(sparse.model, 1)
    for initial_mask in ("magnitude", "as_is"):
        plan = granet(parts, sparsity=0.75, iterations=4, start=0.625, initial_mask=initial_mask)  # type: ignore[arg-type]
        Cursor(sparse, plan).advance(0)
        assert counts(sparse) == [1, 5]


# What it costs, and how it is written


def test_a_plan_with_spreads_is_priced_and_written() -> None:
    recipe = replace(cyclic(), method=dsr, options={"epochs": 8, "every": 1, "drop": 0.3}, allocation="erk")
    found = estimate(recipe)
    assert not found.is_exact  # which layers lose under one ranking is not known before
    assert {round(cost.density, 3) for cost in found.costs} == {0.2}
    texts = [str(row) for row in fold(walk(found.plan))]
    assert texts[:2] == [
        "prune all to 0.8 by random",
        "prune 0.3 of all spread by ranking, grow all to 0.8 spread by live",
    ]
    momentum = replace(recipe, method=snfs, options={"epochs": 8, "every": 1})
    assert {round(cost.density, 3) for cost in estimate(momentum).costs} == {0.2}
    lost = replace(recipe, method=granet, options={"epochs": 8, "every": 1, "until": 0.0}, allocation="global")
    assert {round(cost.density, 2) for cost in estimate(lost).costs} == {0.5, 0.2}


def test_a_state_of_a_plan_with_another_spread_is_refused() -> None:
    sparse = two_layers(FIRST, SECOND, (HALF, HALF))
    part = whole(sparse)
    plans = [[Phase(prune(part, share=0.5, spread=how), iterations=2)] for how in (None, Spread.RANKING)]
    cursors = [Cursor(sparse, plan) for plan in plans]
    cursors[0].advance(0)
    with pytest.raises(GrowpruneError, match="of another plan"):
        cursors[1].load_state_dict(cursors[0].state_dict())


def test_a_moved_model_is_at_its_target_whatever_its_layers_have() -> None:
    sparse = two_layers(FIRST, SECOND, (0b111111, 0b11))
    assert sparse.is_at_target
    sparse.apply(prune(whole(sparse), share=0.125, spread=Spread.RANKING))
    assert not sparse.is_at_target
