"""Turn a module and an example into a graph of torch's operations, with the shapes that the example gives them.

`torch.export` follows the operations of a model on the example through its Python code, and knows all shapes. If it
fails, the model is deployed part by part. Values that do not depend on the input are marked as constant, and identities
are removed.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from growprune.deployment.example import Example, first_line
from growprune.deployment.skeleton import Skeleton
from growprune.files.exporters import quiet

aten = torch.ops.aten

RESHAPES = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
}
PERMUTES = {aten.transpose.int, aten.permute.default, aten.t.default}
VIEWS = {
    *(*RESHAPES, *PERMUTES, aten.expand.default, aten.select.int),
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int),
    *(aten.narrow.default, aten.alias.default, aten.detach.default, operator.getitem, aten.movedim.intlist),
}
"""Operations whose result may share the memory of their input."""
IDENTITIES = {
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.detach.default),
    *(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
}
"""Operations that change no values. A dropout is one only in eval mode."""
LARGEST = 1 << 24
"""The most elements of a constant that is computed from others."""


class NotTraceable(Exception):
    """A module cannot be traced as a graph; the message says why."""


@dataclass(frozen=True)
class Traced:
    """A graph of functional operations."""

    graph: fx.Graph
    tensors: Mapping[fx.Node, Tensor]
    """The tensors of placeholders that are parameters, buffers and constants of the module."""
    inputs: tuple[fx.Node, ...]
    """Placeholders of the leaves of (args, kwargs)."""
    out_spec: pytree.TreeSpec


def trace(module: nn.Module, example: Example) -> Traced:
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # an encoder layer would be one operation that hides its products
    try:
        with torch.no_grad(), quiet("torch.export"):  # the model's own code has warned already, or will
            program = torch.export.export(module, example.args, example.kwargs, strict=False)
    except Exception as error:  # the user's code may raise anything under a tracer
        raise NotTraceable(first_line(error, 120)) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
    graph = copy.deepcopy(program.graph)
    tensors, inputs = {}, []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            tensors[node] = state[spec.target] if spec.target in state else program.constants[spec.target]
        else:
            raise NotTraceable(f"it has an input of kind {spec.kind.name}")
    if len(inputs) != len(example.leaves):
        raise NotTraceable("torch.export flattens its inputs differently")
    _make_functional(graph, tensors)
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotTraceable(f"its graph has a {node.op}, {node.target}")
        if node.target is aten.as_strided.default or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotTraceable(f"it uses {node.target}")
        if any(isinstance(size, torch.SymInt) for size in getattr(node.meta.get("val"), "shape", ())):
            raise NotTraceable(f"{node.target} gives a shape that depends on the data")
    return Traced(graph, tensors, tuple(inputs), program.call_spec.out_spec)


def _make_functional(graph: fx.Graph, tensors: Mapping[fx.Node, Tensor]) -> None:
    """Replace operations that write to their first argument by ones that return a new tensor."""
    positions = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable):
            continue
        written, name = node.args[0], node.target._schema.name.partition("::")[2]
        packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
        functional = getattr(packet, node.target._overloadname, None)  # such as relu for relu_
        is_shared = written in tensors or written.op == "placeholder" or _is_view(written)
        is_seen_elsewhere = any(_is_view(user) and positions[user] < positions[node] for user in written.users)
        if functional is None or is_shared or is_seen_elsewhere:
            raise NotTraceable(f"{node.target} writes in place to a tensor that is used elsewhere")
        node.target = functional
        written.replace_all_uses_with(node, delete_user_cb=lambda user, at=positions[node]: positions[user] > at)
    graph.lint()


def _is_view(node: fx.Node) -> bool:
    """True if the result of a node may share the memory of its inputs."""
    returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return node.target in VIEWS or any(one.alias_info is not None for one in returned)


# Reading nodes


def arguments(node: fx.Node, *defaults: Any) -> list[Any]:
    """Return the positional arguments of a node, with defaults for missing ones."""
    return [*node.args, *defaults[len(node.args) :]]


def pair(values: Any) -> tuple[int, int]:
    """Return height and width, given as a number or a sequence."""
    first, second = (values, values) if isinstance(values, int) else (values[0], values[-1])
    return int(first), int(second)


def are_float(*nodes: fx.Node) -> bool:
    """True if all are float32 tensors on the CPU."""
    values = [node.meta.get("val") for node in nodes]
    return all(isinstance(v, Tensor) and v.dtype == torch.float32 and v.device.type == "cpu" for v in values)


# Constants: values that do not depend on the input


@dataclass(frozen=True)
class Constant:
    """A tensor that is the same for all inputs. It is built on request, because a sparse weight is large when dense."""

    make: Callable[[], Tensor]
    name: str | None = None
    """The name of the parameter, if the constant is an unchanged parameter."""
    is_sparse: bool = False
    """True if the constant is a sparse weight, or computed from one."""


def fold_constants(traced: Traced, skeleton: Skeleton, names: Mapping[fx.Node, str]) -> None:
    """Set `meta["constant"]` for all nodes that do not depend on an input.

    Args:
        names: the name in the model of each placeholder of a parameter.
    """
    for node in traced.graph.nodes:
        if node in traced.tensors:
            tensor, name = traced.tensors[node], names.get(node, "")
            is_sparse = name in skeleton.matrices
            make = functools.partial(skeleton.dense_weight, name, tensor.shape) if is_sparse else tensor.detach
            node.meta["constant"] = Constant(make, name or None, is_sparse)
        elif node.op == "call_function" and all("constant" in n.meta for n in node.all_input_nodes) and _is_pure(node):
            is_sparse = any(n.meta["constant"].is_sparse for n in node.all_input_nodes)

            def made(node: fx.Node = node) -> Any:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["constant"].make())
                with torch.no_grad():
                    return node.target(*args, **kwargs)  # type: ignore[operator]

            node.meta["constant"] = Constant(functools.cache(made), is_sparse=is_sparse)


def is_constant(node: Any) -> bool:
    return isinstance(node, fx.Node) and "constant" in node.meta


def constant(node: Any) -> Tensor | None:
    """Return the tensor of a constant node, or None if there is no node."""
    return node.meta["constant"].make() if isinstance(node, fx.Node) else None


def drop_identities(graph: fx.Graph) -> None:
    """Replace uses of identity operations by their inputs."""
    conversions = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.to.device)
    for node in list(graph.nodes):
        if node.target in IDENTITIES:  # a model may ask for dropout in eval mode, too
            is_identity = not ("dropout" in str(node.target) and bool(node.args[2]))
        elif node.target in conversions:
            before, after = node.args[0].meta["val"], node.meta["val"]
            is_identity = before.dtype == after.dtype and before.device == after.device
        else:
            is_identity = False
        if is_identity:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    value = node.meta.get("val")
    sizes = [value] if isinstance(value, Tensor) else value if isinstance(value, (tuple, list)) else ()
    return not is_random and all(isinstance(v, Tensor) and v.numel() <= LARGEST for v in sizes)
