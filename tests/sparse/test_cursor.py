"""One cursor for every loop: advanced by hand, by an optimizer, or iterated over, it does the same."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import ForkCursor, all_of, check_same_bits, frozen, loss_of, sgd, small_net, thawed, train_step
from torch import nn

import growprune as gp
from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.methods import cyclic_gap, gmp, gradual_gap, parallel_gap, rigl, static_random
from growprune.plan import By, Phase, Plan, Stage, grow, prune
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel

EPOCH = 3
"""Iterations in an epoch."""
every_storage = pytest.mark.parametrize("storage", ["masked", "compact"])


def make(**options: Any) -> tuple[SparseModel, Partition]:
    model = small_net()
    return SparseModel(model, **({"sparsity": 0.75, "allocation": "uniform"} | options)), Partition.per_layer(model)


def steps_of(S: Partition) -> list[Stage]:
    """Phases of 2, 0, 0, 1 and 3 iterations."""
    return [
        Phase(prune(S.whole, to=0.25), iterations=2),
        Phase(prune(S.whole, to=0.5)),
        Phase(grow(S[0])),
        Phase(prune(S.whole, to=0.6), iterations=1),
        Phase(prune(S.whole, to=0.75), iterations=3),
    ]


# Advancing by hand


def test_advance_does_every_edit_that_is_due_and_gives_the_phase_that_began() -> None:
    sparse, S = make()
    stages = steps_of(S)
    cursor = Cursor(sparse, stages)
    began = [cursor.advance(iteration) for iteration in range(8)]
    assert began == [stages[0], None, stages[3], stages[4], None, None, None, None]
    assert (cursor.is_over, cursor.current, cursor.iteration) == (True, None, 7)
    assert sparse.num_alive == 376


def test_advance_may_jump_over_several_phases_at_once() -> None:
    sparse, S = make()
    stages = steps_of(S)
    cursor = Cursor(sparse, stages)
    assert cursor.advance(4) == stages[4]
    assert (cursor.start, cursor.length, cursor.left, cursor.position) == (3, 3, 2, 4)
    assert sparse.editor.num_edits == 5
    assert cursor.advance(1000) is None
    assert cursor.is_over


@pytest.mark.parametrize(("sparsities", "alive"), [((), 1504), ((0.5, 0.75), 376)])
def test_a_plan_without_training_is_done_at_once(sparsities: tuple[float, ...], alive: int) -> None:
    sparse, S = make()
    cursor = Cursor(sparse, [Phase(prune(S.whole, to=sparsity)) for sparsity in sparsities])
    assert cursor.advance(0) is None
    assert cursor.is_over
    assert sparse.num_alive == alive


def test_epochs_count_as_many_iterations_as_they_are_said_to_have() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, cyclic_gap(S, sparsity=0.75, steps=2, epochs=2, finetune=1), iterations_per_epoch=EPOCH)
    starts = {i: phase.epochs for i in range(20) if (phase := cursor.advance(i)) is not None}
    assert starts == {0: 2, 6: 2, 12: 1}
    assert cursor.is_over


def test_advancing_tells_of_each_phase_as_it_begins_and_ends() -> None:
    sparse, S = make()
    told: list[tuple[str, int]] = []
    cursor = Cursor(
        sparse,
        steps_of(S),
        on_enter=lambda scheduled: told.append(("enter", scheduled.index)),
        on_leave=lambda scheduled: told.append(("leave", scheduled.index)),
    )
    cursor.advance(0)
    assert told == [("enter", 0)]
    cursor.advance(2)
    assert told[1:] == [
        ("leave", 0), ("enter", 1), ("leave", 1), ("enter", 2), ("leave", 2), ("enter", 3),
    ]  # fmt: skip


# Three loops, one result


def by_hand(sparse: SparseModel, plan: Plan | Sequence[Stage]) -> dict[str, Any]:
    """As a trainer does: says how far it is; a phase that restarts has a fresh optimizer."""
    cursor = ForkCursor(sparse, plan, iterations_per_epoch=EPOCH)
    optimizer = sparse.attach(sgd(sparse.model.parameters()))
    phase, iteration = cursor.advance(0), 0
    while not cursor.is_over:
        if phase is not None and (phase.restart or isinstance(cursor.current and cursor.current.branch, int)):
            optimizer = sparse.attach(sgd(sparse.model.parameters()))
        train_step(sparse.model, optimizer, iteration)
        iteration += 1
        phase = cursor.advance(iteration)
    return all_of(sparse, optimizer)


def by_itself(sparse: SparseModel, plan: Plan | Sequence[Stage]) -> dict[str, Any]:
    """A plain loop: each step advances."""
    cursor = ForkCursor(sparse, plan, iterations_per_epoch=EPOCH)
    optimizer = cursor.attach(sgd(sparse.model.parameters()))
    iteration = 0
    while not cursor.is_over:
        train_step(sparse.model, optimizer, iteration)
        iteration += 1
    return all_of(sparse, optimizer)


def by_following(sparse: SparseModel, plan: Plan | Sequence[Stage]) -> dict[str, Any]:
    """One's own loop over phases, with a fresh optimizer for each that restarts."""
    optimizer = sparse.attach(sgd(sparse.model.parameters()))
    iteration = 0
    cursor = ForkCursor(sparse, plan)
    for phase in cursor:
        assert cursor.current is not None
        if phase.restart or cursor.current.branch is not None:
            optimizer = sparse.attach(sgd(sparse.model.parameters()))
        for _ in range(phase.num_iterations(EPOCH)):
            train_step(sparse.model, optimizer, iteration)
            iteration += 1
    return all_of(sparse, optimizer)


