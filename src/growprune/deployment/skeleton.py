"""A model without its sparse weights: the code that is traced, and the weights as matrices beside it.

The model itself is left as it is, and not needed afterwards: nothing here shares memory with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.matrix import SparseMatrix, from_dense, from_live
from growprune.deployment.weights import matrix_of_module
from growprune.masks.layers import Weight, dense_shape, layer_weights
from growprune.masks.patterns import Block, Pattern, Unstructured
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel
from growprune.storage.compact_modules import layouts_of, make_plain

WORTHWHILE = 0.3
"""The sparsity below which a weight counts as dense: no kernel of ours is faster there."""
BLOCKS = (Block(8, 1), Block(1, 8))
"""What a mask of nobody knows which pattern is looked through for."""


@dataclass(frozen=True)
class Skeleton:
    """A model in eval mode whose sparse weights hold nothing."""

    module: nn.Module
    matrices: Mapping[str, SparseMatrix]
    """The sparse weights, by the name of their parameter."""

    transposed: frozenset[str] = frozenset()
    """Those of them that the module has as (in, out)."""

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))


def skeleton_of(model: nn.Module | SparseModel) -> Skeleton:
    """Take a model apart. What of a plain model is zero counts as dead."""
    sparse = model if isinstance(model, SparseModel) else None
    module = model.model if isinstance(model, SparseModel) else model
    matrices = _matrices(module, sparse)
    parameters = dict(module.named_parameters())
    memo = _made_dense(module, without=matrices)
    empty = {name: _empty(module, name) for name in matrices}
    memo |= {id(parameters[name]): parameter for name, parameter in empty.items()}
    bare: nn.Module = copy.deepcopy(module, memo)
    for part in bare.modules():
        _make_plain(part)
    for name, parameter in empty.items():
        path, _, local = name.rpartition(".")
        bare.get_submodule(path)._parameters[local] = parameter
    transposed = frozenset(name for name in matrices if _is_transposed(bare, name))
    return Skeleton(bare.eval(), matrices, transposed)


def fill_in(skeleton: Skeleton) -> None:
    """Give the module its weights, dense, for those parts of it that stay in torch."""
    parameters, filled = skeleton._parameters, dict[nn.Parameter, nn.Parameter]()
    for name, matrix in skeleton.matrices.items():
        parameter = parameters.get(name)  # none, if a part is in the place of its module, which then is filled
        if parameter is not None and parameter.stride() == (0,) * parameter.dim():
            weight = dense_weight(matrix, tuple(parameter.shape), is_transposed=name in skeleton.transposed)
            filled[parameter] = nn.Parameter(weight, requires_grad=False)
    _exchange(skeleton.module, filled)


def empty(skeleton: Skeleton) -> None:
    """Let go of the weights again."""
    parameters = skeleton._parameters
    _exchange(skeleton.module, {parameters[name]: _empty(skeleton.module, name) for name in skeleton.matrices})


def _exchange(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put parameters in the place of others, wherever those are: tied weights have several modules."""
    for part in module.modules():
        for local, parameter in part._parameters.items():
            if parameter is not None and parameter in new:
                part._parameters[local] = new[parameter]


def dense_weight(matrix: SparseMatrix, shape: tuple[int, ...], *, is_transposed: bool) -> Tensor:
    """A weight of a matrix, as the layer has it."""
    dense = matrix.dense()
    if is_transposed:
        return dense.t().contiguous()
    return dense.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1).contiguous()


def _is_transposed(module: nn.Module, name: str) -> bool:
    return any(w.transposed for ws in layer_weights(module).values() for w in ws if w.parameter == name)


def _empty(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that has its shape and takes no memory."""
    path, _, local = name.rpartition(".")
    shape = dense_shape(module.get_submodule(path), local)
    return nn.Parameter(torch.zeros(()).expand(shape), requires_grad=False)


def _made_dense(module: nn.Module, without: Collection[str]) -> dict[int, Any]:
    """By the id of a compact parameter, a dense one in its place; not of those that are matrices."""
    found: dict[int, Any] = {}
    for path, part in module.named_modules():
        for local, layout in layouts_of(part).items():
            values = part._parameters[local]
            if layout is not None and values is not None and (f"{path}.{local}" if path else local) not in without:
                found[id(values)] = nn.Parameter(layout.expand(values.detach()), requires_grad=values.requires_grad)
    return found


def _make_plain(module: nn.Module) -> None:
    if layouts := layouts_of(module):
        layouts.update(dict.fromkeys(layouts))  # all are dense by now, or hold nothing
        make_plain(module)


def _matrices(module: nn.Module, sparse: SparseModel | None) -> dict[str, SparseMatrix]:
    groups: dict[str, list[Weight]] = {}
    for weight in [w for ws in layer_weights(module).values() for w in ws] if sparse is None else sparse.weights:
        groups.setdefault(weight.parameter, []).append(weight)
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
    parameter = module._parameters[local]
    assert parameter is not None
    if parameter.dtype != torch.float32 or parameter.is_meta:
        return None
    layout = layouts_of(module).get(local)
    if sparse is not None:
        mask = internals(sparse).stored[name].mask().clone() if layout is None else None
        return matrix_of_module(module, mask, name=local, weights=weights, pattern=internals(sparse).pattern)
    if layout is not None:
        mask = layout.mask()
        pattern = pattern_of(mask.t() if weights[0].transposed else mask)
        return matrix_of_module(module, name=local, weights=weights, pattern=pattern)
    transposed = any(weight.transposed for weight in weights)
    return matrix_of_zeros(parameter.detach().cpu(), transposed=transposed)


def matrix_of_zeros(weight: Tensor, *, transposed: bool = False) -> SparseMatrix:
    """The matrix of a weight whose zeros are dead, in blocks if it is made of whole ones."""
    mask = weight != 0
    pattern = pattern_of(mask.t() if transposed else mask)
    return from_live(weight[mask], mask, pattern=pattern, transposed=transposed)


def pattern_of(mask: Tensor) -> Pattern:
    """Blocks, if what lives (out, in, ...) fills them all but for the odd weight that is zero by chance."""
    folded = mask.movedim(1, -1).flatten(1)
    for blocks in BLOCKS:
        rows, columns = (
            size // step * step for size, step in zip(folded.shape, (blocks.height, blocks.width), strict=True)
        )
        if not rows or not columns:
            continue
        cut = folded[:rows, :columns].view(rows // blocks.height, blocks.height, -1, blocks.width)
        alive = cut.any(3).any(1)
        if int(alive.sum()) * 8 <= 1.02 * int(cut.sum()):
            return blocks
    return Unstructured()


def matrix_of_all(weight: Tensor) -> SparseMatrix:
    """The matrix of a weight that is dense."""
    return from_dense(weight, torch.ones(weight.shape, dtype=torch.bool))
