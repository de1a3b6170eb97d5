"""Every method, against its paper's algorithm written out by hand, and all of them against one contract."""

import inspect
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy
import pytest
import torch
from plan_cases import ForkCursor, all_of, check_same_bits, frozen, options_of, phases_of, plan_of, thawed
from torch import Tensor, nn

from growprune import methods
from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.methods import METHODS, cyclic_gap, dense, one_shot, parallel_gap, random_gap
from growprune.plan import Action, Branch, By, Fork, Part, Phase, Plan, grow, prune, walk
from growprune.sparse.model import SparseModel

every_method = pytest.mark.parametrize("name", list(METHODS))
at_random = By.RANDOM


def parts(kappa: int) -> Partition:
    return Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(kappa)))


def eight_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


def disturb(model: nn.Module, sparse: SparseModel, generator: torch.Generator) -> None:
    """Stands in for training: all live weights move."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    sparse.enforce()


def test_cyclic_gap_with_two_parts_and_three_steps_is_algorithm_1() -> None:
    S = parts(2)
    assert list(cyclic_gap(S, sparsity=0.9, steps=3, epochs=10, finetune=40)) == [
        Phase(prune(S.whole, to=0.9, by=at_random), epochs=0),
        Phase(prune(S[1], to=0.9), grow(S[0]), epochs=10, restart=True),
        Phase(prune(S[0], to=0.9), grow(S[1]), epochs=10, restart=True),
        Phase(prune(S[1], to=0.9), grow(S[0]), epochs=10, restart=True),
        Phase(prune(S[0], to=0.9), epochs=40, restart=True),
    ]


def test_parallel_gap_with_two_parts_and_two_steps_is_algorithm_2() -> None:
    S = parts(2)
    fork = Fork(
        Branch(Phase(grow(S[0]), epochs=10, restart=True), S[0]),
        Branch(Phase(grow(S[1]), epochs=10, restart=True), S[1]),
    )
    assert list(parallel_gap(S, sparsity=0.9, steps=2, epochs=10, finetune=40)) == [
        Phase(prune(S.whole, to=0.9, by=at_random)),
        fork,
        Phase(prune(S.whole, to=0.9)),
        fork,
        Phase(prune(S.whole, to=0.9)),
        Phase(epochs=40, restart=True),
    ]


def test_one_shot_trains_prunes_once_and_fine_tunes() -> None:
    S = parts(2)
    assert list(one_shot(S, sparsity=0.9, epochs=5, finetune=6)) == [
        Phase(epochs=5),
        Phase(prune(S.whole, to=0.9), epochs=6, restart=True),
    ]


def test_dense_is_one_phase_without_edits() -> None:
    assert list(dense(parts(2), epochs=5)) == [Phase(epochs=5)]


def grown_in(phase: Phase) -> list[str]:
    return [edit.part.name for edit in phase.edits if edit.action is Action.GROW]


def pruned_in(phase: Phase) -> list[str]:
    return [edit.part.name for edit in phase.edits if edit.action is Action.PRUNE]


def random_phases(num_parts: int, kappa: int, seed: int = 0, steps: int = 50) -> list[Phase]:
    plan = random_gap(parts(num_parts), sparsity=0.9, steps=steps, epochs=1, finetune=2, kappa=kappa, seed=seed)
    return [step for step in plan if isinstance(step, Phase)]


@pytest.mark.parametrize(
    ("num_parts", "kappa", "size"), [(6, 3, 2), (6, 2, 3), (7, 2, 3), (7, 3, 2), (5, 5, 1), (9, 2, 4)]
)
def test_random_gap_draws_a_share_of_the_parts_and_none_of_the_previous(num_parts: int, kappa: int, size: int) -> None:
    start, *steps, end = random_phases(num_parts, kappa)
    assert start == Phase(prune(parts(num_parts).whole, to=0.9, by=at_random))
    previous: list[str] = []
    for phase in steps:
        grown = grown_in(phase)
        assert len(set(grown)) == len(grown) == size
        assert not set(grown) & set(previous)
        assert pruned_in(phase) == previous
        previous = grown
    assert (pruned_in(end), grown_in(end), end.epochs) == (previous, [], 2)


def test_random_gap_draws_the_same_for_the_same_seed_whatever_the_global_generator_says() -> None:
    random.seed(1)
    first = random_phases(8, 3, seed=5)
    random.seed(2)
    assert random_phases(8, 3, seed=5) == first
    assert random_phases(8, 3, seed=6) != first


@pytest.mark.parametrize(
    ("kappa", "match"), [(1, ">= 2, got 1"), (0, ">= 2, got 0"), (9, "of the partition, 8, got 9")]
)
def test_random_gap_refuses_a_kappa_it_cannot_draw_with(kappa: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        random_phases(8, kappa)


@pytest.mark.parametrize("method", [cyclic_gap, parallel_gap, lambda S, **o: random_gap(S, kappa=2, **o)])
@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": -1}, {"steps": 1.0}, {"sparsity": 1.0}, {"epochs": -1}, {"finetune": 0.5}]
)
def test_bad_options_raise_at_the_call(method: Callable[..., Plan], bad: dict[str, Any]) -> None:
    options = {"sparsity": 0.9, "steps": 2, "epochs": 1, "finetune": 1} | bad
    with pytest.raises(ValueError, match=rf"(is|got) {next(iter(bad.values()))}\b"):
        method(parts(2), **options)


# What holds for every method, present and future


@every_method
def test_a_model_in_the_place_of_its_partition_is_refused_in_a_line(name: str) -> None:
    says = rf"^the first argument of {name} must be a partition such as .*, got a Linear$"
    with pytest.raises(GrowpruneError, match=says):
        METHODS[name](nn.Linear(2, 2), **options_of(name))  # type: ignore[arg-type]


COUNTS = [
    (name, count)
    for name in METHODS
    for count in ("iterations", "epochs", "steps", "every")
    if count in options_of(name)
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_a_count_may_be_any_whole_number_and_else_is_named(name: str, count: str) -> None:
    options, S = options_of(name), Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(4)))
    plan = METHODS[name](S, **options)
    for whole in (numpy.int64(options[count]), torch.tensor(options[count])):
        ours = METHODS[name](S, **{**options, count: whole})
        assert (list(ours), repr(ours)) == (list(plan), repr(plan))
        json.dumps(ours.options)
    less = {key: value for key, value in options.items() if key == count or key != "every"}
    for bad in (float(options[count]), str(options[count]), None, True, torch.tensor(2.0), -1):
        if (count, bad) != ("every", None):  # which is what a method may be given for its own choice
            with pytest.raises(GrowpruneError, match=rf"^{count} must be .* >= \d, got {re.escape(repr(bad))}$"):
                METHODS[name](S, **{**less, count: bad})


def test_an_option_of_several_methods_is_of_one_kind_in_all_of_them() -> None:
    """A recipe keeps the options that it shares with another method: one with two units would mean something else."""
    kinds: dict[str, set[Any]] = {}
    for method in METHODS.values():
        hints = get_type_hints(method.__wrapped__)  # type: ignore[attr-defined]
        for name in list(inspect.signature(method).parameters)[1:]:
            kinds.setdefault(name, set()).add(frozenset(get_args(hints[name]) or [hints[name]]) - {type(None)})
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == {}


@every_method
def test_a_plan_can_be_hashed_and_printed(name: str) -> None:
    plan = plan_of(name, parts(4))
    assert hash(tuple(plan)) == hash(tuple(plan_of(name, parts(4))))
    assert all(str(scheduled).startswith(f"phase {i} (stage ") for i, scheduled in enumerate(walk(plan)))


# Under real training, in a plain loop

EPOCH = 2
"""Iterations in an epoch."""


class Contract:
    """Four layers, a plan, and an optimizer that goes through it by itself."""

    def __init__(self, name: str, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.sparse = SparseModel(self.model, **({"sparsity": 0.75, "allocation": "uniform"} | settings))
        self.plan = plan_of(name, Partition.per_layer(self.model), sparsity=0.75)
        self.iterations = sum(scheduled.phase.num_iterations(EPOCH) for scheduled in walk(self.plan))

    def cursor(self) -> ForkCursor:
        try:
            return ForkCursor(self.sparse, self.plan, iterations_per_epoch=EPOCH, score=self.score)
        except GrowpruneError as error:
            if self.sparse.storage == "compact" and "use storage='masked'" in str(error):
                pytest.skip("needs dense tensors")
            raise

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def loss(self, number: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        return (self.model(x) - x.flip(1)).square().sum()

    def score(self, by: By) -> None:
        """Look at a loss before there was any iteration."""
        self.sparse.score(by, [lambda: self.loss(0)])

    def two_phases_on(self, iteration: int) -> int:
        """An iteration after the edits of the next two phases, or the end; of the first iteration, always the end.

        Where all states are those of a run that was left alone, the rest is, too: another test need not see it.
        """
        lengths = [scheduled.phase.num_iterations(EPOCH) for scheduled in walk(self.plan)]
        later = sorted({first for i in range(len(lengths)) if (first := sum(lengths[:i])) > iteration})
        return min(later[1] + 1, self.iterations) if iteration and later[1:] else self.iterations

    def step(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        optimizer.zero_grad()
        self.loss(iteration).backward()
        optimizer.step()


@every_method
@pytest.mark.parametrize(
    ("storage", "allocation"), [("masked", "uniform"), ("compact", "erk"), ("masked", "global"), ("compact", "global")]
)
def test_every_method_ends_at_the_target_sparsity(name: str, allocation: str, storage: str) -> None:
    case = Contract(name, allocation=allocation, storage=storage)
    cursor = case.cursor()
    optimizer = cursor.attach(case.optimizer())
    for iteration in range(case.iterations):
        assert not cursor.is_over
        case.step(optimizer, iteration)
        state = case.model.state_dict()
        assert all(int(state[name][~mask].count_nonzero()) == 0 for name, mask in case.sparse.masks.items())
    assert cursor.is_over
    alive = list(case.sparse.alive_by_weight().values())
    if "sparsity" not in case.plan.options:  # it is to stay dense
        assert alive == [64] * 4
    elif allocation == "global" or any(edit.spread for phase in walk(case.plan) for edit in phase.phase.edits):
        assert sum(alive) == 64
    else:  # the layers are alike, so Erdos-Renyi gives each the same
        assert alive == [16] * 4


@every_method
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_run_that_was_killed_goes_on_bit_for_bit_from_any_iteration(name: str, storage: str) -> None:
    whole = Contract(name, storage=storage)
    cursor = whole.cursor()
    optimizer = cursor.attach(whole.optimizer())
    saved = []
    for iteration in range(whole.iterations):
        saved.append(frozen(*(x.state_dict() for x in (whole.model, whole.sparse, cursor, optimizer))))
        whole.step(optimizer, iteration)
    saved.append(frozen(*(x.state_dict() for x in (whole.model, whole.sparse, cursor, optimizer))))

    for start, states in enumerate(saved[:-1]):
        case = Contract(name, seed=99, storage=storage)
        cursor = case.cursor()
        of_model, of_sparse, of_cursor, of_optimizer = thawed(states)
        case.model.load_state_dict(of_model)
        case.sparse.load_state_dict(of_sparse)
        cursor.load_state_dict(of_cursor)
        optimizer = cursor.attach(case.optimizer())
        optimizer.load_state_dict(of_optimizer)
        stop = case.two_phases_on(start)
        for iteration in range(start, stop):
            case.step(optimizer, iteration)
        assert cursor.is_over == (stop == case.iterations)
        reached = frozen(*(x.state_dict() for x in (case.model, case.sparse, cursor, optimizer)))
        if reached != saved[stop]:
            check_same_bits(thawed(reached), thawed(saved[stop]), f"from {start}, at {stop}: ")


@pytest.mark.parametrize("name", ["cyclic_gap", "parallel_gap", "rigl"])
def test_one_s_own_loop_over_phases_goes_on_bit_for_bit_from_any_phase(name: str) -> None:
    def follow(states: bytes | None = None) -> tuple[list[bytes], dict[str, Any]]:
        case, saved, of_optimizer = Contract(name, seed=0 if states is None else 99), [], None
        cursor, optimizer = ForkCursor(case.sparse, case.plan), case.sparse.attach(case.optimizer())
        if states is not None:
            of_model, of_sparse, of_cursor, of_optimizer = thawed(states)
            case.model.load_state_dict(of_model)
            case.sparse.load_state_dict(of_sparse)
            cursor.load_state_dict(of_cursor)
        for phase in cursor:
            assert cursor.current is not None
            if phase.restart or cursor.current.branch is not None:
                optimizer = case.sparse.attach(case.optimizer())
            if of_optimizer is not None:
                optimizer.load_state_dict(of_optimizer)
                of_optimizer = None
            saved.append(frozen(*(x.state_dict() for x in (case.model, case.sparse, cursor, optimizer))))
            for iteration in range(phase.num_iterations(EPOCH)):
                case.step(optimizer, 100 * cursor.position + iteration)
        return saved, all_of(case.sparse, optimizer)

    saved, end = follow()
    for number, states in enumerate(saved):
        check_same_bits(follow(states)[1], end, f"from phase {number}: ")


# Plans of thousands of phases


@every_method
def test_a_plan_of_thousands_of_phases_is_listed_and_resumed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Contract(name)
    S = Partition.per_layer(case.model)
    plan = list(plan_of(name, S, iterations=5_000, every=1, steps=1_000 if "parallel" in name else 5_000))
    schedule = list(walk(plan))
    stop = 4_000 if len(schedule) > 4_000 else len(schedule) - 1
    assert hash(tuple(plan))
    for what in ("apply", "restore"):  # the place in the plan is all that counts here
        monkeypatch.setattr(case.sparse, what, lambda *_: None)
    monkeypatch.setattr(case.sparse, "snapshot", lambda *_: {})
    cursor = ForkCursor(case.sparse, plan, iterations_per_epoch=EPOCH)
    for _ in cursor:
        if cursor.position == stop:
            break
    again = ForkCursor(case.sparse, plan, iterations_per_epoch=EPOCH)
    again.load_state_dict(cursor.state_dict())
    assert again.current == schedule[stop]


@pytest.mark.parametrize("name", ["cyclic_gap", "parallel_gap"])
@pytest.mark.parametrize("kappa", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_after_one_round_every_prunable_weight_has_been_trainable(name: str, kappa: int, allocation: str) -> None:
    model, generator = eight_layers(), torch.Generator().manual_seed(0)
    sparse = SparseModel(model, sparsity=0.75, allocation=allocation)
    S = Partition.contiguous(model, kappa)
    ever = {name: torch.zeros_like(mask) for name, mask in sparse.masks.items()}
    plan = plan_of(name, S, sparsity=0.75, steps={"cyclic_gap": kappa, "parallel_gap": 1}[name])
    for scheduled in phases_of(sparse, plan):
        is_finetuning = scheduled.stage == len(plan) - 1
        if scheduled.phase.epochs and not is_finetuning:
            for parameter, mask in sparse.masks.items():
                ever[parameter] |= mask
            disturb(model, sparse, generator)
    assert all(bool(mask.all()) for mask in ever.values())


def test_plans_can_be_written_without_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None
import growprune.masks.layers, growprune.masks.partition, growprune.plan
from growprune.methods import METHODS, cyclic_gap
S = growprune.masks.partition.Partition((growprune.plan.Part("S0", ("w",)),))
print(len(METHODS), len(cyclic_gap(S, sparsity=0.9, steps=2, epochs=1, finetune=1)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.split() == [str(len(METHODS)), "4"]


def test_a_method_is_called_in_strings_what_it_is_called_in_its_paper() -> None:
    assert METHODS["set"] is methods.set_
    assert METHODS["str"] is methods.str_
    assert [method.__name__ for method in METHODS.values()] == [*METHODS]
    assert not [name for name in METHODS if name.endswith("_")]
    for name in ("set", "str"):
        with pytest.raises(GrowpruneError, match=f"there is no method '{name}_'; similar: {name}"):
            methods.find_method(f"{name}_")


@every_method
def test_a_plan_listed_twice_is_the_same(name: str) -> None:
    plan = plan_of(name, parts(4))
    assert list(plan) == list(plan)
    assert list(plan) == list(plan_of(name, parts(4)))


@every_method
def test_an_unknown_option_is_refused_at_the_call(name: str) -> None:
    with pytest.raises(TypeError, match="sparsty"):
        METHODS[name](parts(2), sparsty=0.9)


def test_a_plan_that_is_too_long_names_an_option_of_its_method() -> None:
    S = Partition.contiguous(nn.Linear(2, 2), 1)
    with pytest.raises(GrowpruneError, match=r"the plan of gradual_gap has more than 100,000 phases: raise `every`"):
        METHODS["gradual_gap"](S, sparsity=0.9, iterations=200_000, every=1)
    with pytest.raises(GrowpruneError, match=r"the plan of cyclic_gap has more than 100,000 phases"):
        cyclic_gap(S, sparsity=0.9, steps=200_000, epochs=1, finetune=1)
