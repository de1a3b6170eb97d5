"""The baselines of grow-and-prune, each against its paper's formula worked out by hand on a few numbers."""

from typing import Any

import pytest
import torch
from few_weights import Eight, alive, pass_one, splitmix, still
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from growprune.errors import GrowpruneError
from growprune.masks.allocation import num_kept
from growprune.masks.partition import Partition
from growprune.masks.ranking import salt_of
from growprune.methods import acdc, admm, gmp, rigl, set_, static_random
from growprune.methods.admm import Admm
from growprune.plan import Action, By, Part, Phase, grow, prune
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

S = Partition((Part("S0", ("weight",)),))
ALL = S.whole


# Gradual magnitude pruning


def test_gmp_says_the_cubic_of_the_paper() -> None:
    """s_t = 0.8 (1 - (1 - (t - 2) / 10)^3) at t = 2, 4, ..., 12."""
    plan = list(gmp(S, sparsity=0.8, iterations=16, every=2, begin=0.125, until=0.75))
    assert [(stage.iterations, len(stage.edits)) for stage in plan] == [(2, 0), *[(2, 1)] * 5, (4, 1)]
    targets = [stage.edits[0].to for stage in plan[1:]]
    assert targets == pytest.approx([0.0, 0.3904, 0.6272, 0.7488, 0.7936, 0.8], abs=1e-12)
    assert targets[-1] == 0.8
    assert {(edit.action, edit.part, edit.by) for stage in plan for edit in stage.edits} == {
        (Action.PRUNE, ALL, By.MAGNITUDE)
    }


def test_gmp_may_begin_with_a_random_sparse_mask() -> None:
    """s_t = 0.8 + (0.4 - 0.8) (1 - (t - 2) / 10)^3 at t = 2, 4, ..., 12."""
    plan = list(gmp(S, sparsity=0.8, start=0.4, iterations=16, every=2, begin=0.125, until=0.75))
    assert [str(edit) for edit in plan[0].edits] == ["prune all to 0.4 by random"]
    targets = [stage.edits[0].to for stage in plan[1:]]
    assert targets == pytest.approx([0.4, 0.5952, 0.7136, 0.7744, 0.7968, 0.8], abs=1e-12)
    assert [stage.iterations for stage in plan] == [2, 2, 2, 2, 2, 2, 4]


def layers(*shapes: tuple[int, int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(columns, rows) for rows, columns in shapes)


def counts(sparse: SparseModel) -> list[int]:
    return list(sparse.alive_by_weight().values())


def test_where_erk_rounds_a_layer_up_as_sparsity_rises_another_layer_gives_one() -> None:
    model = layers((5, 4), (6, 3), (6, 3), (4, 3))
    sparse = SparseModel(model, sparsity=0.2647, allocation="erk")
    sparse.prune(to=0.25)
    assert counts(sparse) == [14, 14, 13, 10]  # 51 of 68
    whole = Partition.contiguous(model, 1).whole
    pools = sparse.editor.pools(prune(whole, to=0.2647))
    assert [pool.kept for pool in pools] == [13, 13, 13, 11]  # 50
    assert sparse.can_be_pruned
    with sparse.pruned():
        assert counts(sparse) == [14, 13, 13, 10]
    sparse.prune()
    assert counts(sparse) == [14, 13, 13, 10]


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")
@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.lists(st.floats(0.001, 0.99), min_size=50, max_size=50),
)
def test_erk_with_a_rising_sparsity_never_fails_by_rounding(
    shapes: list[tuple[int, int]], sparsities: list[float]
) -> None:
    sparse = SparseModel(layers(*shapes), sparsity=0.5, allocation="erk")
    for sparsity in sorted(sparsities):
        sparse.prune(to=sparsity)
        assert sparse.num_alive == num_kept(sparsity, sparse.num_prunable)


# RigL and SET


def test_rigl_swaps_a_share_that_falls_with_a_cosine() -> None:
    """alpha/2 (1 + cos(pi t / T_end)), alpha = 0.3, T_end = 12: at t = 3, 6, 9 the cosine is 0.7071, 0, -0.7071."""
    plan = list(rigl(S, sparsity=0.5, iterations=16, every=3))
    assert plan[0] == Phase(prune(ALL, to=0.5, by=By.RANDOM), iterations=3)
    shares = [stage.edits[0].share for stage in plan[1:4]]
    assert shares == pytest.approx([0.256066017, 0.15, 0.043933983], abs=1e-9)
    for stage, share in zip(plan[1:4], shares, strict=True):
        assert stage == Phase(prune(ALL, share=share), grow(ALL, to=0.5, by=By.GRADIENT), iterations=3)
    assert plan[4:] == [Phase(iterations=3), Phase(iterations=1)]


