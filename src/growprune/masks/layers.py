"""Find the weights of a model that may become sparse.

A *layer* is a module that multiplies its input by weights. `LAYERS` lists the known kinds of layers, each with a
function that inspects the attributes of a module. Norms, biases and embeddings are not layers. `register_layer` adds
your own kind. A weight that is tied to an embedding stays dense. So do adapters such as LoRA, which are small and are
merged into the layers they adapt.

Standard library only: models are read by their attributes, so that partitions and plans do not need torch.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from growprune.errors import GrowpruneError
from growprune.plan.settings import as_names

DENSE_SHAPES = "_dense_shapes"
"""The attribute with a module's dense shapes, by local name, of parameters that it stores in another shape."""

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
RECURRENT_WEIGHT = re.compile(r"weight_(ih|hh|hr)(_l\d+(_reverse)?)?")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "num_routed_experts", "n_experts", "n_routed_experts")


@dataclass(frozen=True)
class Weight:
    """A matrix that may become sparse: a parameter, some rows of it, or one matrix of a stack."""

    name: str
    parameter: str
    """The parameter's name in the model."""
    shape: tuple[int, ...]
    """(out, in, ...), or (in, out, ...) if transposed. One dimension less than the parameter if that is a stack."""
    rows: tuple[int, int] | None = None
    """The range of the parameter's dimension 0 that holds this matrix; None for all of it."""
    transposed: bool = False
    """True if it is stored as (in, out, ...), as in transposed convolutions."""

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Any) -> Any:
        """Return the view of this weight in a tensor that has the shape of the parameter."""
        if self.rows is None:
            return tensor
        rows = tensor[self.rows[0] : self.rows[1]]
        return rows[0] if len(rows.shape) > len(self.shape) else rows


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of a module's own parameters that have two dimensions or more, by their local names."""

Layers: TypeAlias = Mapping[str, Sequence[Weight]]
"""The layers of a model with their weights, by path."""

Layer: TypeAlias = Callable[[Any, Shapes], Sequence[Weight]]
"""A kind of layer: a function that returns the weights of a module, with local names; none for other kinds."""


