"""Count FLOPs: a multiplication and an addition are two operations, and a sparse weight costs its live elements.

Every matrix product and convolution of one forward pass counts, as in torch's own FLOP counter, including products
between activations (attention). Each operation is charged to the weight it multiplies by. The weight is recognized by
its memory, whether the model uses it through a layer, `F.linear`, or a copy under autocast: a dispatch mode sees every
operation, but its arguments have no names. Norms, activations and biases do not count.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight, layer_weights, shape_of
from growprune.sparse.rng import rng_state, set_rng_state

COPIES = ("aten::_to_copy", "aten::clone", "growprune::expand")
"""Operations that copy a weight into another tensor. The last is how compact storage makes it dense."""


class WeightMemory:
    """Find the parameter that a tensor is a view or copy of.

    Args:
        parameters: the parameters to recognize, by name; several may share a storage.
        kept: how many copies of parameters are remembered, and so kept in memory; by default all.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, kept: int | None = None) -> None:
        self._kept = kept
        self._places: dict[int, list[tuple[range, str, int]]] = {}
        """By memory: the range of a parameter in it, its name, and the index of its first element there."""
        self._copies: deque[Tensor] = deque()
        """Kept, so that their memory is not given to anything else."""
        for name, parameter in parameters.items():
            self._place(parameter, name, 0)

    def __contains__(self, tensor: Any) -> bool:
        return self._found(tensor) is not None

    def range_of(self, tensor: Tensor) -> tuple[str, int, int]:
        """Return the parameter that a tensor is part of, and the range of its elements."""
        found = self._found(tensor)
        assert found is not None, "ask whether it is one first"
        return found[0], found[1], found[1] + _extent(tensor)

    def note(self, operation: str, arguments: Sequence[Any], out: Any) -> None:
        """Remember the result of an operation if it is a copy of a parameter."""
        for copied in [a for a in reversed(arguments) if a in self][:1] if operation in COPIES else ():
            name, first, _ = self.range_of(copied)
            self._place(out, name, first)
            self._copies.append(out)
            if self._kept is not None and len(self._copies) > self._kept:
                del self._places[_memory(self._copies.popleft())]

    def _place(self, tensor: Tensor, name: str, first: int) -> None:
        start = int(tensor.storage_offset())
        self._places.setdefault(_memory(tensor), []).append((range(start, start + _extent(tensor)), name, first))

    def _found(self, tensor: Any) -> tuple[str, int] | None:
        """Return the parameter in which a tensor begins, and the index of the first element."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return None
        places, at = self._places.get(_memory(tensor), ()), int(tensor.storage_offset())
        return next(((name, first + at - lies.start) for lies, name, first in places if at in lies), None)


def _extent(tensor: Tensor) -> int:
    """From the first to the last element in memory; fewer than `numel` if a weight is repeated along a batch."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # unlike data_ptr, it tells tensors on the meta device apart


