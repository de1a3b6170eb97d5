"""A plan says what will happen, and nothing else: it can be listed twice, and refuses bad options at once."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.plan import (
    Action,
    Branch,
    By,
    Edit,
    Fork,
    Part,
    Phase,
    Plan,
    Rule,
    ScheduledPhase,
    grow,
    method,
    parse_choice,
    prune,
    walk,
)

A, B = Part("A", ("a.weight",)), Part("B", ("b.weight",))
S = Partition((A, B))


@method
def one_each(S: Partition, *, epochs: int = 1) -> Iterator[Phase | Fork]:
    """Grow the parts apart, then prune the whole."""
    yield Fork(*(Branch(Phase(grow(P), epochs=epochs), returns=P) for P in S))
    yield Phase(prune(S.whole, to=0.5))


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.0, 1.5, float("nan"), float("inf")])
def test_an_edit_refuses_a_sparsity_outside_zero_to_one(sparsity: float) -> None:
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\), got"):
        prune(A, to=sparsity)
    with pytest.raises(ValueError, match=f"sparsity must be in .*, got {sparsity}"):
        grow(A, to=sparsity)


@pytest.mark.parametrize("bad", [-1, 1.5, True, "3", None])
@pytest.mark.parametrize("name", ["epochs", "iterations"])
def test_a_phase_refuses_a_length_that_is_no_count(name: str, bad: Any) -> None:
    with pytest.raises(GrowpruneError, match=rf"^{name} must be an integer >= 0, got .*$"):
        Phase(**{name: bad})


def test_a_phase_is_told_in_epochs_or_in_iterations_but_not_in_both() -> None:
    assert Phase(epochs=3).num_iterations(10) == 30
    assert Phase(iterations=3).num_iterations(10) == 3
    assert Phase().num_iterations(10) == 0
    assert [Phase(epochs=1).is_trained, Phase(iterations=1).is_trained, Phase().is_trained] == [True, True, False]
    with pytest.raises(GrowpruneError, match=r"^a phase takes epochs or iterations, got epochs=3 and iterations=5$"):
        Phase(epochs=3, iterations=5)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), float("inf"), True, "0.3"])
@pytest.mark.parametrize("edit", [prune, grow])
def test_an_edit_refuses_a_share_outside_zero_to_one(edit: Callable[..., Edit], share: float) -> None:
    with pytest.raises(GrowpruneError, match=r"^share must be in \[0, 1\], got .*$"):
        edit(A, share=share)


def test_an_edit_has_a_sparsity_or_a_share() -> None:
    assert grow(A, share=1).share == prune(A, share=1.0).share == 1.0
    assert prune(A, share=0).share == 0.0
    for edit in (prune, grow):
        with pytest.raises(GrowpruneError, match=r"takes to= or share=, got to=0.5 and share=0.1"):
            edit(A, to=0.5, share=0.1)
    with pytest.raises(GrowpruneError, match=r"^prune takes to= or share=, got to=None and share=None$"):
        prune(A)


def test_equal_numbers_make_equal_edits_that_are_written_alike() -> None:
    assert repr(prune(A, to=0)) == repr(prune(A, to=0.0))
    assert prune(A, to=Fraction(1, 2)) == prune(A, to=0.5)
    assert isinstance(prune(A, to=Fraction(1, 2)).to, float)
    assert prune(A, to=np.float32(0.9)) == prune(A, to=0.9), "the float32 nearest to 0.9 means 0.9"
    assert repr(grow(A, share=np.float16(0.3))) == repr(grow(A, share=0.3))


def test_what_an_edit_goes_by_may_be_named() -> None:
    assert Edit(Action.PRUNE, A, "snip", 0.5).by is By.SNIP  # type: ignore[arg-type]
    with pytest.raises(GrowpruneError, match=r"^by must be one of magnitude, random, .*, got 'luck'$"):
        parse_choice(By, "luck")


def test_all_but_magnitude_and_random_look_at_gradients() -> None:
    assert [by.value for by in By if by.needs_gradients] == ["gradient", "momentum", "snip", "grasp"]
    assert Phase(prune(A, to=0.5), grow(B, to=0.5, by=By.GRADIENT)).needs_gradients
    assert not Phase(prune(A, to=0.5, by=By.RANDOM)).needs_gradients


def test_a_plan_that_never_ends_is_refused() -> None:
    @method
    def endless(S: Partition) -> Iterator[Phase]:
        while True:
            yield Phase(iterations=1)

    with pytest.raises(GrowpruneError, match=r"^the plan of endless has more than 100,000 phases: .* yield fewer$"):
        endless(S)


def test_a_method_that_yields_no_phases_is_told_so() -> None:
    @method
    def counting(S: Partition) -> Iterator[Phase]:
        yield Phase(epochs=1)
        yield 3  # type: ignore[misc]

    @method
    def listing(S: Partition) -> Iterator[Phase]:
        return [Phase(epochs=1)]  # type: ignore[return-value]

    with pytest.raises(GrowpruneError, match=r"^counting must yield Phase or Fork objects, got 3$"):
        counting(S)
    with pytest.raises(GrowpruneError, match=r"^listing must yield phases, but returns list: use yield, not return$"):
        listing(S)


def test_a_scheduled_phase_names_all_its_parts() -> None:
    (scheduled,) = walk([Phase(prune(A, to=0.5), iterations=1, rule=Rule(B))])
    assert scheduled.parts == [A, B]
    first, second = walk([Fork(Branch(Phase(grow(A)), returns=A), Branch(Phase(), returns=B))])
    assert (first.parts, second.parts) == ([A, A], [B])
    assert str(first) == "phase 0 (stage 0, branch 0: grow A to dense)"


def test_edits_and_phases_print_as_sentences() -> None:
    assert prune(A, to=0.9) == Edit(Action.PRUNE, A, By.MAGNITUDE, 0.9)
    assert grow(A) == Edit(Action.GROW, A, By.RANDOM, 0.0)
    assert str(prune(A, to=0.9)) == "prune A to 0.9"
    assert str(prune(A, to=0.9, by=By.RANDOM)) == "prune A to 0.9 by random"
    assert str(Phase(prune(A, to=0.95), grow(B, to=0.5), epochs=3)) == "prune A to 0.95, grow B to 0.5"
    assert str(prune(A, share=0.25)) == "prune 0.25 of A"
    assert str(grow(A, share=0.25, by=By.GRADIENT)) == "grow 0.25 more of A by gradient"
    assert str(grow(A, by=By.GRADIENT)) == "grow A to dense"  # all of it, so nothing is chosen
    assert str(Phase(grow(B))) == "grow B to dense"
    assert str(Phase(epochs=3)) == "train"
    assert str(Phase(iterations=3, rule=Rule(A))) == "train (Rule on A)"


def test_values_with_the_same_content_are_equal_and_cannot_be_changed() -> None:
    assert Phase(prune(A, to=0.9), epochs=1) == Phase(prune(A, to=0.9), epochs=1)
    assert Phase(prune(A, to=0.9)) != Phase(prune(A, to=0.8))
    assert Fork(Branch(Phase(), A)) == Fork(Branch(Phase(), A))
    with pytest.raises(AttributeError):
        Phase().epochs = 3  # type: ignore[misc]


def test_calling_a_method_gives_a_plan_that_lists_the_same_twice() -> None:
    plan = one_each(S, epochs=2)
    assert isinstance(plan, Plan)
    assert list(plan) == list(plan)
    assert plan == one_each(S, epochs=2)
    assert len(plan) == 2
    assert plan[-1] == Phase(prune(S.whole, to=0.5))
    assert plan[:1] == [plan[0]]


def test_a_bad_option_fails_where_the_plan_is_written() -> None:
    with pytest.raises(ValueError, match="epochs"):
        one_each(S, epochs=-1)
    with pytest.raises(TypeError, match="epoch"):
        one_each(S, epoch=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="keyword arguments only"):
        one_each(S, 1)  # type: ignore[misc]


def test_walking_takes_the_branches_of_a_fork_one_after_the_other() -> None:
    grow_a, grow_b, end = Phase(grow(A), epochs=1), Phase(grow(B), epochs=1), Phase(prune(S.whole, to=0.5))
    assert (
        list(walk(list(one_each(S))))
        == list(walk(one_each(S)))
        == [
            ScheduledPhase(0, stage=0, branch=0, phase=grow_a, returns=A, is_last_branch=False),
            ScheduledPhase(1, stage=0, branch=1, phase=grow_b, returns=B, is_last_branch=True),
            ScheduledPhase(2, stage=1, branch=None, phase=end, returns=None, is_last_branch=False),
        ]
    )