CYCLIC = {"sparsity": 0.75, "steps": 3, "epochs": 1, "finetune": 2}
PLANS: dict[str, Callable[[Partition], Plan]] = {
    "restarts": lambda S: cyclic_gap(S, **CYCLIC, restart=True),
    "continues": lambda S: cyclic_gap(S, **CYCLIC, restart=False),
    "forks": lambda S: parallel_gap(S, sparsity=0.75, steps=2, epochs=1, finetune=1),
    "growth by gradient": lambda S: rigl(S, sparsity=0.75, iterations=12, every=3, drop=0.5),
}


@every_storage
@pytest.mark.parametrize("name", PLANS)
def test_advancing_by_hand_and_by_itself_and_following_are_the_same(name: str, storage: str) -> None:
    ends = []
    for loop in (by_hand, by_itself, by_following):
        sparse, S = make(storage=storage)
        ends.append(loop(sparse, PLANS[name](S)))
        assert sparse.num_alive == 376
    check_same_bits(ends[0], ends[1])
    check_same_bits(ends[0], ends[2])


def test_forks_need_a_fork_cursor() -> None:
    sparse, S = make()
    with pytest.raises(GrowpruneError, match="Cursor trains no branches of a fork"):
        Cursor(sparse, parallel_gap(S, sparsity=0.75, steps=2, epochs=1, finetune=1))
    assert sparse.waiting is None


# Optimizers


def momenta(optimizer: torch.optim.Optimizer) -> int:
    return sum("momentum_buffer" in state for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([Phase(iterations=1), Phase(iterations=1, restart=True), Phase(iterations=2)], [0, 6, 6]),
        ([Phase(iterations=1), Phase(restart=True), Phase(iterations=1)], [0]),  # also if it has no iterations
    ],
)
def test_a_phase_that_restarts_empties_the_state_of_the_optimizer_and_another_does_not(
    plan: list[Stage], expected: list[int]
) -> None:
    sparse, _ = make()
    optimizer = Cursor(sparse, plan).attach(sgd(sparse.model.parameters()))
    for iteration, had in enumerate(expected):
        train_step(sparse.model, optimizer, iteration)
        assert momenta(optimizer) == had


def test_an_optimizer_that_is_attached_twice_advances_once_a_step() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, static_random(S, sparsity=0.75, iterations=4))
    optimizer = sparse.attach(sgd(sparse.model.parameters()))
    assert cursor.attach(cursor.attach(optimizer)) is optimizer
    train_step(sparse.model, optimizer, 0)
    assert cursor.iteration == 1


