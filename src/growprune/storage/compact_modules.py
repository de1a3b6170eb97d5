"""The class of a layer with compact parameters, whose attributes and `state_dict` are dense.

Attributes, `state_dict` and copies all see dense tensors. What needs a dense model (pickling, scripting, replacing a
parameter) raises an error that says what to do.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.layers import DENSE_SHAPES
from growprune.storage.compact_layers import FORWARDS, LAYOUTS, WATCHED, applied, check_first_derivative, record
from growprune.storage.layout import Layout

MOST_GRAPHS = 64
"""The most graphs of one function that torch.compile may keep. Its own default is 8."""


def let_compile_again() -> None:
    """Raise torch.compile's limit of graphs, so that it keeps one for each part that may be dense.

    It compiles once for each of them, and reuses the graphs in later rounds. By default, it runs eagerly from the ninth
    graph on, and only logs that.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)


def layouts_of(module: nn.Module) -> dict[str, Layout | None]:
    """Return the layouts of a module's compact parameters, by local name; None for one that is fully live."""
    found = module.__dict__.get(LAYOUTS, {})
    assert isinstance(found, dict)
    return found


def set_layout(module: nn.Module, local: str, layout: Layout | None) -> None:
    """Set the layout of a module's parameter, and adapt the module's class and its state_dict."""
    layouts = {**layouts_of(module), local: layout}
    module.__dict__[LAYOUTS] = layouts
    module.__dict__.setdefault(WATCHED, False)
    module.__dict__[DENSE_SHAPES] = {name: tuple(own.shape) for name, own in layouts.items() if own is not None}
    plain: type[nn.Module] = getattr(type(module), "_plain_class", type(module))
    # mypy takes a class for one of its instances here, and finds no __hash__
    compact = compact_class(plain, tuple(sorted(layouts)))  # type: ignore[arg-type]
    if not isinstance(module, compact):  # FSDP2 derives a class of its own from it
        module.__class__ = compact
    if "_compact_hooks" not in module.__dict__:
        module.__dict__["_compact_hooks"] = (
            module.register_state_dict_post_hook(_give_dense),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_take_dense),  # type: ignore[no-untyped-call]
        )


def make_plain(module: nn.Module) -> None:
    """Undo `set_layout`: restore dense parameters and the plain class."""
    for local, layout in layouts_of(module).items():
        values = module._parameters[local]
        if layout is not None and values is not None:
            dense = layout.expand(values.detach())
            module._parameters[local] = nn.Parameter(dense, requires_grad=values.requires_grad)
    module.__class__ = getattr(type(module), "_plain_class", type(module))
    for handle in vars(module).pop("_compact_hooks", ()):
        handle.remove()
    for attribute in (LAYOUTS, DENSE_SHAPES, WATCHED):
        vars(module).pop(attribute, None)


