"""What a sparsification method says: a plan, which is a repeatable listing of phases.

Read this file first. A *phase* is a few edits of the masks, then some training. There are two edits: `prune` a part,
and `grow` a part, to a sparsity or by a share of its live weights. A phase costs its edits and nothing else, so a
method may yield one every few iterations. A *fork* sends several machines off with the same model, each through a phase
of its own, and each returns one part. That is all a method may say.

A plan builds values and touches nothing, so it can be listed, printed, costed, tested, and resumed by skipping
what is done, with no model, no GPU and no torch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, get_args, overload

from growprune.errors import GrowpruneError, shorten
from growprune.settings import as_float, check_counts, check_share, check_sparsity, plain

MAX_STAGES = 100_000
"""The longest plan: an edit every iteration of a run of that many."""


class By(Enum):
    """What decides which weights an edit chooses. All but the first two and the last look at gradients."""

    MAGNITUDE = "magnitude"
    RANDOM = "random"
    GRADIENT = "gradient"
    """The magnitude of the loss's gradient, of dead weights too, in the iteration before the edit."""
    MOMENTUM = "momentum"
    """The magnitude of the gradient's moving average over the phase before the edit."""
    SNIP = "snip"
    """|gradient x weight|: Lee et al., ICLR 2019."""
    GRASP = "grasp"
    """weight x (Hessian x gradient), the larger the better: Wang et al., ICLR 2020."""
    AS_IS = "as_is"
    """Nothing is chosen: just so many weights must live already, and it is an error if others do."""

    @property
    def needs_gradients(self) -> bool:
        """Whether it looks at gradients."""
        return self not in (By.MAGNITUDE, By.RANDOM, By.AS_IS)


def parse_by(name: str) -> By:
    known = [by.value for by in By]
    if name not in known:
        raise GrowpruneError(f"by is {name!r}, but must be one of {', '.join(known)}")
    return By(name)


InitialMask: TypeAlias = Literal["random", "magnitude", "as_is"]
"""How a method that begins sparse comes to its first mask: at random, as for new weights; by the magnitude of weights
that are trained already; or as the model is, if it is sparse already."""


def first_by(initial_mask: InitialMask) -> By:
    """What the first edit of a method goes by.

    Examples:
        >>> first_by("magnitude")
        <By.MAGNITUDE: 'magnitude'>
    """
    if initial_mask not in get_args(InitialMask):
        known = ", ".join(map(repr, get_args(InitialMask)))
        raise GrowpruneError(f"initial_mask is {initial_mask!r}, but must be one of {known}")
    return By(initial_mask)


class Action(Enum):
    PRUNE = "prune"
    GROW = "grow"


class Spread(Enum):
    """How what an edit takes or adds is shared among the layers of its part, if not as the model's allocation says."""

    RANKING = "ranking"
    """By one ranking of all their weights. For a share, which then is one of all live weights together."""
    LIVE = "live"
    """In proportion to the live weights that each layer has. For growth; a layer without any gets none."""
    MOMENTUM = "momentum"
    """In proportion to the mean |momentum| of each layer's live weights. For growth by momentum."""
    LOST = "lost"
    """Each layer gets back what it lost by the edit before. For growth right after a prune of the same part, in one
    phase, under one ranking (allocation="global"); other allocations say themselves what a layer has."""
    ERK = "erk"
    """Each layer gets its share under ERK. For the mask that a method begins with, `prune(..., to=)`, under one ranking
    (allocation="global"); other allocations say themselves what a layer has."""


def parse_spread(name: str) -> Spread:
    known = [spread.value for spread in Spread]
    if name not in known:
        raise GrowpruneError(f"spread is {name!r}, but must be one of {', '.join(known)}")
    return Spread(name)


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
    @property
    def largest_share(self) -> float: ...
    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Part: ...
    def __iter__(self) -> Iterator[Part]: ...