@every_storage
def test_of_several_optimizers_the_one_attached_last_advances(storage: str) -> None:
    sparse, S = make(storage=storage)
    cursor = Cursor(sparse, rigl(S, sparsity=0.75, iterations=8, every=2, drop=0.5))
    weights = [p for p in sparse.model.parameters() if p.dim() > 1]
    biases = [p for p in sparse.model.parameters() if p.dim() == 1]
    first, last = cursor.attach(sgd(weights)), cursor.attach(sgd(biases))
    for iteration in range(8):
        assert cursor.iteration == iteration
        sparse.model.zero_grad()
        loss_of(sparse.model, iteration).backward()
        first.step()
        last.step()
        assert sparse.num_alive == 376
    assert cursor.is_over


# Errors


def test_advancing_backwards_is_refused() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, steps_of(S))
    cursor.advance(2)
    with pytest.raises(GrowpruneError, match=r"^advance\(1\) goes backwards: 2 iterations [^\n]*$"):
        cursor.advance(1)
    cursor.advance(2)
    with pytest.raises(GrowpruneError, match=r"advance\(-1\) goes backwards"):
        Cursor(sparse, steps_of(S)).advance(-1)


@pytest.mark.parametrize("iteration", ["3", 2.5, None, True])
def test_iterations_are_whole_numbers(iteration: Any) -> None:
    sparse, S = make()
    cursor = Cursor(sparse, steps_of(S))
    with pytest.raises(GrowpruneError, match=r"^advance takes .* an integer such as 3, got [^\n]*$"):
        cursor.advance(iteration)
    cursor.advance(torch.tensor(1))  # type: ignore[arg-type]
    assert cursor.iteration == 1 and type(cursor.iteration) is int


@pytest.mark.parametrize("order", ["socm", "scmo", "ocsm", "osmc"])
@every_storage
def test_states_may_be_loaded_in_any_order_but_a_compact_optimizers_before_its_masks(storage: str, order: str) -> None:
    def made() -> dict[str, Any]:
        sparse, S = make(storage=storage)
        cursor = Cursor(sparse, rigl(S, sparsity=0.75, iterations=8, every=2))
        return {"s": sparse, "m": sparse.model, "c": cursor, "o": cursor.attach(sgd(sparse.model.parameters()))}

    first, again = made(), made()
    for number in range(2):
        train_step(first["m"], first["o"], number)
    states = {name: frozen(thing.state_dict()) for name, thing in first.items()}
    for name in order:
        again[name].load_state_dict(thawed(states[name])[0])
    if storage == "compact" and order[0] == "o":
        for _ in range(2):
            with pytest.raises(GrowpruneError, match=r"was loaded before the SparseModel's, whose masks say"):
                train_step(again["m"], again["o"], 2)
        again["o"].load_state_dict(thawed(states["o"])[0])
    train_step(first["m"], first["o"], 2)
    train_step(again["m"], again["o"], 2)
    check_same_bits(first["m"].state_dict(), again["m"].state_dict())


def test_a_state_of_another_plan_is_refused_and_changes_nothing() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, gmp(S, sparsity=0.75, iterations=8, every=2))
    cursor.advance(5)
    state = cursor.state_dict()
    other = Cursor(make(sparsity=0.7)[0], gmp(S, sparsity=0.7, iterations=8, every=2))
    with pytest.raises(GrowpruneError, match=r"^the state belongs to phase \d of another plan: [^\n]*$"):
        other.load_state_dict(state)
    assert (other.position, other.iteration) == (-1, 0)


@pytest.mark.parametrize("change", [{"sparsity": 0.7}, {"every": 3}, {"begin": 0.5}, {"until": 0.5}, {"iterations": 9}])
def test_every_option_that_changes_what_was_done_makes_another_plan(change: dict[str, Any]) -> None:
    sparse, S = make()
    options = {"sparsity": 0.75, "iterations": 8, "every": 2}
    cursor = Cursor(sparse, gmp(S, **options))
    cursor.advance(6)
    Cursor(sparse, gmp(S, **options)).check_place(cursor.state_dict())
    changed = {**options, **change}
    other, _ = make(sparsity=changed["sparsity"])
    with pytest.raises(GrowpruneError, match="another plan"):
        Cursor(other, gmp(S, **changed)).check_place(cursor.state_dict())


