"""What users hand over (names, sparsities, seeds), checked and made plain Python values where it comes in.

Standard library only. What comes out can be used twice, compared, and written as JSON.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Rational, Real
from typing import Any

from growprune.errors import GrowpruneError


def as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """Names or globs as a tuple; an iterator would be empty when it is read again.

    >>> as_names(iter(["head", "embed*"]), "keep_dense")
    ('head', 'embed*')
    """
    if isinstance(names, str):
        raise GrowpruneError(f"{argument} is the text {names!r}, but must be a list of names or globs: [{names!r}]")
    listed = tuple(names) if isinstance(names, Iterable) else (names,)
    for name in listed:
        if not isinstance(name, str):
            raise GrowpruneError(f"{argument} has {name!r}, but must be a list of names or globs, as texts")
    return listed


def as_float(number: Any) -> float:
    """A number as a Python float, as it is written: the float32 nearest to 0.9 means 0.9.

    >>> import numpy
    >>> as_float(numpy.float32(0.9))
    0.9
    """
    return float(number) if isinstance(number, float | Rational) else float(str(number))


def plain(value: Any) -> Any:
    """A whole number of another kind (numpy's, torch's) as a Python int; anything else, switches too, as it is.

    >>> import numpy
    >>> plain(numpy.int64(3)), plain(0.5), plain(True)
    (3, 0.5, True)
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    with contextlib.suppress(TypeError):  # a tensor of floats has an __index__ too, which refuses
        return operator.index(value)
    return value


def as_seed(seed: Any) -> int:
    """A whole number as a Python int."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise GrowpruneError(f"seed is {seed!r}, but must be a whole number, such as 0")
    return int(seed)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no switch."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and abs(value) < math.inf


def check_sparsity(sparsity: float) -> None:
    if not is_number(sparsity) or not 0 <= sparsity < 1:
        raise GrowpruneError(f"sparsity is {sparsity!r}, but it is the fraction of zeros: give a number in [0, 1)")


def check_share(**shares: float) -> None:
    for name, share in shares.items():
        if not is_number(share) or not 0 <= share <= 1:
            raise GrowpruneError(f"{name} is {share!r}, but it is a share of a whole: give a number in [0, 1]")


def check_rise(*, start: float, sparsity: float) -> None:
    """Raise unless a sparsity can rise from one to the other."""
    check_sparsity(sparsity)
    check_share(start=start)
    if start > sparsity:
        raise GrowpruneError(f"start is {start!r}, but the sparsity to reach is {sparsity!r}: give at most that")


def check_span(*, begin: float, until: float) -> None:
    """Raise unless two shares of a training are its part from one to the other."""
    check_share(begin=begin, until=until)
    if begin > until:
        raise GrowpruneError(f"begin is {begin!r}, but until is {until!r}: give a begin of at most until")


def check_counts(least: int, **counts: int) -> None:
    for name, count in counts.items():
        whole = plain(count)
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < least:
            raise GrowpruneError(f"{name} is {count!r}, but must be a whole number of at least {least}")


def check_state(state: Mapping[str, Any], *names: str) -> None:
    """Raise unless a state that is to be loaded has all of these."""
    if missing := set(names) - state.keys():
        raise GrowpruneError(
            f"the state has no {', '.join(sorted(missing))}: give what this version's state_dict() returned"
        )


def step_length(*, iterations: int, every: int | None, steps: int) -> int:
    """The iterations of a step: `every`, or, where that is None, as many as cut the training into so many steps."""
    check_counts(0, iterations=iterations)
    every = max(1, iterations // steps) if every is None else every
    check_counts(1, every=every)
    return every
