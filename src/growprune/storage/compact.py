"""Compact storage: of a sparse weight, only the live values are kept, and one bit for each weight or block.

The parameter of the layer *becomes* the 1-D tensor of its live values, under its old name, so that gradients, optimizer
state, moving averages, all-reduce and checkpoints shrink by themselves. The dense weight exists only while its layer
computes, in the dtype it computes in: `Linear` and convolutions make it for the forward pass, forget it, and make it
again for the backward pass, where the dense gradient of one layer at a time is gathered to the live values. Any other
module sees the dense weight, with gradients, when it reads its attribute; there autograd keeps it until the backward
pass. A weight that is all alive is a plain dense parameter; its layer forgets, and makes again, the copy that autocast
would keep.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.layers import DENSE_SHAPES
from growprune.patterns import Pattern
from growprune.snapshot import unpack
from growprune.storage import block_products, kernels
from growprune.storage.blocks import LiveBlocks, block_of, live_blocks
from growprune.storage.compact_layers import (
    FORWARDS,
    RECORDERS,
    WATCHED,
    check_first_derivative,
    hand_over,
    record,
    watch,
)
from growprune.storage.masked import hookable

MOST_GRAPHS = 64
"""How many graphs of one function torch.compile may keep; its own default is 8."""


@dataclass(eq=False)
class Layout:
    """Where the live values of one parameter belong."""

    shape: torch.Size
    bits: Tensor
    offsets: Tensor
    num_alive: int
    group: int
    """Consecutive elements that live and die together, and share a bit."""
    is_folded: bool
    """Whether elements are ordered kernel position by kernel position, as blocks of a convolution are."""
    blocks: LiveBlocks | None = None
    """Where its live blocks are, if it lives in blocks that products can be taken over."""

    @classmethod
    def of(cls, mask: Tensor, group: int) -> Layout:
        is_folded = group > 1 and mask.dim() > 2
        flat = (mask.movedim(1, -1) if is_folded else mask).reshape(-1)
        bits = kernels.pack(flat, group=group)
        offsets, num_groups = kernels.block_offsets(bits)
        return cls(mask.shape, bits, offsets, num_groups * group, group, is_folded)

    @classmethod
    def of_packed(cls, packed: Tensor, shape: torch.Size, group: int, *, keep: bool = False) -> Layout | None:
        """That of a mask that `snapshot.pack` made, without unpacking it; None where values must change their order.

        Args:
            keep: whether the mask may be kept as it is, if that is possible.
        """
        is_folded = group > 1 and len(shape) > 2
        if (is_folded and shape[2:].numel() > 1) or (group > 1 and group % 8):
            return None
        if group > 1:
            octets = packed.cpu().numpy().reshape(-1, group // 8)
            if not ((octets == octets[:, :1]).all() and ((octets[:, 0] == 0) | (octets[:, 0] == 0xFF)).all()):
                return None
            packed = torch.from_numpy(np.packbits(octets[:, 0] == 0xFF, bitorder="little")).to(packed.device)
        is_padded = packed.numel() % (kernels.BLOCK // 8) == 0
        bits = packed if keep and is_padded else kernels.padded_copy(packed, to=kernels.BLOCK // 8)
        offsets, num_groups = kernels.block_offsets(bits)
        return cls(shape, bits, offsets, num_groups * group, group, is_folded)

    def __post_init__(self) -> None:
        self._numel = self.shape.numel()
        self._quick: dict[tuple[Any, ...], Callable[[int], Tensor] | None] = {}
        """Ways to expand and compress that Python is done with soon, by what for; made when first needed."""

    def to(self, device: torch.device) -> Layout:
        """Follow the values to another device."""
        if self.bits.device != device:
            self.bits, self.offsets = self.bits.to(device), self.offsets.to(device)
            self.blocks = None if self.blocks is None else self.blocks.to(device)
            self._quick = {}
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        blocks = None if self.blocks is None else self.blocks.clone()
        copied = replace(self, bits=self.bits.clone(), offsets=self.offsets.clone(), blocks=blocks)
        memo[id(self)] = copied
        return copied

    def mask(self) -> Tensor:
        return self._unfold(kernels.unpack(self.bits, self.shape.numel(), group=self.group))

    def expand(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The dense tensor."""
        key = (values.dtype, dtype, values.device)
        if (quick := self._quick.get(key)) is not None and _is_usual(values):
            return quick(values.data_ptr())
        here = self.to(values.device)
        # unchecked, here and below: a layout made its own bits and offsets, and checking takes as long as a kernel
        flat = kernels.expand_known(values, here.bits, here.offsets, self._numel, dtype or values.dtype, self.group)
        if _is_usual(values) and key not in self._quick and not self.is_folded:
            settings = (here.bits, here.offsets, self.shape, dtype or values.dtype, self.group)
            self._quick[key] = kernels.expander(values, *settings)
        return self._unfold(flat)

    def compress(self, dense: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The live values of a dense tensor."""
        key = (dense.dtype, dtype, dense.device, "compress")
        if (quick := self._quick.get(key)) is not None and _is_usual(dense):
            return quick(dense.data_ptr())
        here = self.to(dense.device)
        flat = (dense.movedim(1, -1) if self.is_folded else dense).reshape(-1)
        settings = (here.bits, here.offsets, self.num_alive, dtype or dense.dtype, self.group)
        if _is_usual(dense) and key not in self._quick and not self.is_folded:
            live = kernels.compress_known(flat, *settings)
            self._quick[key] = kernels.compressor(flat, *settings)
            return live
        return kernels.compress_known(flat, *settings)

    def _unfold(self, flat: Tensor) -> Tensor:
        if not self.is_folded:
            return flat.view(self.shape)
        folded = (self.shape[0], *self.shape[2:], self.shape[1])
        return flat.view(folded).movedim(-1, 1).contiguous()


def _is_usual(tensor: Tensor) -> bool:
    """Whether a kernel that was started before can be started again with this tensor, past all checks."""
    return (
        tensor.is_cuda
        and kernels.is_plain()
        and tensor.is_contiguous()
        and tensor.data_ptr() % 16 == 0
        and tensor.get_device() == torch.cuda.current_device()
    )


class Compact:
    """A parameter stored as its live values."""

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        path, _, self._local = name.rpartition(".")
        self.module = model.get_submodule(path)
        self._shape = self.parameter.shape
        self._group = _group_of(pattern, self.module, self._shape)
        self._block = block_of(pattern, name, self._shape)
        block_products.check_environment()
        self._record: Callable[[Tensor], None] | None = None
        self._listening: weakref.ref[nn.Parameter] | None = None
        set_layout(self.module, self._local, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_listening": None}  # a copy records nothing

    @staticmethod
    def check(model: nn.Module, name: str) -> None:
        """Raise if it cannot be stored compact."""
        _check_can_be_compact(model, name)

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self._local]
        assert parameter is not None
        return parameter

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def _layout(self) -> Layout | None:
        """None while everything lives. It belongs to the module, so that a copy of the model takes it along."""
        return layouts_of(self.module)[self._local]

    @property
    def is_known_full(self) -> bool:
        return self._layout is None

    def mask(self) -> Tensor:
        if self._layout is None:
            return torch.ones(self._shape, dtype=torch.bool, device=self.parameter.device)
        return self._layout.to(self.parameter.device).mask()

    def weight(self) -> Tensor:
        return self.to_dense(self.parameter.detach())

    def set_mask(self, mask: Tensor) -> None:
        self._put(self.weight(), mask)

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        here = live.device if self.parameter.is_meta else self.parameter.device
        live = live.to(here, self.parameter.dtype)
        kept = (lambda tensor: tensor) if keep else kernels.padded_copy  # a copy is no view of somebody's file
        if live.numel() == self._shape.numel():
            self._keep(kept(live.view(-1)).view(self._shape), None)
        elif (layout := Layout.of_packed(packed.to(here), self._shape, self._group, keep=keep)) is not None:
            self._keep(kept(live), layout)
        else:
            mask = unpack(packed, self._shape, here)
            dense = torch.zeros(self._shape, dtype=live.dtype, device=here)
            dense[mask] = live
            self._put(dense, mask)

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
        return self.to_dense(tensor)[self.mask()]

    def from_live(self, live: Tensor) -> Tensor:
        live = live.to(self.parameter.device)
        if self._layout is not None and not self._layout.is_folded:
            return live
        dense = torch.zeros(self._shape, dtype=live.dtype, device=live.device)
        dense[self.mask()] = live
        return self.from_dense(dense)

    def release(self) -> None:
        make_plain(self.module)

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]]) -> None:
        del shaped_alike  # dead weights are not there

    def hook_gradients(self) -> None:
        pass

    def mask_gradient(self, *, again: bool) -> None:
        pass

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
        self._listen()

    def _listen(self) -> None:
        """See the dense gradients from now on: in the layer, or at the parameter itself where all of it lives."""
        parameter, me = self.parameter, weakref.ref(self)
        if self._layout is not None:
            RECORDERS[self._layout] = me
        elif self._listening is None or self._listening() is not parameter:
            with hookable(parameter):
                parameter.register_post_accumulate_grad_hook(lambda p: hand_over(me(), p.grad))  # type: ignore[no-untyped-call]
            self._listening = weakref.ref(parameter)

    def _put(self, dense: Tensor, mask: Tensor) -> None:
        group = self._group if self._group > 1 and _is_grouped(mask, self._group) else 1
        layout = None if bool(mask.all()) else Layout.of(mask, group)
        self._keep(torch.where(mask, dense, 0) if layout is None else layout.compress(dense), layout)

    def _keep(self, values: Tensor, layout: Layout | None) -> None:
        old = self.parameter
        self._find_blocks(layout)
        self.module._parameters[self._local] = nn.Parameter(values, requires_grad=old.requires_grad)
        set_layout(self.module, self._local, layout)
        let_compile_again()
        if self._record is not None:
            self._listen()

    def _find_blocks(self, layout: Layout | None) -> None:
        if layout is not None and self._block is not None:
            layout.blocks = live_blocks(layout.mask(), *self._block)


def let_compile_again() -> None:
    """Let torch.compile keep a graph for each part that may be dense.

    It compiles once for each of them, and finds its graphs again when the parts' turn comes again. But from the ninth
    graph on it would run without any, and say so in a log only.
    """
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)


def layouts_of(module: nn.Module) -> dict[str, Layout | None]:
    """The layouts of a module's compact parameters, by their local names; None for one that is all alive."""
    found = module.__dict__.get("_compact_layouts", {})
    assert isinstance(found, dict)
    return found


def set_layout(module: nn.Module, local: str, layout: Layout | None) -> None:
    """Say how a parameter of a module is stored; the module's class, and what its state_dict does, follow."""
    layouts = {**layouts_of(module), local: layout}
    module.__dict__["_compact_layouts"] = layouts
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
    for attribute in ("_compact_layouts", DENSE_SHAPES, WATCHED):
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


def _group_of(pattern: Pattern, module: nn.Module, shape: torch.Size) -> int:
    """How many consecutive elements a bit can stand for."""
    return pattern.run_length(shape, transposed=getattr(module, "transposed", False))


def _is_grouped(mask: Tensor, group: int) -> bool:
    folded = mask.movedim(1, -1).reshape(-1, group)
    return torch.equal(folded.any(1), folded.all(1))


def _check_can_be_compact(model: nn.Module, name: str) -> None:
    parameter = model.get_parameter(name)
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.RNNBase):
        raise GrowpruneError(
            f"compact storage cannot hold {name}, a recurrent weight: use storage='masked', or keep_dense"
        )
    if not parameter.is_floating_point():
        raise GrowpruneError(
            f"compact storage cannot hold {name}, which is {parameter.dtype}: use storage='masked', or keep_dense"
        )
    if sum(p is parameter for _, m in model.named_modules(remove_duplicate=False) for p in m._parameters.values()) > 1:
        places = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
        raise GrowpruneError(
            f"compact storage cannot hold {name}, which is tied to {', '.join(places[1:])}: "
            f"use storage='masked', or keep_dense"
        )
