"""Which weights of a model may become sparse.

A *layer* is a module that multiplies its input by weights. `LAYERS` lists the kinds of layers that are known, each by
a function that reads a module by its attributes: norms, biases and embeddings are none; `register_layer` adds a kind of
one's own. A weight that an embedding shares stays dense, and so do adapters (LoRA and its kin), which are small and are
merged into what they adapt.

Standard library only: models are read by their attributes, so that partitions and plans need no torch.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from growprune.errors import GrowpruneError
from growprune.plan.settings import as_names

DENSE_SHAPES = "_dense_shapes"
"""The attribute in which a module keeps the shapes, by local name, of parameters it holds in another shape."""

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_routed_experts", "n_experts", "n_routed_experts")


@dataclass(frozen=True)
class Weight:
    """A matrix that may become sparse: a parameter, some rows of one, or one of the matrices stacked in one."""

    name: str
    parameter: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    """(out, in, ...), or (in, out, ...) if it is transposed; one dimension less than a parameter that is a stack."""
    rows: tuple[int, int] | None = None
    """The range of the parameter's dimension 0 that is this matrix; None for all of it."""
    transposed: bool = False
    """Whether it is stored (in, out, ...), as in transposed convolutions."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Any) -> Any:
        """This weight's share of a tensor shaped like the parameter, as a view."""
        if self.rows is None:
            return tensor
        rows = tensor[self.rows[0] : self.rows[1]]
        return rows[0] if len(rows.shape) > len(self.shape) else rows


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of a module's own parameters that have two dimensions or more, by their local names."""

Layer: TypeAlias = Callable[[Any, Shapes], Sequence[Weight]]
"""A kind of layer: the weights of a module, by their local names; none if the module is of another kind."""


