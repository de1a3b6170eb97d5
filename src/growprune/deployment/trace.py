"""From a module and an example to a graph of torch's operations, with the shapes that the example gives them.

`torch.export` follows what a model does with an example, through whatever Python it is written in, and knows the shape
of everything. Where it cannot, the model is taken part by part (parts.py).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

aten = torch.ops.aten

VIEWS = {
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.expand.default, aten.select.int),
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int),
    *(aten.narrow.default, aten.alias.default, aten.detach.default, operator.getitem, aten.movedim.intlist),
}
"""Operations whose result is the memory they were given."""


class NotTraceable(Exception):
    """A module that cannot be taken as a graph, and why."""


@dataclass(frozen=True)
class Traced:
    """A graph of functional operations."""

    graph: fx.Graph
    tensors: Mapping[fx.Node, Tensor]
    """Placeholders that are parameters, buffers and constants of the module."""
    inputs: tuple[fx.Node, ...]
    """Placeholders of the leaves of (args, kwargs)."""
    outputs: tuple[Any, ...]
    """Nodes or plain values, leaves of what the module returns."""
    out_spec: pytree.TreeSpec


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Traced:
    with _quietly():
        try:
            program = torch.export.export(module, args, dict(kwargs), strict=False)
        except Exception as error:  # whatever the code of a user does under a tracer
            raise NotTraceable(_first_line(error)) from error
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
    if len(inputs) != len(pytree.tree_leaves((args, dict(kwargs)))):
        raise NotTraceable("its inputs are of a kind that torch.export takes apart otherwise")
    output = next(iter(reversed(graph.nodes)))
    _make_functional(graph, tensors)
    _check(graph)
    return Traced(graph, tensors, tuple(inputs), tuple(output.args[0]), program.call_spec.out_spec)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the fused encoder layer of torch, which is one operation that hides all its products."""
    fast = torch.backends.mha.get_fastpath_enabled()
    logger, level = logging.getLogger("torch.export"), logging.getLogger("torch.export").level
    torch.backends.mha.set_fastpath_enabled(False)
    logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer; the model's own code has warned already, or will
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        logger.setLevel(level)


def _make_functional(graph: fx.Graph, tensors: Mapping[fx.Node, Tensor]) -> None:
    """Let operations that write to their first argument make a new tensor, which later ones then read."""
    positions = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not _mutates(node):
            continue
        written = node.args[0]
        functional = _functional(node.target)
        is_shared = written in tensors or written.op == "placeholder" or _is_view(written)
        is_seen_elsewhere = any(_is_view(user) and positions[user] < positions[node] for user in written.users)
        if functional is None or is_shared or is_seen_elsewhere:
            raise NotTraceable(f"{node.target} writes to what others see")
        node.target = functional
        written.replace_all_uses_with(node, delete_user_cb=lambda user, at=positions[node]: positions[user] > at)
    graph.lint()


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether its result is, or may be, memory that it was given."""
    returned = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    return node.target in VIEWS or any(one.alias_info is not None for one in returned)


def _functional(target: Any) -> Any:
    """The operation that gives what `target` writes, such as relu for relu_."""
    name = target._schema.name.partition("::")[2]
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotTraceable(f"its graph has a {node.op}, {node.target}")
        if node.target is aten.as_strided.default or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotTraceable(f"it uses {node.target}")
        if any(isinstance(size, torch.SymInt) for size in getattr(node.meta.get("val"), "shape", ())):
            raise NotTraceable(f"{node.target} gives a shape that depends on the data")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]
