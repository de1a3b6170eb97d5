"""Which weights of a model may become sparse.

A *layer* is a module that multiplies its input by a weight and is written the way torch writes one: it says how
many inputs it takes (`in_features`, `in_channels`), or it is an attention with `in_proj_weight`. Norms, biases and
embeddings are not layers, and a weight that an embedding shares stays dense.

Standard library only: models are read by their attributes, so that partitions and plans need no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from growprune.errors import GrowpruneError

DENSE_SHAPES = "_dense_shapes"
"""The attribute in which a module keeps the shapes, by local name, of parameters it holds in another shape."""

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Weight:
    """A matrix that may become sparse: a parameter, or some rows of one."""

    name: str
    parameter: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    """The rows of the parameter that are this matrix; None for all of them."""
    transposed: bool = False
    """Whether the parameter is stored (in, out, ...), as transposed convolutions do."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Any) -> Any:
        """This weight's share of a tensor shaped like the parameter, as a view."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def is_compact(module: Any) -> bool:
    """Whether a module holds a parameter in another shape."""
    return bool(vars(module).get(DENSE_SHAPES))


def own_weights(module: Any) -> list[str]:
    """The local names of the parameters a module multiplies its input by; empty if it is no layer."""
    own = {name for name, _ in module.named_parameters(recurse=False) if len(dense_shape(module, name)) >= 2}
    if own & set(ATTENTION_WEIGHTS):
        return [name for name in ATTENTION_WEIGHTS if name in own]
    takes_inputs = hasattr(module, "in_features") or hasattr(module, "in_channels")
    return ["weight"] if takes_inputs and "weight" in own else []


def dense_shape(module: Any, local: str) -> tuple[int, ...]:
    """The shape of a module's own parameter, however it is stored."""
    shapes: dict[str, tuple[int, ...]] = getattr(module, DENSE_SHAPES, {})
    return shapes.get(local) or tuple(dict(module.named_parameters(recurse=False))[local].shape)


def layer_weights(model: Any) -> dict[str, list[Weight]]:
    """Every layer of a model with its weights, in the order of registration; a shared module or weight counts once.

    >>> import torch
    >>> [w.name for ws in layer_weights(torch.nn.MultiheadAttention(4, 2)).values() for w in ws]
    ['in_proj_weight[q]', 'in_proj_weight[k]', 'in_proj_weight[v]', 'out_proj.weight']
    """
    excluded = _used_otherwise(model)
    seen: set[int] = set()
    layers: dict[str, list[Weight]] = {}
    for path, module in model.named_modules():
        weights = []
        for local in own_weights(module):
            parameter = dict(module.named_parameters(recurse=False))[local]
            if id(parameter) not in seen | excluded:
                seen.add(id(parameter))
                shape = dense_shape(module, local)
                if math.prod(shape) == 0:
                    continue
                weights += _split(_join(path, local), local, shape, getattr(module, "transposed", False))
        if weights:
            layers[path] = weights
    return layers


def prunable_weights(model: Any, *, keep_dense: Sequence[str] = (), include: Sequence[str] = ()) -> tuple[Weight, ...]:
    """The weights that may become sparse: those of layers, less `keep_dense`, plus the parameters named in `also`.

    Both take names of modules or parameters, or globs of them; one that matches nothing is an error.
    """
    weights = [w for ws in layer_weights(model).values() for w in ws]
    known = {w.parameter for w in weights}
    parameters, first = dict(model.named_parameters()), first_names(model)
    for name in (first[name] for name in _match_all(include, first, "include")):
        if parameters[name].dim() == 0:
            raise GrowpruneError(f"also has {name!r}, which is a single number and cannot be sparse")
        if name not in known:
            known.add(name)
            weights.append(Weight(name, name, tuple(parameters[name].shape)))
    matched = _match_all(keep_dense, [*first, *(w.name for w in weights)], "keep_dense")
    dense = {first.get(name, name) for name in matched}
    kept = tuple(w for w in weights if w.name not in dense and w.parameter not in dense)
    if not kept:
        why = "all are in keep_dense" if weights else "it has no Linear, convolution or attention weight"
        raise GrowpruneError(f"the model has nothing to prune: {why}; name parameters to prune with include=[...]")
    return kept


def first_names(model: Any) -> dict[str, str]:
    """The name by which each parameter is known, by all names that it has: a tied one has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def computed_weights(model: Any) -> list[str]:
    """Layers whose weight is no parameter of theirs, but computed from others, as weight_norm does it."""
    found = []
    for path, module in model.named_modules():
        takes_inputs = hasattr(module, "in_features") or hasattr(module, "in_channels")
        # not by reading the attribute, which may compute it, and change the state of that
        if takes_inputs and ("weight" in vars(module) or "weight" in getattr(module, "parametrizations", ())):
            found.append(_join(path, "weight"))
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a tensor's name is the pattern, lies below the module it names, or fits it as a glob."""
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def _match_all(patterns: Sequence[str], names: Iterable[str], argument: str) -> Iterator[str]:
    if isinstance(patterns, str):
        raise GrowpruneError(
            f"{argument} is the text {patterns!r}, but must be a list of names or globs: [{patterns!r}]"
        )
    names = list(names)
    for pattern in patterns:
        found = [name for name in names if matches(name, pattern)]
        if not found:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise GrowpruneError(f"{argument} has {pattern!r}, which matches no parameter; there are {shown}")
        yield from found


def _split(name: str, local: str, shape: tuple[int, ...], transposed: bool) -> list[Weight]:
    if local != "in_proj_weight":
        return [Weight(name, name, shape, transposed=transposed)]
    third = shape[0] // 3  # attention stacks the matrices of q, k and v
    return [
        Weight(f"{name}[{letter}]", name, (third, *shape[1:]), rows=(i * third, (i + 1) * third))
        for i, letter in enumerate("qkv")
    ]


def _used_otherwise(model: Any) -> set[int]:
    """Parameters that also belong to a module that is no layer: a tied embedding must stay dense."""
    found: dict[int, bool] = {}
    for _, module in model.named_modules():
        weights = set(own_weights(module))
        for local, parameter in module.named_parameters(recurse=False):
            found[id(parameter)] = found.get(id(parameter), False) or local not in weights
    return {key for key, otherwise in found.items() if otherwise}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
