"""What a sparsification method says: a plan, which is a repeatable listing of phases.

Read this file first. A *phase* is a few edits of the masks, then a phase of training. There are two edits:
`prune` a part to a sparsity, and `grow` a part to a sparsity. A *fork* sends several machines off with the same
model, each through a phase of its own, and each brings back one part. That is all a method may say.

A plan builds values and touches nothing, so it can be listed, printed, costed, tested, and resumed by skipping
what is done, with no model, no GPU and no torch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, overload

from growprune.errors import GrowpruneError


class By(Enum):
    """What decides which weights an edit takes."""

    MAGNITUDE = "magnitude"
    RANDOM = "random"


def parse_by(name: str) -> By:
    known = [by.value for by in By]
    if name not in known:
        raise GrowpruneError(f"by is {name!r}, but must be one of {', '.join(known)}")
    return By(name)


class Action(Enum):
    PRUNE = "prune"
    GROW = "grow"


@dataclass(frozen=True)
class Part:
    """A named set of a model's tensors: S_i in the paper."""

    name: str
    tensors: tuple[str, ...]
    """Every parameter and buffer of the part, norms and biases included, so that a merge has an owner for each."""


class Parts(Protocol):
    """What a method needs of a partition: S[i], len(S), iteration, and the model as one part."""

    @property
    def whole(self) -> Part: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Part: ...
    def __iter__(self) -> Iterator[Part]: ...


@dataclass(frozen=True)
class Edit:
    """One change of the masks of one part."""

    action: Action
    part: Part
    to: float
    """The sparsity (fraction of zeros) after the edit."""
    by: By

    def __post_init__(self) -> None:
        check_sparsity(self.to)
        object.__setattr__(self, "to", float(self.to))  # so that what is equal is also written alike
        if not isinstance(self.by, By):
            object.__setattr__(self, "by", parse_by(self.by))

    def __str__(self) -> str:
        to = "dense" if self.to == 0 else f"{self.to:.4g}"
        how = " at random" if self.by is By.RANDOM and self.to > 0 else ""
        return f"{self.action.value} {self.part.name} to {to}{how}"


def prune(part: Part, *, to: float, by: By = By.MAGNITUDE) -> Edit:
    """ArgPruneTo: keep the best `1 - to` of a part's weights, and make the rest exactly zero.

    >>> print(prune(Part("S0", ("fc.weight",)), to=0.9))
    prune S0 to 0.9
    """
    return Edit(Action.PRUNE, part, to, by)


def grow(part: Part, *, to: float = 0.0, by: By = By.RANDOM) -> Edit:
    """ArgGrowTo: let more of a part's weights live, all of them by default. A grown weight starts at exactly zero.

    >>> print(grow(Part("S0", ("fc.weight",))))
    grow S0 to dense
    """
    return Edit(Action.GROW, part, to, by)


@dataclass(frozen=True, init=False)
class Phase:
    """A few edits, then `epochs` epochs of training (none, if the phase only edits)."""

    edits: tuple[Edit, ...]
    epochs: int

    def __init__(self, *edits: Edit, epochs: int = 0) -> None:
        check_counts(0, epochs=epochs)
        object.__setattr__(self, "edits", edits)
        object.__setattr__(self, "epochs", epochs)

    def __str__(self) -> str:
        return ", ".join(map(str, self.edits)) or "train"


@dataclass(frozen=True)
class Branch:
    """What one machine does in a fork: a phase, after which it brings back the part."""

    phase: Phase
    returns: Part


@dataclass(frozen=True, init=False)
class Fork:
    """Branches that start from the same model and combine: each tensor comes from the branch that brings it."""

    branches: tuple[Branch, ...]

    def __init__(self, *branches: Branch) -> None:
        owners = Counter(name for branch in branches for name in branch.returns.tensors)
        if shared := [name for name, count in owners.items() if count > 1]:
            raise GrowpruneError(f"two branches of a fork bring {shared[0]!r}: every tensor can come from one only")
        object.__setattr__(self, "branches", branches)


Stage: TypeAlias = Phase | Fork


@dataclass(frozen=True)
class Plan:
    """A method together with its arguments: list it as often as you like, it yields the same steps."""

    method: Callable[..., Iterator[Stage]]
    partition: Parts
    options: dict[str, Any]

    def __post_init__(self) -> None:
        for _ in self:  # a wrong option should fail where the plan is written, not where it is run
            pass

    def __iter__(self) -> Iterator[Stage]:
        return self.method(self.partition, **self.options)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, i: int) -> Stage: ...
    @overload
    def __getitem__(self, i: slice) -> list[Stage]: ...
    def __getitem__(self, i: int | slice) -> Stage | list[Stage]:
        return list(self)[i]


Options = ParamSpec("Options")


def method(
    generator: Callable[Concatenate[Any, Options], Iterator[Stage]],
) -> Callable[Concatenate[Parts, Options], Plan]:
    """Turn a generator of steps into a method: calling it gives a `Plan`.

    `__wrapped__` stays reachable, so the options a method takes can be read off its signature.
    """

    def plan(S: Parts, /, *args: Options.args, **kwargs: Options.kwargs) -> Plan:
        if args:
            raise TypeError(f"{generator.__name__} takes the partition, then keyword arguments only")
        return Plan(generator, S, dict(kwargs))

    functools.update_wrapper(plan, generator)
    return plan


@dataclass(frozen=True)
class ScheduledPhase:
    """One phase as a single machine meets it, walking a plan from left to right, a fork's branches in turn."""

    index: int
    """Its number in the walk."""
    stage: int
    """The number of the stage of the plan it belongs to."""
    branch: int | None
    """The number of the branch, if the stage is a fork."""
    phase: Phase
    returns: Part | None = None
    is_last_branch: bool = False


def walk(plan: Plan | Sequence[Stage]) -> Iterator[ScheduledPhase]:
    """Every phase of a plan in the order in which one machine takes them."""
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


def check_sparsity(sparsity: float) -> None:
    if isinstance(sparsity, bool) or not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
        raise GrowpruneError(f"sparsity is {sparsity!r}, but it is the fraction of zeros: give a number in [0, 1)")


def check_counts(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise GrowpruneError(f"{name} is {count!r}, but must be a whole number of at least {least}")
