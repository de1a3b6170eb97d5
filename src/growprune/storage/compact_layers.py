"""Layers with compact weights: the dense weight is created for the forward pass, and again for the backward pass.

The backward formulas are those of autograd, operation by operation, so that compact and masked storage are
bit-identical on a CPU. This code runs most often, and a GPU waits for it, so speed matters more than style here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.storage import block_products
from growprune.storage.parameter import uncompiled

LAYOUTS = "_compact_layouts"
"""The attribute of a module that holds the layouts of its compact parameters, by their local names."""

WATCHED = "_compact_is_watched"
"""The attribute of a layer whose dense gradients are recorded. torch.compile checks it too."""


def _apply(function: type[torch.autograd.Function], *operands: Any) -> Tensor:
    return function.apply(*operands)  # type: ignore[no-any-return,no-untyped-call]


EAGERLY = _apply
"""The same, outside compiled graphs once gradients were recorded: marking a function loads the compiler."""


def _apply_eagerly(function: type[torch.autograd.Function], *operands: Any) -> Tensor:
    return _apply(_eager(function), *operands)


@functools.cache
def _eager(function: Any) -> Any:
    """Wrap a function so that its backward pass runs eagerly too if a whole training step is compiled."""
    return type(function.__name__, (function,), {"backward": staticmethod(uncompiled(function.backward))})


def watch(module: nn.Module, *, is_watched: bool) -> None:
    """Make a layer run eagerly, even in a compiled model, while its dense gradients are recorded."""
    global EAGERLY
    module.__dict__[WATCHED] = is_watched
    if is_watched and EAGERLY is _apply:
        EAGERLY = uncompiled(_apply_eagerly)


def record(layout: Any, gradient: Tensor) -> None:
    """Pass a dense gradient to the sparse parameter that records it, if there is one."""
    if torch.compiler.is_compiling():
        return  # nobody does: see `watch`
    if layout is not None and layout.recorder is not None:
        hand_over(layout.recorder(), gradient)


def hand_over(sparse_parameter: Any, gradient: Tensor | None) -> None:
    if sparse_parameter is not None and gradient is not None:
        sparse_parameter.see(gradient)


def is_recorded(layout: Any) -> bool:
    if torch.compiler.is_compiling() or layout.recorder is None:
        return False
    sparse_parameter = layout.recorder()
    return sparse_parameter is not None and sparse_parameter.record is not None


def _operands(module: nn.Module) -> tuple[Tensor, Tensor | None, Any, torch.dtype]:
    """Return live values, bias, layout, and the dtype that autocast would use."""
    parameters = module._parameters
    values, layout = parameters["weight"], module.__dict__[LAYOUTS]["weight"]
    assert values is not None
    kind = "cuda" if values.is_cuda else values.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
    return values, parameters.get("bias"), layout, dtype


def _dense(values: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if layout is None else layout.expand(values, dtype)


def _live(dense: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    return dense.to(dtype) if layout is None else layout.compress(dense, dtype)


def applied(module: nn.Module, function: type[torch.autograd.Function], *operands: Any) -> Tensor:
    """Call `function.apply` without its support for function transforms, which takes as long as the rest."""
    if torch.compiler.is_compiling():
        # what is compiled records nothing
        return EAGERLY(function, *operands) if module.__dict__[WATCHED] else _apply(function, *operands)
    if torch._C._are_functorch_transforms_active():
        return _apply(function, *operands)
    function = _eager(function) if module.__dict__[WATCHED] else function
    return super(torch.autograd.Function, function).apply(*operands)  # type: ignore[no-any-return,misc]


def check_first_derivative() -> None:
    """Raise if a graph of the backward pass is created."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("compact storage has no second derivatives: use storage='masked'")


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Compute `nn.Linear.forward`."""
    return applied(module, CompactLinear, x, *_operands(module))


class CompactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layout: Any, dtype: torch.dtype) -> Tensor:
        ctx.layout, ctx.dtypes = layout, (x.dtype, None if bias is None else bias.dtype)
        x = x if x.dtype is dtype else x.to(dtype)
        ctx.save_for_backward(x, values)
        bias = bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        if _has_block_products(layout, x):
            y = block_products.output(layout, x.reshape(-1, x.shape[-1]), values, bias)
            return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        weight = _dense(values, layout, dtype)
        if not x.is_cuda and not torch.compiler.is_compiling():
            # no graph is made here, but torch multiplies otherwise, to other bits, if no operand wants a gradient
            weight = weight.detach().requires_grad_()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        x, values = ctx.saved_tensors
        needs_x, needs_values, needs_bias, _, _ = ctx.needs_input_grad
        (x_dtype, bias_dtype), layout = ctx.dtypes, ctx.layout
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])  # (N, out)
        grad_x = grad_values = grad_bias = None
        shape, dtype = x.shape, x.dtype
        if needs_values:
            grad_values = _linear_gradient(rows, x, layout, values.dtype)
        del x  # before its gradient, which is as large, is made
        if needs_x:
            if _has_block_products(layout, rows):
                grad_x = block_products.input_gradient(layout, rows, values)
            else:
                grad_x = rows @ _dense(values, layout, dtype)
            grad_x = grad_x if len(shape) == 2 else grad_x.view(shape)
            grad_x = grad_x if x_dtype is dtype else grad_x.to(x_dtype)
        if needs_bias:
            grad_bias = rows.sum(0).to(bias_dtype)
        return grad_x, grad_values, grad_bias, None, None


def _has_block_products(layout: Any, x: Tensor) -> bool:
    return layout is not None and layout.blocks is not None and block_products.can_run(layout.blocks, x)


def _linear_gradient(rows: Tensor, x: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    columns = x.reshape(-1, x.shape[-1])  # (N, in)
    if _has_block_products(layout, x) and not is_recorded(layout):
        return block_products.values_gradient(layout, rows, columns, dtype)
    if layout is None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and dtype is torch.float32:
        return torch.mm(rows.t(), columns, out_dtype=dtype)  # without a rounded copy on the way
    gradient = rows.t() @ columns  # (out, in)
    record(layout, gradient)
    return _live(gradient, layout, dtype)


def convolution(module: Any, x: Tensor) -> Tensor:
    """Compute `nn.Conv1d.forward` to `nn.Conv3d.forward`, and the padding that a convolution does not support."""
    padding = nothing = (0,) * len(module.stride)
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if any(t % 2 for t in total):  # one more on the right
            x = F.pad(x, [side for t in reversed(total) for side in (0, t % 2)])
        padding = tuple(t // 2 for t in total)
    elif module.padding != "valid":
        padding = module.padding
    return _convolve(module, x, (module.stride, padding, module.dilation, False, nothing, module.groups))


def transposed_convolution(module: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    """Compute `nn.ConvTranspose1d.forward` to `nn.ConvTranspose3d.forward`."""
    extra = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, len(module.stride), module.dilation
    )
    shape = (module.stride, module.padding, module.dilation, True, tuple(extra), module.groups)
    return _convolve(module, x, shape)


def _convolve(module: nn.Module, x: Tensor, shape: tuple[Any, ...]) -> Tensor:
    is_batch = x.dim() == len(shape[0]) + 2
    x = x if is_batch else x[None]
    y = applied(module, CompactConvolution, x, *_operands(module), shape)
    return y if is_batch else y[0]


class CompactConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        layout: Any,
        dtype: torch.dtype,
        shape: tuple[Any, ...],
    ) -> Tensor:
        ctx.layout, ctx.shape, ctx.dtypes = layout, shape, (x.dtype, None if bias is None else bias.dtype)
        ctx.bias_size = None if bias is None else [bias.numel()]
        x = x if x.dtype is dtype else x.to(dtype)
        ctx.save_for_backward(x, values)
        bias = bias if bias is None or bias.dtype is dtype else bias.to(dtype)
        return torch.convolution(x, _dense(values, layout, dtype), bias, *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative()
        x, values = ctx.saved_tensors
        (x_dtype, bias_dtype), needs = ctx.dtypes, list(ctx.needs_input_grad[:3])
        dense = _dense(values, ctx.layout, x.dtype)
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            gradients[0], x, dense, ctx.bias_size, *ctx.shape, needs
        )
        grad_values = None
        if needs[1]:
            record(ctx.layout, grad_weight)
            grad_values = _live(grad_weight, ctx.layout, values.dtype)
        grad_x = grad_x.to(x_dtype) if needs[0] else None
        grad_bias = grad_bias.to(bias_dtype) if needs[2] else None
        return grad_x, grad_values, grad_bias, None, None, None


FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), transposed_convolution),
}
"""By the class of a layer: the function that replaces its forward."""
