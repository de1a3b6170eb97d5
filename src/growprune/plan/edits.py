"""The two edits of masks, prune and grow, as values: of which part, to which sparsity, chosen by what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, TypeAlias, TypeVar, get_args

from growprune.errors import GrowpruneError
from growprune.plan.settings import as_float, check_share, check_sparsity


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


Choice = TypeVar("Choice", By, Spread)


def parse_choice(kind: type[Choice], name: Choice | str) -> Choice:
    """A `By` or a `Spread`, as it is or by its name."""
    known = [choice.value for choice in kind]
    if not isinstance(name, kind) and name not in known:
        raise GrowpruneError(f"{kind.__name__.lower()} is {name!r}, but must be one of {', '.join(known)}")
    return kind(name)


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
        object.__setattr__(self, "by", parse_choice(By, self.by))
        if self.by is By.AS_IS and (self.action is Action.GROW or self.to is None):
            raise GrowpruneError(f"{self.action.value} goes by as_is, which is for prune with to=: give another by")
        if self.spread is not None:
            self._check_spread(parse_choice(Spread, self.spread))
        if self.within is not None:
            self._check_within(self.within)

    def _check_spread(self, spread: Spread) -> None:
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