def test_a_plan_that_is_over_is_not_one_that_goes_on() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, steps_of(S)[:1])
    cursor.advance(2)
    assert cursor.is_over
    with pytest.raises(GrowpruneError, match="another plan"):
        Cursor(sparse, steps_of(S)).check_place(cursor.state_dict())
    cursor = Cursor(sparse, steps_of(S))
    cursor.advance(1)
    Cursor(sparse, steps_of(S)[:1]).check_place(cursor.state_dict())  # what is to come may change
    cursor.advance(4)
    with pytest.raises(GrowpruneError, match="phase 4 of another plan"):
        Cursor(sparse, steps_of(S)[:1]).check_place(cursor.state_dict())


def test_epochs_need_their_number_of_iterations_before_anything_is_done() -> None:
    sparse, S = make()
    plan = cyclic_gap(S, sparsity=0.75, steps=2, epochs=2, finetune=1)
    for begin in (lambda c: c.advance(0), lambda c: c.attach(sgd(sparse.model.parameters()))):
        with pytest.raises(GrowpruneError, match=r"^a phase of the plan has 2 epochs [^\n]*iterations_per_epoch=len"):
            begin(Cursor(sparse, plan))
        assert sparse.num_alive == sparse.num_prunable
    assert len(list(Cursor(sparse, plan))) == 4  # one's own loop needs no such number


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
def test_iterations_per_epoch_must_be_a_count(bad: Any) -> None:
    sparse, S = make()
    with pytest.raises(GrowpruneError, match=f"^iterations_per_epoch must be an integer >= 1, got {bad}$"):
        Cursor(sparse, steps_of(S), iterations_per_epoch=bad)


def test_an_edit_that_cannot_reach_its_count_says_where_it_stands() -> None:
    sparse, S = make()
    plan = [Phase(prune(S.whole, to=0.75), iterations=4), Phase(prune(S.whole, to=0.5), iterations=1)]
    cursor = Cursor(sparse, plan)
    for iteration in range(4):
        cursor.advance(iteration)
    with pytest.raises(GrowpruneError, match=r"^phase 1 \(stage 1: prune all to 0.5\), at iteration 4: .* 0.weight"):
        cursor.advance(4)
    assert sparse.num_alive == 376
    assert (cursor.position, cursor.start) == (0, 0)


def test_a_share_that_has_no_room_to_grow_says_where_it_stands() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, [Phase(prune(S.whole, to=0.25), iterations=1), Phase(grow(S.whole, share=0.5))])
    cursor.advance(0)
    with pytest.raises(GrowpruneError, match=r"at iteration 1: cannot grow 0.5 more of all: .* at most 288$"):
        cursor.advance(1)


@every_storage
def test_growth_by_gradient_sees_the_steps_of_an_optimizer_that_nobody_attached(storage: str) -> None:
    models = []
    for is_attached in (True, False):
        sparse, S = make(storage=storage)
        cursor = Cursor(sparse, rigl(S, sparsity=0.75, iterations=8, every=2))
        cursor.advance(0)
        optimizer = sgd(sparse.model.parameters())
        if is_attached:
            sparse.attach(optimizer)
        for iteration in range(8):
            cursor.advance(iteration)
            train_step(sparse.model, optimizer, iteration)
        models.append(sparse)
    for name, mask in models[0].masks.items():
        assert torch.equal(mask, models[1].masks[name])


@pytest.mark.parametrize("by", [By.MOMENTUM, By.GRASP])
def test_what_needs_dense_tensors_is_refused_with_compact_storage_before_anything_is_done(by: By) -> None:
    sparse, S = make(storage="compact")
    plan = [Phase(prune(S.whole, to=0.5), iterations=1), Phase(prune(S.whole, to=0.75, by=by), iterations=1)]
    with pytest.raises(GrowpruneError, match=rf"^by={by.value} needs dense tensors of all weights: use"):
        Cursor(sparse, plan)
    assert sparse.num_alive == sparse.num_prunable
    with pytest.raises(GrowpruneError, match=f"by={by.value}"):
        sparse.score(by, [])
    Cursor(make()[0], plan)


