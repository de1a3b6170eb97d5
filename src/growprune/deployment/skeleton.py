"""A model without its sparse weights, which is traced for its code, and the weights as separate matrices.

Nothing here shares memory with the original model, which is not changed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.matrix import WORTHWHILE, SparseMatrix, from_dense, pattern_of
from growprune.deployment.cuda.products import DTYPES, MOST_COLUMNS
from growprune.masks.layers import Weight, dense_shape, layer_weights, shape_of
from growprune.masks.patterns import Unstructured
from growprune.sparse.model import SparseModel
from growprune.storage.adapters import leaving_masks
from growprune.storage.compact import layouts_of, make_plain

WORTHWHILE_ON_A_GPU = 0.4
"""The sparsity below which no layer is faster on the sparse kernels of a GPU."""


@dataclass(frozen=True)
class Skeleton:
    """A model in eval mode whose sparse weights are empty."""

    module: nn.Module
    matrices: Mapping[str, SparseMatrix]
    """The sparse weights, by the name of their parameter."""

    transposed: frozenset[str] = frozenset()
    """The names of the sparse weights that the module stores as (in, out)."""

    def dense_weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a sparse weight as a dense tensor, in the shape of its layer."""
        dense = self.matrices[name].dense()
        if name in self.transposed:
            return dense.t().contiguous()
        return dense.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()

    def fill_in(self) -> None:
        """Give the module its dense weights, for the parts that stay in torch."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name in self.matrices:
            parameter = parameters.get(name)  # None if its module was replaced by a part with the weights
            if parameter is not None and parameter.stride() == (0,) * parameter.dim():
                parameter.data = self.dense_weight(name, parameter.shape).to(parameter.device, parameter.dtype)

    def empty(self) -> None:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name in self.matrices:
            parameters[name].data = nothing_like(parameters[name].detach(), parameters[name].shape)


def nothing_like(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape that takes no memory."""
    return torch.zeros((), dtype=values.dtype, device=values.device).expand(shape)


def module_of(model: nn.Module | SparseModel) -> nn.Module:
    return model.model if isinstance(model, SparseModel) else model


def skeleton_of(model: nn.Module | SparseModel, *, for_gpu: bool = False) -> Skeleton:
    """Split a model into its code and its sparse weights. Zeros of a plain model count as pruned.

    Args:
        for_gpu: take only linear layers with unshared weights, in a dtype of the GPU kernels, in blocks of 1 x 1.
    """
    sparse, module = model if isinstance(model, SparseModel) else None, module_of(model)
    groups: dict[str, list[Weight]] = {}
    for weight in [w for ws in layer_weights(module).values() for w in ws] if sparse is None else sparse.weights:
        groups.setdefault(weight.parameter, []).append(weight)
    parts = [part for _, part in module.named_modules(remove_duplicate=False)]
    uses = Counter(id(parameter) for part in parts for parameter in part._parameters.values())
    matrices, nothing = dict[str, SparseMatrix](), dict[str, nn.Parameter]()
    for name, weights in groups.items():
        path, _, local = name.rpartition(".")
        owner = module.get_submodule(path)
        values, shape = owner._parameters[local], dense_shape(owner, local)
        assert values is not None
        if values.is_meta or values.dtype not in (DTYPES if for_gpu else (torch.float32,)):
            continue
        if for_gpu and not (path and local == "weight" and is_linear(owner) and uses[id(values)] == 1):
            continue
        if len(weights[0].shape) != len(shape) or (weights[0].transposed and len(shape) != 2):
            continue
        matrix = _matrix(owner, local, weights, sparse, for_gpu)
        fits = not for_gpu or matrix.columns <= MOST_COLUMNS
        if fits and matrix.sparsity >= (WORTHWHILE_ON_A_GPU if for_gpu else WORTHWHILE):
            matrices[name] = matrix
            nothing[name] = nn.Parameter(nothing_like(values.detach(), shape).cpu(), requires_grad=False)
    transposed = frozenset(name for name in matrices if groups[name][0].transposed)
    return Skeleton(_copied_with(module, nothing).eval(), matrices, transposed)


def _matrix(
    module: nn.Module, local: str, weights: list[Weight], sparse: SparseModel | None, for_gpu: bool
) -> SparseMatrix:
    """Return a parameter in either storage as a matrix. Without a SparseModel, its zeros count as pruned."""
    values, layout = module._parameters[local], layouts_of(module).get(local)
    assert values is not None
    if layout is not None:
        dense, mask = layout.expand(values.detach()), layout.mask()
    else:
        dense, mask = values, values != 0 if sparse is None else sparse.stored[weights[0].parameter].mask()
    transposed = weights[0].transposed
    pattern = Unstructured() if for_gpu else pattern_of(mask.t() if transposed else mask)
    return from_dense(dense, mask, pattern=pattern, transposed=transposed)


def blank_copy(module: nn.Module) -> nn.Module:
    """Return a plain copy of a model to fill from a file: parameters on the meta device, all else on the CPU."""
    blank = {
        name: nn.Parameter(torch.empty(shape_of(module, name), dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in module.named_parameters()
    }
    copied = _copied_with(module, blank)
    copied._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]
    return copied


def _copied_with(module: nn.Module, replaced: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a plain copy of a model in which these parameters are replaced. Replaced parameters are not copied."""
    parameters = dict(module.named_parameters())
    memo: dict[int, Any] = {id(parameters[name]): parameter for name, parameter in replaced.items()}
    bare: nn.Module = copy.deepcopy(module, memo | leaving_masks(module))
    for name in replaced:
        path, _, local = name.rpartition(".")
        if layouts := layouts_of(bare.get_submodule(path)):
            layouts[local] = None  # replaced values are not in this layout
    for part in bare.modules():
        if layouts_of(part):
            make_plain(part)
    return bare


def is_linear(module: nn.Module) -> bool:
    """True for a Linear or Conv1D of transformers, in either storage, without hooks or a forward of its own."""
    kind = getattr(type(module), "_plain_class", type(module))
    is_conv1d = any(base.__name__ == "Conv1D" for base in kind.__mro__) and hasattr(module, "nf")
    is_plain = issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward
    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    return (is_conv1d or is_plain) and not has_hooks and "forward" not in vars(module)