def test_set_is_rigl_that_grows_at_random() -> None:
    ours, rigls = (list(method(S, sparsity=0.5, iterations=16, every=3)) for method in (set_, rigl))
    assert ours[0] == rigls[0]
    for our, their in zip(ours[1:4], rigls[1:4], strict=True):
        assert our == Phase(their.edits[0], grow(ALL, to=0.5, by=By.RANDOM), iterations=3)
    assert ours[4:] == rigls[4:]


WEIGHTS = (0.9, -0.1, 0.4, -0.2, 0.5, 0.5, 0.5, 0.5)
"""Of which the first four live."""
FIRST_FOUR = [1, 1, 1, 1, 0, 0, 0, 0]


def one_swap(
    by: By, gradient: list[float], *, storage: str = "masked", share: float = 0.5
) -> tuple[SparseModel, Eight]:
    """Four of eight weights live; one iteration with a gradient, then a swap of a share of them."""
    model = Eight(*WEIGHTS)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    state = sparse.state_dict()
    state["masks"]["weight"] = torch.tensor([0b00001111], dtype=torch.uint8)
    sparse.load_state_dict(state)
    plan = [Phase(iterations=1), Phase(prune(ALL, share=share), grow(ALL, to=0.5, by=by), iterations=1)]
    cursor = Cursor(sparse, plan)
    optimizer = cursor.attach(still(model))
    assert alive(sparse) == FIRST_FOUR
    pass_one(model, optimizer, gradient)
    return sparse, model


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    ("gradient", "share", "expected"),
    [
        # of four alive half are dropped, -0.1 and -0.2; of the six that do not live then, |-7| and |5| are the largest
        ([9, 1, 8, 2, 3, -7, 5, 0], 0.5, [1, 0, 1, 0, 0, 1, 1, 0]),
        ([0, 6, 0, 1, 3, 2, -5, 0], 0.5, [1, 1, 1, 0, 0, 0, 1, 0]),  # one that is dropped may come back
        ([0, 0, 0, 0, 3, -7, 5, 0], 0.49, [1, 0, 1, 1, 0, 1, 0, 0]),  # 0.49 x 4 = 1.96: one is dropped
        ([0, 0, 0, 0, 3, -7, 5, 0], 0.24, FIRST_FOUR),  # 0.24 x 4 = 0.96: none is
    ],
)
def test_rigl_drops_the_smallest_and_grows_those_of_the_largest_gradient_from_zero(
    gradient: list[float], share: float, expected: list[int], storage: str
) -> None:
    sparse, model = one_swap(By.GRADIENT, gradient, storage=storage, share=share)
    assert alive(sparse) == expected
    stayed = sorted(range(4), key=lambda i: -abs(WEIGHTS[i]))[: 4 - int(4 * share)]
    assert model.weight[0].tolist() == pytest.approx([w * (i in stayed) for i, w in enumerate(WEIGHTS)])


