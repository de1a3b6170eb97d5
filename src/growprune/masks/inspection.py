"""Find out what a model is: its output layers, whether it is normalized, trained, or sparse already."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import (
    Layers,
    Weight,
    adapter_parameters,
    computed_weights,
    few,
    first_names,
    is_norm,
    layer_weights,
    matches,
    matching,
)
from growprune.masks.patterns import Pattern, in_one_go, row_chunks, write_groups


def output_layers(
    model: nn.Module, example: Any = None, *, layers: Layers | None = None
) -> tuple[tuple[str, ...], str]:
    """Return the names of a model's output layers, and how they were found, for a message.

    With an example, the model computes it once, and each output is followed back to the last layer before it; where
    outputs are concatenated, to the last layer of each. Of a dict with logits, only the logits count. Without an
    example, the output layers of a transformers model are its output head and every layer outside its base model, and
    those of any other model the layer registered last.

    A head that is tied to an embedding is never pruned, so it is not listed. Empty if no other layer would be left.

    Args:
        example: the input, a tuple of positional arguments or a dict of keyword arguments.
        layers: what `layer_weights` returns, if it is known.
    """
    paths = list(layer_weights(model) if layers is None else layers)
    outer: Any = model
    if callable(unwrap := getattr(model, "get_base_model", None)):  # PEFT has wrapped it
        outer = unwrap()
    if example is not None:
        found, how = _by_example(model, example), "found by following an example to the outputs"
    elif hasattr(outer, "base_model_prefix"):
        base = getattr(outer, outer.base_model_prefix, None) if outer.base_model_prefix else None
        names = {id(module): name for name, module in model.named_modules()}
        inside = names.get(id(base), "")
        output = names.get(id(outer.get_output_embeddings())) if hasattr(outer, "get_output_embeddings") else None
        found = {path for path in paths if path == output or (inside and not matches(path, inside))}
        how = "the output head, and what is outside the base model"
    else:
        found, how = set(paths[-1:]), "the layer registered last"
    return (tuple(path for path in paths if path in found) if len(found) < len(paths) else ()), how


def _by_example(model: nn.Module, example: Any) -> set[str]:
    """Return the last layers before the outputs, from the autograd graph of a forward pass in eval mode."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    example = dict(example) if isinstance(example, Mapping) else example
    example = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = tuple(args) if isinstance(args, list) else args
    layer_of = {id(parameters[w.parameter]): path for path, weights in layer_weights(model).items() for w in weights}
    embeddings = {id(m.weight) for m in model.modules() if hasattr(m, "num_embeddings")}
    training = {module: module.training for module in model.modules()}
    frozen = [p for p in parameters.values() if p.is_floating_point() and not p.requires_grad]
    gpus = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(True)
        keep_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
        with torch.enable_grad(), keep_nothing, torch.random.fork_rng(list(gpus)):  # no backward pass will follow
            outputs = torch.func.functional_call(model, buffers, args, kwargs)
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise GrowpruneError(f"the model cannot compute the example, to find its output layers: {error}") from error
    finally:
        for module, was_training in training.items():
            module.training = was_training
        for parameter in frozen:
            parameter.requires_grad_(False)
    if isinstance(outputs, Mapping) and (logits := [outputs[key] for key in outputs if "logits" in str(key)]):
        outputs = logits
    last: dict[Any, dict[str, int]] = {}
    """By node of the graph: the last layers before it, each with the number of its node, which grows with time."""
    ends = [tensor.grad_fn for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor) and tensor.grad_fn]
    waiting: list[Any] = list(ends)
    while waiting:
        node = waiting[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        own = [_parameter_of(child) for child in children]
        layers = {layer_of[id(p)] for p in own if id(p) in layer_of}
        inputs = [child for child, p in zip(children, own, strict=True) if p is None]
        if layers or any(id(p) in embeddings for p in own):
            last[node] = dict.fromkeys(layers, node._sequence_nr())
        elif missing := [child for child in inputs if child not in last]:
            waiting += missing
            continue
        else:
            before = [last[child] for child in inputs if last[child]]
            if before and not node.name().startswith(("Cat", "Stack")):  # of a sum, the branch that ends last
                before = [max(before, key=lambda some: max(some.values()))]
            last[node] = {path: number for some in before for path, number in some.items()}
        waiting.pop()
    return {path for node in ends for path in last[node]}


def _parameter_of(node: Any) -> Tensor | None:
    """Return the parameter that a node of the graph is, perhaps transposed or converted; None for anything else."""
    while not hasattr(node, "variable"):
        if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return None
        node = node.next_functions[0][0]
    return node.variable  # type: ignore[no-any-return]


# Is it sparse already?

LEAST = 0.05
"""The least share of zeros of a sparse model. Any model may have a few zeros."""
LOOKS_PRUNED = 0.2
"""The least share of zeros at which a model is assumed to be pruned."""


def masks_of_zeros(read: Callable[[str], Tensor], weights: Sequence[Weight], pattern: Pattern) -> dict[str, Tensor]:
    """Return the non-zero weights of each parameter as masks; for blocks, those with any non-zero weight.

    Args:
        read: returns the values of a parameter, such as `model.get_parameter`.
    """
    masks: dict[str, Tensor] = {}
    for weight in weights:
        values = read(weight.parameter).detach()
        if values.is_meta:
            raise GrowpruneError(f"{weight.parameter} is on the meta device and has no values: load the model first")
        if weight.parameter not in masks:  # what lies in no matrix of it always lives
            masks[weight.parameter] = torch.ones(values.shape, dtype=torch.bool, device=values.device)
        groups = _live_groups(weight.of(values), weight, pattern)
        write_groups(pattern, weight.of(masks[weight.parameter]), weight, groups)
    return masks


def _live_groups(values: Tensor, weight: Weight, pattern: Pattern) -> Iterator[Tensor]:
    for rows in row_chunks(pattern, values, weight):
        alive = pattern.score(pattern.fold((rows != 0).float())) > 0
        if not torch.equal(pattern.restrict(alive.int()) > 0, alive):
            raise GrowpruneError(f"the zeros of {weight.name} do not have the pattern {pattern.name}: use another one")
        yield alive


def check_sparse(weights: Sequence[Weight], masks: dict[str, Tensor], pattern: Pattern) -> float:
    """Return the share of zeros. Raise if the model is dense, and warn about layers without non-zero weights."""
    total = sum(weight.numel for weight in weights)
    alive = {weight.name: int(torch.count_nonzero(weight.of(masks[weight.parameter]))) for weight in weights}
    zeros = total - sum(alive.values())
    if zeros < LEAST * total:
        groups = "" if pattern.is_single else f" in whole groups of {pattern.name}"
        raise GrowpruneError(
            f"the model is dense: only {zeros:,} of its {total:,} prunable weights are zero{groups} "
            f"({zeros / total:.2%}, a sparse model has at least {LEAST:.0%}). Prune it: "
            f"SparseModel(model, sparsity=...).prune()"
        )
    if dead := [name for name, count in alive.items() if not count]:
        warn(f"all weights of {few(dead)} are zero and will stay zero: add them to keep_dense to train them")
    return zeros / total


def already_sparse(model: nn.Module, weights: Sequence[Weight]) -> float | None:
    """Return the share of exact zeros of a model that looks pruned; None if it does not.

    Weights that are all zero do not count, because some layers are initialized to zero (a last layer, the B of LoRA).
    Nor do weights without dense values: on the meta device, sharded, or stored compact.
    """
    parameters = dict(model.named_parameters())
    values = [parameters[weight.parameter] for weight in weights]
    here = [
        weight
        for weight, own in zip(weights, values, strict=True)
        if own.dim() >= 2 and not own.is_meta and not hasattr(own, "device_mesh")  # compact ones are flat
    ]
    alive = in_one_go([torch.count_nonzero(weight.of(parameters[weight.parameter].detach())) for weight in here])
    counts = [(weight.numel, count) for weight, count in zip(here, alive, strict=True) if count]
    total = sum(numel for numel, _ in counts)
    zeros = total - sum(count for _, count in counts)
    return zeros / total if total and zeros >= LOOKS_PRUNED * total else None


# Is it trained?


def signs_of_training(model: nn.Module, weights: Sequence[Weight]) -> str | None:
    """Return why a model looks trained; None if it does not.

    Args:
        weights: the prunable weights. Others, such as a head tied to an embedding, may be initialised otherwise.
    """
    has_norms = False
    for module in model.modules():
        if getattr(getattr(module, "config", None), "_name_or_path", None):
            return "loaded by from_pretrained"
        if is_norm(module):
            has_norms = True
            if any(map(_has_moved, module.parameters(recurse=False))):
                return "its norms differ from their initial values"
        if _has_moved(getattr(module, "running_mean", None)):
            return "its BatchNorm statistics have changed"
    if has_norms:
        return None
    modules = [model.get_submodule(weight.parameter.rpartition(".")[0]) for weight in weights]
    return "its weights do not look like initial weights" if any(map(_is_moved_layer, modules)) else None


def _is_moved_layer(module: nn.Module) -> bool:
    """True if a layer's weights are neither torch's initial ones nor independent uniform or normal numbers.

    Training changes the shape of the distribution, and adds directions that stand out: a random matrix has a spectral
    norm of at most about std * (sqrt(rows) + sqrt(columns)), and hardly ever std * 2 more.
    """
    weight = module.weight if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) else None
    if weight is None or weight.is_meta or weight.numel() < 2 or hasattr(weight, "device_mesh"):
        return False
    matrix = weight.detach().flatten(1).float()
    largest, size = float(matrix.abs().max()), matrix.numel()
    bound = 1.001 * matrix.shape[1] ** -0.5  # torch's own: uniform within 1 / sqrt(fan_in)
    if largest <= bound:
        return False
    bias: Any = module.bias
    if _has_moved(bias) and bool(bias.detach().abs().max() > bound):
        return True
    std = float(matrix.square().mean().sqrt())
    kurtosis = float((matrix / std).pow(4).mean())  # 1.8 if uniform, 3 if normal
    is_uniform = largest <= std * 3**0.5 * (1 + 1.5 * size**-0.5)
    is_normal = kurtosis >= min(2.3, 3 - 3 * (24 / size) ** 0.5)
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(10):
        vector = nn.functional.normalize(matrix.T @ (matrix @ vector), dim=0)
    spectral = float((matrix @ vector).norm())
    return not (is_uniform or is_normal) or spectral > std * (sum(n**0.5 for n in matrix.shape) + 2)


