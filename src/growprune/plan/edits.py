"""The two edits of masks, prune and grow, as values: which part, which sparsity, and how weights are chosen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from growprune.errors import GrowpruneError
from growprune.plan.settings import as_float, check_share, check_sparsity

Score: TypeAlias = Callable[..., Any]
"""A criterion of your own: (weight) -> scores, or (weight, gradient) -> scores, where higher is better.

It is called once for each parameter of an edit, with the dense weight and the gradient of the last iteration. It gives
a floating-point tensor of the same shape without NaN or infinity. A block has the sum of its scores. A function of one
argument needs no gradients. Its name takes part in the check that a resumed plan is the same.
"""


class By(Enum):
    """The criterion by which an edit chooses weights: those with the highest scores stay or grow.

    w is a weight, g its gradient, and H the Hessian of the loss. A function is a criterion of your own (`Score`).

    - MAGNITUDE: |w|
    - RANDOM: a hash of the seed, the edit and the position
    - GRADIENT: |g| in the iteration before the edit, of dead weights too
    - MOMENTUM: |m|, where m is 0.9 m + 0.1 g after each iteration of the phase before the edit
    - SNIP: |w g|, in the iteration before the edit (Lee et al., ICLR 2019)
    - GRASP: w (H g), with its sign (Wang et al., ICLR 2020)
    - AS_IS: keep the present mask; it is an error if the model is not at the target sparsity already

    All but MAGNITUDE, RANDOM and AS_IS need gradients.
    """

    MAGNITUDE = "magnitude"
    RANDOM = "random"
    GRADIENT = "gradient"
    MOMENTUM = "momentum"
    SNIP = "snip"
    GRASP = "grasp"
    AS_IS = "as_is"

    @property
    def needs_gradients(self) -> bool:
        """True if the criterion needs gradients."""
        return self not in (By.MAGNITUDE, By.RANDOM, By.AS_IS)


InitialMask: TypeAlias = Literal["random", "magnitude", "as_is"]
"""The first mask of a method that starts sparse: "random" for new weights, "magnitude" for trained weights, "as_is" for
a model that is sparse already."""


def first_by(initial_mask: InitialMask) -> By:
    """Return the criterion of a method's first prune.

    Examples:
        >>> first_by("magnitude")
        <By.MAGNITUDE: 'magnitude'>
    """
    if initial_mask not in get_args(InitialMask):
        known = ", ".join(map(repr, get_args(InitialMask)))
        raise GrowpruneError(f"initial_mask must be one of {known}, got {initial_mask!r}")
    return By(initial_mask)


class Action(Enum):
    PRUNE = "prune"
    GROW = "grow"


class Spread(Enum):
    """How an edit divides weights among the layers of a part, where this differs from the model's allocation."""

    RANKING = "ranking"
    """By one ranking of all weights of the part. For `share=`, which then counts all live weights of the part."""
    LIVE = "live"
    """In proportion to each layer's live weights. For growth; a layer without live weights gets none."""
    MOMENTUM = "momentum"
    """In proportion to the mean |momentum| of each layer's live weights. For growth by momentum."""
    LOST = "lost"
    """Each layer regains what the previous edit took from it. For growth right after a prune of the same part, in the
    same phase, with allocation="global". Other allocations fix the counts of each layer themselves."""
    ERK = "erk"
    """Each layer gets its share under ERK. For the first mask of a method, `prune(..., to=)`, with allocation="global".
    Other allocations fix the counts of each layer themselves."""


Choice = TypeVar("Choice", By, Spread)


def parse_choice(kind: type[Choice], name: Choice | str) -> Choice:
    """Return a `By` or a `Spread`, given as a member or as a string."""
    known = [choice.value for choice in kind]
    if not isinstance(name, kind) and name not in known:
        raise GrowpruneError(f"{kind.__name__.lower()} must be one of {', '.join(known)}, got {name!r}")
    return kind(name)


@dataclass(frozen=True)
class Part:
    """A named set of a model's tensors: S_i in the paper."""

    name: str
    tensors: tuple[str, ...]
    """Every parameter and buffer of the part, norms and biases included: a merge needs an owner for each."""


