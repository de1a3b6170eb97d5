"""What users hand over (names, sparsities, seeds), checked and made plain Python values where it comes in.

Standard library only. What comes out can be used twice, compared, and written as JSON.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable
from numbers import Integral, Rational
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
