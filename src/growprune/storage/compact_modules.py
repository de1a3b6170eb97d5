"""What a layer with compact parameters becomes: a class of its own, that shows dense weights to whoever asks.

Reading an attribute, `state_dict`, copies: all see dense tensors. What cannot be done without a dense model (pickling,
scripting, another parameter in its place) is refused with what to do.
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
from growprune.storage.compact_layers import FORWARDS, LAYOUTS, WATCHED, check_first_derivative, record
from growprune.storage.layout import Layout

MOST_GRAPHS = 64
"""How many graphs of one function torch.compile may keep; its own default is 8."""


def let_compile_again() -> None:
    """Let torch.compile keep a graph for each part that may be dense.

    It compiles once for each of them, and finds its graphs again when the parts' turn comes again. But from the ninth
    graph on it would run without any, and say so in a log only.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)


def layouts_of(module: nn.Module) -> dict[str, Layout | None]:
    """The layouts of a module's compact parameters, by their local names; None for one that is all alive."""
    found = module.__dict__.get(LAYOUTS, {})
    assert isinstance(found, dict)
    return found


def set_layout(module: nn.Module, local: str, layout: Layout | None) -> None:
    """Say how a parameter of a module is stored; the module's class, and what its state_dict does, follow."""
    layouts = {**layouts_of(module), local: layout}
    module.__dict__[LAYOUTS] = layouts
    module.__dict__.setdefault(WATCHED, False)
    module.__dict__[DENSE_SHAPES] = {
        name: tuple(sparse_parameter.shape)
        for name, sparse_parameter in layouts.items()
        if sparse_parameter is not None
    }
    plain: type[nn.Module] = getattr(type(module), "_plain_class", type(module))
    # mypy takes a class for one of its instances here, and finds no __hash__
    compact = compact_class(plain, tuple(sorted(layouts)))  # type: ignore[arg-type]
    if not isinstance(module, compact):  # FSDP2 derives a class of its own from it
        module.__class__ = compact
    _hook_state_dict(module)


def make_plain(module: nn.Module) -> None:
    """Undo `set_layout`: dense parameters, the plain class, and nothing that is left of ours."""
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
    """A kind of layer like `plain`, but whose parameters of these names are compact."""
    members: dict[str, Any] = {name: _dense_attribute(name) for name in names}
    members["_plain_class"], members["__setattr__"] = plain, _assign
    members |= {"__reduce_ex__": _refuse_to_pickle, "__prepare_scriptable__": _refuse_to_script, "__copy__": _copied}
    if not hasattr(plain, "__deepcopy__"):
        members["__deepcopy__"] = _deeply_copied
    for layer, forward in FORWARDS.items():
        if plain.forward is layer.forward and names == ("weight",):
            members["forward"] = forward
    return type(f"Compact{plain.__name__}", (plain,), members)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process has a shard: as FSDP2 leaves parameters between passes."""
    return hasattr(tensor, "device_mesh")


def _dense_attribute(name: str) -> property:
    """Reading the attribute gives the dense weight, through which gradients reach the live values."""

    def dense(module: nn.Module) -> Tensor:
        layout, values = layouts_of(module)[name], module._parameters[name]
        assert values is not None
        if layout is None or is_sharded(values):
            return values
        return Expand.apply(values, layout)  # type: ignore[no-any-return,no-untyped-call]

    return property(dense)


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Assigning a dense tensor, such as the attribute itself, takes in its live elements."""
    layout, values = layouts_of(module).get(name), module._parameters.get(name)
    is_parameter = isinstance(value, nn.Parameter)
    is_dense = isinstance(value, Tensor) and not is_parameter
    if is_parameter and layout is not None and value.shape == layout.shape:
        raise GrowpruneError(
            f"{name} of a {type(module).__name__} cannot become another parameter, as torchao's quantize_ wants: call "
            f"sparse.to_dense_() first, which makes the model a plain one; or assign a tensor"
        )
    if name in layouts_of(module) and values is None and is_dense:
        raise GrowpruneError(
            f"{name} of a {type(module).__name__} cannot become a view of another tensor, as FSDP1 "
            f"(FullyShardedDataParallel) wants: shard the model with sparse.shard(mesh), which is FSDP2"
        )
    if layout is not None and values is not None and is_dense and value.shape == layout.shape:
        values.data.copy_(layout.compress(value.detach()))
    elif is_parameter and values is not None and name in layouts_of(module):
        # FSDP2 does so up to four times a step; of plain modules, it goes past __setattr__ as well, which is slow
        module._parameters[name] = value
    else:
        plain: Any = getattr(type(module), "_plain_class", nn.Module)
        plain.__setattr__(module, name, value)


def _refuse_to_pickle(module: nn.Module, protocol: object) -> Any:
    """A pickle names its classes, and this one has no name that another process could find."""
    del protocol
    raise GrowpruneError(
        f"{type(module).__name__} has compact storage, and compact storage cannot be pickled: call sparse.to_dense_() "
        f"first, which makes the model a plain one, or write a file with growprune.save(sparse, path)"
    )


def _refuse_to_script(module: nn.Module) -> Any:
    """What torch.jit.script asks a module for first."""
    raise GrowpruneError(
        f"{type(module).__name__} has compact storage, which torch.jit.script cannot read: call sparse.to_dense_() "
        f"first, which makes the model a plain one"
    )


def _copied(module: nn.Module) -> nn.Module:
    """What copy.copy does, which would ask for what a pickle is made of."""
    clone: nn.Module = type(module).__new__(type(module))
    clone.__setstate__(module.__getstate__())  # type: ignore[no-untyped-call]
    return clone


def _deeply_copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    clone: nn.Module = type(module).__new__(type(module))
    memo[id(module)] = clone
    clone.__setstate__(copy.deepcopy(module.__getstate__(), memo))  # type: ignore[no-untyped-call]
    return clone


class Expand(torch.autograd.Function):
    """Live values to the dense tensor; gradients go back to the live values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, values.dtype
        return layout.expand(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        check_first_derivative(gradients[0])
        record(ctx.layout, gradients[0])
        return ctx.layout.compress(gradients[0], ctx.dtype), None


def _hook_state_dict(module: nn.Module) -> None:
    if "_compact_hooks" not in module.__dict__:
        module.__dict__["_compact_hooks"] = (
            module.register_state_dict_post_hook(_give_dense),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_take_dense),  # type: ignore[no-untyped-call]
        )


def _give_dense(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Whoever asks for the state gets plain dense tensors; of a sharded model, shards of the live values."""
    del metadata
    for name, layout in layouts_of(module).items():
        if layout is not None and prefix + name in state and not is_sharded(state[prefix + name]):
            state[prefix + name] = layout.expand(state[prefix + name].detach())


def _take_dense(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Dense tensors are taken in, if they are zero off the mask."""
    del rest
    for name, layout in layouts_of(module).items():
        tensor = state.get(prefix + name)
        if layout is not None and tensor is not None and tensor.shape == layout.shape:
            state[prefix + name] = live = layout.to(tensor.device).compress(tensor)
            if lost := int(torch.count_nonzero(tensor)) - int(torch.count_nonzero(live)):
                raise GrowpruneError(
                    f"{prefix}{name} has {lost} weights where none live with compact storage, which would be lost: "
                    f"load the SparseModel's state before the model's"
                )
