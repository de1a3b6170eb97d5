"""A model without its sparse weights: the code that is traced, and the weights as matrices beside it.

The model itself is left as it is, and not needed afterwards: nothing here shares memory with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.matrix import (
    WORTHWHILE,
    SparseMatrix,
    block_of,
    from_dense,
    from_live,
    matrix_of_zeros,
    pattern_of,
)
from growprune.masks.layers import Weight, dense_shape, layer_weights, shape_of
from growprune.masks.patterns import Pattern, Unstructured
from growprune.sparse.model import SparseModel
from growprune.storage.adapters import leaving_masks
from growprune.storage.compact_modules import layouts_of, make_plain


@dataclass(frozen=True)
class Skeleton:
    """A model in eval mode whose sparse weights hold nothing."""

    module: nn.Module
    matrices: Mapping[str, SparseMatrix]
    """The sparse weights, by the name of their parameter."""

    transposed: frozenset[str] = frozenset()
    """Those of them that the module has as (in, out)."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def dense_weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """A sparse weight in the shape that its layer has."""
        dense = self.matrices[name].dense()
        if name in self.transposed:
            return dense.t().contiguous()
        return dense.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


def module_of(model: nn.Module | SparseModel) -> nn.Module:
    return model.model if isinstance(model, SparseModel) else model


def skeleton_of(model: nn.Module | SparseModel) -> Skeleton:
    """Split a model into its code and its sparse weights. Zeros of a plain model count as pruned."""
    sparse, module = model if isinstance(model, SparseModel) else None, module_of(model)
    groups = _weights_by_parameter(module, sparse)
    matrices = _matrices(module, sparse, groups)
    bare = _copied_with(module, {name: _empty(module, name) for name in matrices})
    transposed = frozenset(name for name in matrices if groups[name][0].transposed)
    return Skeleton(bare.eval(), matrices, transposed)


def blank_copy(module: nn.Module) -> nn.Module:
    """A copy of a model, to be filled from a file: plain, its parameters on the meta device and all else on the CPU."""
    blank = {
        name: nn.Parameter(torch.empty(shape_of(module, name), dtype=p.dtype, device="meta"), p.requires_grad)
        for name, p in module.named_parameters()
    }
    copied = _copied_with(module, blank)
    copied._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]
    return copied


def _copied_with(module: nn.Module, replaced: Mapping[str, nn.Parameter]) -> nn.Module:
    """A plain copy of a model with other parameters of these names; those of the model are not copied."""
    parameters = dict(module.named_parameters())
    memo: dict[int, Any] = {id(parameters[name]): parameter for name, parameter in replaced.items()}
    bare: nn.Module = copy.deepcopy(module, memo | leaving_masks(module))
    for name in replaced:
        path, _, local = name.rpartition(".")
        if layouts := layouts_of(bare.get_submodule(path)):
            layouts[local] = None  # it holds nothing that could be made dense
    for part in bare.modules():
        if layouts_of(part):
            make_plain(part)
    return bare


def fill_in(skeleton: Skeleton) -> None:
    """Give the module its weights, dense, for those parts of it that stay in torch."""
    parameters = skeleton.parameters
    for name in skeleton.matrices:
        parameter = parameters.get(name)  # none, if a part is in the place of its module, which then is filled
        if parameter is not None and parameter.stride() == (0,) * parameter.dim():
            parameter.data = skeleton.dense_weight(name, parameter.shape)


def empty(skeleton: Skeleton) -> None:
    """Let go of the weights again."""
    parameters = skeleton.parameters
    for name in skeleton.matrices:
        parameters[name].data = torch.zeros(()).expand(parameters[name].shape)


def _empty(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that has its shape and takes no memory."""
    return nn.Parameter(torch.zeros(()).expand(shape_of(module, name)), requires_grad=False)


def _weights_by_parameter(module: nn.Module, sparse: SparseModel | None) -> dict[str, list[Weight]]:
    groups: dict[str, list[Weight]] = {}
    for weight in [w for ws in layer_weights(module).values() for w in ws] if sparse is None else sparse.weights:
        groups.setdefault(weight.parameter, []).append(weight)
    return groups


def _matrices(
    module: nn.Module, sparse: SparseModel | None, groups: Mapping[str, list[Weight]]
) -> dict[str, SparseMatrix]:
    found = {}
    for name, weights in groups.items():
        path, _, local = name.rpartition(".")
        shape = dense_shape(module.get_submodule(path), local)
        is_known = len(weights[0].shape) == len(shape) and (not weights[0].transposed or len(shape) == 2)
        matrix = _matrix(module.get_submodule(path), local, name, weights, sparse) if is_known else None
        if matrix is not None and matrix.sparsity >= WORTHWHILE:
            found[name] = matrix
    return found


def _matrix(
    module: nn.Module, local: str, name: str, weights: list[Weight], sparse: SparseModel | None
) -> SparseMatrix | None:
    """A parameter of a module in either storage. Without a SparseModel, the zeros of a dense one are dead."""
    values, layout = module._parameters[local], layouts_of(module).get(local)
    assert values is not None
    if values.dtype != torch.float32 or values.is_meta:
        return None
    transposed = any(weight.transposed for weight in weights)
    if layout is None and sparse is None:
        return matrix_of_zeros(values.detach().cpu(), transposed=transposed)
    if layout is None:
        assert sparse is not None
        pattern = _pattern_of_all(sparse.pattern, weights)
        return from_dense(values, sparse.stored[name].mask().clone(), pattern=pattern, transposed=transposed)
    mask = layout.mask()
    pattern = pattern_of(mask.t() if transposed else mask) if sparse is None else sparse.pattern
    pattern = _pattern_of_all(pattern, weights)
    return from_live(values, mask, pattern=pattern, transposed=transposed, inputs_last=layout.is_folded)


def _pattern_of_all(pattern: Pattern, weights: Sequence[Weight]) -> Pattern:
    """The pattern of several matrices one below the other: blocks that end where a matrix does."""
    height, _ = block_of(pattern)
    is_cut = any(weight.rows is not None and weight.rows[0] % height for weight in weights)
    return Unstructured() if is_cut else pattern


def does_more(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says: it has hooks, or a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)
