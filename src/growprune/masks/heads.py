"""keep_dense="auto": find the output layers of a model, which have few weights and suffer most from pruning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from growprune.errors import GrowpruneError
from growprune.masks.layers import Layers, is_norm, layer_weights, matches


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


def is_normalized(model: nn.Module) -> bool:
    """True if a model has a layer such as BatchNorm or RMSNorm, which brings activations to one size.

    >>> is_normalized(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), is_normalized(nn.Linear(4, 4))
    (True, False)
    """
    return any(map(is_norm, model.modules()))
