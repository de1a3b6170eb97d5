"""Plans: the phases of a sparsification method, as values that can be listed any number of times.

A *phase* is a few edits of the masks, then some training. There are two edits: `prune` a part and `grow` a part. Each
goes to a sparsity, or by a share of the part's live weights. A phase costs only its edits, so a method may yield one
every few iterations. In a *fork*, several machines start from the same model. Each trains its own phase and returns one
part. A method consists of nothing else.

A plan builds values and changes nothing. It can be listed, printed, costed and tested without a model, a GPU or torch.
Resuming skips the phases that are done.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, get_args, overload

from growprune.errors import GrowpruneError, shorten
from growprune.plan.settings import as_float, check_counts, check_share, check_sparsity, one_of, plain

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
    return By(one_of("initial_mask", initial_mask, get_args(InitialMask)))


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
    if isinstance(name, kind):
        return name
    return kind(one_of(kind.__name__.lower(), name, [choice.value for choice in kind]))


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
        action, is_prune = self.action.value, self.action is Action.PRUNE
        if (self.to is None) is (self.share is None):
            raise GrowpruneError(f"{action} takes to= or share=, got to={self.to} and share={self.share}")
        if self.to is not None:
            check_sparsity(self.to)
        for name in ("to", "share", "within"):
            if (value := getattr(self, name)) is not None:
                check_share(**{name: value})
                object.__setattr__(self, name, as_float(value))  # so that what is equal is written alike
        by = parse_choice(By, self.by)
        spread = None if self.spread is None else parse_choice(Spread, self.spread)
        object.__setattr__(self, "by", by)
        object.__setattr__(self, "spread", spread)
        is_prune_to = is_prune and self.to is not None
        if by is By.AS_IS and not is_prune_to:
            raise GrowpruneError(f"{action} got by=as_is, which needs prune with to=: choose another by")
        if spread is Spread.RANKING and self.share is None:
            raise GrowpruneError(f"{action} got spread=ranking and to={self.to}: use share= instead of to=")
        if spread is Spread.ERK and not is_prune_to:
            raise GrowpruneError(f"{action} got spread=erk, which needs prune with to=: use spread=None")
        if is_prune and spread not in (Spread.RANKING, Spread.ERK, None):
            raise GrowpruneError(f"prune got spread={spread.value}, which is for grow only: use ranking, erk or None")
        if spread is Spread.MOMENTUM and by is not By.MOMENTUM:
            raise GrowpruneError(f"grow got spread=momentum with by={by.value}: use by=By.MOMENTUM")
        is_to_dense = not is_prune and self.to == 0 and by is By.RANDOM and spread is None
        if self.within is not None and not is_to_dense:
            within = f"within={self.within:g}"
            raise GrowpruneError(f"{within} is only for growth to dense: call grow(part, {within})")

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


MAX_STAGES = 100_000
"""The most stages of a plan, enough for an edit in each of 100,000 iterations."""


@dataclass(frozen=True)
class Rule:
    """What a phase does in each iteration besides the optimizer's step, as a value. `sparse.rules` implements it."""

    part: Part


