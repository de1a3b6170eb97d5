"""Doing once what does not depend on the input: constants, and identities, which are left out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from growprune.deployment.trace import Traced, aten

IDENTITIES = {
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.detach.default),
    *(aten.contiguous.default, aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default),
}
"""Operations that change no number, dropouts only where a model is not trained."""
LARGEST = 1 << 24
"""The most numbers that a constant may have that is made of smaller ones."""


@dataclass(frozen=True)
class Constant:
    """A tensor that is the same for all inputs. It is made when it is asked for, since a sparse weight is large."""

    make: Callable[[], Tensor]
    weight: str | None = None
    """The sparse weight that it is, as it is."""


def fold_constants(traced: Traced, weight_of: Callable[[Tensor], tuple[str, Callable[[], Tensor]] | None]) -> None:
    """Mark what depends on no input, in `meta["constant"]`.

    Args:
        weight_of: by a parameter of the module, the name of the sparse weight that it stands for, and how to make it.
    """
    for node in traced.graph.nodes:
        if node in traced.tensors:
            tensor = traced.tensors[node]
            found = weight_of(tensor)
            node.meta["constant"] = Constant(tensor.detach) if found is None else Constant(found[1], found[0])
        elif node.op == "call_function" and all("constant" in n.meta for n in node.all_input_nodes) and _is_pure(node):
            node.meta["constant"] = Constant(_once(node))


def is_constant(node: Any) -> bool:
    return isinstance(node, fx.Node) and "constant" in node.meta


def constant(node: Any) -> Tensor | None:
    """The tensor that a node stands for; of no node, none."""
    return node.meta["constant"].make() if isinstance(node, fx.Node) else None


def drop_identities(graph: fx.Graph) -> None:
    """Let who reads the result of an identity read its input."""
    for node in list(graph.nodes):
        if (node.target in IDENTITIES and not _is_trained(node)) or _is_same_type(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_trained(node: fx.Node) -> bool:
    """A dropout that drops in eval mode too, because someone wants it to."""
    return "dropout" in str(node.target) and bool(node.args[2])


def _is_same_type(node: fx.Node) -> bool:
    """A conversion to what it is already."""
    if node.target not in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.to.device):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.dtype == after.dtype and before.device == after.device)


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    value = node.meta.get("val")
    sizes = [value] if isinstance(value, Tensor) else value if isinstance(value, (tuple, list)) else ()
    return not is_random and all(isinstance(v, Tensor) and v.numel() <= LARGEST for v in sizes)


def _once(node: fx.Node) -> Callable[[], Any]:
    kept: list[Any] = []

    def make() -> Any:
        if not kept:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["constant"].make())
            with torch.no_grad():
                kept.append(node.target(*args, **kwargs))  # type: ignore[operator]
        return kept[0]

    return make
