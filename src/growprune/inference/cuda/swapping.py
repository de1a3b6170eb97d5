"""Swapping the linear layers of a model for prepared ones, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from growprune.inference.cuda.choosing import Timed, choose
from growprune.inference.cuda.entries import Entries, from_bits, from_dense
from growprune.storage.compact import layouts_of

LEAST_SPARSITY = 0.4
"""Layers with fewer zeros than this stay as they are, untimed: no format would be faster."""


def swap_linears(model: nn.Module, *, batches: Sequence[int] = (1,), keep_dense: bool = False) -> list[Timed]:
    """Time every sparse `nn.Linear` of a model, masked or compact, and put the fastest in its place.

    The model must be on the device, and in the dtype, that it is to run in. Returns what was measured; a model with
    nothing sparse is left as it is, and gives an empty list.

    Args:
        batches: the batches that matter, 16 at most.
        keep_dense: let sparse layers keep a dense copy too, for batches over 16.
    """
    rows: list[Timed] = []
    for name, module in list(model.named_modules()):
        entries = entries_of(module)
        if entries is None or entries.sparsity < LEAST_SPARSITY or not name:
            continue
        bias: Tensor | None = module.bias.detach() if isinstance(module.bias, Tensor) else None
        choice = choose(entries, bias=bias, batches=batches, keep_dense=keep_dense, name=name)
        path, _, local = name.rpartition(".")
        setattr(model.get_submodule(path), local, choice.layer)
        rows += choice.rows
    return rows


@torch.no_grad()
def entries_of(module: nn.Module) -> Entries | None:
    """The live weights of a linear layer; None of another module. Compact storage is not expanded."""
    plain = getattr(type(module), "_plain_class", type(module))
    if plain is not nn.Linear:
        return None
    layout, weight = layouts_of(module).get("weight"), module._parameters["weight"]
    assert weight is not None
    if layout is None:
        return from_dense(weight)
    return from_bits(weight.detach(), layout.bits.to(weight.device), layout.shape, group=layout.group)
