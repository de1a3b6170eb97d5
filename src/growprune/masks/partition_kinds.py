"""The kinds of partition, as values without a model: contiguous(4), balanced(4), per_layer(), named([...]).

In code, call the function of the kind. In strings, such as `--set partition=balanced(4)`, write the same call:
`parse_partition` reads it with the table `KINDS`. Trainers and methods have the number of parts elsewhere, and use only
the name of the kind. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.plan.settings import check_counts

PARTS = 4
"""The default number of parts."""


@dataclass(frozen=True)
class _InParts:
    kappa: int = PARTS

    def __post_init__(self) -> None:
        check_counts(1, kappa=self.kappa)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.kappa})"

    @property
    def num_parts(self) -> int | None:
        return self.kappa

    def cut(self, model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> Partition:
        cut = Partition.contiguous if isinstance(self, Contiguous) else Partition.balanced
        return cut(model, self.kappa, keep_dense=keep_dense, include=include)


class Contiguous(_InParts):
    """The value that `contiguous` returns."""


class Balanced(_InParts):
    """The value that `balanced` returns."""


@dataclass(frozen=True)
class Named:
    """The value that `named` returns."""

    parts: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"named({json.dumps(self.parts)})"

    @property
    def num_parts(self) -> int | None:
        return len(self.parts)

    def cut(self, model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> Partition:
        return Partition.of(model, self.parts, keep_dense=keep_dense, include=include)


@dataclass(frozen=True)
class PerLayer:
    """The value that `per_layer` returns."""

    num_parts = None
    """Unknown without a model: the number of its layers."""

    def __str__(self) -> str:
        return "per_layer()"

    def cut(self, model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> Partition:
        return Partition.per_layer(model, keep_dense=keep_dense, include=include)


PartitionConfig: TypeAlias = Contiguous | Balanced | Named | PerLayer


def contiguous(kappa: int) -> Contiguous:
    """Choose kappa parts of neighboring layers of similar size, without splitting residual or attention blocks."""
    return Contiguous(kappa)


def balanced(kappa: int) -> Balanced:
    """Choose kappa parts with about the same number of weights, from layers all over the model."""
    return Balanced(kappa)


def named(parts: Sequence[Sequence[str]]) -> Named:
    """Choose the parts by hand, as lists of module names."""
    return Named(tuple(tuple(names) for names in parts))


def per_layer() -> PerLayer:
    """Make every layer its own part, for methods that draw sets of layers."""
    return PerLayer()


KINDS: dict[str, Callable[..., PartitionConfig]] = {
    kind.__name__: kind for kind in (contiguous, balanced, per_layer, named)
}


def parse_partition(text: str, *, kappa: int | None = None) -> PartitionConfig:
    """Return the partition that a string such as "balanced(4)" names.

    Args:
        kappa: the number of parts, if the string is only the name of a kind.

    Examples:
        >>> parse_partition("balanced(4)"), parse_partition("balanced", kappa=2)
        (Balanced(kappa=4), Balanced(kappa=2))
        >>> print(parse_partition('named([["stem"], ["head"]])'))
        named([["stem"], ["head"]])
    """
    name, _, inside = text.removesuffix(")").partition("(")
    allowed = 'contiguous(4), balanced(4), per_layer(), or named([["a", "b"], ["c"]])'
    if kappa is not None:
        inside = "" if name == "per_layer" else str(kappa)
        allowed = "contiguous, balanced, per_layer, a list of lists of names, or a Partition"
    if text == (f"{name}({inside})" if kappa is None else name):
        with contextlib.suppress(KeyError, ValueError, TypeError):  # no kind, no JSON, or not what the kind takes
            return KINDS[name](*json.loads(f"[{inside}]"))
    raise GrowpruneError(f"parts must be a number, {allowed}, got {text!r}")


def parse_parts(parts: int | str, *, kind: str, most: int = PARTS) -> PartitionConfig:
    """Return the partition for a number of parts, a kind, or a call such as "balanced(8)".

    Args:
        kind: the kind that the method uses by default.
        most: the number of layers, if known.

    Examples:
        >>> parse_parts(8, kind="balanced"), parse_parts("contiguous", kind="balanced")
        (Balanced(kappa=8), Contiguous(kappa=4))
    """
    if isinstance(parts, str) and parts not in KINDS:
        return parse_partition(parts)
    count = min(PARTS, most) if isinstance(parts, str) else parts
    check_counts(1, parts=count)
    return parse_partition(parts if isinstance(parts, str) else kind, kappa=count)