def _has_moved(tensor: Tensor | None) -> bool:
    """True if a tensor is no longer constant, as the weights and biases of norms initially are."""
    if tensor is None or tensor.is_meta or tensor.ndim != 1 or not len(tensor):
        return False
    local = tensor.detach()
    return bool((local != local[0]).any())


# What stays dense

LARGE = 0.01
"""The least share of the model's parameters at which a dense parameter is worth a warning."""


def unpruned(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> Iterator[str]:
    """Yield warnings about large layers that will not be pruned, and about layers with computed weights.

    Args:
        weights: the weights that may become sparse.
        keep_dense: names or globs of what the user keeps dense.
    """
    pruned = {weight.parameter for weight in weights}
    computed = computed_weights(model)
    sources = {source for several in computed.values() for source in several}
    named = {name for found in matching(keep_dense, [*computed, *sources]) for name in found}
    left = [name for name in computed if name not in named and (named | pruned).isdisjoint(computed[name])]
    if left:
        yield (
            f"these weights are computed from other parameters (as by weight_norm) and will not be pruned: "
            f"{few(left)}. Remove the parametrization first, or add them to keep_dense=[...]"
        )
    first = first_names(model)
    known = pruned | sources | {first[name] for found in matching(keep_dense, first) for name in found}
    meant_to_be_dense = adapter_parameters(model)  # as embeddings and norms are
    for module in model.modules():
        if hasattr(module, "num_embeddings") or is_norm(module):
            meant_to_be_dense |= {id(parameter) for parameter in module.parameters(recurse=False)}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    least = LARGE * sum(map(math.prod, shapes.values()))
    large = [
        f"{name} ({'x'.join(map(str, shapes[name]))})"
        for name, parameter in model.named_parameters()
        if len(shapes[name]) >= 2
        and shapes[name][0] > 1  # what is added to every example, such as positions, begins with a 1
        and math.prod(shapes[name]) >= least
        and parameter.is_floating_point()
        and name not in known
        and id(parameter) not in meant_to_be_dense
        and not any(word in name.lower() for word in ("embed", "bias"))
    ]
    if large:
        yield (
            f"these large parameters belong to no known kind of layer and will not be pruned: {few(large)}. Add "
            f"them to include=[...] to prune them, or to keep_dense=[...]"
        )
