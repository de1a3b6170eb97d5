"""Phases, forks, and plans: what a method yields, and the order in which one machine trains it."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeAlias, overload

from growprune.errors import GrowpruneError, shorten
from growprune.plan.edits import Action, By, Edit, Part, Parts, Spread
from growprune.plan.settings import check_counts, plain

MAX_STAGES = 100_000
"""The longest plan: an edit every iteration of a run of that many."""


@dataclass(frozen=True)
class Rule:
    """What a phase does in each iteration beside the optimizer's step, as a value; `sparse.rules` carries it out."""

    part: Part


@dataclass(frozen=True, init=False)
class Phase:
    """A few edits, then some epochs or iterations of training (none, if the phase only edits).

    Args:
        restart: begin with a fresh optimizer and the learning-rate schedule from its start, as the paper's C-GaP does.
            Without it, the optimizer goes on, with its state of the weights that survive.
        rule: what else happens in each iteration.
    """

    edits: tuple[Edit, ...]
    epochs: int
    iterations: int
    restart: bool
    rule: Rule | None

    def __init__(
        self, *edits: Edit, epochs: int = 0, iterations: int = 0, restart: bool = False, rule: Rule | None = None
    ) -> None:
        check_counts(0, epochs=epochs, iterations=iterations)
        epochs, iterations = plain(epochs), plain(iterations)
        if epochs and iterations:
            raise GrowpruneError(f"a phase has epochs={epochs} and iterations={iterations}: give one of the two")
        for before, edit in zip((None, *edits), edits, strict=False):
            if edit.spread is Spread.LOST and not _is_prune_of(before, edit.part):
                raise GrowpruneError(f"{edit} has no prune of {edit.part.name} right before it in its phase: give one")
        for name, value in zip(Phase.__dataclass_fields__, (edits, epochs, iterations, restart, rule), strict=True):
            object.__setattr__(self, name, value)

    @property
    def is_trained(self) -> bool:
        """Whether it has any iteration of training."""
        return self.epochs > 0 or self.iterations > 0

    @property
    def needs_gradients(self) -> bool:
        """Whether an edit of it looks at gradients."""
        return any(edit.by.needs_gradients for edit in self.edits)

    def num_iterations(self, per_epoch: int) -> int:
        """How many iterations it has, if an epoch has `per_epoch`."""
        return self.iterations or self.epochs * per_epoch

    def __str__(self) -> str:
        return self.say(", ".join(map(str, self.edits)))

    def say(self, edits: str) -> str:
        """What it does, with its edits in these words."""
        edits = edits or "train"
        return edits if self.rule is None else f"{edits} ({type(self.rule).__name__} on {self.rule.part.name})"


def _is_prune_of(edit: Edit | None, part: Part) -> bool:
    return edit is not None and edit.action is Action.PRUNE and edit.part == part


@dataclass(frozen=True)
class Branch:
    """What one machine does in a fork: a phase, after which it returns the part. Its optimizer is always fresh."""

    phase: Phase
    returns: Part


@dataclass(frozen=True, init=False)
class Fork:
    """Branches that start from the same model and combine: each tensor comes from the branch that returns it."""

    branches: tuple[Branch, ...]

    def __init__(self, *branches: Branch) -> None:
        owners = Counter(name for branch in branches for name in branch.returns.tensors)
        if shared := [name for name, count in owners.items() if count > 1]:
            raise GrowpruneError(f"two branches of a fork return {shared[0]!r}: every tensor can come from one only")
        object.__setattr__(self, "branches", branches)


Stage: TypeAlias = Phase | Fork


_SHORTER = {"every": "raise `every`", "steps": "lower `steps`"}
"""What makes a plan shorter, by the option of its method."""


@dataclass(frozen=True)
class Plan:
    """A method together with its arguments: list it as often as you like, it yields the same stages."""

    method: Callable[..., Iterator[Stage]]
    partition: Parts
    options: dict[str, Any]

    def __post_init__(self) -> None:
        # all of it, since a wrong option should fail where the plan is written, not where it is run
        name, count = self.method.__name__, 0
        for stage in itertools.islice(self, MAX_STAGES + 1):
            if not isinstance(stage, Phase | Fork):
                given = shorten(repr(stage), 100)
                raise GrowpruneError(f"{name} yields {given}, but a method yields phases, or forks of them")
            count += 1
        if count > MAX_STAGES:
            known = inspect.signature(self.method).parameters
            ways = [way for option, way in _SHORTER.items() if option in known] or ["yield fewer"]
            raise GrowpruneError(f"the plan of {name} has over {MAX_STAGES:,} phases: {', or '.join(ways)}")

    def __iter__(self) -> Iterator[Stage]:
        stages: object = self.method(self.partition, **self.options)
        if not isinstance(stages, Iterator):
            kind = type(stages).__name__
            raise GrowpruneError(f"{self.method.__name__} returns {kind}, but a method yields phases: write yield")
        return stages

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, i: int) -> Stage: ...
    @overload
    def __getitem__(self, i: slice) -> list[Stage]: ...
    def __getitem__(self, i: int | slice) -> Stage | list[Stage]:
        return list(self)[i]