@dataclass(frozen=True, init=False)
class Phase:
    """A few edits, then some epochs or iterations of training (none, if the phase only edits).

    Args:
        restart: start with a fresh optimizer and restart the learning-rate schedule, as the paper's C-GaP does. If
            False, the optimizer keeps the state of the weights that survive.
        rule: what happens in each iteration besides the optimizer's step.
    """

    edits: tuple[Edit, ...]
    epochs: int
    iterations: int
    restart: bool
    rule: Rule | None

    def __init__(
        self, *edits: Edit, epochs: int = 0, iterations: int = 0, restart: bool = False, rule: Rule | None = None
    ) -> None:
        epochs, iterations = check_counts(0, epochs=epochs, iterations=iterations)
        if epochs and iterations:
            raise GrowpruneError(f"a phase takes epochs or iterations, got epochs={epochs} and iterations={iterations}")
        for before, edit in zip((None, *edits), edits, strict=False):
            follows_prune = before is not None and before.action is Action.PRUNE and before.part == edit.part
            if edit.spread is Spread.LOST and not follows_prune:
                raise GrowpruneError(f"'{edit}' needs a prune of {edit.part.name} right before it in the same phase")
        for name, value in zip(Phase.__dataclass_fields__, (edits, epochs, iterations, restart, rule), strict=True):
            object.__setattr__(self, name, value)

    @property
    def is_trained(self) -> bool:
        return self.epochs > 0 or self.iterations > 0

    @property
    def needs_gradients(self) -> bool:
        return any(edit.by.needs_gradients for edit in self.edits)

    def num_iterations(self, per_epoch: int) -> int:
        """Return the iterations of the phase, where an epoch has `per_epoch` iterations."""
        return self.iterations or self.epochs * per_epoch

    def __str__(self) -> str:
        return self.say(", ".join(map(str, self.edits)))

    def say(self, edits: str) -> str:
        """Describe the phase, given a description of its edits."""
        edits = edits or "train"
        return edits if self.rule is None else f"{edits} ({type(self.rule).__name__} on {self.rule.part.name})"


@dataclass(frozen=True)
class Branch:
    """One machine's work in a fork: train a phase with a fresh optimizer, then return one part."""

    phase: Phase
    returns: Part


@dataclass(frozen=True, init=False)
class Fork:
    """Branches that start from the same model and are merged: each tensor comes from the branch that returns it."""

    branches: tuple[Branch, ...]

    def __init__(self, *branches: Branch) -> None:
        owners = Counter(name for branch in branches for name in branch.returns.tensors)
        if shared := [name for name, count in owners.items() if count > 1]:
            raise GrowpruneError(f"two branches of a fork return {shared[0]!r}: let only one branch return each tensor")
        object.__setattr__(self, "branches", branches)


Stage: TypeAlias = Phase | Fork


@dataclass(frozen=True)
class Plan:
    """A method with its arguments: an iterable that yields the same stages each time."""

    method: Callable[..., Iterator[Stage]]
    partition: Parts
    options: dict[str, Any]

    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)
    schedule: tuple[ScheduledPhase, ...] = field(init=False, repr=False, compare=False)
    """Every phase, in the order in which one machine trains them."""

    def __post_init__(self) -> None:
        # all stages at once: a wrong option should fail where the plan is written, not where it is run
        name, stages = self.method.__name__, self.method(self.partition, **self.options)
        if not isinstance(stages, Iterator):
            raise GrowpruneError(
                f"{name} must yield phases, but returns {type(stages).__name__}: use yield, not return"
            )
        listed = tuple(itertools.islice(stages, MAX_STAGES + 1))
        for stage in listed:
            if not isinstance(stage, Phase | Fork):
                raise GrowpruneError(f"{name} must yield Phase or Fork objects, got {shorten(repr(stage), 100)}")
        if len(listed) > MAX_STAGES:
            raise GrowpruneError(
                f"the plan of {name} has more than {MAX_STAGES:,} phases: raise `every`, lower `steps`, or yield fewer"
            )
        object.__setattr__(self, "stages", listed)
        object.__setattr__(self, "schedule", tuple(_scheduled(listed)))

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"Plan({self.method.__name__}({options}), {len(self.partition)} parts)"

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, i: Any) -> Any:
        return list(self.stages)[i]


Options = ParamSpec("Options")


Generator: TypeAlias = Callable[Concatenate[Any, Options], Iterator[Stage]]
Method: TypeAlias = Callable[Concatenate[Parts, Options], Plan]


LENGTHS = ("iterations", "epochs", "epochs + finetune", "steps * epochs + finetune")
"""How parameters of a method may add up to the length of the whole training, as `@method(length=...)` declares it."""


