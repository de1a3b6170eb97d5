"""The argument `parts`: how a model is divided into the parts that grow in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import nn

from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import PARTS, PartitionConfig, parse_parts

PartsLike: TypeAlias = int | str | Partition | PartitionConfig | Sequence[Sequence[str]] | None
"""A number of parts, a kind such as "balanced", "balanced(8)" or `growprune.balanced(8)`, a list of lists of names, or
a `Partition`. None for four parts, or one per layer if there are fewer layers."""


def cut(
    model: nn.Module, parts: PartsLike, *, kind: str, keep_dense: Sequence[str], include: Sequence[str]
) -> Partition:
    """Divide a model into parts.

    Args:
        kind: the kind of partition that the method uses by default.
    """
    if isinstance(parts, Partition):
        return parts.counted(model, keep_dense=keep_dense, include=include)
    if isinstance(parts, PartitionConfig):
        return parts.cut(model, keep_dense=keep_dense, include=include)
    if parts is None or isinstance(parts, int | str):
        return _of_kind(model, parts, kind, keep_dense, include)
    return Partition.of(model, parts, keep_dense=keep_dense, include=include)


def _of_kind(
    model: nn.Module, parts: int | str | None, kind: str, keep_dense: Sequence[str], include: Sequence[str]
) -> Partition:
    layers = Partition.per_layer(model, keep_dense=keep_dense, include=include)
    made = parse_parts(min(PARTS, len(layers)) if parts is None else parts, kind=kind, most=len(layers))
    return made.cut(model, keep_dense=keep_dense, include=include)
