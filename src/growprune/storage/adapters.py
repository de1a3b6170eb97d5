"""Keep masks when adapters, such as PEFT's LoRA, are trained on a sparse model and merged into it.

To merge, an adapter writes into the weight of the layer it adapts: `base_layer.weight.data += change`. In masked
storage this would make pruned weights non-zero. In compact storage the attribute is a dense copy, and the change would
be lost. So the adapter's methods that write run while the layer has a plain dense weight, and their changes to pruned
weights are dropped. So that this changes nothing, LoRA computes with its masked change from the start: what is trained
is what the merged model will compute. Other adapters warn when a merge drops something. PEFT is not imported: an
adapter is recognized by its attributes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import conv1d_of_transformers, is_adapter
from growprune.storage.compact import layouts_of
from growprune.storage.parameter import SparseParameter

SPARSE_PARAMETERS = "_growprune_sparse_parameters"
"""The attribute of a module that holds its stored sparse parameters (`LayerMasks`)."""

WRITING = ("merge", "unmerge", "update_layer")
"""The methods of an adapter that may write into its layer; the last one on creation, as in PiSSA."""


class LayerMasks:
    """What a layer holds the storage of its parameters by, so that masks live as long as the layer.

    A deepcopy of the layer has a copy of it, so that the copied model keeps its zeros in training.
    """

    def __init__(self, stored: dict[str, SparseParameter]) -> None:
        self.stored = stored

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerMasks:
        return LayerMasks(copy.deepcopy(self.stored, memo))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a model that is pickled leaves its SparseModel behind, and needs no growprune


def stored_in(module: nn.Module) -> dict[str, SparseParameter]:
    """Return how a module's own sparse parameters are stored, by local name."""
    masks = vars(module).get(SPARSE_PARAMETERS)
    return {} if masks is None else masks.stored


def check_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Raise if a parameter for compact storage has an adapter that replaces it."""
    own = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    for module in filter(is_adapter, model.modules()):
        _check(module, [local for layer, local in own if layer is _innermost(module)])


def _check(adapter: nn.Module, compact: Collection[str]) -> None:
    if (parameter := vars(adapter).get("parameter_name")) in compact:
        raise GrowpruneError(
            f"{parameter} has its own adapter (target_parameters of PEFT), which storage='compact' does not support: "
            f"use storage='masked', or adapt whole layers"
        )


def keep_masks(model: nn.Module, sparse_parameters: Mapping[str, SparseParameter]) -> None:
    """Let layers hold their masks, so that copies, and present and future adapters, keep them."""
    for module in model.modules():  # if it is a copy of another sparse model: the masks from there count no more
        vars(module).pop(SPARSE_PARAMETERS, None)
    for name, sparse_parameter in sparse_parameters.items():
        masks = vars(sparse_parameter.module).setdefault(SPARSE_PARAMETERS, LayerMasks({}))
        masks.stored[name.rpartition(".")[2]] = sparse_parameter
    for module in filter(is_adapter, model.modules()):
        _guard(module, _innermost(module))
    _watch_for_adapters()


def leaving_masks(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` that copies a model without its masks."""
    masks = (vars(module).get(SPARSE_PARAMETERS) for module in model.modules())
    return {id(one): LayerMasks({}) for one in masks if one is not None}


def forget_masks(model: nn.Module) -> None:
    """Stop restricting what adapters write."""
    for module in model.modules():
        vars(module).pop(SPARSE_PARAMETERS, None)
        if is_adapter(module):
            for name in (*WRITING, "forward"):
                vars(module).pop(name, None)