@dataclass(frozen=True)
class Declaration:
    """What a method declares. Only the parameters named here, sparsity, iterations and epochs are filled in."""

    options: Mapping[str, inspect.Parameter]
    """All parameters of the method but the partition."""
    allocation: str = "uniform"
    """How layers share the sparsity by default."""
    partition: str = "contiguous"
    """The default kind of partition."""
    length: str | None = None
    """One of `LENGTHS`. By default "iterations", if the method takes `iterations`."""
    every: str | None = None
    """The parameter with the iterations between two edits. If its default is a number, a short training lowers it."""
    first_mask: str | None = None
    """The parameter that takes the first mask: "random", "magnitude" or "as_is"."""
    rises_from: str | None = None
    """The parameter with the first sparsity, if the sparsity rises."""
    peak: str | None = None
    """The parameter that limits the share of live weights, and so sets the first sparsity instead of `rises_from`."""
    parts: str | None = None
    """The parameter with the number of parts, if the method draws its own from a finer partition."""
    seed: str | None = None
    """The parameter with the seed of its random choices."""
    control: str | None = None
    """The parameter that makes a control of it: the same plan without growth, "start" or "peak"."""

    def __post_init__(self) -> None:
        if self.length is None and "iterations" in self.options:
            object.__setattr__(self, "length", "iterations")
        if self.length is not None and self.length not in LENGTHS:
            raise GrowpruneError(f"length must be one of {', '.join(map(repr, LENGTHS))}, got {self.length!r}")
        for name in vars(self).keys() - {"options", "allocation", "partition"}:
            for parameter in re.findall(r"\w+", getattr(self, name) or ""):
                if parameter not in self.options:
                    raise GrowpruneError(
                        f"@method declares {name}={getattr(self, name)!r}, but the method has no parameter "
                        f"{parameter!r}; it has {', '.join(self.options) or 'none'}"
                    )


def declaration_of(method: Any) -> Declaration:
    found = getattr(method, "declaration", None)
    if not isinstance(found, Declaration):
        name = getattr(method, "__name__", repr(method))
        raise GrowpruneError(f"{name} is not a method. Decorate it with @growprune.method")
    return found


@overload
def method(generator: Generator[Options], /) -> Method[Options]: ...
@overload
def method(**declared: str) -> Callable[[Generator[Options]], Method[Options]]: ...
def method(generator: Any = None, /, **declared: str) -> Any:
    """Decorate a generator of stages to make it a method, which returns a `Plan` when called.

    A training passes `sparsity` and `iterations` to a method that takes them, and `epochs` if the user gives it. All
    other parameters keep their defaults or are options of the user, unless the method declares what they are.

    Args:
        declared: the fields of `Declaration`, such as allocation="global" or rises_from="start".
    """
    if generator is None:
        return functools.partial(method, **declared)
    generator.__name__ = generator.__name__.removesuffix("_")  # which keeps `set_` apart from Python's own `set`
    parameters = list(inspect.signature(generator).parameters.values())[1:]
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    generator.declaration = Declaration(named, **declared)

    def plan(S: Any, /, *args: Any, **kwargs: Any) -> Plan:
        if args:
            raise TypeError(f"{generator.__name__} takes the partition, then keyword arguments only")
        if not hasattr(S, "whole"):
            what = "a partition such as Partition.balanced(model, 4)"
            raise GrowpruneError(f"the first argument of {generator.__name__} must be {what}, got a {type(S).__name__}")
        return Plan(generator, S, {name: plain(value) for name, value in kwargs.items()})

    return functools.update_wrapper(plan, generator)  # its declaration too


@dataclass(frozen=True)
class ScheduledPhase:
    """A phase with its place in the order in which one machine trains a plan. Branches of a fork follow one another."""

    index: int
    """The number of the phase among all phases."""
    stage: int
    """The number of its stage in the plan."""
    branch: int | None
    """The number of its branch, if the stage is a fork."""
    phase: Phase
    returns: Part | None = None
    is_last_branch: bool = False

    @property
    def parts(self) -> list[Part]:
        """Every part that the phase names."""
        named = [edit.part for edit in self.phase.edits] + ([] if self.returns is None else [self.returns])
        return named if self.phase.rule is None else [*named, self.phase.rule.part]

    def __str__(self) -> str:
        branch = "" if self.branch is None else f", branch {self.branch}"
        return f"phase {self.index} (stage {self.stage}{branch}: {self.phase})"