def test_set_drops_the_smallest_and_grows_as_many_at_random() -> None:
    sparse, model = one_swap(By.RANDOM, [9, 1, 8, 2, 3, -7, 5, 0])
    mask = alive(sparse)
    assert (mask[0], mask[2], sum(mask)) == (1, 1, 4)
    assert model.weight.count_nonzero() == 2
    numbers = {i: splitmix(i, salt_of(0, 1, "weight")) for i in (1, 3, 4, 5, 6, 7)}  # seed 0; the swap's second edit
    drawn = sorted(numbers, key=lambda i: numbers[i])[-2:]
    assert mask == [int(i in (0, 2, *drawn)) for i in range(8)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_growth_by_gradient_never_drops_a_live_weight_however_large_the_gradient(
    storage: str, dtype: torch.dtype
) -> None:
    model = Eight(*WEIGHTS).to(dtype)
    sparse = SparseModel(model, sparsity=0.5, storage=storage)
    sparse.prune()
    assert alive(sparse) == [1, 0, 0, 0, 1, 1, 1, 0]
    largest = torch.finfo(dtype).max
    huge = torch.tensor([[0, largest, -largest, 0, 0, 0, 0, largest]], dtype=dtype)
    sparse.score(By.GRADIENT, [lambda: (model.weight * huge).sum()])
    sparse.grow(to=0.25, by=By.GRADIENT)
    assert alive(sparse) == [1, 1, 1, 0, 1, 1, 1, 0]


# AC/DC


def test_acdc_of_a_hundred_epochs_is_the_schedule_of_the_paper() -> None:
    """Dense to 10, sparse and dense by fives to 75, dense to 85, sparse to 100."""
    sparse, dense = prune(ALL, to=0.9), grow(ALL)
    assert list(acdc(S, sparsity=0.9, iterations=100)) == [
        Phase(iterations=10),
        *[Phase(edit, iterations=5) for _ in range(6) for edit in (sparse, dense)],  # 10, 15, ..., 65
        Phase(sparse, iterations=5),  # 70
        Phase(dense, iterations=10),  # 75
        Phase(sparse, iterations=15),  # 85
    ]


@pytest.mark.parametrize("begin", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("until", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("dense_until", [0.0, 0.5, 0.85, 1.0])
def test_acdc_trains_as_long_as_it_is_told_whatever_the_shares(begin: float, until: float, dense_until: float) -> None:
    if begin > until:
        pytest.skip("refused")
    plan = acdc(S, sparsity=0.9, iterations=33, every=4, begin=begin, until=until, dense_until=dense_until)
    assert sum(stage.iterations for stage in plan) == 33
    assert plan[-1].edits == (prune(ALL, to=0.9),)


@pytest.mark.parametrize("method", [acdc, admm, gmp])
def test_what_ends_before_it_begins_is_refused(method: Any) -> None:
    with pytest.raises(GrowpruneError, match=r"^begin must be <= until, got begin=0.8 and until=0.5$"):
        method(S, sparsity=0.9, iterations=10, begin=0.8, until=0.5)


# A random mask that stays


def test_static_random_looks_at_no_weight_and_never_changes() -> None:
    masks = []
    for values in (range(8), range(8, 0, -1)):
        model = Eight(*map(float, values))
        sparse = SparseModel(model, sparsity=0.75, allocation="uniform")
        cursor = Cursor(sparse, static_random(S, sparsity=0.75, iterations=3))
        optimizer = cursor.attach(torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(3):
            masks.append(alive(sparse))
            pass_one(model, optimizer, [1.0] * 8)
        assert cursor.is_over
        assert model.weight.flatten().tolist() == [m * (v - 3) for m, v in zip(masks[-1], values, strict=True)]
    assert masks == [[0, 1, 0, 1, 0, 0, 0, 0]] * 6


# ADMM


def test_admm_is_three_phases_of_which_one_has_a_rule() -> None:
    assert list(admm(S, sparsity=0.75, iterations=20, every=2, rho=0.1)) == [
        Phase(iterations=8),
        Phase(iterations=7, rule=Admm(ALL, to=0.75, rho=0.1, every=2)),
        Phase(prune(ALL, to=0.75), iterations=5),
    ]


def test_gmp_prunes_eight_weights_by_its_cubic() -> None:
    model = Eight(0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8)
    sparse = SparseModel(model, sparsity=0.8, allocation="uniform")
    cursor = Cursor(sparse, gmp(S, sparsity=0.8, iterations=16, every=2, begin=0.125, until=0.75))
    masks = {}
    for iteration in range(16):
        cursor.advance(iteration)
        masks[iteration] = alive(sparse)
    # 8 (1 - s) is 8, 8, 4.88, 2.98, 2.01, 1.65, 1.6
    assert masks[0] == masks[3] == [1, 1, 1, 1, 1, 1, 1, 1]
    assert masks[4] == masks[5] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert masks[6] == masks[7] == [0, 0, 0, 0, 0, 1, 1, 1]
    assert masks[8] == masks[15] == [0, 0, 0, 0, 0, 0, 1, 1]


def test_gmp_with_one_edit_is_one_shot_pruning() -> None:
    assert list(gmp(S, sparsity=0.5, iterations=4, every=9, begin=0.5, until=0.5)) == [
        Phase(iterations=2),
        Phase(prune(ALL, to=0.5), iterations=2),
    ]


def test_acdc_masks_of_six_weights() -> None:
    model = Eight(0.1, -0.2, 0.3, -0.4, 0.5, -0.6)
    sparse = SparseModel(model, sparsity=0.5, allocation="uniform")
    cursor = Cursor(sparse, acdc(S, sparsity=0.5, iterations=8, every=2, begin=0.25, until=0.75, dense_until=0.875))
    masks = []
    for iteration in range(8):
        cursor.advance(iteration)
        masks.append(alive(sparse))
        with torch.no_grad():
            model.weight += 1.0  # as training would
        sparse.enforce()
    whole, half = [1] * 6, [1, 0, 1, 0, 1, 0]  # after two iterations, those that were positive are the largest
    assert masks == [whole, whole, half, half, whole, whole, whole, half]


def test_static_random_is_one_phase() -> None:
    assert list(static_random(S, sparsity=0.75, iterations=6)) == [
        Phase(prune(ALL, to=0.75, by=By.RANDOM), iterations=6)
    ]
