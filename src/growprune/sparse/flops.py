"""The one FLOPs rule: a multiplication and an addition are two operations, and a sparse weight costs its live elements.

What is counted is every matrix product and convolution of one forward pass, as torch's own FLOP counter does, those
between activations (attention) included. Each operation is charged to the weight it multiplies by, which is known by
its memory, however a model comes to use it: through a layer, through `F.linear`, or through a copy under autocast.
Norms, activations and biases count nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from growprune.errors import GrowpruneError, warn
from growprune.masks.layers import Weight, dense_shape, layer_weights


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one forward pass."""

    dense: int
    """In all, if everything lives."""
    by_layer: dict[str, int]
    """What the weights of each layer cost if they all live; a product of two activations belongs to no layer."""
    by_weight: dict[str, int]
    """The same for each weight, and for each other parameter."""

    def at(self, densities: Mapping[str, float]) -> int:
        """In all, if only this share of each weight lives; a weight that is not named is dense.

        Examples:
            >>> count_flops(nn.Linear(8, 4), torch.zeros(1, 8)).at({"weight": 0.25})
            16
        """
        unknown = [name for name in densities if name not in self.by_weight]
        if unknown:
            raise GrowpruneError(
                f"densities has {unknown[0]!r}, which is no weight; there are {', '.join(self.by_weight)}"
            )
        return self.dense - sum(self.by_weight[name] - self.of(name, density) for name, density in densities.items())

    def of(self, name: str, density: float) -> int:
        """What one weight costs if only this share of it lives."""
        return round(self.by_weight[name] * density)


def count_flops(model: nn.Module, example: Any) -> Flops:
    """Count the FLOPs of a forward pass of `example`, in eval mode; the model is left as it was.

    Args:
        example: the input, or a tuple of positional or a dict of keyword arguments. Model and example may both be on
            the meta device, where nothing is computed.

    Examples:
        >>> count_flops(nn.Linear(8, 4), torch.zeros(3, 8)).dense
        192
    """
    if any(isinstance(m, nn.RNNBase) and not next(m.parameters()).is_meta for m in model.modules()):
        warn("recurrent layers run as one and are not counted: count on the meta device")
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    layers = layer_weights(model)
    weights = [weight for group in layers.values() for weight in group]
    known = {weight.parameter for weight in weights}
    weights += [Weight(name, name, _shape(model, name)) for name, _ in model.named_parameters() if name not in known]
    with _left_as_it_was(model) as buffers, FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        charges = _Charges(counter, model, weights)
        with charges:
            torch.func.functional_call(model, buffers, args, kwargs)
    by_weight = {weight.name: charges.of(weight) for weight in weights}
    by_layer = {path: sum(by_weight[weight.name] for weight in group) for path, group in layers.items()}
    return Flops(counter.get_total_flops(), by_layer, by_weight)


def _trilinear(x1: Sequence[int], weight: Sequence[int], *rest: Any, **options: Any) -> int:
    """`nn.Bilinear`: every element of the weight is used once an example."""
    del rest, options
    return 2 * math.prod(x1[:-1]) * math.prod(weight)


def _grouped_mm(a: Sequence[int], b: Sequence[int], *rest: Any, **options: Any) -> int:
    """The experts of a mixture at once: rows go to one expert each, or every expert has its own."""
    del rest, options
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * math.prod(a[-2:]) * b[-1]


FORMULAS: dict[Any, Any] = {torch.ops.aten._trilinear: _trilinear, torch.ops.aten._grouped_mm: _grouped_mm}
"""The FLOPs, by the shapes of the arguments, of operations that torch's own counter does not know."""


class _Charges(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Charges what a FLOP counter counts to the parameters that take part."""

    supports_higher_order_operators = True

    COPIES = ("aten._to_copy.default", "aten.clone.default", "growprune.expand.default")
    """Operations that make another tensor of the same weight; the last is how compact storage makes it dense."""

    def __init__(self, counter: FlopCounterMode, model: nn.Module, weights: list[Weight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._charged: dict[str, list[tuple[int, int, int]]] = {weight.parameter: [] for weight in weights}
        """By parameter: (first element, first beyond the last, FLOPs) of each operation."""
        self._places: dict[int, tuple[str, int]] = {}
        """By memory: the parameter that lies there, and which of its elements is the first."""
        self._copies: list[Tensor] = []
        """Kept until the end, so that their memory is not given to anything else."""
        parameters = dict(model.named_parameters())
        for weight in weights:
            if len(weight.shape) >= 2:  # a bias takes part, but only adds
                parameter = parameters[weight.parameter]
                self._places[_memory(parameter)] = weight.parameter, -int(parameter.storage_offset())

    def of(self, weight: Weight) -> int:
        """What was charged to a weight: its parameter's operations, or the share that its rows have in each."""
        charged = self._charged[weight.parameter]
        if weight.rows is None:
            return sum(flops for _, _, flops in charged)
        length = weight.rows[1] - weight.rows[0]
        first, end = (row * (weight.numel // length) for row in weight.rows)
        shares = ((max(0, min(end, stop) - max(first, start)), stop - start, flops) for start, stop, flops in charged)
        return sum(flops * common // size for common, size, flops in shares)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._counter.get_total_flops()
        out = func(*args, **(kwargs or {}))
        flops = self._counter.get_total_flops() - before
        if flops or str(func) in self.COPIES:
            for name, start, tensor in self._known(tree_leaves((args, kwargs)))[:1]:
                if flops:
                    self._charged[name].append((start, start + _extent(tensor), flops))
                else:
                    self._places[_memory(out)] = name, start - out.storage_offset()
                    self._copies.append(out)
        return out

    def _known(self, arguments: list[Any]) -> list[tuple[str, int, Tensor]]:
        """The parameters among the arguments, the last first: in addmm(bias, x, weight) it is the weight."""
        tensors = [a for a in reversed(arguments) if isinstance(a, Tensor) and a.layout is torch.strided]
        found = [(self._places[_memory(t)], t) for t in tensors if _memory(t) in self._places]
        return [(name, first + int(t.storage_offset()), t) for (name, first), t in found]


def _shape(model: nn.Module, name: str) -> tuple[int, ...]:
    path, _, local = name.rpartition(".")
    return dense_shape(model.get_submodule(path), local)


def _extent(tensor: Tensor) -> int:
    """From the first to the last element in memory; fewer than `numel` if a weight is repeated along a batch."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # unlike data_ptr, it tells tensors on the meta device apart


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Eval mode without gradients, and ways of computing that a counter sees; gives buffers that may be written to."""
    training = {module: module.training for module in model.modules()}
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), torch.random.fork_rng(list(gpus)), sdpa_kernel(SDPBackend.MATH):
            yield {name: buffer.clone() for name, buffer in model.named_buffers()}
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, was_training in training.items():
            module.training = was_training
