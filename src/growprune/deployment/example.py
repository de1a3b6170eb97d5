"""The example that a model is deployed with, and calls of the model: their inputs, their state and their errors."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.errors import GrowpruneError
from growprune.errors import first_line as first_line
from growprune.storage.adapters import leaving_masks

TOLERANCE = 1e-5
"""Largest difference between equal outputs, relative to the largest number, because the order of sums may vary."""
PARTS = {"_parameters", "_buffers", "_modules"}
"""Attributes that `restored` treats differently: buffers have their own code, and deploying changes the others."""


@dataclass
class Example:
    """The arguments of a call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Example:
        if isinstance(example, dict):
            return cls((), dict(example))
        return cls(tuple(example) if isinstance(example, (tuple, list)) else (example,))

    @property
    def is_plain(self) -> bool:
        """True if all arguments are positional tensors, as for most models. Calls then start faster."""
        return not self.kwargs and all(type(x) is Tensor for x in self.args)

    @property
    def leaves(self) -> list[Any]:
        return list(self.args) if self.is_plain else pytree.tree_leaves((self.args, self.kwargs))

    @torch.no_grad()
    def call(self, module: nn.Module) -> Any:
        return module(*self.args, **self.kwargs)

    def outside_inference_mode(self) -> Example:
        """Return the example with normal tensors, which `torch.export` needs. Call this outside inference mode."""
        return self.mapped(lambda x: x.clone() if isinstance(x, Tensor) and x.is_inference() else x)

    def mapped(self, change: Any) -> Example:
        return Example(*pytree.tree_map(change, (self.args, self.kwargs)))


@contextlib.contextmanager
def of_the_example() -> Iterator[None]:
    """Turn any error in this context into a GrowpruneError in one line that blames the example."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise GrowpruneError(
            f"the model failed on the example ({first_line(error, 600)}): give an input of a shape and dtype that it "
            f"takes"
        ) from error


def first_inputs(module: nn.Module, example: Example) -> dict[str, Example]:
    """Call a module. Return the first inputs of each module inside that is called, by its path."""
    found: dict[str, Example] = {}
    handles = []
    for path, part in module.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
            found.setdefault(path, Example(args, kwargs))

        handles.append(part.register_forward_pre_hook(note, with_kwargs=True))
    try:
        example.call(module)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def keeps_state(module: nn.Module, example: Example) -> bool:
    """True if a model gives another output when it is called again with the same input and random numbers.

    The calls use a copy that shares the parameters, so that sparse weights stay compact.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    copied, outputs = copy.deepcopy(module, memo | leaving_masks(module)).eval(), []
    for _ in range(2):
        # some models write to their input, and objects such as a cache may hold tensors
        again = example.mapped(lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x))
        with of_the_example(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs.append(pytree.tree_map_only(Tensor, Tensor.clone, again.call(copied)))
    (first, structure), (second, other) = (pytree.tree_flatten(output) for output in outputs)
    return structure != other or not all(map(_is_same, first, second))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
            return torch.equal(a, b)
        largest = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
        return torch.allclose(a, b, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
    is_plain = isinstance(a, (bool, int, float, str))
    return type(a) is type(b) and (not is_plain or a == b or a != a)


@contextlib.contextmanager
def restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the buffers and attributes of the modules afterwards, and the contents of both."""
    kept = [
        (module, {name: value for name, value in vars(module).items() if name not in PARTS}, dict(module._buffers))
        for module in modules
    ]
    values = [value for _, *parts in kept for part in parts for value in part.values()]
    tensors = [(value, value.detach().clone()) for value in values if isinstance(value, Tensor)]
    containers = [(value, copy.copy(value)) for value in values if isinstance(value, (list, deque, dict, set))]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            for name in vars(module).keys() - attributes.keys() - PARTS:
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, numbers in tensors:
            tensor.data.copy_(numbers)
        for container, items in containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(items)
