"""How layers compute with a compact weight: the dense one is made for the forward pass, and again for the backward.

The backward formulas are those of autograd, operation by operation, so that on a CPU compact and masked storage give
the same bits. What they need is saved by `Hold`, before the layer computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RECORDERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""By layout: the sparse parameter that may want to record dense gradients."""


def record(layout: Any, gradient: Tensor) -> None:
    """Give a dense gradient to the sparse parameter that records it, if there is one."""
    if RECORDERS and layout is not None and (recorder := RECORDERS.get(layout)) is not None:
        hand_over(recorder(), gradient)


def hand_over(sparse_parameter: Any, gradient: Tensor | None) -> None:
    if sparse_parameter is not None and sparse_parameter.record is not None and gradient is not None:
        sparse_parameter.record(gradient)


def _compute_dtype(values: Tensor) -> torch.dtype:
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


def _operands(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    """Input, live values, bias and layout; input and bias in the dtype to compute in, as autocast would have them."""
    values, layout = module._parameters["weight"], module.__dict__["_compact_layouts"]["weight"]
    assert values is not None
    bias = module._parameters.get("bias")
    dtype = _compute_dtype(values)
    return x.to(dtype), values, None if bias is None else bias.to(dtype), layout


def _dense(values: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if layout is None else layout.expand(values, dtype)


def _live(dense: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    return dense.to(dtype) if layout is None else layout.compress(dense, dtype)


class Hold(torch.autograd.Function):
    """Saves input and values for the backward pass of a layer that is still to compute; gives the input.

    What a function saves is saved when its forward is over. Activation checkpointing ends a recomputation as soon as
    the last tensor it needs is saved: a layer that saved its own would be multiplied through once more for nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(x, values)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _hold(x: Tensor, values: Tensor) -> tuple[Tensor, Any]:
    """The input, and who holds what the backward pass needs; None for the layer itself."""
    if torch.compiler.is_compiling():  # which decides by itself what is kept, and what is computed again
        return x, None
    held: Tensor = Hold.apply(x, values)  # type: ignore[no-untyped-call]
    return held, held.grad_fn


def _save(ctx: Any, x: Tensor, values: Tensor, holder: Any) -> None:
    ctx.holder = holder
    if holder is None:
        ctx.save_for_backward(x, values)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, bool]:
    """What was saved, and whether the input wants a gradient."""
    holder = ctx if ctx.holder is None else ctx.holder
    x, values = holder.saved_tensors
    return x, values, holder.needs_input_grad[0]


def check_first_derivative(gradient: Tensor) -> None:
    """Raise where a graph of the backward pass is made, since the kernels on a GPU have no derivatives of their own."""
    if torch.is_grad_enabled() and gradient.is_cuda and not torch.compiler.is_compiling():
        raise RuntimeError("compact storage has no second derivatives on a GPU: use storage='masked'")


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """`nn.Linear.forward`."""
    x, values, bias, layout = _operands(module, x)
    x, holder = _hold(x, values)
    return CompactLinear.apply(x, values, bias, layout, holder)  # type: ignore[no-any-return,no-untyped-call]


class CompactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layout: Any, holder: Any) -> Tensor:
        _save(ctx, x, values, holder)
        ctx.layout = layout
        # no graph is made here, but torch multiplies otherwise, to other bits, if no operand wants a gradient
        return F.linear(x, _dense(values, layout, x.dtype).detach().requires_grad_(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        check_first_derivative(gradients[0])
        x, values, needs_x = _saved(ctx)
        _, needs_values, needs_bias, _, _ = ctx.needs_input_grad
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])  # (N, out)
        grad_x = (rows @ _dense(values, ctx.layout, x.dtype)).view(x.shape) if needs_x else None
        grad_values = _linear_gradient(rows, x, ctx.layout, values.dtype) if needs_values else None
        return grad_x, grad_values, rows.sum(0) if needs_bias else None, None, None


def _linear_gradient(rows: Tensor, x: Tensor, layout: Any, dtype: torch.dtype) -> Tensor:
    columns = x.reshape(-1, x.shape[-1])  # (N, in)
    if layout is None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and dtype is torch.float32:
        return torch.mm(rows.t(), columns, out_dtype=dtype)  # without a rounded copy on the way
    gradient = rows.t() @ columns  # (out, in)
    record(layout, gradient)
    return _live(gradient, layout, dtype)


def convolution(module: Any, x: Tensor) -> Tensor:
    """`nn.Conv1d.forward` to `nn.Conv3d.forward`."""
    x, values, bias, layout = _operands(module, x)
    x, padding = _padded(module, x)
    shape = (module.stride, padding, module.dilation, False, (0,) * len(module.stride), module.groups)
    return _convolve(x, values, bias, layout, shape)


def _padded(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input with the padding that a convolution cannot do by itself, and the padding that is left to it."""
    nothing = (0,) * len(module.stride)
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), nothing
    if module.padding != "same":
        return x, nothing if module.padding == "valid" else module.padding
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    if any(t % 2 for t in total):  # one more on the right
        x = F.pad(x, [side for t in reversed(total) for side in (0, t % 2)])
    return x, tuple(t // 2 for t in total)


def transposed_convolution(module: Any, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    """`nn.ConvTranspose1d.forward` to `nn.ConvTranspose3d.forward`."""
    x, values, bias, layout = _operands(module, x)
    extra = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, len(module.stride), module.dilation
    )
    shape = (module.stride, module.padding, module.dilation, True, tuple(extra), module.groups)
    return _convolve(x, values, bias, layout, shape)


def _convolve(x: Tensor, values: Tensor, bias: Tensor | None, layout: Any, shape: tuple[Any, ...]) -> Tensor:
    is_batch = x.dim() == len(shape[0]) + 2
    x, holder = _hold(x if is_batch else x[None], values)
    y = CompactConvolution.apply(x, values, bias, layout, shape, holder)  # type: ignore[no-untyped-call]
    return y if is_batch else y[0]  # type: ignore[no-any-return]


class CompactConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, layout: Any, shape: tuple[Any, ...], holder: Any
    ) -> Tensor:
        _save(ctx, x, values, holder)
        ctx.layout, ctx.shape = layout, shape
        ctx.bias_size = None if bias is None else [bias.numel()]
        return torch.convolution(x, _dense(values, layout, x.dtype), bias, *shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative(gradients[0])
        x, values, needs_x = _saved(ctx)
        dense = _dense(values, ctx.layout, x.dtype)
        needs = [needs_x, *ctx.needs_input_grad[1:3]]
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            gradients[0], x, dense, ctx.bias_size, *ctx.shape, needs
        )
        if needs[1]:
            record(ctx.layout, grad_weight)
        grad_values = _live(grad_weight, ctx.layout, values.dtype) if needs[1] else None
        return grad_x, grad_values, grad_bias, None, None, None


FORWARDS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
}
"""By the kind of layer whose own forward it takes the place of."""