@contextlib.contextmanager
def showing_products(model: nn.Module) -> Iterator[None]:
    """Switch to eval mode without gradients, and to operations that show each product; restore all of it at the end."""
    training, random = {module: module.training for module in model.modules()}, rng_state()
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    # cuDNN and oneDNN compute all steps of a recurrent layer in one operation
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    libraries: list[Any] = [torch.backends.cudnn, torch.backends.mkldnn] if is_recurrent else []
    before = [library.enabled for library in libraries]
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer
        for library in libraries:
            library.enabled = False
        with torch.no_grad():
            yield
    finally:
        for library, was_enabled in zip(libraries, before, strict=True):
            library.enabled = was_enabled
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for module, was_training in training.items():
            module.training = was_training
        set_rng_state(random)


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one forward pass."""

    dense: int
    """The total of the dense model."""
    by_weight: dict[str, int]
    """The cost of each weight, and each other parameter, if dense. A product of two activations belongs to none."""

    def at(self, densities: Mapping[str, float]) -> int:
        """Return the total if only this share of each weight is live. A weight that is not named is dense.

        Examples:
            >>> count_flops(nn.Linear(8, 4), torch.zeros(1, 8)).at({"weight": 0.25})
            16
        """
        unknown = [name for name in densities if name not in self.by_weight]
        if unknown:
            raise GrowpruneError(
                f"densities has {unknown[0]!r}, which is not a weight; the weights are {', '.join(self.by_weight)}"
            )
        return self.dense - sum(self.by_weight[name] - self.of(name, density) for name, density in densities.items())

    def of(self, name: str, density: float) -> int:
        """Return the cost of one weight if only this share of it is live."""
        return round(self.by_weight[name] * density)


def count_flops(model: nn.Module, example: Any) -> Flops:
    """Count the FLOPs of a forward pass of `example`, in eval mode, without changing the model.

    Args:
        example: the input, a tuple of positional arguments or a dict of keyword arguments. Model and example may both
            be on the meta device, where nothing is computed.

    Examples:
        >>> count_flops(nn.Linear(8, 4), torch.zeros(3, 8)).dense
        192
    """
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    weights = [weight for group in layer_weights(model).values() for weight in group]
    known = {weight.parameter for weight in weights}
    weights += [Weight(name, name, shape_of(model, name)) for name, _ in model.named_parameters() if name not in known]
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with showing_products(model), sdpa_kernel(SDPBackend.MATH), counter:
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        charges = _Charges(counter, model, weights)
        with charges:
            torch.func.functional_call(model, buffers, args, kwargs)
    return Flops(counter.get_total_flops(), {weight.name: charges.of(weight) for weight in weights})


def cost_factors(model: nn.Module, example: Any, weights: Sequence[Weight], power: float) -> dict[str, float]:
    """Return by how much the scores of each weight count in a ranking of all layers: (cost of an element) ** -power.

    The cost is the number of FLOPs per element of the dense weight, relative to that of the cheapest layer.
    """
    if example is None:
        raise GrowpruneError(f"cost_power={power:g} needs example=, an input of the model, to count operations")
    device = next(model.parameters()).device
    example = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example)
    flops = count_flops(model, example).by_weight
    if uncounted := [weight.name for weight in weights if not flops.get(weight.name)]:
        raise GrowpruneError(
            f"cost_power={power:g} needs the operations of every layer, but the example leads to none of "
            f"{uncounted[0]}: pass an input that uses it, or add it to keep_dense"
        )
    costs = {weight.name: Fraction(flops[weight.name], weight.numel) for weight in weights}
    cheapest = min(costs.values(), default=Fraction(1))
    return {name: float(cost / cheapest) ** -power for name, cost in costs.items()}


def _trilinear(x1: Sequence[int], weight: Sequence[int], *rest: Any, **options: Any) -> int:
    """`nn.Bilinear`: every element of the weight is used once an example."""
    return 2 * math.prod(x1[:-1]) * math.prod(weight)


def _grouped_mm(a: Sequence[int], b: Sequence[int], *rest: Any, **options: Any) -> int:
    """The experts of a mixture at once: rows go to one expert each, or every expert has its own."""
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * math.prod(a[-2:]) * b[-1]


FORMULAS: dict[Any, Any] = {torch.ops.aten._trilinear: _trilinear, torch.ops.aten._grouped_mm: _grouped_mm}
"""The FLOPs, by the shapes of the arguments, of operations that torch's own counter does not know."""


class _Charges(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Charges what a FLOP counter counts to the parameters that take part."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounterMode, model: nn.Module, weights: list[Weight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._charged: dict[str, list[tuple[int, int, int]]] = {weight.parameter: [] for weight in weights}
        """By parameter: (first element, first beyond the last, FLOPs) of each operation."""
        parameters = dict(model.named_parameters())
        matrices = [w.parameter for w in weights if len(w.shape) >= 2]  # a bias takes part, but only adds
        self._memory = WeightMemory({name: parameters[name] for name in matrices})

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
        arguments = tree_leaves((args, kwargs))
        # the last that is a weight: in addmm(bias, x, weight) it is not the bias
        for tensor in [a for a in reversed(arguments) if a in self._memory][:1] if flops else ():
            name, first, end = self._memory.range_of(tensor)
            self._charged[name].append((first, end, flops))
        if not flops:
            self._memory.note(func._schema.name if hasattr(func, "_schema") else "", arguments, out)
        return out