def walk(plan: Plan | Iterable[Stage]) -> tuple[ScheduledPhase, ...]:
    """Return every phase of a plan, in the order in which one machine trains them."""
    if isinstance(plan, Plan):
        return plan.schedule
    if isinstance(plan, str) or not isinstance(plan, Iterable):
        example = "methods.gmp(parts, sparsity=0.9, iterations=1000)"
        raise GrowpruneError(f"plan must be a plan or a list of phases, such as {example}, got {plan!r}")
    return tuple(_scheduled(plan))


def _scheduled(stages: Iterable[Stage]) -> Iterator[ScheduledPhase]:
    numbers = itertools.count()
    for stage_number, stage in enumerate(stages):
        if isinstance(stage, Phase):
            yield ScheduledPhase(next(numbers), stage_number, None, stage)
            continue
        for b, branch in enumerate(stage.branches):
            last = b == len(stage.branches) - 1
            yield ScheduledPhase(next(numbers), stage_number, b, branch.phase, branch.returns, last)


def next_edits(schedule: Sequence[ScheduledPhase], current: ScheduledPhase) -> list[Edit]:
    """Return the edits between the end of a phase and the next iteration."""
    edits: list[Edit] = []
    for index in range(current.index + 1, len(schedule)):
        edits += schedule[index].phase.edits
        if schedule[index].phase.is_trained or schedule[index].branch is not None:
            break
    return edits