def linear_or_convolution(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the weight of a module that has `in_features` or `in_channels`, as torch's own have, or of a Bilinear."""
    names = ("in_features", "in_channels", "in1_features")
    if "weight" not in shapes or not any(hasattr(module, name) for name in names):
        return ()
    return (Weight("weight", "weight", shapes["weight"], transposed=getattr(module, "transposed", False)),)


def attention(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the weights of torch's MultiheadAttention, whose in_proj_weight stacks the matrices of q, k and v."""
    del module
    if "in_proj_weight" not in shapes:
        return [Weight(name, name, shapes[name]) for name in ATTENTION_WEIGHTS if name in shapes]
    third, columns = shapes["in_proj_weight"][0] // 3, shapes["in_proj_weight"][1:]
    return [
        Weight(f"in_proj_weight[{letter}]", "in_proj_weight", (third, *columns), rows=(i * third, (i + 1) * third))
        for i, letter in enumerate("qkv")
    ]


def recurrent(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the weights of torch's LSTM, GRU and RNN and their cells. Their stacked gates are pruned as one matrix."""
    if not (hasattr(module, "input_size") and hasattr(module, "hidden_size")):
        return ()
    return [Weight(name, name, shape) for name, shape in shapes.items() if RECURRENT_WEIGHT.fullmatch(name)]


def conv1d_of_transformers(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the weight of GPT-2's Conv1D, which is a Linear stored as (in, out)."""
    is_one = any(c.__name__ == "Conv1D" for c in type(module).__mro__) and hasattr(module, "nf")
    return (Weight("weight", "weight", shapes["weight"], transposed=True),) if is_one and "weight" in shapes else ()


def experts(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the experts of a mixture, stacked in three-dimensional parameters. Each expert is its own matrix."""
    counts = [getattr(module, name, None) for name in EXPERT_COUNTS]
    stacks = {name: shape for name, shape in shapes.items() if len(shape) == 3 and shape[1] > 1 and shape[0] in counts}
    transposed = False
    if stacks:  # stored as (experts, in, out): by their flag, or as the hidden size comes first
        shape, stated = next(iter(stacks.values())), getattr(module, "is_transposed", None)
        hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
        transposed = shape[1] == hidden != shape[2] if stated is None else bool(stated)
    return [
        Weight(f"{name}[{i}]", name, shape[1:], rows=(i, i + 1), transposed=transposed)
        for name, shape in stacks.items()
        for i in range(shape[0])
    ]


NORM = re.compile(r"[^_].*Norm(alization)?(Act|Gated|Fp\d+|\d+d?)*|Norm")
"""The class names of normalization layers: LayerNorm, LlamaRMSNorm, GroupNorm1, RMSNormGated, but not _WeightNorm."""


def is_norm(module: Any) -> bool:
    """True for a normalization layer of any library, such as BatchNorm2d or LayerNormFp32. It is known by its name."""
    return NORM.fullmatch(type(module).__name__) is not None and not own_weights(module)


def is_normalized(model: Any) -> bool:
    """True if a model has a layer such as BatchNorm or RMSNorm, which brings activations to one size.

    >>> from torch import nn
    >>> is_normalized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), is_normalized(nn.Linear(4, 4))
    (True, False)
    """
    return any(map(is_norm, model.modules()))


REGISTERED: dict[type, dict[str, str]] = {}
"""Layers registered by users: class -> axes of each of its weights."""

AXES = ("out in", "in out", "stack out in", "stack in out")
"""The possible orders of a weight's dimensions. Kernel positions, if any, come last, as "..."."""


def register_layer(kind: type, /, **axes: str) -> None:
    """Register your own layer class: which of its parameters are weights, and the order of their axes.

    growprune then treats it like a Linear: patterns run along its inputs, partitions count it as a layer, and FLOPs,
    both storages and files support it. Register it where the class is defined, so that everyone who loads a file has
    it too. Subclasses are included, unless they are registered themselves.

    Args:
        kind: the class of the module.
        axes: the axes of each parameter that is a weight: "out in", or "in out" if inputs come first. Put "stack "
            before it for a stack of such matrices, each pruned on its own. Put " ..." after it if kernel positions
            follow, as in a convolution.

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
        raise GrowpruneError(f"register_layer needs a subclass of nn.Module, got {kind!r}")
    if not axes:
        raise GrowpruneError(f"register_layer({kind.__name__}) needs the axes of a weight, such as weight='out in'")
    for name, text in axes.items():
        if not isinstance(text, str) or text.removesuffix(" ...") not in AXES:
            known = ", ".join(map(repr, AXES))
            raise GrowpruneError(f"{name} must be one of {known}, each optionally with ' ...' after it, got {text!r}")
    if REGISTERED.get(kind, axes) != axes:
        raise GrowpruneError(f"{kind.__name__} is already registered, with {REGISTERED[kind]}: register it only once")
    REGISTERED[kind] = dict(axes)


def registered(module: Any, shapes: Shapes) -> Sequence[Weight]:
    """Find the weights of a registered module. Of several registered base classes, the nearest counts."""
    kind = next((c for c in type(module).__mro__ if c in REGISTERED), None)
    weights: list[Weight] = []
    for name, axes in REGISTERED[kind].items() if kind is not None else ():
        if name in shapes:
            words, shape = axes.split(), shapes[name]
            num_axes = len(words) - (words[-1] == "...")
            if len(shape) < num_axes or (len(shape) > num_axes and words[-1] != "..."):
                raise GrowpruneError(
                    f"{type(module).__name__} was registered with {name}={axes!r}, but {name} has shape {shape}: name "
                    f"all of its axes"
                )
            transposed = words.index("in") < words.index("out")
            if words[0] == "stack":
                stack = range(shape[0])
                weights += [Weight(f"{name}[{i}]", name, shape[1:], (i, i + 1), transposed) for i in stack]
            else:
                weights.append(Weight(name, name, shape, transposed=transposed))
        elif vars(module).get("_parameters", {}).get(name, module) is not None:  # None is a weight that is switched off
            has = ", ".join(name for name, _ in module.named_parameters(recurse=False)) or "none"
            raise GrowpruneError(
                f"{type(module).__name__} was registered with {name}={axes!r}, but has no parameter {name} with 2 or "
                f"more dimensions; its parameters: {has}"
            )
    return weights


LAYERS: dict[str, Layer] = {
    "registered": registered,
    "attention": attention,
    "linear or convolution": linear_or_convolution,
    "recurrent": recurrent,
    "Conv1D of transformers": conv1d_of_transformers,
    "experts": experts,
}
"""The kinds of layers, by a readable name. The first one that finds weights in a module applies."""


def is_compact(module: Any) -> bool:
    """True if a module stores a parameter in another shape than its dense one."""
    return bool(vars(module).get(DENSE_SHAPES))


def dense_shape(module: Any, local: str) -> tuple[int, ...]:
    """Return the dense shape of a module's own parameter, however it is stored."""
    shapes: dict[str, tuple[int, ...]] = getattr(module, DENSE_SHAPES, {})
    return shapes.get(local) or tuple(module._parameters[local].shape)


def own_weights(module: Any) -> Sequence[Weight]:
    """Return the weights of a module, with local names; none if it is not a layer."""
    compact: dict[str, tuple[int, ...]] = getattr(module, DENSE_SHAPES, {})
    shapes = {}
    for name, parameter in module._parameters.items():  # named_parameters is slow
        if parameter is not None and len(shape := compact.get(name) or tuple(parameter.shape)) >= 2:
            shapes[name] = shape
    for layer in LAYERS.values() if shapes else ():
        if weights := layer(module, shapes):
            return weights
    return ()


def is_adapter(module: Any) -> bool:
    """True for an adapter of PEFT, such as LoRA: a module that wraps a `base_layer`."""
    has_adapters = hasattr(module, "adapter_layer_names") or hasattr(module, "lora_A")
    return has_adapters and "base_layer" in dict(module.named_children())


def adapter_parameters(model: Any) -> set[int]:
    """Return the ids of all parameters of adapters, which are never pruned."""
    found: set[int] = set()
    for module in filter(is_adapter, model.modules()):
        found |= {id(p) for p in module.parameters()} - {id(p) for p in module.base_layer.parameters()}
    return found


def layer_weights(model: Any) -> dict[str, list[Weight]]:
    """Return every layer of a model with its weights, in registration order. Shared modules and weights count once.

    Examples:
        >>> import torch
        >>> [w.name for ws in layer_weights(torch.nn.MultiheadAttention(4, 2)).values() for w in ws]
        ['in_proj_weight[q]', 'in_proj_weight[k]', 'in_proj_weight[v]', 'out_proj.weight']
    """
    found: list[tuple[str, Any, Sequence[Weight]]] = []
    seen = adapter_parameters(model)
    for path, module in model.named_modules():
        if not module._parameters:
            continue
        weights = own_weights(module)
        names = {weight.parameter for weight in weights}
        # what also belongs to a module that is no layer stays dense, as a tied embedding does
        seen |= {id(p) for name, p in module._parameters.items() if p is not None and name not in names}
        if weights:
            found.append((path, module, weights))
    layers: dict[str, list[Weight]] = {}
    for path, module, weights in found:
        own = module._parameters
        new = [w for w in weights if id(own[w.parameter]) not in seen and w.numel]
        if new:
            seen |= {id(own[w.parameter]) for w in new}
            before = f"{path}." if path else ""
            layers[path] = [replace(w, name=before + w.name, parameter=before + w.parameter) for w in new]
    return layers


def prunable_weights(
    model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = (), layers: Layers | None = None
) -> tuple[Weight, ...]:
    """Return the weights that may become sparse: those of layers, without `keep_dense`, plus those in `include`.

    Both take names of modules or parameters, or globs; one that matches nothing is an error. A parameter that is not
    part of a known layer is read as (out, in, ...). Parameters with fewer than two dimensions are never pruned.

    Args:
        layers: what `layer_weights` returns, if it is known.
    """
    keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
    weights = [w for ws in (layer_weights(model) if layers is None else layers).values() for w in ws]
    weights += _included(model, include, {w.parameter for w in weights})
    first = first_names(model)
    names = [*first, *[w.name for w in weights], *computed_weights(model)]
    dense = {first.get(name, name) for _, found in _match_all(keep_dense, names, "keep_dense") for name in found}
    kept = tuple([w for w in weights if w.name not in dense and w.parameter not in dense])
    if not kept:
        holders = {w.parameter.rpartition(".")[0] for w in weights}
        raise GrowpruneError(f"the model has nothing to prune: {why_nothing(model, holders)}")
    return kept


def frozen_layers(model: Any, *, include: Iterable[str] = (), layers: Layers | None = None) -> tuple[str, ...]:
    """Return the weights of layers that are frozen (requires_grad=False). A training leaves them as they are.

    Weights that `include` names are meant to be pruned, so they are not listed. In a model with adapters such as LoRA
    none are, because all of its layers are frozen, and pruned all the same.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> frozen_layers(model)
        ('0.weight',)
    """
    parameters = dict(model.named_parameters())
    layers = layer_weights(model) if layers is None else layers
    names = dict.fromkeys(w.parameter for weights in layers.values() for w in weights)
    asked = {name for found in matching(include, names) for name in found}
    frozen = tuple([name for name in names if name not in asked and not parameters[name].requires_grad])
    return () if frozen and any(map(is_adapter, model.modules())) else frozen


def _included(model: Any, include: Sequence[str], known: set[str]) -> list[Weight]:
    """What is named in `include`, has two dimensions or more, and is not known as a weight already."""
    if not include:
        return []
    adapters = adapter_parameters(model)
    parameters = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in adapters}
    first, shapes = first_names(model), dict[str, tuple[int, ...]]()
    for pattern, matched in _match_all(include, parameters, "include"):
        found = {name: shape_of(model, name) for name in (first[name] for name in matched)}
        matrices = {name: shape for name, shape in found.items() if len(shape) >= 2}
        if not matrices:
            raise GrowpruneError(
                f"include has {pattern!r}, but {few(found)} cannot be pruned: weights need at least two dimensions"
            )
        shapes |= matrices
    for name in (new := [name for name in shapes if name not in known]):
        path, _, local = name.rpartition(".")
        if reason := not_prunable(model.get_submodule(path), local):
            raise GrowpruneError(f"include has {name!r}, {reason}")
    return [Weight(name, name, shapes[name]) for name in new]


def shape_of(model: Any, name: str) -> tuple[int, ...]:
    """Return the dense shape of a model's parameter, however it is stored."""
    path, _, local = name.rpartition(".")
    return dense_shape(model.get_submodule(path), local)


def first_names(model: Any) -> dict[str, str]:
    """Map every name of each parameter to its first name. A tied parameter has several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def tensors_of(model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return parameters and persistent buffers by their first names, and {other name: first name} of shared ones."""
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
    """Return the layers whose weight is computed, as by weight_norm, with the parameters it is computed from."""
    found = {}
    for path, module in model.named_modules():
        takes_inputs = hasattr(module, "in_features") or hasattr(module, "in_channels")
        # not by reading the attribute, which may compute it, and change the state of that
        if takes_inputs and ("weight" in vars(module) or "weight" in getattr(module, "parametrizations", ())):
            beginnings = (_join(path, "parametrizations.weight."), _join(path, "weight_"))
            found[_join(path, "weight")] = [n for n, _ in module.named_parameters(path) if n.startswith(beginnings)]
    return found


def matches(name: str, pattern: str) -> bool:
    """True if a tensor's name equals the pattern, is inside the module it names, or matches it as a glob."""
    return name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)


def matching(patterns: Iterable[str], names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names that match each pattern, in order. Names with another beginning are skipped quickly."""
    names = list(names)
    order = sorted(range(len(names)), key=names.__getitem__)
    ordered = [names[i] for i in order]
    for pattern in patterns:
        beginning = re.split(r"[*?[]", pattern, maxsplit=1)[0]
        first = bisect.bisect_left(ordered, beginning)
        end = bisect.bisect_right(ordered, beginning, first, key=operator.itemgetter(slice(len(beginning))))
        yield [names[i] for i in sorted(order[first:end]) if matches(names[i], pattern)]


def _match_all(patterns: Sequence[str], names: Iterable[str], argument: str) -> Iterator[tuple[str, list[str]]]:
    """Each pattern with the names that match it; one that matches none is an error."""
    names = list(names)
    for pattern, found in zip(patterns, matching(patterns, names), strict=True):
        if not found:
            raise GrowpruneError(f"{argument} has {pattern!r}, which matches no parameter; the model has {few(names)}")
        yield pattern, found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Messages that say why a model, or one of its parameters, cannot be pruned


def why_nothing(model: Any, holders: Collection[str]) -> str:
    """Say why none of a model's layers can be pruned: they are of unknown kinds, or in keep_dense.

    Args:
        holders: the paths of the modules whose weights could be pruned if they were not in keep_dense.
    """
    kinds = {p: type(m).__name__ for p, m in model.named_modules() if [*m.parameters(recurse=False)]}
    known = dict.fromkeys(kind for path, kind in kinds.items() if path in holders)
    others = dict.fromkeys(kind for kind in kinds.values() if kind not in known)
    if not known:
        has = f"none of its layers ({few(others)}) can be" if others else "it has no parameters that can be"
        return f"{has} pruned; name parameters in include=[...], or add your layer class with register_layer"
    rest = f", and {few(others)} cannot be pruned" if others else ""
    kept = f"the weights of {few(known)} are all frozen or in keep_dense{rest}"
    return f"{kept}; remove some, or name parameters in include=[...]"


def not_prunable(module: Any, local: str) -> str:
    """Say why a parameter cannot be sparse and what to do; empty if it can."""
    if getattr(module, "sparse", False) is True and hasattr(module, "num_embeddings"):
        return "of an embedding with sparse=True, whose gradients cannot be masked: create it with sparse=False"
    is_by_parametrization = any(type(child).__name__ == "_WeightNorm" for _, child in module.named_children())
    stem, _, letter = local.rpartition("_")
    is_by_hook = letter == "v" and f"{stem}_g" in dict(module.named_parameters(recurse=False))
    if (is_by_parametrization and local == "original1") or is_by_hook:
        return "which weight_norm divides by its norm, 0 for a row without live weights: remove the weight_norm first"
    return ""


def few(named: Iterable[Weight | str]) -> str:
    """Join the first names for a message, which says how many more there are."""
    names = [one if isinstance(one, str) else one.name for one in named]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
