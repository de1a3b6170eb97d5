"""Compact storage: keep only the live values of a sparse weight, and one bit for each weight or block.

The parameter of the layer *becomes* the 1-D tensor of its live values, under its old name. So gradients, optimizer
state, moving averages, all-reduce and checkpoints shrink too. The dense weight exists only while its layer computes, in
the dtype of the computation. `Linear` and convolutions create it for the forward pass, free it, and create it again for
the backward pass, where the dense gradient of one layer at a time is reduced to the live values. Any other module gets
the dense weight, with gradients, when it reads its attribute; there autograd keeps it until the backward pass. A fully
live weight is a plain dense parameter; its layer frees and recreates the copy that autocast would keep.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import unpack
from growprune.masks.layers import DENSE_SHAPES
from growprune.masks.patterns import Pattern
from growprune.storage import kernels
from growprune.storage.block_products import block_of, check_environment, live_blocks
from growprune.storage.compact_layers import (
    FORWARDS,
    LAYOUTS,
    WATCHED,
    applied,
    check_first_derivative,
    hand_over,
    record,
    watch,
)
from growprune.storage.kernels import Layout
from growprune.storage.masked import hookable
from growprune.storage.parameter import SparseParameter, no_parameter, uncompiled


class Compact(SparseParameter):
    """A parameter stored as its live values."""

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        super().__init__(model, name, pattern)
        self._strides = self.parameter.stride()
        """The strides of the dense weight: torch rounds otherwise with others, such as those of channels_last."""
        self._group = pattern.run_length(self.shape, transposed=getattr(self.module, "transposed", False))
        """The number of consecutive elements that share a bit."""
        self._block = block_of(pattern, name, self.shape)
        check_environment()
        self._record: Callable[[Tensor], None] | None = None
        self._listening: weakref.ref[nn.Parameter] | None = None
        set_layout(self.module, self._local, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_listening": None}  # a copy records nothing

    @staticmethod
    def check(model: nn.Module, names: Collection[str]) -> None:
        places: dict[int, list[str]] = {}
        for place, parameter in model.named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append(place)
        for name in names:
            parameter, path = model.get_parameter(name), name.rpartition(".")[0]
            if isinstance(layer := model.get_submodule(path), nn.RNNBase):
                what, instead = path or "the model", f", or keep_dense=[{path!r}]" if path else ""
                raise GrowpruneError(
                    f"storage='compact' does not support {what} ({type(layer).__name__}): use storage='masked'{instead}"
                )
            if not parameter.is_floating_point():
                raise GrowpruneError(
                    f"storage='compact' does not support {name}, which has dtype {parameter.dtype}: add it to "
                    f"keep_dense"
                )
            if others := places[id(parameter)][1:]:
                raise GrowpruneError(
                    f"storage='compact' does not support {name}, which is tied to {', '.join(others)}: use "
                    f"storage='masked', or add it to keep_dense"
                )

    @property
    def _layout(self) -> Layout | None:
        """The layout; None while all weights are live. It belongs to the module, so that copies include it."""
        return layouts_of(self.module)[self._local]

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters.get(self._local)
        if parameter is None:
            raise no_parameter(self.module, self._local)
        return parameter

    @property
    def is_known_full(self) -> bool:
        return self._layout is None

    def num_alive(self) -> int:
        return self.shape.numel() if self._layout is None else self._layout.num_alive

    def mask(self) -> Tensor:
        if self._layout is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.parameter.device)
        return self._layout.to(self.parameter.device).mask()

    def weight(self) -> Tensor:
        return self.to_dense(self.parameter.detach())

    def set_mask(self, mask: Tensor) -> None:
        self._put(self.weight(), mask)

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        here = live.device if self.parameter.is_meta else self.parameter.device
        live = live.to(here, self.parameter.dtype)
        kept = (lambda tensor: tensor) if keep else kernels.padded_copy  # a copy is no view of somebody's file
        if live.numel() == self.shape.numel():
            self._keep(kept(live.view(-1)).view(self.shape), None)
        elif (layout := Layout.of_packed(packed.to(here), self.shape, self._group, keep=keep)) is not None:
            self._keep(kept(live), layout)
        else:
            mask = unpack(packed, self.shape, here)
            self._put(torch.zeros(self.shape, dtype=live.dtype, device=here).masked_scatter_(mask, live), mask)

    def preview(self, mask: Tensor) -> Callable[[], None]:
        parameter, layout = self.parameter, self._layout
        self.set_mask(mask)

        def undo() -> None:
            self.module._parameters[self._local] = parameter
            set_layout(self.module, self._local, layout)

        return undo

    def to_dense(self, tensor: Tensor) -> Tensor:
        return tensor if self._layout is None else self._layout.expand(tensor)

    def from_dense(self, dense: Tensor) -> Tensor:
        return dense if self._layout is None else self._layout.compress(dense)

    def to_live(self, tensor: Tensor) -> Tensor:
        if self._layout is not None and not self._layout.is_folded:
            return tensor
        return super().to_live(tensor)

    def from_live(self, live: Tensor) -> Tensor:
        if self._layout is not None and not self._layout.is_folded:
            return live.to(self.parameter.device)
        return super().from_live(live)

    def release(self) -> None:
        make_plain(self.module)

    @property
    def is_first_gradient(self) -> bool:
        return self._layout is None or self.parameter.grad is None  # of a plain one, each is the sum

    @property
    def adds_up_gradients(self) -> bool:
        return self._layout is None  # then the parameter is a plain one, and what is recorded is its gradient

    @property
    def record(self) -> Callable[[Tensor], None] | None:
        return self._record

    @record.setter
    def record(self, record: Callable[[Tensor], None] | None) -> None:
        self._record = record
        watch(self.module, is_watched=record is not None)
        if record is not None:
            self._listen()

    def see(self, gradient: Tensor) -> None:
        """Record a dense gradient."""
        if self._record is not None:
            self._record(gradient)

    def _listen(self) -> None:
        """Start to record dense gradients: in the layer, or at the parameter itself if it is fully live."""
        parameter, me = self.parameter, weakref.ref(self)
        if self._layout is not None:
            self._layout.recorder = me
        elif self._listening is None or self._listening() is not parameter:
            with hookable(parameter):
                parameter.register_post_accumulate_grad_hook(uncompiled(lambda p: hand_over(me(), p.grad)))  # type: ignore[no-untyped-call]
            self._listening = weakref.ref(parameter)

    def _put(self, dense: Tensor, mask: Tensor) -> None:
        group = self._group
        if group > 1:
            folded = mask.movedim(1, -1).reshape(-1, group)
            group = group if torch.equal(folded.any(1), folded.all(1)) else 1  # someone has split one
        layout = None if bool(mask.all()) else Layout.of(mask, group)
        self._keep(torch.where(mask, dense, 0) if layout is None else layout.compress(dense), layout)

    def _keep(self, values: Tensor, layout: Layout | None) -> None:
        if layout is None and values.stride() != self._strides:
            strided = torch.empty_strided(self.shape, self._strides, dtype=values.dtype, device=values.device)
            values = strided.copy_(values)
        if layout is not None and self._block is not None:
            layout.blocks = live_blocks(layout.mask(), *self._block)
        self._place(values, layout)
        if dynamo := sys.modules.get("torch._dynamo"):
            # torch.compile makes a graph for each part that may be dense; by default it gives up at the ninth
            dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 64)
        if self._record is not None:
            self._listen()

    def _place(self, values: Tensor, layout: Layout | None) -> None:
        self.module._parameters[self._local] = nn.Parameter(values, requires_grad=self.parameter.requires_grad)
        set_layout(self.module, self._local, layout)


# The class of a layer with compact parameters. Attributes, `state_dict` and copies are dense. What needs a dense model
# (pickling, scripting, replacing a parameter) raises an error that says what to do.


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
    members |= dict.fromkeys(("__reduce_ex__", "__prepare_scriptable__"), _refuse_to_serialize)
    members |= dict.fromkeys(("__copy__",) if hasattr(plain, "__deepcopy__") else ("__copy__", "__deepcopy__"), _copied)
    for layer, forward in FORWARDS.items():
        if plain.forward is layer.forward and names == ("weight",):
            members["forward"] = forward
    return type(f"Compact{plain.__name__}", (plain,), members)


def _dense_attribute(name: str) -> property:
    """Return a property that reads the dense weight, through which gradients reach the live values."""

    def dense(module: nn.Module) -> Tensor:
        layout, values = layouts_of(module)[name], module._parameters.get(name)
        if values is None:
            raise _not_replaceable(module, name)
        if layout is None or hasattr(values, "device_mesh"):  # FSDP2 leaves shards (DTensors) between passes
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


def _refuse_to_serialize(module: nn.Module, *protocol: object) -> Any:
    """Refuse to pickle, because another process could not find this class by its name; and torch.jit.script."""
    raise GrowpruneError(
        f"{type(module).__name__} has compact storage, which cannot be pickled or scripted: call sparse.to_dense_() "
        f"first, or write a file with growprune.save(sparse, path)"
    )


def _copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a module as copy.copy and copy.deepcopy do, which would otherwise use the refused pickling."""
    clone: nn.Module = object.__new__(type(module))
    state: Any = module.__getstate__()  # type: ignore[no-untyped-call]
    if memo is not None:
        memo[id(module)] = clone
        state = copy.deepcopy(state, memo)
    clone.__setstate__(state)  # type: ignore[no-untyped-call]
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
    for name, layout in layouts_of(module).items():
        values = state.get(prefix + name)
        if layout is not None and values is not None and not hasattr(values, "device_mesh"):
            state[prefix + name] = layout.expand(values.detach())


def _take_dense(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load dense tensors. Raise if pruned weights are not zero in them."""
    for name, layout in layouts_of(module).items():
        tensor = state.get(prefix + name)
        if layout is not None and tensor is not None and tensor.shape == layout.shape:
            state[prefix + name] = live = layout.to(tensor.device).compress(tensor)
            if lost := int(torch.count_nonzero(tensor)) - int(torch.count_nonzero(live)):
                raise GrowpruneError(
                    f"{prefix}{name} has {lost} non-zero weights where the mask is pruned, which compact storage would "
                    f"lose: load the SparseModel's state before the model's"
                )
