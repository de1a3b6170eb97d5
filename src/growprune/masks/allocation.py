"""Allocations: how many groups are live in each layer (uniform, Erdos-Renyi-kernel, or one global ranking).

An allocation turns a sparsity into *pools*: sets of weights that are ranked together, and the number of live groups in
each. Uniform and ERK make one pool per weight; global makes one pool of all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern
from growprune.plan.settings import as_float, is_number, one_of

MOST_POWER = 2.0
FLOOR = Fraction(3, 100)
"""Under "global", a layer keeps at least this share of the weights that "uniform" gives it. One ranking would empty
layers with small weights otherwise, such as those with a lower learning rate."""


def num_kept(sparsity: float, total: int) -> int:
    """Return how many of `total` are live: (1 - sparsity) * total in exact arithmetic, rounded half to even.

    >>> num_kept(0.8, 1000), num_kept(0.95, 10), num_kept(0.85, 10)
    (200, 0, 2)
    """
    return round((1 - Fraction(str(sparsity))) * total)


@dataclass(frozen=True)
class Pool:
    weights: tuple[Weight, ...]
    kept: int
    """The number of live groups among these weights, which are ranked together."""
    least: tuple[int, ...] = ()
    """How many groups each weight keeps however it ranks, if it has them before a prune. Empty for no such floor."""


Allocation = Callable[[Sequence[Weight], Sequence[Weight], float, Pattern], list[Pool]]
"""(all prunable weights, those of the part, sparsity, pattern) -> pools."""


def uniform(model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern) -> list[Pool]:
    """Give every layer the same sparsity."""
    del model
    return [Pool((w,), num_kept(sparsity, pattern.num_groups(w))) for w in part]


def erk(model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern) -> list[Pool]:
    """Erdos-Renyi-kernel (Evci et al. 2020): density proportional to (sum of a layer's dimensions) / (their product).

    The densities are computed for the whole model, so that parts that are pruned one by one add up to its sparsity.
    """
    sizes, most = [pattern.num_groups(w) for w in model], [pattern.most_alive(w) for w in model]
    counts = erk_counts([w.shape for w in model], sizes, sparsity, most=most)
    by_name = {w.name: count for w, count in zip(model, counts, strict=True)}
    return [Pool((w,), by_name[w.name]) for w in part]


def global_(model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern) -> list[Pool]:
    """Rank all weights of the model together, whatever the part. Each layer keeps `FLOOR` of its uniform share."""
    sizes = [pattern.num_groups(w) for w in model]
    least = tuple([int(FLOOR * num_kept(sparsity, size)) for size in sizes])
    return [Pool(tuple(model), num_kept(sparsity, sum(sizes)), least)]


def global_no_floor(model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern) -> list[Pool]:
    """Rank all weights of the model together, whatever the part, even if a layer then has no live weights."""
    del part
    return [Pool(tuple(model), num_kept(sparsity, sum(map(pattern.num_groups, model))))]


RANKINGS = (global_, global_no_floor)
"""The allocations under which layers have no fixed counts."""
ALLOCATIONS: dict[str, Allocation] = {each.__name__.removesuffix("_"): each for each in (uniform, erk, *RANKINGS)}


def parse_allocation(name: str) -> Allocation:
    return ALLOCATIONS[one_of("allocation", name, ALLOCATIONS)]


def parse_cost_power(power: float, allocation: str) -> float:
    """Check a cost power, which only means something if one ranking divides the sparsity among layers."""
    if not is_number(power) or abs(power) > MOST_POWER:
        raise GrowpruneError(f"cost_power must be a number in [-{MOST_POWER:g}, {MOST_POWER:g}], got {power!r}")
    if power and parse_allocation(allocation) not in RANKINGS:
        raise GrowpruneError(
            f"cost_power={power:g} scales the ranking of all layers, but allocation={allocation!r} has none: use "
            f"allocation='global'"
        )
    return as_float(power)


def erk_counts(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], sparsity: float, *, most: Sequence[int] | None = None
) -> list[int]:
    """Return how many groups each layer keeps under ERK. The total matches the model's sparsity exactly.

    Args:
        sizes: the number of groups of each layer.
        most: how many of them can be live at once; by default all.

    >>> erk_counts([(10, 10), (100, 100)], [100, 10000], 0.9)
    [92, 918]
    """
    total = num_kept(sparsity, sum(sizes))
    raw = [sum(shape) / math.prod(shape) for shape in shapes]
    most = sizes if most is None else most
    full: set[int] = set()
    while True:  # a layer that would need more groups than can live is full; solve again for the others
        left = total - sum(most[i] for i in full)
        share = sum(raw[i] * sizes[i] for i in range(len(sizes)) if i not in full)
        epsilon = left / share if share else 0.0
        over = {i for i in range(len(sizes)) if i not in full and epsilon * raw[i] * sizes[i] > most[i]}
        if not over:
            break
        full |= {max(over, key=lambda i: raw[i])}
    exact = [float(most[i]) if i in full else epsilon * raw[i] * sizes[i] for i in range(len(sizes))]
    return round_to_total(exact, most, total)


def shared_out(total: int, among: Sequence[float], capacity: Sequence[int]) -> list[int]:
    """Divide `total` into integers in proportion to `among`, each at most its `capacity`. The excess goes on.

    If the remaining proportions are all zero, divide in proportion to `capacity`.

    >>> shared_out(10, [3, 1, 1], [4, 9, 9])
    [4, 3, 3]
    """
    full: set[int] = set()
    while True:  # a layer that is full takes no more; solve again for the others
        others = [i for i in range(len(capacity)) if i not in full]
        share = {i: Fraction(among[i]) for i in others}
        share = share if any(share.values()) else {i: Fraction(capacity[i]) for i in others}
        each = (total - sum(capacity[i] for i in full)) / (sum(share.values()) or Fraction(1))
        exact = [share[i] * each if i in share else Fraction(capacity[i]) for i in range(len(capacity))]
        over = {i for i in others if exact[i] > capacity[i]}
        if not over:
            return round_to_total(exact, capacity, total)
        full |= over


def round_to_total(exact: Sequence[float | Fraction], sizes: Sequence[int], total: int) -> list[int]:
    """Round down, then add the missing ones at the largest remainders, earlier layers first."""
    counts = [min(int(x), size) for x, size in zip(exact, sizes, strict=True)]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in (i for _ in range(2) for i in order):
        if sum(counts) == total:
            break
        counts[i] += counts[i] < sizes[i]
    return counts