@functools.cache
def compact_class(plain: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a subclass of `plain` whose parameters of these names are compact."""
    members: dict[str, Any] = {name: _dense_attribute(name) for name in names}
    # who makes another layer of the same class, as PEFT does for a convolution's adapter, gets a plain one
    members |= {"_plain_class": plain, "__new__": lambda cls, *args, **kwargs: plain(*args, **kwargs)}
    members |= {"__setattr__": _assign, "__delattr__": _delete}
    members |= {"__reduce_ex__": _refuse_to_pickle, "__prepare_scriptable__": _refuse_to_script, "__copy__": _copied}
    if not hasattr(plain, "__deepcopy__"):
        members["__deepcopy__"] = _deeply_copied
    for layer, forward in FORWARDS.items():
        if plain.forward is layer.forward and names == ("weight",):
            members["forward"] = forward
    return type(f"Compact{plain.__name__}", (plain,), members)


def is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor, of which this process has a shard, as FSDP2 leaves parameters between passes."""
    return hasattr(tensor, "device_mesh")


def _dense_attribute(name: str) -> property:
    """Return a property that reads the dense weight, through which gradients reach the live values."""

    def dense(module: nn.Module) -> Tensor:
        layout, values = layouts_of(module)[name], module._parameters.get(name)
        if values is None:
            raise _not_replaceable(module, name)
        if layout is None or is_sharded(values):
            return values
        return applied(module, Expand, values, layout)

    return property(dense)


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Assign an attribute: of a dense tensor, such as the attribute itself, keep the live elements."""
    layout, values = layouts_of(module).get(name), module._parameters.get(name)
    is_parameter = isinstance(value, nn.Parameter)
    is_dense = isinstance(value, Tensor) and not is_parameter
    if is_parameter and layout is not None and value.shape == layout.shape:
        raise GrowpruneError(
            f"{name} of a {type(module).__name__} in compact storage cannot be replaced by another parameter, as "
            f"torchao's quantize_ does: call sparse.to_dense_() first, or assign a tensor"
        )
    if name in layouts_of(module) and values is None and is_dense:
        raise _not_replaceable(module, name)
    if layout is not None and values is not None and is_dense and value.shape == layout.shape:
        values.data.copy_(layout.compress(value.detach()))
    elif is_parameter and values is not None and name in layouts_of(module):
        # FSDP2 does so up to four times a step; of plain modules, it goes past __setattr__ as well, which is slow
        module._parameters[name] = value
    else:
        plain: Any = getattr(type(module), "_plain_class", nn.Module)
        plain.__setattr__(module, name, value)


def _not_replaceable(module: nn.Module, name: str) -> GrowpruneError:
    return GrowpruneError(
        f"{name} of a {type(module).__name__} in compact storage cannot be replaced by a computed tensor: apply "
        f"weight_norm and other parametrizations before you create the SparseModel. Instead of FSDP1 "
        f"(FullyShardedDataParallel), use sparse.shard(mesh), which is FSDP2"
    )


def _delete(module: nn.Module, name: str) -> None:
    """Refuse to delete a compact parameter, as a parametrization does in order to replace it."""
    if name in layouts_of(module):
        raise _not_replaceable(module, name)
    plain: Any = getattr(type(module), "_plain_class", nn.Module)
    plain.__delattr__(module, name)


def _refuse_to_pickle(module: nn.Module, protocol: object) -> Any:
    """Refuse to pickle, because another process could not find this class by its name."""
    del protocol
    raise GrowpruneError(
        f"{type(module).__name__} has compact storage, which cannot be pickled: call sparse.to_dense_() first, or "
        f"write a file with growprune.save(sparse, path)"
    )


def _refuse_to_script(module: nn.Module) -> Any:
    """Refuse torch.jit.script, at the first attribute that it reads."""
    raise GrowpruneError(
        f"{type(module).__name__} has compact storage, which torch.jit.script does not support: call "
        f"sparse.to_dense_() first"
    )


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module as copy.copy does, which would otherwise use the refused pickling."""
    clone: nn.Module = object.__new__(type(module))
    clone.__setstate__(module.__getstate__())  # type: ignore[no-untyped-call]
    return clone


def _deeply_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    clone: nn.Module = object.__new__(type(module))
    memo[id(module)] = clone
    clone.__setstate__(copy.deepcopy(module.__getstate__(), memo))  # type: ignore[no-untyped-call]
    return clone


class Expand(torch.autograd.Function):
    """Expand live values to the dense tensor. Gradients go back to the live values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, values.dtype
        return layout.expand(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        check_first_derivative()
        record(ctx.layout, gradients[0])
        return ctx.layout.compress(gradients[0], ctx.dtype), None


def _give_dense(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put plain dense tensors into the state dict; for a sharded model, shards of the live values."""
    del metadata
    for name, layout in layouts_of(module).items():
        if layout is not None and prefix + name in state and not is_sharded(state[prefix + name]):
            state[prefix + name] = layout.expand(state[prefix + name].detach())


def _take_dense(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load dense tensors. Raise if pruned weights are not zero in them."""
    del rest
    for name, layout in layouts_of(module).items():
        tensor = state.get(prefix + name)
        if layout is not None and tensor is not None and tensor.shape == layout.shape:
            state[prefix + name] = live = layout.to(tensor.device).compress(tensor)
            if lost := int(torch.count_nonzero(tensor)) - int(torch.count_nonzero(live)):
                raise GrowpruneError(
                    f"{prefix}{name} has {lost} non-zero weights where the mask is pruned, which compact storage would "
                    f"lose: load the SparseModel's state before the model's"
                )