@functools.cache
def _watch_for_adapters() -> None:
    """Hook torch's registration of modules, because an adapter may be added to a sparse model later."""

    def guard(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if name == "base_layer" and submodule is not None and SPARSE_PARAMETERS in vars(_innermost(submodule)):
            _guard(module, _innermost(submodule))

    register_module_module_registration_hook(guard)


def _guard(adapter: nn.Module, layer: nn.Module) -> None:
    """Make an adapter keep the masks of its layer."""
    _check(adapter, layouts_of(layer))
    for name in WRITING:
        if hasattr(type(adapter), name):
            vars(adapter)[name] = functools.partial(_call_keeping_masks, adapter, name)
    if hasattr(type(adapter), "get_delta_weight") and _product_of(layer) is not None:
        vars(adapter)["forward"] = functools.partial(_compute_masked, adapter)


def _product_of(layer: nn.Module) -> Callable[..., Tensor] | None:
    """Return the function (x, weight, bias) that a layer computes, if it is known."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return layer._conv_forward
    if conv1d_of_transformers(layer, {"weight": ()}):
        return lambda x, weight, bias: x @ weight if bias is None else x @ weight + bias
    return None


def _compute_masked(adapter: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute what a LoRA layer of PEFT does, with the change masked as `merge` would keep it.

    In training without dropout, this is one product with the sum of both weights. With dropout, whose input differs, it
    is two; without gradients too, so that whoever watches the layer (as `prune_pretrained` does) sees it compute.
    """
    layer = _innermost(adapter)
    stored = stored_in(layer).get("weight")
    active = [name for name in adapter.active_adapters if name in getattr(adapter, "lora_A", ())]
    if stored is None or not active or adapter.disable_adapters or adapter.merged:
        result: Tensor = type(adapter).forward(adapter, x, *args, **kwargs)
        return result
    _check_plain_lora(adapter)
    if kwargs.get("adapter_names") is not None:
        raise GrowpruneError(
            f"adapter_names={kwargs['adapter_names']!r} does not work on a sparse layer, which masks the change of all "
            f"examples together: use set_adapter, and one adapter at a time"
        )
    product, mask = _product_of(layer), stored.mask()
    assert product is not None
    whole, alone = None, []
    for name in active:
        change = adapter.get_delta_weight(name)
        change = change * mask.to(change.dtype)
        bias = adapter.lora_B[name].bias
        bias = None if bias is None else bias * adapter.scaling[name]
        if isinstance(adapter.lora_dropout[name], nn.Dropout):
            seen = adapter.lora_dropout[name](x.to(change.dtype))
            alone.append(product(seen, change, bias))
        else:
            whole = change if whole is None else whole + change
            alone += [] if bias is None else [bias]
    trains_compact = layouts_of(layer) and stored.parameter.requires_grad
    if whole is None or adapter.base_layer is not layer or trains_compact or not torch.is_grad_enabled():
        result = adapter.base_layer(x, *args, **kwargs)
        alone += [] if whole is None else [product(x.to(whole.dtype), whole, None)]
    else:
        result = product(x, layer.weight + whole.to(layer.weight.dtype), layer.bias)
    for one in alone:
        result = result + one.to(result.dtype)
    return result


def _check_plain_lora(adapter: Any) -> None:
    if variants := getattr(adapter, "lora_variant", None):
        kinds = ", ".join(sorted({type(variant).__name__ for variant in variants.values()}))
        raise GrowpruneError(f"{kinds} does not work on a sparse layer: use plain LoRA (use_dora=False)")


def _innermost(module: Any) -> Any:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _call_keeping_masks(adapter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an adapter's own method while its layer has plain dense weights, and then apply the masks again.

    Warn if that drops a part of what was written. If the method fails, compact weights are restored.
    """
    if is_masked := "forward" in vars(adapter):
        _check_plain_lora(adapter)
    layer = _innermost(adapter.base_layer)
    parameters = layer._parameters  # not the attributes, which are dense
    stored = stored_in(layer)
    compact = {local: layout for local, layout in layouts_of(layer).items() if layout is not None}
    masks = {local: found.mask() for local, found in stored.items()}
    masks |= {local: layout.mask() for local, layout in compact.items()}
    values = {local: parameters[local] for local in compact}
    for local, layout in compact.items():
        dense = layout.expand(values[local].detach())
        parameters[local] = nn.Parameter(dense, requires_grad=values[local].requires_grad)
        layouts_of(layer)[local] = None
    before = {local: parameters[local].detach().clone() for local in masks}
    dropped = total = 0.0
    try:
        result = getattr(type(adapter), name)(adapter, *args, **kwargs)
        for local, mask in masks.items():
            change = (parameters[local].detach() - before[local]).abs()
            total += float(change.sum(dtype=torch.float32))
            dropped += float(change.masked_fill(mask, 0).sum(dtype=torch.float32))
        for local, layout in compact.items():
            values[local].data.copy_(layout.compress(parameters[local].detach()))
    finally:
        parameters.update(values)
        layouts_of(layer).update(compact)
        for found in stored.values():
            found.enforce([(found, [found.parameter])])
    # an unmerge takes back only what was kept, and LoRA's change was masked in training too
    if dropped and name != "unmerge" and not (name == "merge" and is_masked):
        warn(
            f"{name} dropped {100 * dropped / total:.2g} % of the adapter's change, which fell on pruned weights, so "
            "the model computes something else than before: keep the adapter unmerged, or train the sparse weights"
        )
    return result