def onward(trail: str, scheduled: ScheduledPhase) -> str:
    """Return a digest of the phases up to this one, so that a cursor resumes in the same plan only."""
    phase, returns = scheduled.phase, scheduled.returns
    edits = [(e.action.value, _digest(e.part), e.criterion, e.to, e.share, e.spread, e.within) for e in phase.edits]
    place = (scheduled.stage, scheduled.branch, None if returns is None else _digest(returns))
    how = (phase.epochs, phase.iterations, phase.restart, repr(phase.rule))
    return hashlib.sha256(f"{trail}{edits}{place}{how}".encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest(part: Part) -> str:
    return hashlib.sha256(repr(part).encode()).hexdigest()


SEARCH, ROUNDS = 0.4, 2
"""The share of the training in which grow-and-prune searches, and how often it grows each part in that time."""
LEAST_EDITS = 40
"""The fewest edits in a training, for a method that edits every few iterations."""


def fill_lengths(
    method: Callable[..., Plan], given: Mapping[str, Any], total: int, *, parts: int, branches: int = 1
) -> dict[str, int]:
    """Return the lengths with which a method's phases fill a whole training; none if it declares no length.

    Args:
        given: the options that are already set. Lengths among them are kept; the others follow from them.
        total: the length of the training, in iterations for a method that counts those, else in epochs. If the given
            lengths exceed it, so do the returned ones.
        parts: the number of parts of the model.
        branches: the number of branches that each step trains. All of them count.

    Examples:
        >>> from growprune.methods import cyclic_gap, gmp
        >>> fill_lengths(cyclic_gap, {"finetune": 10}, 30, parts=4)
        {'steps': 8, 'epochs': 2, 'finetune': 10}
        >>> fill_lengths(gmp, {}, 2000, parts=1)
        {'iterations': 2000, 'every': 50}
    """
    about = declaration_of(method)
    if about.length is None:
        return {}
    if about.length == "iterations":
        filled = {"iterations": total}
        if about.every and isinstance(usual := about.options[about.every].default, int):
            filled[about.every] = max(1, min(usual, total // LEAST_EDITS))
        return filled
    check_counts(0, **{name: given[name] for name in ("steps", "epochs", "finetune") if name in given})
    if about.length == "epochs":
        return {"epochs": total}
    if about.length == "epochs + finetune":
        epochs = given.get("epochs", max(0, total - given.get("finetune", total - total // 2)))
        return {"epochs": epochs, "finetune": given.get("finetune", max(0, total - epochs))}
    # K steps of T epochs, then T' of fine-tuning: two rounds over all parts if there is time, else one
    of_round = max(1, (given.get(about.parts, parts) if about.parts else parts) // max(1, branches))
    rounds = ROUNDS if ROUNDS * of_round * branches <= SEARCH * total else 1
    steps = given.get("steps", rounds * of_round)
    search = total - given["finetune"] if "finetune" in given else round(SEARCH * total)
    epochs = given.get("epochs", max(1, search // max(1, steps * branches)))
    finetune = given.get("finetune", max(0, total - steps * branches * epochs))
    return {"steps": steps, "epochs": epochs, "finetune": finetune}


def plan_length(plan: Plan, iterations_per_epoch: int) -> int:
    """Return the iterations of all phases of a plan, including all branches."""
    return sum([scheduled.phase.num_iterations(iterations_per_epoch) for scheduled in walk(plan)])


MAX_ROWS = 60
"""The most rows of a file before phases that edit different parts in the same way are folded too."""


@dataclass(frozen=True)
class Row:
    """Consecutive phases that are alike."""

    phases: tuple[ScheduledPhase, ...]

    @property
    def first(self) -> ScheduledPhase:
        return self.phases[0]

    def __str__(self) -> str:
        """Describe the phases: "prune all to 0.1 ... 0.9"."""
        phase = self.first.phase
        if any(_parts(other) != _parts(self.first) for other in self.phases):
            return phase.say(f"{', '.join(edit.action.value for edit in phase.edits)} of changing parts")
        said = []
        for first, last in zip(phase.edits, self.phases[-1].phase.edits, strict=True):
            begin, end = (f"{edit.share if edit.to is None else edit.to:.4g}" for edit in (first, last))
            lead = f"{first.action.value} " if first.to is None else f"{first.action.value} {first.part.name} to "
            value, *rest = str(first).removeprefix(lead).split(" ")
            said.append(" ".join([lead + (value if first == last else f"{begin} ... {end}"), *rest]))
        return phase.say(", ".join(said))

    def to_dict(self) -> dict[str, Any]:
        phase = self.first.phase
        length = {"epochs": phase.epochs} if phase.epochs else {"iterations": phase.iterations}
        about = {"stage": self.first.stage, "edits": str(self), **length, "restart": phase.restart}
        if self.first.returns is not None:
            about |= {"branch": self.first.branch, "returns": self.first.returns.name}
        return about | ({"times": len(self.phases)} if len(self.phases) > 1 else {})


def fold(schedule: Iterable[ScheduledPhase], most: int = MAX_ROWS) -> list[Row]:
    """Fold a schedule into rows, each for one or more consecutive phases that are alike.

    Args:
        most: the most rows before phases that edit different parts in the same way are folded too.

    >>> from growprune import methods, Partition
    >>> from growprune.plan import Part, walk
    >>> S = Partition((Part("S0", ("w",)),))
    >>> [f"{len(row.phases)} x {row}" for row in fold(walk(methods.gmp(S, sparsity=0.9, iterations=1000, every=10)))]
    ['1 x train', '65 x prune all to 0 ... 0.9', '1 x prune all to 0.9']
    """
    schedule = list(schedule)
    rows = [Row(tuple(group)) for _, group in groupby(schedule, key=_alike)]
    if len(rows) > most:
        rows = [Row(tuple(group)) for _, group in groupby(schedule, key=lambda s: _alike(s)[:-1])]
    return rows


def _alike(scheduled: ScheduledPhase) -> tuple[Any, ...]:
    """Return a key that is equal for phases that differ only in the degree of their edits. Its last item: the parts."""
    phase = scheduled.phase
    what = tuple((e.action, e.by, e.score, e.to is None, e.spread, e.within) for e in phase.edits)
    return (what, phase.epochs, phase.iterations, phase.restart, phase.rule, scheduled.returns, _parts(scheduled))


def _parts(scheduled: ScheduledPhase) -> tuple[str, ...]:
    return tuple(edit.part.name for edit in scheduled.phase.edits)
