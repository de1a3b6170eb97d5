"""Swapping the linear layers of a model for prepared ones, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from growprune.deployment.cuda.choosing import Timed, choose
from growprune.deployment.cuda.layers import sparse_layers


def swap_linears(model: nn.Module, *, batches: Sequence[int] = (1,), keep_dense: bool = False) -> list[Timed]:
    """Time every sparse `nn.Linear` of a model, masked or compact, and put the fastest in its place.

    The model must be on the device, and in the dtype, that it is to run in. Returns what was measured; a model with
    nothing sparse is left as it is, and gives an empty list.

    Args:
        batches: the batches that matter, 16 at most.
        keep_dense: let sparse layers keep a dense copy too, for batches over 16.
    """
    rows: list[Timed] = []
    for path, source in sparse_layers(model).items():
        choice = choose(source.entries, bias=source.bias, batches=batches, keep_dense=keep_dense, name=path)
        owner, _, local = path.rpartition(".")
        setattr(model.get_submodule(owner), local, choice.layer)
        rows += choice.rows
    return rows
