"""How many groups live in each layer: the same share everywhere, Erdos-Renyi-kernel, or one ranking for all.

An allocation turns a sparsity into *pools*: sets of weights that are ranked together, and how many groups of each
live. Uniform and ERK make a pool of every weight; global makes one pool of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern


class Scope(Enum):
    """What a global ranking covers when a part is pruned."""

    MODEL = "model"
    """One threshold over the whole model, so that its total sparsity is the target."""
    PART = "part"
    """One threshold over the part alone."""


def parse_scope(name: str | Scope) -> Scope:
    known = [scope.value for scope in Scope]
    if not isinstance(name, Scope) and name not in known:
        raise GrowpruneError(f"scope is {name!r}, but must be one of {', '.join(known)}")
    return Scope(name)


def num_kept(sparsity: float, total: int) -> int:
    """How many of `total` live at a sparsity: (1 - sparsity) * total, rounded half to even, in exact arithmetic.

    >>> num_kept(0.8, 1000), num_kept(0.95, 10), num_kept(0.85, 10)
    (200, 0, 2)
    """
    return round((1 - Fraction(str(sparsity))) * total)


@dataclass(frozen=True)
class Pool:
    weights: tuple[Weight, ...]
    kept: int
    """How many groups of these weights, ranked together, live."""


Allocation = Callable[[Sequence[Weight], Sequence[Weight], float, Pattern, Scope], list[Pool]]
"""(all prunable weights, those of the part, sparsity, pattern, scope) -> pools."""


def uniform(
    model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern, scope: Scope
) -> list[Pool]:
    """Every layer has the same sparsity."""
    del model, scope
    return [Pool((w,), num_kept(sparsity, pattern.num_groups(w))) for w in part]


def erk(model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern, scope: Scope) -> list[Pool]:
    """Erdos-Renyi-kernel (Evci et al. 2020): a layer's density goes with (sum of its dimensions) / (their product).

    The densities are those of the whole model, so that parts pruned one by one add up to its sparsity.
    """
    del scope
    sizes, most = [pattern.num_groups(w) for w in model], [pattern.most_alive(w) for w in model]
    counts = erk_counts([w.shape for w in model], sizes, sparsity, most=most)
    by_name = {w.name: count for w, count in zip(model, counts, strict=True)}
    return [Pool((w,), by_name[w.name]) for w in part]


def global_(
    model: Sequence[Weight], part: Sequence[Weight], sparsity: float, pattern: Pattern, scope: Scope
) -> list[Pool]:
    """One ranking over the whole model (or over the part): layers end up with different sparsities."""
    weights = tuple(model if scope is Scope.MODEL else part)
    return [Pool(weights, num_kept(sparsity, sum(pattern.num_groups(w) for w in weights)))]


ALLOCATIONS: dict[str, Allocation] = {"uniform": uniform, "erk": erk, "global": global_}


def parse_allocation(name: str) -> Allocation:
    if name not in ALLOCATIONS:
        raise GrowpruneError(f"allocation is {name!r}, but must be one of {', '.join(ALLOCATIONS)}")
    return ALLOCATIONS[name]


def erk_counts(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], sparsity: float, *, most: Sequence[int] | None = None
) -> list[int]:
    """How many groups each layer keeps under ERK; they add up to exactly the model's sparsity.

    Args:
        sizes: how many groups each layer has.
        most: how many of them can live at once; all, if not given.

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


def shared_out(total: int, among: Sequence[float], room: Sequence[int]) -> list[int]:
    """`total` as whole numbers in proportion to `among`, none above its room; what is too much goes to the others.

    Where all that is left in proportion to is zero, the room counts.

    >>> shared_out(10, [3, 1, 1], [4, 9, 9])
    [4, 3, 3]
    """
    full: set[int] = set()
    while True:  # a layer that is full takes no more; solve again for the others
        others = [i for i in range(len(room)) if i not in full]
        share = {i: Fraction(among[i]) for i in others}
        share = share if any(share.values()) else {i: Fraction(room[i]) for i in others}
        each = (total - sum(room[i] for i in full)) / (sum(share.values()) or Fraction(1))
        exact = [share[i] * each if i in share else Fraction(room[i]) for i in range(len(room))]
        over = {i for i in others if exact[i] > room[i]}
        if not over:
            return round_to_total(exact, room, total)
        full |= over


def round_to_total(exact: Sequence[float | Fraction], sizes: Sequence[int], total: int) -> list[int]:
    """Round down, then give what is missing to the largest remainders, the earlier layer first."""
    counts = [min(int(x), size) for x, size in zip(exact, sizes, strict=True)]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in (i for _ in range(2) for i in order):
        if sum(counts) == total:
            break
        counts[i] += counts[i] < sizes[i]
    return counts
