"""Check what users pass (names, sparsities, seeds) and convert it to plain Python values.

Standard library only. The results can be read twice, compared, and written as JSON.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral, Rational, Real
from typing import Any, Literal

from growprune.errors import GrowpruneError

LARGEST_SCALING = 2.0


def as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """Return names or globs as a tuple. (An iterator would be empty when it is read again.)

    >>> as_names(iter(["head", "embed*"]), "keep_dense")
    ('head', 'embed*')
    """
    if isinstance(names, str):
        raise GrowpruneError(f"{argument} must be a list of names or globs, got {names!r}. Did you mean [{names!r}]?")
    listed = tuple(names) if isinstance(names, Iterable) else (names,)
    for name in listed:
        if not isinstance(name, str):
            raise GrowpruneError(f"{argument} must be a list of names or globs (strings), got {name!r}")
    return listed


def one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return a setting, or raise if it is not one of the allowed names."""
    if value not in (names := tuple(allowed)):
        raise GrowpruneError(f"{name} must be one of {', '.join(names)}, got {value!r}")
    return value  # type: ignore[no-any-return]


def parse_lr_scaling(given: Any) -> float | Literal["auto"]:
    """Check an lr_scaling setting.

    >>> parse_lr_scaling("auto"), parse_lr_scaling(1)
    ('auto', 1.0)
    """
    if given == "auto":
        return "auto"
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) <= LARGEST_SCALING:
        raise GrowpruneError(
            f"lr_scaling must be 'auto' or an exponent in [0, {LARGEST_SCALING:g}], got {given!r}. 0 leaves learning "
            f"rates unchanged, 1 divides them by the density of the layer"
        )
    return float(given)


def as_float(number: Any) -> float:
    """Return a number as the Python float that it prints as: numpy.float32(0.9) becomes 0.9.

    >>> import numpy
    >>> as_float(numpy.float32(0.9))
    0.9
    """
    return float(number) if isinstance(number, float | Rational) else float(str(number))


def plain(value: Any) -> Any:
    """Return an integer of numpy or torch as a Python int, and anything else (bools too) unchanged.

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
    """Return a seed as a Python int, or raise if it is not an integer."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise GrowpruneError(f"seed must be an integer, such as 0, got {seed!r}")
    return int(seed)


def is_number(value: Any) -> bool:
    """True for a finite number that is not a bool."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and abs(value) < math.inf


def check_sparsity(sparsity: float) -> None:
    if not is_number(sparsity) or not 0 <= sparsity < 1:
        is_percent = is_number(sparsity) and 2 <= sparsity < 100
        hint = f". Did you mean {as_float(sparsity) / 100:g}?" if is_percent else ""
        raise GrowpruneError(f"sparsity must be in [0, 1), got {sparsity!r}{hint}")


def check_share(**shares: float) -> None:
    for name, share in shares.items():
        if not is_number(share) or not 0 <= share <= 1:
            raise GrowpruneError(f"{name} must be in [0, 1], got {share!r}")


def check_rise(*, start: float, sparsity: float) -> None:
    """Raise unless the sparsity can rise from `start` to `sparsity`."""
    check_sparsity(sparsity)
    check_share(start=start)
    if start > sparsity:
        raise GrowpruneError(f"start must be <= sparsity, got start={start!r} and sparsity={sparsity!r}")


def check_span(*, begin: float, until: float) -> None:
    check_share(begin=begin, until=until)
    if begin > until:
        raise GrowpruneError(f"begin must be <= until, got begin={begin!r} and until={until!r}")


def check_counts(least: int, **counts: int) -> list[int]:
    """Return counts as Python ints. Raise unless they are integers >= least."""
    found = [count if type(count) is int else plain(count) for count in counts.values()]
    for name, whole in zip(counts, found, strict=True):
        if isinstance(whole, bool) or not isinstance(whole, int) or whole < least:
            raise GrowpruneError(f"{name} must be an integer >= {least}, got {counts[name]!r}")
    return found


def check_state(state: Mapping[str, Any], *names: str) -> None:
    if not isinstance(state, Mapping):
        raise GrowpruneError(f"load_state_dict takes a state dict, got a {type(state).__name__}")
    if missing := set(names) - state.keys():
        raise GrowpruneError(
            f"the state dict lacks {', '.join(sorted(missing))}: pass one that state_dict() of this version returned"
        )


def step_length(*, iterations: int, every: int | None, steps: int) -> int:
    """Return the iterations of a step: `every`, or if that is None, `iterations` divided by `steps`."""
    check_counts(0, iterations=iterations)
    every = max(1, iterations // steps) if every is None else every
    check_counts(1, every=every)
    return every
