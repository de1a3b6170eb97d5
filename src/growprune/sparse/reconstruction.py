"""Train each block, after it was pruned, to compute what the dense block computed on the calibration data.

Only the non-zero weights, biases and norms of one block change, by a few steps of Adam on the squared error of the
block's output. Besides the model, only the inputs and outputs of one block are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from growprune.errors import GrowpruneError
from growprune.sparse.calibration import LIMIT

LEARNING_RATE = 1e-3
"""The learning rate of Adam in the first step; it falls linearly to zero."""
BETAS = (0.9, 0.999)
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Call:
    """One call of a block: its arguments, and the tensors that the dense block returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


@contextlib.contextmanager
def recorded(block: nn.Module | None) -> Iterator[list[Call]]:
    """Record the calls of a block."""
    calls: list[Call] = []
    begun: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun.append(tree_map(_copied, (args, kwargs)))  # a block may write to its input

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(Call(*begun.pop(), [_copied(leaf) for leaf in _floats(output)]))

    with contextlib.ExitStack() as hooks:
        if block is not None:
            hooks.enter_context(block.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(end, with_kwargs=True))
        yield calls


@contextlib.contextmanager
def checked_sizes(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Raise at the end if the inputs and outputs of a block are too large to keep."""
    sizes = dict.fromkeys(blocks, 0)

    def add(name: str, module: nn.Module, *tensors: Any) -> None:
        sizes[name] += sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))

    with contextlib.ExitStack() as hooks:
        for name, block in blocks.items():
            hooks.enter_context(block.register_forward_hook(partial(add, name), with_kwargs=True))
        yield
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if largest and sizes[largest] > LIMIT:
        raise GrowpruneError(
            f"reconstruct keeps the inputs and outputs of a block, {sizes[largest] / 2**30:.1f} GiB for {largest}, but "
            f"at most {LIMIT >> 30} GiB are allowed: calibrate with fewer or shorter examples, or without reconstruct"
        )


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Let models of transformers compute without a cache of keys, to which a block would add at each call."""
    found: dict[int, Any] = {id(config): config for m in model.modules() if (config := getattr(m, "config", None))}
    before = [(config, config.use_cache) for config in found.values() if hasattr(config, "use_cache")]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            config.use_cache = value


@torch.enable_grad()
def reconstruct(block: nn.Module, calls: Sequence[Call], *, steps: int) -> None:
    """Train a pruned block to return what the dense block returned. Keep it as it was if that does not help."""
    trained = [p for p in block.parameters() if p.requires_grad and p.is_floating_point()]
    if not trained or not any(call.outputs for call in calls):
        return
    gradients = [p.grad for p in trained]
    before = [p.detach().clone() for p in trained]
    # the values that are trained; half precision would round most steps away
    values = [p.detach().float() if p.dtype in HALF else p.detach().clone() for p in trained]
    first, second = [torch.zeros_like(v) for v in values], [torch.zeros_like(v) for v in values]
    started = _error(block, calls)
    try:
        for step in range(1, steps + 1):
            for p in trained:
                p.grad = None
            _loss(block, calls[(step - 1) % len(calls)]).backward()  # type: ignore[no-untyped-call]
            rate = LEARNING_RATE * (1 - (step - 1) / steps)
            with torch.no_grad():
                for p, value, m, v in zip(trained, values, first, second, strict=True):
                    if p.grad is None:
                        continue
                    g = p.grad.to(value.dtype)
                    m.lerp_(g, 1 - BETAS[0])
                    v.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
                    scale = (v / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
                    value.addcdiv_(m, scale, value=-rate / (1 - BETAS[0] ** step))
                    p.copy_(value)
        ended = _error(block, calls)
    finally:
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient
    if not ended < started:
        with torch.no_grad():
            for p, value in zip(trained, before, strict=True):
                p.copy_(value)


def _loss(block: nn.Module, call: Call) -> Tensor:
    """The squared error of a block's outputs, as a share of the dense outputs' squares."""
    found = _floats(block(*tree_map(_copied, call.args), **tree_map(_copied, call.kwargs)))
    pairs = list(zip(found, call.outputs, strict=True))
    error = torch.stack([(a.float() - b.float()).square().sum() for a, b in pairs]).sum()
    return error / torch.stack([b.float().square().sum() for _, b in pairs]).sum().clamp_min(1e-12)


@torch.no_grad()
def _error(block: nn.Module, calls: Sequence[Call]) -> float:
    return sum(_loss(block, call).item() for call in calls) / len(calls)


def _floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