# Plans that never begin, or do not fit the model


def planned(model: nn.Module, sparsity: float = 0.9) -> tuple[SparseModel, Plan]:
    sparse = SparseModel(model, sparsity, allocation="global")
    return sparse, gradual_gap(Partition.balanced(model, 2), sparsity=sparsity, iterations=20)


def test_a_model_whose_plan_was_never_begun_is_not_saved_in_silence(tmp_path: Path) -> None:
    model = small_net()
    sparse, plan = planned(model)
    cursor = Cursor(sparse, plan)
    optimizer = sgd(model.parameters())  # cursor.attach is forgotten
    with pytest.raises(GrowpruneError, match="the plan has not begun"):
        train_step(model, optimizer, 0)
    for save in (
        lambda: gp.save(sparse, tmp_path / "model.safetensors"),
        lambda: gp.save_pretrained(sparse, tmp_path / "folder"),
    ):
        with pytest.warns(UserWarning, match=r"its plan never began. Call cursor.attach\(optimizer\)"):
            save()
    del cursor


def test_a_plan_that_is_made_after_the_optimizer_was_attached_is_waited_for_too() -> None:
    model = small_net()
    sparse, plan = planned(model)
    optimizer = sparse.attach(sgd(model.parameters()))
    train_step(model, optimizer, 0)
    cursor = Cursor(sparse, plan)
    with pytest.raises(GrowpruneError, match="the plan has not begun"):
        train_step(model, optimizer, 1)
    assert next(iter(cursor)).edits
    train_step(model, optimizer, 1)


def test_a_plan_for_another_sparsity_is_refused_when_the_cursor_is_made() -> None:
    model = small_net()
    sparse, _ = planned(model, 0.8)
    _, plan = planned(small_net(), 0.9)
    with pytest.raises(GrowpruneError, match=r"gradual_gap has sparsity=0\.9, but the SparseModel has 0\.8"):
        Cursor(sparse, plan)


def test_a_plan_meant_for_another_allocation_than_the_default_is_refused() -> None:
    model = small_net()
    plan = gmp(Partition.contiguous(model, 1), sparsity=0.9, iterations=20)
    with pytest.raises(GrowpruneError, match=r"gmp is designed for allocation='global'"):
        Cursor(SparseModel(model, 0.9), plan)
    Cursor(SparseModel(model, 0.9, allocation="uniform"), plan)  # the user means it


def test_a_partition_with_other_dense_layers_than_the_model_is_refused() -> None:
    model = small_net()
    sparse = SparseModel(model, 0.9, allocation="global", keep_dense=["5"])
    plan = gradual_gap(Partition.balanced(model, 2), sparsity=0.9, iterations=20)
    with pytest.raises(GrowpruneError, match=r"has 1,504 prunable weights, but the SparseModel has 1,440"):
        Cursor(sparse, plan)
    by_hand = Partition.of(model, [["0"], ["3", "5"]], keep_dense=["5"])
    Cursor(sparse, gradual_gap(by_hand, sparsity=0.9, iterations=20))


# What is to be scored before any training


def test_a_cursor_asks_for_a_score_where_no_iteration_came_before() -> None:
    sparse, S = make()
    asked = []

    def score(by: By) -> None:
        asked.append(by)
        sparse.score(by, [lambda: sparse.model(torch.ones(1, 4, 3, 3)).square().sum()])

    plan = [Phase(prune(S.whole, to=0.5, by=By.SNIP), iterations=2), Phase(prune(S.whole, to=0.75, by=By.SNIP))]
    cursor = Cursor(sparse, plan, score=score)
    optimizer = cursor.attach(sgd(sparse.model.parameters()))
    assert asked == [By.SNIP]
    for iteration in range(2):
        train_step(sparse.model, optimizer, iteration)
    assert asked == [By.SNIP]  # the second edit saw the iteration before it
    assert sparse.num_alive == 376


# State