@dataclass(frozen=True)
class Edit:
    """One change of the masks of one part: to a sparsity, or by a share of each layer's live weights."""

    action: Action
    part: Part
    by: By
    to: float | None = None
    """The sparsity (fraction of zeros) after the edit."""
    share: float | None = None
    """How many weights of each layer it takes or adds, as a share of those that live there, rounded down."""
    spread: Spread | None = None
    """How the layers share it; None for as the allocation says, or each its own share."""
    within: float | None = None
    """The share of all weights of the model that may live after it: growth to dense stops there."""

    def __post_init__(self) -> None:
        if (self.to is None) is (self.share is None):
            raise GrowpruneError(f"{self.action.value} has to={self.to}, share={self.share}: give one of the two")
        if self.to is not None:
            check_sparsity(self.to)
            object.__setattr__(self, "to", as_float(self.to))  # so that what is equal is written alike
        if self.share is not None:
            check_share(share=self.share)
            object.__setattr__(self, "share", as_float(self.share))
        if not isinstance(self.by, By):
            object.__setattr__(self, "by", parse_by(self.by))
        if self.by is By.AS_IS and (self.action is Action.GROW or self.to is None):
            raise GrowpruneError(f"{self.action.value} goes by as_is, which is for prune with to=: give another by")
        if self.spread is not None:
            self._check_spread()
        if self.within is not None:
            self._check_within(self.within)

    def _check_spread(self) -> None:
        spread = self.spread if isinstance(self.spread, Spread) else parse_spread(str(self.spread))
        object.__setattr__(self, "spread", spread)
        if spread is Spread.RANKING and self.share is None:
            raise GrowpruneError(f"{self.action.value} has spread=ranking and to={self.to}: give share instead of to")
        if spread is Spread.ERK and (self.action is Action.GROW or self.to is None):
            raise GrowpruneError(f"{self.action.value} has spread=erk, which is for prune with to=: give None")
        if spread not in (Spread.RANKING, Spread.ERK) and self.action is Action.PRUNE:
            raise GrowpruneError(f"prune has spread={spread.value}, which is for grow: give ranking, erk, or None")
        if spread is Spread.MOMENTUM and self.by is not By.MOMENTUM:
            raise GrowpruneError(f"grow has spread=momentum, but goes by {self.by.value}: give by=By.MOMENTUM too")

    def _check_within(self, within: float) -> None:
        check_share(within=within)
        object.__setattr__(self, "within", as_float(within))
        if self.action is Action.PRUNE or self.to != 0 or self.by is not By.RANDOM or self.spread is not None:
            raise GrowpruneError(f"within={within:g} is for growth to dense: give grow a part and within alone")

    def __str__(self) -> str:
        how = "" if self.is_usual else f" by {self.by.value}"
        how += "" if self.spread is None else f" spread by {self.spread.value}"
        how += "" if self.within is None else f" within {self.within:.4g}"
        if self.share is not None:
            more = "more of " if self.action is Action.GROW else "of "
            return f"{self.action.value} {self.share:.4g} {more}{self.part.name}{how}"
        return f"{self.action.value} {self.part.name} to {'dense' if self.to == 0 else f'{self.to:.4g}'}{how}"

    @property
    def is_usual(self) -> bool:
        """Whether it chooses as one would expect if nothing is said: prune by magnitude, grow all or at random."""
        if self.action is Action.GROW:
            return self.by is By.RANDOM or self.to == 0
        return self.by is By.MAGNITUDE


def prune(
    part: Part,
    *,
    to: float | None = None,
    share: float | None = None,
    by: By = By.MAGNITUDE,
    spread: Spread | None = None,
) -> Edit:
    """ArgPruneTo: keep the best `1 - to` of a part's weights, and make the rest exactly zero.

    With `share` instead of `to`: prune that share of the live weights of each of its layers; with `spread` of
    `Spread.RANKING`, of all of them together, wherever they are.

    Examples:
        >>> print(prune(Part("S0", ("fc.weight",)), to=0.9))
        prune S0 to 0.9
        >>> print(prune(Part("S0", ("fc.weight",)), share=0.3))
        prune 0.3 of S0
    """
    return Edit(Action.PRUNE, part, by, to, share, spread)


def grow(
    part: Part,
    *,
    to: float | None = None,
    share: float | None = None,
    by: By = By.RANDOM,
    spread: Spread | None = None,
    within: float | None = None,
) -> Edit:
    """ArgGrowTo: let more of a part's weights live, all of them by default. A grown weight starts at exactly zero.

    With `spread`, the part as a whole gets as many as the allocation says, but its layers share them otherwise. With
    `within`, growth to dense stops where this share of the whole model's weights lives (under "uniform", where
    each layer rounds for itself, and half a group a layer): which of the part's weights there is no room for is
    drawn anew at each growth.

    Examples:
        >>> print(grow(Part("S0", ("fc.weight",))))
        grow S0 to dense
        >>> print(grow(Part("S0", ("fc.weight",)), to=0.9, by=By.GRADIENT))
        grow S0 to 0.9 by gradient
        >>> print(grow(Part("S0", ("fc.weight",)), to=0.9, spread=Spread.LIVE))
        grow S0 to 0.9 spread by live
        >>> print(grow(Part("S0", ("fc.weight",)), within=0.6))
        grow S0 to dense within 0.6
    """
    return Edit(Action.GROW, part, by, 0.0 if to is None and share is None else to, share, spread, within)


@dataclass(frozen=True)
class Rule:
    """What a phase does in each iteration beside the optimizer's step, as a value; `growprune.rules` carries it out."""

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