class Parts(Protocol):
    """The interface of a partition that methods use: S[i], len(S), iteration, and the model as one part."""

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
    """The weights of each layer that are pruned or grown, as a share of its live weights, rounded down."""
    spread: Spread | None = None
    """How the layers divide the change. None: as the allocation says for `to`, the same share in each for `share`."""
    within: float | None = None
    """The largest share of the model's weights that may be live afterwards. Growth to dense stops there."""
    score: Score | None = None
    """A criterion of the user's own. `by` then says what it needs: MAGNITUDE for weights only, GRADIENT for both."""

    def __post_init__(self) -> None:
        if (self.to is None) is (self.share is None):
            raise GrowpruneError(f"{self.action.value} takes to= or share=, got to={self.to} and share={self.share}")
        if self.to is not None:
            check_sparsity(self.to)
            object.__setattr__(self, "to", as_float(self.to))  # so that what is equal is written alike
        if self.share is not None:
            check_share(share=self.share)
            object.__setattr__(self, "share", as_float(self.share))
        object.__setattr__(self, "by", parse_choice(By, self.by))
        if self.by is By.AS_IS and (self.action is Action.GROW or self.to is None):
            raise GrowpruneError(f"{self.action.value} got by=as_is, which needs prune with to=: choose another by")
        if self.spread is not None:
            self._check_spread(parse_choice(Spread, self.spread))
        if self.within is not None:
            self._check_within(self.within)

    def _check_spread(self, spread: Spread) -> None:
        object.__setattr__(self, "spread", spread)
        if spread is Spread.RANKING and self.share is None:
            raise GrowpruneError(f"{self.action.value} got spread=ranking and to={self.to}: use share= instead of to=")
        if spread is Spread.ERK and (self.action is Action.GROW or self.to is None):
            raise GrowpruneError(f"{self.action.value} got spread=erk, which needs prune with to=: use spread=None")
        if spread not in (Spread.RANKING, Spread.ERK) and self.action is Action.PRUNE:
            raise GrowpruneError(f"prune got spread={spread.value}, which is for grow only: use ranking, erk or None")
        if spread is Spread.MOMENTUM and self.by is not By.MOMENTUM:
            raise GrowpruneError(f"grow got spread=momentum with by={self.by.value}: use by=By.MOMENTUM")

    def _check_within(self, within: float) -> None:
        check_share(within=within)
        object.__setattr__(self, "within", as_float(within))
        if self.action is Action.PRUNE or self.to != 0 or self.by is not By.RANDOM or self.spread is not None:
            raise GrowpruneError(f"within={within:g} is only for growth to dense: call grow(part, within={within:g})")

    def __str__(self) -> str:
        how = "" if self.is_usual else f" by {self.criterion}"
        how += "" if self.spread is None else f" spread by {self.spread.value}"
        how += "" if self.within is None else f" within {self.within:.4g}"
        if self.share is not None:
            more = "more of " if self.action is Action.GROW else "of "
            return f"{self.action.value} {self.share:.4g} {more}{self.part.name}{how}"
        return f"{self.action.value} {self.part.name} to {'dense' if self.to == 0 else f'{self.to:.4g}'}{how}"

    @property
    def criterion(self) -> str:
        """The name of what the edit chooses by: "magnitude", or "my_score()" for a function."""
        if self.score is None:
            return self.by.value
        return f"{getattr(self.score, '__qualname__', type(self.score).__qualname__)}()"

    @property
    def is_usual(self) -> bool:
        """True for the default choice: prune by magnitude, grow everything or at random."""
        if self.action is Action.GROW:
            return self.by is By.RANDOM or self.to == 0
        return self.by is By.MAGNITUDE and self.score is None


def _parsed(by: By | Score) -> tuple[By, Score | None]:
    """Return what a criterion needs to see, and the user's function if it is one."""
    if isinstance(by, By) or not callable(by):
        return by, None
    try:
        known = [p for p in inspect.signature(by).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        known = []
    if len(known) not in (1, 2) or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in known):
        raise GrowpruneError(
            f"by must be a function of (weight) or (weight, gradient), got {by!r}: write def my_score(weight, gradient)"
        )
    return (By.GRADIENT if len(known) == 2 else By.MAGNITUDE), by


def prune(
    part: Part,
    *,
    to: float | None = None,
    share: float | None = None,
    by: By | Score = By.MAGNITUDE,
    spread: Spread | None = None,
) -> Edit:
    """Keep the best `1 - to` of a part's weights and set the rest to exactly zero (the paper's ArgPruneTo).

    The best are the largest, unless `by` says otherwise: a `By`, or a function of your own (`Score`).

    With `share` instead of `to`, prune that share of the live weights in each layer of the part. With
    `spread=Spread.RANKING`, the share is of all live weights of the part, ranked together.

    Examples:
        >>> print(prune(Part("S0", ("fc.weight",)), to=0.9))
        prune S0 to 0.9
        >>> print(prune(Part("S0", ("fc.weight",)), share=0.3))
        prune 0.3 of S0
    """
    kind, score = _parsed(by)
    return Edit(Action.PRUNE, part, kind, to, share, spread, score=score)


def grow(
    part: Part,
    *,
    to: float | None = None,
    share: float | None = None,
    by: By | Score = By.RANDOM,
    spread: Spread | None = None,
    within: float | None = None,
) -> Edit:
    """Make more of a part's weights live, by default all of them, starting at exactly zero (the paper's ArgGrowTo).

    With `spread`, the part as a whole grows as the allocation says, but its layers divide the new weights differently.
    With `within`, growth to dense stops when this share of the model's weights is live. Under "uniform" each layer
    rounds on its own, so it may be exceeded by half a group per layer. The weights that stay dead are drawn at random
    at each growth.

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
    kind, score = _parsed(by)
    to = 0.0 if to is None and share is None else to
    return Edit(Action.GROW, part, kind, to, share, spread, within, score)