def linear_or_convolution(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """A module that says how many inputs it has, as those of torch do."""
    if "weight" not in shapes or not (hasattr(module, "in_features") or hasattr(module, "in_channels")):
        return ()
    return (Weight("weight", "weight", shapes["weight"], transposed=getattr(module, "transposed", False)),)


def attention(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """torch's MultiheadAttention, whose in_proj_weight is the matrices of q, k and v, one below the other."""
    del module
    if "in_proj_weight" not in shapes:
        return [Weight(name, name, shapes[name]) for name in ATTENTION_WEIGHTS if name in shapes]
    third, columns = shapes["in_proj_weight"][0] // 3, shapes["in_proj_weight"][1:]
    return [
        Weight(f"in_proj_weight[{letter}]", "in_proj_weight", (third, *columns), rows=(i * third, (i + 1) * third))
        for i, letter in enumerate("qkv")
    ]


def bilinear(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """torch's Bilinear: (out, in1, in2)."""
    is_one = hasattr(module, "in1_features") and "weight" in shapes
    return (Weight("weight", "weight", shapes["weight"]),) if is_one else ()


def conv1d_of_transformers(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """The Conv1D of GPT-2, which is a Linear stored (in, out)."""
    is_one = any(c.__name__ == "Conv1D" for c in type(module).__mro__) and hasattr(module, "nf")
    return (Weight("weight", "weight", shapes["weight"], transposed=True),) if is_one and "weight" in shapes else ()


def experts(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """The experts of a mixture, stacked in parameters of three dimensions: each expert is a matrix of its own."""
    counts = [getattr(module, name, None) for name in EXPERT_COUNTS]
    stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[1] > 1 and shape[0] in counts}
    transposed = bool(stacks) and _is_inputs_first(module, next(iter(stacks.values())))
    return [
        Weight(f"{name}[{i}]", name, shape[1:], rows=(i, i + 1), transposed=transposed)
        for name, shape in stacks.items()
        for i in range(shape[0])
    ]


def _is_inputs_first(module: Any, shape: tuple[int, ...]) -> bool:
    """Whether experts are stored (experts, in, out): they say so, or their first matrix has the hidden size first."""
    stated = getattr(module, "is_transposed", None)
    if stated is not None:
        return bool(stated)
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    return shape[1] == hidden != shape[2]


REGISTERED: dict[type, dict[str, str]] = {}
"""Kinds of layers of users: by class, the axes of each of its weights."""

AXES = ("out in", "in out", "stack out in", "stack in out")
"""How the dimensions of a weight can be ordered; kernel positions, if there are any, come last, as "..."."""


def register_layer(kind: type, /, **axes: str) -> None:
    """Let growprune know a kind of layer of your own: which of its parameters are weights, and what their axes are.

    From then on it is like a Linear to everything: patterns run along its inputs, it is a layer to partitions, FLOPs
    are charged to it, both storages hold it, and files have it. Register it where its class is defined, so that
    whoever loads a file has it too. A class derived from it is of that kind as well, unless it is registered itself.

    Args:
        kind: the class of the module.
        axes: by the name of each parameter that is a weight: "out in", or "in out" where inputs come first; with
            "stack " before it, if it is a stack of such matrices, each pruned by itself; with " ..." after it, if
            kernel positions follow, as in a convolution.

    Examples:
        >>> import torch
        >>> class Dense(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = torch.nn.Parameter(torch.zeros(8, 4))
        >>> register_layer(Dense, kernel="in out")
        >>> prunable_weights(Dense())[0].transposed
        True
    """
    if not isinstance(kind, type) or not hasattr(kind, "named_parameters"):
        raise GrowpruneError(f"register_layer was given {kind!r}, but takes the class of a module")
    if not axes:
        raise GrowpruneError(f"register_layer({kind.__name__}) names no weight: give its axes, as in weight='out in'")
    for name, text in axes.items():
        if not isinstance(text, str) or text.removesuffix(" ...") not in AXES:
            known = ", ".join(map(repr, AXES))
            raise GrowpruneError(f"{name} is {text!r}, but must be one of {known}, each also with ' ...' after it")
    if REGISTERED.get(kind, axes) != axes:
        raise GrowpruneError(f"{kind.__name__} is registered already, with {REGISTERED[kind]}: register it once")
    REGISTERED[kind] = dict(axes)


def registered(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """What `register_layer` was told of; of several classes that a module derives from, the nearest."""
    kind = next((c for c in type(module).__mro__ if c in REGISTERED), None)
    weights: list[Weight] = []
    for name, axes in REGISTERED[kind].items() if kind is not None else ():
        if name in shapes:
            weights += _matrices(module, name, shapes[name], axes)
        elif vars(module).get("_parameters", {}).get(name, module) is not None:  # None is a weight that it is without
            has = ", ".join(name for name, _ in module.named_parameters(recurse=False)) or "none"
            raise GrowpruneError(
                f"{type(module).__name__} was registered with {name}={axes!r}, but has no such parameter of two "
                f"dimensions or more; its own are {has}"
            )
    return weights


def _matrices(module: Any, name: str, shape: tuple[int, ...], axes: str) -> list[Weight]:
    words = axes.split()
    num_axes = len(words) - (words[-1] == "...")
    if len(shape) < num_axes or (len(shape) > num_axes and words[-1] != "..."):
        raise GrowpruneError(
            f"{type(module).__name__} was registered with {name}={axes!r}, but {name} has shape {shape}: name the axes "
            f"of all its dimensions"
        )
    transposed = words.index("in") < words.index("out")
    if words[0] != "stack":
        return [Weight(name, name, shape, transposed=transposed)]
    return [Weight(f"{name}[{i}]", name, shape[1:], (i, i + 1), transposed) for i in range(shape[0])]


LAYERS: dict[str, Layer] = {
    "registered": registered,
    "attention": attention,
    "linear or convolution": linear_or_convolution,
    "bilinear": bilinear,
    "Conv1D of transformers": conv1d_of_transformers,
    "experts": experts,
}
"""The kinds of layers, by a name for readers; a module is of the first that finds weights in it."""


def is_compact(module: Any) -> bool:
    """Whether a module holds a parameter in another shape."""
    return bool(vars(module).get(DENSE_SHAPES))


def dense_shape(module: Any, local: str) -> tuple[int, ...]:
    """The shape of a module's own parameter, however it is stored."""
    shapes: dict[str, tuple[int, ...]] = getattr(module, DENSE_SHAPES, {})
    return shapes.get(local) or tuple(dict(module.named_parameters(recurse=False))[local].shape)


def own_weights(module: Any) -> Sequence[Weight]:
    """The weights a module multiplies its input by, by their local names; none if it is no layer."""
    named = ((name, dense_shape(module, name)) for name, _ in module.named_parameters(recurse=False))
    shapes = {name: shape for name, shape in named if len(shape) >= 2}
    found = (layer(module, shapes) for layer in LAYERS.values()) if shapes else ()
    return next((weights for weights in found if weights), ())


def is_adapter(module: Any) -> bool:
    """Whether a module adapts another, as those of PEFT (LoRA and its kin): what it has beside `base_layer`."""
    has_adapters = hasattr(module, "adapter_layer_names") or hasattr(module, "lora_A")
    return has_adapters and "base_layer" in dict(module.named_children())


def adapter_parameters(model: Any) -> set[int]:
    """The ids of all parameters of adapters; they are never pruned."""
    found: set[int] = set()
    for module in filter(is_adapter, model.modules()):
        found |= {id(p) for p in module.parameters()} - {id(p) for p in module.base_layer.parameters()}
    return found


def layer_weights(model: Any) -> dict[str, list[Weight]]:
    """Every layer of a model with its weights, in the order of registration; a shared module or weight counts once.

    Examples:
        >>> import torch
        >>> [w.name for ws in layer_weights(torch.nn.MultiheadAttention(4, 2)).values() for w in ws]
        ['in_proj_weight[q]', 'in_proj_weight[k]', 'in_proj_weight[v]', 'out_proj.weight']
    """
    seen = _used_otherwise(model) | adapter_parameters(model)
    layers: dict[str, list[Weight]] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        new = [w for w in own_weights(module) if id(own[w.parameter]) not in seen and w.numel]
        if new:
            seen |= {id(own[w.parameter]) for w in new}
            layers[path] = [replace(w, name=_join(path, w.name), parameter=_join(path, w.parameter)) for w in new]
    return layers


def prunable_weights(model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = ()) -> tuple[Weight, ...]:
    """The weights that may become sparse: those of layers, less `keep_dense`, plus the parameters named in `include`.

    Both take names of modules or parameters, or globs of them; one that matches nothing is an error. A parameter that
    is of no known kind of layer is read as (out, in, ...).
    """
    keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
    weights = [w for ws in layer_weights(model).values() for w in ws]
    weights += _included(model, include, {w.parameter for w in weights})
    first = first_names(model)
    matched = _match_all(keep_dense, [*first, *(w.name for w in weights), *computed_weights(model)], "keep_dense")
    dense = {first.get(name, name) for name in matched}
    kept = tuple(w for w in weights if w.name not in dense and w.parameter not in dense)
    if not kept:
        why = "all are in keep_dense" if weights else "it has no Linear, convolution or attention weight"
        raise GrowpruneError(f"the model has nothing to prune: {why}; name parameters to prune with include=[...]")
    return kept


def _included(model: Any, include: Sequence[str], known: set[str]) -> list[Weight]:
    """What is named in `include` and is not known as a weight already."""
    adapters = adapter_parameters(model)
    parameters = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in adapters}
    first = first_names(model)
    names = dict.fromkeys(first[name] for name in _match_all(include, parameters, "include"))
    found = []
    for name in (name for name in names if name not in known):
        path, _, local = name.rpartition(".")
        module = model.get_submodule(path)
        if reason := _not_prunable(module, local):
            raise GrowpruneError(f"include has {name!r}, {reason}")
        found.append(Weight(name, name, dense_shape(module, local)))
    return found


def _not_prunable(module: Any, local: str) -> str:
    """Why a parameter cannot be sparse, and what to do; nothing if it can."""
    if not dense_shape(module, local):
        return "which is a single number and cannot be sparse"
    if getattr(module, "sparse", False) is True and hasattr(module, "num_embeddings"):
        return "of an embedding made with sparse=True, whose gradients cannot be masked: make it with sparse=False"
    is_by_parametrization = any(type(child).__name__ == "_WeightNorm" for _, child in module.named_children())
    stem, _, letter = local.rpartition("_")
    is_by_hook = letter == "v" and f"{stem}_g" in dict(module.named_parameters(recurse=False))
    if (is_by_parametrization and local == "original1") or is_by_hook:
        return "which weight_norm divides by its norm, NaN for a row without live weights: remove the weight_norm first"
    return ""


def first_names(model: Any) -> dict[str, str]:
    """The name by which each parameter is known, by all names that it has: a tied one has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def tensors_of(model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Parameters and persistent buffers by their first names, and {other name: first name} of shared ones."""
    passing = set()
    for path, module in model.named_modules(remove_duplicate=False):
        passing |= {_join(path, local) for local in module._non_persistent_buffers_set}
    buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in passing]
    tensors: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first[id(tensor)]
    return tensors, aliases


def computed_weights(model: Any) -> dict[str, list[str]]:
    """Layers whose weight is no parameter of theirs, but computed, as by weight_norm; and from which parameters."""
    found = {}
    for path, module in model.named_modules():
        takes_inputs = hasattr(module, "in_features") or hasattr(module, "in_channels")
        # not by reading the attribute, which may compute it, and change the state of that
        if takes_inputs and ("weight" in vars(module) or "weight" in getattr(module, "parametrizations", ())):
            beginnings = (_join(path, "parametrizations.weight."), _join(path, "weight_"))
            found[_join(path, "weight")] = [n for n, _ in module.named_parameters(path) if n.startswith(beginnings)]
    return found


def matches(name: str, pattern: str) -> bool:
    """Whether a tensor's name is the pattern, lies below the module it names, or fits it as a glob."""
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def matching(patterns: Iterable[str], names: Iterable[str]) -> Iterator[list[str]]:
    """For each pattern, the names that match it, in their order. Those that begin otherwise are not even looked at."""
    names = list(names)
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[i] for i in order]
    for pattern in patterns:
        beginning = re.split(r"[*?[]", pattern, maxsplit=1)[0]
        first = bisect.bisect_left(ordered, beginning)
        end = bisect.bisect_right(ordered, beginning, first, key=operator.itemgetter(slice(len(beginning))))
        yield [names[i] for i in sorted(order[first:end]) if matches(names[i], pattern)]


def _match_all(patterns: Sequence[str], names: Iterable[str], argument: str) -> Iterator[str]:
    names = list(names)
    for pattern, found in zip(patterns, matching(patterns, names), strict=True):
        if not found:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise GrowpruneError(f"{argument} has {pattern!r}, which matches no parameter; there are {shown}")
        yield from found


def _used_otherwise(model: Any) -> set[int]:
    """Parameters that also belong to a module that is no layer: a tied embedding must stay dense."""
    found: dict[int, bool] = {}
    for _, module in model.named_modules():
        weights = {weight.parameter for weight in own_weights(module)}
        for local, parameter in module.named_parameters(recurse=False):
            found[id(parameter)] = found.get(id(parameter), False) or local not in weights
    return {key for key, otherwise in found.items() if otherwise}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
