"""Fuse each layer to one operation: product, folded BatchNorm, bias, residual and activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.matrix import WORTHWHILE, SparseMatrix, from_dense, pattern_of
from growprune.deployment.cpu.prepared import Activation, LayerSpec
from growprune.deployment.graph.trace import PERMUTES, RESHAPES, are_float, arguments, aten, constant, is_constant, pair
from growprune.deployment.skeleton import Skeleton


@dataclass
class Fused(LayerSpec):
    """A layer and the operations that are fused with it."""

    axis: int = 1
    """The dimension of the features in input and output: 1 for images, otherwise the last."""
    is_image: bool = False
    """True if its input is (batch, channels, height, width)."""
    before: list[fx.Node] = field(default_factory=list)
    """Reshapes and permutations between the layer and its residual. They are no longer in the graph."""
    after: list[fx.Node] = field(default_factory=list)
    """Reshapes and permutations after those in `before`, up to the activation."""


def layer(x: Any, residual: Any) -> Any:
    """Stand for a fused layer in a graph. This function is never called."""
    raise NotImplementedError


def fuse(graph: fx.Graph, skeleton: Skeleton) -> None:
    """Replace the layers of a graph by fused layers."""
    for node in list(graph.nodes):
        make = LAYERS.get(node.target) if node.op == "call_function" else None
        if make is None or not are_float(node, *node.all_input_nodes):
            continue
        if (found := make(node, skeleton)) is not None:
            x, fused = found
            chain, residual = _absorb(node, fused)
            with graph.inserting_before(chain[-1]):
                new = graph.call_function(layer, (x, residual))
            new.meta = {"val": chain[-1].meta["val"], "fused": fused}
            chain[-1].replace_all_uses_with(new)
            for old in reversed(chain):
                graph.erase_node(old)
    graph.eliminate_dead_code()


def _sparse(node: Any, skeleton: Skeleton, *, transposed: bool = False) -> tuple[str, SparseMatrix] | None:
    """Return the name and the matrix of a weight, or None if it is not sparse enough."""
    if not is_constant(node) or not node.meta["constant"].is_sparse:
        return None
    name = node.meta["constant"].name
    if name is not None and (name in skeleton.transposed) == transposed:
        return name, skeleton.matrices[name]
    weight = constant(node)
    if weight is None or weight.dim() < 2:
        return None
    mask = weight != 0
    pattern = pattern_of(mask.t() if transposed else mask)
    matrix = from_dense(weight, mask, pattern=pattern, transposed=transposed)
    return (node.name, matrix) if matrix.sparsity >= WORTHWHILE else None


def _dense(node: Any) -> tuple[str, SparseMatrix] | None:
    weight = constant(node) if is_constant(node) else None
    if weight is None:
        return None
    alive = torch.ones(weight.shape, dtype=torch.bool)
    pattern = "8x1" if len(weight) >= 8 else "unstructured"  # the faster blocks for a dense weight
    return node.meta["constant"].name or node.name, from_dense(weight, alive, pattern=pattern)


Made = tuple[fx.Node, Fused] | None


def _linear(node: fx.Node, skeleton: Skeleton) -> Made:
    x, weight, bias = arguments(node, None, None, None)
    return _product(x, _sparse(weight, skeleton), bias)


def _addmm(node: fx.Node, skeleton: Skeleton) -> Made:
    bias, x, weight = node.args
    if node.kwargs or not isinstance(bias, fx.Node) or bias.meta["val"].shape != node.meta["val"].shape[-1:]:
        return None
    return _product(x, _sparse(weight, skeleton, transposed=True), bias)


def _mm(node: fx.Node, skeleton: Skeleton) -> Made:
    x, weight = node.args
    is_matrix = isinstance(weight, fx.Node) and weight.meta["val"].dim() == 2
    return _product(x, _sparse(weight, skeleton, transposed=True), None) if is_matrix else None


def _product(x: Any, found: tuple[str, SparseMatrix] | None, bias: Any) -> Made:
    if found is None or not isinstance(x, fx.Node) or is_constant(x) or (bias is not None and not is_constant(bias)):
        return None
    shape = x.meta["val"].shape
    if not shape.numel():
        return None
    name, matrix = found
    geometry = Geometry.linear(matrix.columns, shape.numel() // shape[-1])
    return x, Fused(name.removesuffix(".weight"), matrix, geometry, constant(bias), True, axis=len(shape) - 1)


def _conv2d(node: fx.Node, skeleton: Skeleton) -> Made:
    x, weight, bias, stride, padding, dilation, groups = arguments(node, None, None, None, 1, 0, 1, 1)
    is_known = (bias is None or is_constant(bias)) and not is_constant(x) and x.meta["val"].dim() == 4
    is_known &= groups == 1 or groups == x.meta["val"].shape[1] == weight.meta["val"].shape[0]
    padding = _padding(padding, weight.meta["val"].shape[2:], dilation) if is_known else None
    if padding is None or not x.meta["val"].numel():
        return None
    sparse = _sparse(weight, skeleton)
    found = sparse or _dense(weight)
    if found is None:
        return None
    batch, channels, height, width = x.meta["val"].shape
    kernel = tuple(weight.meta["val"].shape[2:])
    pairs = (kernel, pair(stride), padding, pair(dilation))
    geometry = Geometry(channels, batch, height, width, *pairs)
    name, matrix = found[0].removesuffix(".weight"), found[1]
    is_depthwise = groups > 1  # the depthwise kernel is dense
    is_sparse = sparse is not None and not is_depthwise
    ends: Any = {"is_depthwise": is_depthwise, "is_image": True}
    return x, Fused(name, matrix, geometry, constant(bias), is_sparse, **ends)


def _padding(padding: Any, kernel: Any, dilation: Any) -> tuple[int, int] | None:
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(pair(dilation), kernel, strict=True)]
        return None if any(t % 2 for t in total) else (total[0] // 2, total[1] // 2)
    return pair(padding)


LAYERS: dict[Any, Callable[[fx.Node, Skeleton], Made]] = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _mm,
    aten.matmul.default: _mm,
    aten.conv2d.default: _conv2d,
    aten.conv2d.padding: _conv2d,
}


def _absorb(node: fx.Node, fused: Fused) -> tuple[list[fx.Node], fx.Node | None]:
    """Fuse the operations after a layer. Return all operations that are now part of it, and the residual."""
    chain, residual = [node], None
    at, pending = node, list[fx.Node]()
    while len(at.users) == 1 and fused.activation is Activation.NONE:
        at, before = next(iter(at.users)), at
        if at.target in RESHAPES or at.target in PERMUTES:
            pending.append(at)
            continue
        if at.target is aten.batch_norm.default and residual is None and not pending and at.args[0] is before:
            if fused.axis != 1 or not _fold_batch_norm(at, fused):  # BatchNorm is over dimension 1
                break
        elif residual is None and (other := _residual(at, before)) is not None:
            residual, fused.before = other, pending
        elif (activation := _activation(at)) is not Activation.NONE:
            fused.activation, fused.after = activation, pending
        else:
            break
        chain += [*pending, at]
        pending = []
    return chain, residual


def _fold_batch_norm(node: fx.Node, fused: Fused) -> bool:
    _, weight, bias, mean, variance, is_training, _, epsilon, _ = node.args
    given = (weight, bias, mean, variance)
    if is_training or any(n is not None and not is_constant(n) for n in given) or mean is None:
        return False
    gain, shift, center, spread = (None if (t := constant(n)) is None else t.double() for n in given)
    assert center is not None and spread is not None and isinstance(epsilon, float)
    scale = (spread + epsilon).rsqrt() * (1.0 if gain is None else gain)
    before = 0.0 if fused.bias is None else fused.bias.double()
    fused.bias = ((before - center) * scale + (0.0 if shift is None else shift)).float()
    matrix = fused.weight
    by_row = torch.nn.functional.pad(scale, (0, -matrix.rows % matrix.height)).view(-1, matrix.height, 1)
    values = matrix.values.view(-1, matrix.height, matrix.width) * by_row[matrix.block_rows]
    fused.weight = dataclasses.replace(matrix, values=values.float().reshape(-1))
    return True


def _residual(node: fx.Node, own: fx.Node) -> fx.Node | None:
    """Return the node that is added to a layer's output, or None if `node` does not add one of the same shape."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is own else first
    if not isinstance(other, fx.Node) or other is own or is_constant(other) or not are_float(other):
        return None
    return other if other.meta["val"].shape == own.meta["val"].shape else None


def _activation(node: fx.Node) -> Activation:
    if node.target is aten.relu.default:
        return Activation.RELU
    if node.target is aten.relu6.default or (node.target is aten.hardtanh.default and node.args[1:] == (0.0, 6.0)):
        return Activation.RELU6
    is_exact = node.target is aten.gelu.default and node.kwargs.get("approximate", "none") == "none"
    return Activation.GELU if is_exact and len(node.args) == 1 else Activation.NONE
