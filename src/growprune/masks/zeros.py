"""Read masks from the zeros of a model that is already sparse, such as a pruned checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, in_one_go, row_chunks, write_groups

LEAST = 0.05
"""The least share of zeros of a sparse model. Any model may have a few zeros."""
LOOKS_PRUNED = 0.2
"""The least share of zeros at which a model is assumed to be pruned."""


def masks_of_zeros(read: Callable[[str], Tensor], weights: Sequence[Weight], pattern: Pattern) -> dict[str, Tensor]:
    """Return the non-zero weights of each parameter as masks; for blocks, those with any non-zero weight.

    Args:
        read: returns the values of a parameter, such as `model.get_parameter`.
    """
    masks: dict[str, Tensor] = {}
    for weight in weights:
        values = read(weight.parameter).detach()
        if values.is_meta:
            raise GrowpruneError(f"{weight.parameter} is on the meta device and has no values: load the model first")
        if weight.parameter not in masks:  # what lies in no matrix of it always lives
            masks[weight.parameter] = torch.ones(values.shape, dtype=torch.bool, device=values.device)
        groups = _live_groups(weight.of(values), weight, pattern)
        write_groups(pattern, weight.of(masks[weight.parameter]), weight, groups)
    return masks


def _live_groups(values: Tensor, weight: Weight, pattern: Pattern) -> Iterator[Tensor]:
    for rows in row_chunks(pattern, values, weight):
        alive = pattern.score(pattern.fold((rows != 0).float())) > 0
        if not torch.equal(pattern.restrict(alive.int()) > 0, alive):
            raise GrowpruneError(f"the zeros of {weight.name} do not have the pattern {pattern.name}: use another one")
        yield alive


def check_sparse(weights: Sequence[Weight], masks: dict[str, Tensor], pattern: Pattern) -> float:
    """Return the share of zeros. Raise if the model is dense, and warn about layers without non-zero weights."""
    total = sum(weight.numel for weight in weights)
    alive = {weight.name: int(torch.count_nonzero(weight.of(masks[weight.parameter]))) for weight in weights}
    zeros = total - sum(alive.values())
    if zeros < LEAST * total:
        groups = "" if pattern.is_single else f" in whole groups of {pattern.name}"
        raise GrowpruneError(
            f"the model is dense: only {zeros:,} of its {total:,} prunable weights are zero{groups} "
            f"({zeros / total:.2%}, a sparse model has at least {LEAST:.0%}). Prune it: "
            f"SparseModel(model, sparsity=...).prune()"
        )
    if dead := [name for name, count in alive.items() if not count]:
        warn(f"all weights of {', '.join(dead[:5])} are zero and will stay zero: add them to keep_dense to train them")
    return zeros / total


def already_sparse(model: nn.Module, weights: Sequence[Weight]) -> float | None:
    """Return the share of exact zeros of a model that looks pruned; None if it does not.

    Weights that are all zero do not count, because some layers are initialized to zero (a last layer, the B of LoRA).
    Nor do weights without dense values: on the meta device, sharded, or stored compact.
    """
    parameters = dict(model.named_parameters())
    here = [weight for weight in weights if _is_here(parameters[weight.parameter])]
    alive = in_one_go([torch.count_nonzero(weight.of(parameters[weight.parameter].detach())) for weight in here])
    counts = [(weight.numel, count) for weight, count in zip(here, alive, strict=True) if count]
    total = sum(numel for numel, _ in counts)
    zeros = total - sum(count for _, count in counts)
    return zeros / total if total and zeros >= LOOKS_PRUNED * total else None


def _is_here(values: Tensor) -> bool:
    return values.dim() >= 2 and not values.is_meta and not hasattr(values, "device_mesh")  # compact ones are flat
