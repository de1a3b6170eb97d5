"""The zeros of a model that is sparse already, as masks: of a checkpoint that somebody else pruned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, row_chunks, write_groups

LEAST = 0.05
"""The share of zeros from which on a model counts as sparse: a few, any model may have."""


def masks_of_zeros(model: nn.Module, weights: Sequence[Weight], pattern: Pattern) -> dict[str, Tensor]:
    """By parameter: which weights are not zero; of blocks, those with a weight that is not. Nothing is changed."""
    masks: dict[str, Tensor] = {}
    for weight in weights:
        values = model.get_parameter(weight.parameter).detach()
        if values.is_meta:
            raise GrowpruneError(f"{weight.parameter} is on the meta device, and has no zeros: load the model first")
        if weight.parameter not in masks:  # what lies in no matrix of it always lives
            masks[weight.parameter] = torch.ones(values.shape, dtype=torch.bool, device=values.device)
        groups = _live_groups(weight.of(values), weight, pattern)
        write_groups(pattern, weight.of(masks[weight.parameter]), weight, groups)
    return masks


def _live_groups(values: Tensor, weight: Weight, pattern: Pattern) -> Iterator[Tensor]:
    for rows in row_chunks(pattern, values, weight):
        alive = pattern.score(pattern.fold((rows != 0).float())) > 0
        if not torch.equal(pattern.restrict(alive.int()) > 0, alive):
            raise GrowpruneError(f"the zeros of {weight.name} do not keep to pattern {pattern.name}: give another one")
        yield alive


def check_sparse(weights: Sequence[Weight], masks: dict[str, Tensor], pattern: Pattern) -> float:
    """The share of zeros; raises if it is that of a dense model, and warns of layers in which nothing lives."""
    total = sum(weight.numel for weight in weights)
    alive = {weight.name: int(torch.count_nonzero(weight.of(masks[weight.parameter]))) for weight in weights}
    zeros = total - sum(alive.values())
    if zeros < LEAST * total:
        groups = "" if pattern.is_single else f" in whole groups of {pattern.name}"
        raise GrowpruneError(
            f"the model is dense: {zeros:,} of its {total:,} prunable weights are zero{groups} ({zeros / total:.2%}, "
            f"and at least {LEAST:.0%} make a sparse one); prune it: SparseModel(model, sparsity=...).prune()"
        )
    if dead := [name for name, count in alive.items() if not count]:
        warn(f"all weights are zero in {', '.join(dead[:5])}, and stay so: name them in keep_dense to train them")
    return zeros / total