Options = ParamSpec("Options")


Generator: TypeAlias = Callable[Concatenate[Any, Options], Iterator[Stage]]
Method: TypeAlias = Callable[Concatenate[Parts, Options], Plan]


@overload
def method(generator: Generator[Options], /) -> Method[Options]: ...
@overload
def method(*, allocation: str = ..., partition: str = ...) -> Callable[[Generator[Options]], Method[Options]]: ...
def method(generator: Any = None, /, *, allocation: str = "uniform", partition: str = "contiguous") -> Any:
    """Turn a generator of stages into a method: calling it gives a `Plan`.

    Where methods are compared and nobody says otherwise, each has the `allocation` and the kind of `partition` that it
    names here. `__wrapped__` stays reachable, so the options a method takes can be read off its signature.
    """
    if generator is None:
        return functools.partial(_method, allocation=allocation, partition=partition)
    return _method(generator, allocation=allocation, partition=partition)


def _method(generator: Generator[Options], *, allocation: str, partition: str) -> Method[Options]:
    def plan(S: Parts, /, *args: Options.args, **kwargs: Options.kwargs) -> Plan:
        if args:
            raise TypeError(f"{generator.__name__} takes the partition, then keyword arguments only")
        if not hasattr(S, "whole"):
            what = "a partition of the model, such as Partition.balanced(model, 4)"
            raise GrowpruneError(f"{generator.__name__} was given a {type(S).__name__}, but takes {what}")
        return Plan(generator, S, {name: plain(value) for name, value in kwargs.items()})

    functools.update_wrapper(plan, generator)
    plan.__dict__.update(allocation=allocation, partition=partition)
    return plan


@dataclass(frozen=True)
class ScheduledPhase:
    """One phase in the order in which a single machine trains a plan, the branches of a fork one after the other."""

    index: int
    """Its number among all of them."""
    stage: int
    """The number of the stage of the plan it belongs to."""
    branch: int | None
    """The number of the branch, if the stage is a fork."""
    phase: Phase
    returns: Part | None = None
    is_last_branch: bool = False

    @property
    def parts(self) -> list[Part]:
        """All that it names."""
        named = [edit.part for edit in self.phase.edits] + ([] if self.returns is None else [self.returns])
        return named if self.phase.rule is None else [*named, self.phase.rule.part]

    def __str__(self) -> str:
        branch = "" if self.branch is None else f", branch {self.branch}"
        return f"phase {self.index} (stage {self.stage}{branch}: {self.phase})"


def walk(plan: Plan | Sequence[Stage]) -> Iterator[ScheduledPhase]:
    """Every phase of a plan in the order in which one machine trains them."""
    if isinstance(plan, str) or not isinstance(plan, Iterable):
        example = "methods.gmp(parts, sparsity=0.9, iterations=1000)"
        raise GrowpruneError(f"the plan is {plan!r}, but must be a plan or a list of phases, such as {example}")
    index = 0
    for number, stage in enumerate(plan):
        if isinstance(stage, Phase):
            yield ScheduledPhase(index, number, None, stage)
            index += 1
            continue
        for b, branch in enumerate(stage.branches):
            last = b == len(stage.branches) - 1
            yield ScheduledPhase(index, number, b, branch.phase, branch.returns, last)
            index += 1


def next_edits(schedule: Sequence[ScheduledPhase], current: ScheduledPhase) -> list[Edit]:
    """The edits that follow when a phase is over, up to the next iteration."""
    edits: list[Edit] = []
    for index in range(current.index + 1, len(schedule)):
        edits += schedule[index].phase.edits
        if schedule[index].phase.is_trained or schedule[index].branch is not None:
            break
    return edits


def prunes_after_fork(scheduled: ScheduledPhase, schedule: Sequence[ScheduledPhase]) -> tuple[Edit, ...]:
    """What is pruned right after the fork that a branch belongs to, if that is all that is done.

    A part can be pruned so where it was trained, as long as no other part is ranked with it: the result is the same.
    One ranking of the whole model looks at the other parts, so there all parts live until they are together.
    """
    later = (schedule[index] for index in range(scheduled.index + 1, len(schedule)))
    after = next((phase for phase in later if phase.stage > scheduled.stage), None)
    edits = () if after is None or after.branch is not None else after.phase.edits
    is_plain = all(e.action is Action.PRUNE and e.by is By.MAGNITUDE and e.to is not None for e in edits)
    return edits if is_plain else ()
