"""The sparse linear layers of a model, and a copy of the model in which they are yet to be chosen."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cuda.entries import Entries, from_bits, from_dense
from growprune.deployment.cuda.products import DTYPES
from growprune.deployment.weights import does_more
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel
from growprune.storage.compact_modules import layouts_of, make_plain

LEAST_SPARSITY = 0.4
"""Layers with fewer zeros than this stay as they are, untimed: no format would be faster."""


@dataclass(frozen=True)
class SparseSource:
    """The weights of a linear layer."""

    entries: Entries
    bias: Tensor | None
    is_transposed: bool
    """Whether the model has the weight as (in, out): transformers' Conv1D."""


def sparse_layers(model: nn.Module | SparseModel) -> dict[str, SparseSource]:
    """By path, the linear layers that are sparse enough to be timed; not those that share a weight with others."""
    module = model.model if isinstance(model, SparseModel) else model
    found = {}
    for path, part in module.named_modules():
        if path and is_linear(part) and part._parameters["weight"] is not None:
            mask = _mask(model, path) if isinstance(model, SparseModel) else None
            source = source_of(part, mask)
            if source is not None and source.entries.sparsity >= LEAST_SPARSITY:
                found[path] = source
    shared = _shared(module, found)
    return {path: source for path, source in found.items() if path not in shared}


def _mask(model: SparseModel, path: str) -> Tensor | None:
    name = f"{path}.weight"
    is_compact = layouts_of(model.model.get_submodule(path)).get("weight") is not None
    is_sparse = any(weight.parameter == name for weight in model.weights)
    return internals(model).stored[name].mask().clone() if is_sparse and not is_compact else None


def _shared(module: nn.Module, found: Iterable[str]) -> set[str]:
    """Those whose weight another module has too, such as an embedding, or that have several names themselves."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    places = Counter(id(parameter) for part in parts for parameter in part._parameters.values())
    return {path for path in found if places[id(module.get_submodule(path)._parameters["weight"])] > 1}


def is_linear(module: nn.Module) -> bool:
    """Whether it is a plain Linear, or transformers' Conv1D, in either storage."""
    plain = getattr(type(module), "_plain_class", type(module))
    return (plain is nn.Linear or _is_conv1d(plain)) and not does_more(module)


def _is_conv1d(kind: type[nn.Module]) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


@torch.no_grad()
def source_of(module: nn.Module, mask: Tensor | None = None) -> SparseSource | None:
    """The live weights of a linear layer, without a mask those that are not zero; None of a type we have no kernel for.

    They are copies. Compact storage is not expanded, but for Conv1D's.
    """
    layout, weight = layouts_of(module).get("weight"), module._parameters["weight"]
    assert weight is not None
    if weight.dtype not in DTYPES or weight.is_meta:
        return None
    is_transposed = not issubclass(getattr(type(module), "_plain_class", type(module)), nn.Linear)
    bias = module._parameters.get("bias")
    kept = None if bias is None else bias.detach().clone()
    if layout is not None and not is_transposed:
        bits = layout.bits.to(weight.device)
        return SparseSource(from_bits(weight.detach().clone(), bits, layout.shape, group=layout.group), kept, False)
    dense = weight.detach() if layout is None else layout.expand(weight.detach())
    mask = mask if layout is None else layout.mask()
    if is_transposed:
        dense, mask = dense.t(), None if mask is None else mask.t()
    return SparseSource(from_dense(dense, None if mask is None else mask.to(dense.device)), kept, is_transposed)


class Waiting(nn.Module):
    """In the place of a layer that is yet to be chosen: notes how many samples it is called with."""

    def __init__(self, source: SparseSource, device: torch.device) -> None:
        super().__init__()
        self.entries = source.entries.to(device)
        self.bias = None if source.bias is None else source.bias.to(device)
        self.samples: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.samples is None:
            self.samples = x.numel() // max(1, x.shape[-1])
        return F.linear(x, self.entries.dense(), self.bias)


def waiting_copy(module: nn.Module, sources: Mapping[str, SparseSource], device: torch.device) -> nn.Module:
    """A copy of a model on a device, in eval mode, without these layers' weights; all else of it is plain."""
    memo: dict[int, Any] = {}
    for path in sources:
        weight = module.get_submodule(path)._parameters["weight"]
        memo[id(weight)] = nn.Parameter(torch.empty(0), requires_grad=False)
    bare: nn.Module = copy.deepcopy(module, memo)
    for path, source in sources.items():
        owner, _, local = path.rpartition(".")
        bare.get_submodule(owner)._modules[local] = Waiting(source, device)
    for part in bare.modules():
        if layouts_of(part):
            make_plain(part)
    return bare.to(device).eval().requires_grad_(False)
