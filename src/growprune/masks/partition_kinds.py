"""The kinds of partition, as values that know no model yet: contiguous(4), balanced(4), per_layer(), named([...]).

In code, call the function of the kind. In strings, such as `--set partition=balanced(4)`, write the same call:
`parse_partition` reads it by the table `KINDS`. Trainers and methods say the number of parts elsewhere, and give the
name of the kind alone. Standard library only.
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


@dataclass(frozen=True)
class _InParts:
    kappa: int = 4

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
    """What `contiguous` gives."""


class Balanced(_InParts):
    """What `balanced` gives."""


@dataclass(frozen=True)
class Named:
    """What `named` gives."""

    parts: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"named({json.dumps(self.parts)})"

    @property
    def num_parts(self) -> int | None:
        return len(self.parts)

    def cut(self, model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> Partition:
        del keep_dense, include
        return Partition.of(model, self.parts)


@dataclass(frozen=True)
class PerLayer:
    """What `per_layer` gives."""

    num_parts = None
    """As many as the model has layers, which is not known before."""

    def __str__(self) -> str:
        return "per_layer()"

    def cut(self, model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> Partition:
        return Partition.per_layer(model, keep_dense=keep_dense, include=include)


PartitionConfig: TypeAlias = Contiguous | Balanced | Named | PerLayer


def contiguous(kappa: int) -> Contiguous:
    """kappa parts of neighbouring layers, as equal as can be, that split no residual or attention block."""
    return Contiguous(kappa)


def balanced(kappa: int) -> Balanced:
    """kappa parts of layers from all over the model, as equal in weights as single layers allow."""
    return Balanced(kappa)


def named(parts: Sequence[Sequence[str]]) -> Named:
    """Parts by hand: for each, the names of its modules."""
    return Named(tuple(tuple(names) for names in parts))


def per_layer() -> PerLayer:
    """Every layer is a part: for methods that draw their own sets of layers."""
    return PerLayer()


KINDS: dict[str, Callable[..., PartitionConfig]] = {
    kind.__name__: kind for kind in (contiguous, balanced, per_layer, named)
}


def parse_partition(text: str, *, kappa: int | None = None) -> PartitionConfig:
    """Return the partition that a string such as "balanced(4)" names.

    Args:
        kappa: the number of parts, if the string is the name of a kind alone.

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
    raise GrowpruneError(f"partition is {text!r}, but must be {allowed}")