def test_a_plan_lives_as_long_as_its_model() -> None:
    sparse, S = make()
    cursor = Cursor(sparse, gmp(S, sparsity=0.75, iterations=4, every=1))
    optimizer = cursor.attach(sgd(sparse.model.parameters()))
    left, model = weakref.ref(cursor), sparse.model
    del cursor, sparse
    gc.collect()
    for iteration in range(4):
        train_step(model, optimizer, iteration)
    assert sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1) == 376
    assert left() is not None
    del model, S
    gc.collect()
    assert left() is None
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_of_two_cursors_of_a_model_the_one_attached_last_advances() -> None:
    sparse, S = make()
    optimizer = sgd(sparse.model.parameters())
    first = Cursor(sparse, gmp(S, sparsity=0.75, iterations=4, every=1))
    first.attach(optimizer)
    train_step(sparse.model, optimizer, 0)
    second = Cursor(sparse, [Phase(iterations=4)])
    second.attach(optimizer)
    train_step(sparse.model, optimizer, 1)
    assert (first.iteration, second.iteration) == (1, 1)


@pytest.mark.parametrize("begin", ["attach", "advance", "load"])
def test_a_model_is_trained_by_one_cursor_while_another_has_not_begun(begin: str) -> None:
    sparse, S = make()
    unused, cursor = (Cursor(sparse, static_random(S, sparsity=0.75, iterations=4)) for _ in range(2))
    optimizer = sparse.attach(sgd(sparse.model.parameters()))
    with pytest.raises(GrowpruneError, match="the optimizer steps, but the plan has not begun: call cursor"):
        train_step(sparse.model, optimizer, 0)
    if begin == "attach":
        cursor.attach(optimizer)
    elif begin == "advance":
        cursor.advance(0)
    else:
        other, _ = make()
        begun = Cursor(other, static_random(S, sparsity=0.75, iterations=4))
        begun.advance(1)
        cursor.load_state_dict(begun.state_dict())
    train_step(sparse.model, optimizer, 0)
    assert (cursor.position, unused.position) == (0, -1)


def test_the_state_is_safe_to_load_and_of_plain_values() -> None:
    sparse, S = make()
    cursor = ForkCursor(sparse, parallel_gap(S, sparsity=0.75, steps=1, epochs=1, finetune=1), iterations_per_epoch=2)
    cursor.advance(3)
    state = cursor.state_dict()
    assert (state["position"], state["iteration"], state["start"]) == (2, 3, 2)
    check_same_bits(thawed(frozen(state))[0], state)


def test_a_plan_of_another_model_is_refused_before_anything_is_done() -> None:
    sparse, _ = make()
    S = Partition.per_layer(nn.ModuleDict({"other": nn.Linear(3, 3)}))
    with pytest.raises(GrowpruneError, match=r"other\.weight"):
        Cursor(sparse, static_random(S, sparsity=0.75, iterations=1))


def test_weights_that_compact_storage_would_lose_are_not_loaded_in_silence() -> None:
    dense, _ = make(storage="compact")
    sparse, S = make(storage="compact")
    Cursor(sparse, static_random(S, sparsity=0.75, iterations=2)).attach(sgd(sparse.model.parameters()))
    with pytest.raises(GrowpruneError, match=r"1,128 weights of 0\.weight, 3\.weight, 5\.weight are non-zero"):
        sparse.model.load_state_dict(dense.model.state_dict())


def test_an_edit_that_is_refused_leaves_the_place_in_the_plan() -> None:
    sparse = SparseModel(nn.Linear(10, 10), 0.5)
    optimizer = torch.optim.SGD(sparse.model.parameters(), 0.1)
    cursor = Cursor(
        sparse, [Phase(prune(sparse.whole, to=0.5), iterations=2), Phase(prune(sparse.whole, to=0.2), iterations=2)]
    )
    cursor.attach(optimizer)
    for step in range(2):
        sparse.model(torch.ones(1, 10)).sum().backward()
        with pytest.raises(GrowpruneError, match=r"0\.2") if step == 1 else contextlib.nullcontext():
            optimizer.step()
    assert (cursor.position, cursor.start) == (0, 0)
