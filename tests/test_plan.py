"""A plan says what will happen, and nothing else: it can be listed twice, and refuses bad options at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from growprune.partition import Partition
from growprune.plan import Action, Branch, By, Edit, Fork, Part, Phase, Plan, ScheduledPhase, grow, method, prune, walk

A, B = Part("A", ("a.weight",)), Part("B", ("b.weight",))
S = Partition((A, B))


@method
def one_each(S: Partition, *, epochs: int = 1) -> Iterator[Phase | Fork]:
    """Grow the parts apart, then prune the whole."""
    yield Fork(*(Branch(Phase(grow(P), epochs=epochs), returns=P) for P in S))
    yield Phase(prune(S.whole, to=0.5))


def test_prune_goes_by_magnitude_unless_told_otherwise() -> None:
    assert prune(A, to=0.9) == Edit(Action.PRUNE, A, By.MAGNITUDE, 0.9)
    assert prune(A, to=0.9, by=By.RANDOM) == Edit(Action.PRUNE, A, By.RANDOM, 0.9)


def test_grow_goes_to_dense_unless_told_otherwise() -> None:
    assert grow(A) == Edit(Action.GROW, A, By.RANDOM, 0.0)
    assert grow(A, to=0.5) == Edit(Action.GROW, A, By.RANDOM, 0.5)


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.0, 1.5, float("nan"), float("inf")])
def test_an_edit_refuses_a_sparsity_outside_zero_to_one(sparsity: float) -> None:
    with pytest.raises(ValueError, match=r"fraction of zeros: give a number in \[0, 1\)"):
        prune(A, to=sparsity)
    with pytest.raises(ValueError, match=f"sparsity is {sparsity}"):
        grow(A, to=sparsity)


@pytest.mark.parametrize("epochs", [-1, 1.5, True, "3", None])
def test_a_phase_refuses_epochs_that_are_no_count(epochs: int) -> None:
    with pytest.raises(ValueError, match=r"epochs is .* but must be a whole number of at least 0"):
        Phase(epochs=epochs)


def test_edits_and_phases_print_as_sentences() -> None:
    assert str(prune(A, to=0.9)) == "prune A to 0.9"
    assert str(prune(A, to=0.9, by=By.RANDOM)) == "prune A to 0.9 by random"
    assert str(Phase(prune(A, to=0.95), grow(B, to=0.5), epochs=3)) == "prune A to 0.95, grow B to 0.5 at random"
    assert str(Phase(grow(B))).startswith("grow B to dense")
    assert str(Phase(epochs=3)) == "train"


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


def test_a_method_keeps_its_name_its_docstring_and_its_signature() -> None:
    assert one_each.__name__ == "one_each"  # type: ignore[attr-defined]
    assert one_each.__doc__ == "Grow the parts apart, then prune the whole."
    assert one_each.__wrapped__.__kwdefaults__ == {"epochs": 1}  # type: ignore[attr-defined]


def test_walking_takes_the_branches_of_a_fork_one_after_the_other() -> None:
    grow_a, grow_b, end = Phase(grow(A), epochs=1), Phase(grow(B), epochs=1), Phase(prune(S.whole, to=0.5))
    assert list(walk(one_each(S))) == [
        ScheduledPhase(0, stage=0, branch=0, phase=grow_a, returns=A, is_last_branch=False),
        ScheduledPhase(1, stage=0, branch=1, phase=grow_b, returns=B, is_last_branch=True),
        ScheduledPhase(2, stage=1, branch=None, phase=end, returns=None, is_last_branch=False),
    ]


def test_a_list_of_steps_can_be_walked_like_a_plan() -> None:
    assert list(walk(list(one_each(S)))) == list(walk(one_each(S)))
