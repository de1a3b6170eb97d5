"""The parts of a model that are deployed, each in the place of the module it was made of.

A part takes inputs of any shape: for each it makes a plan, of which it keeps a few.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.deployment.compiling import Compiled, compile_module
from growprune.deployment.fuse import Fused
from growprune.deployment.geometry import Geometry
from growprune.deployment.measure import Chosen, Row, choose_layer
from growprune.deployment.skeleton import Skeleton, fill_in
from growprune.deployment.trace import NotTraceable
from growprune.errors import GrowpruneError, warn

MOST_PLANS = 8
"""How many shapes a part keeps the plans of; the one that was used longest ago goes first."""


DEPLOY_AGAIN = "change the model itself, and deploy it again, on device='cpu' or 'cuda'"


def refuse_to_copy(module: nn.Module, protocol: object) -> Any:
    """What copy, deepcopy, pickle and torch.save ask for: kernels are bound to memory that no copy would have."""
    del protocol
    raise GrowpruneError(
        f"{type(module).__name__} is deployed, and can be neither copied nor pickled: call save(folder) of what deploy "
        f"returned, then growprune.load_deployed(folder, model); or deploy the model once more"
    )


def stay_as_made(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What half(), to(), cuda() and their kin ask for: nothing, if it is so already, and no more is done then."""
    del recurse
    check_no_change(change, torch.empty(0))
    return module


def check_no_change(change: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    """Raise if a tensor such as those of a deployed model would get another dtype or device."""
    try:
        changed = change(tensor)
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch has no CUDA here
        said = str(error).partition("\n")[0]
        raise GrowpruneError(f"a deployed model cannot be changed like this ({said}): {DEPLOY_AGAIN}") from None
    if changed.device != tensor.device:
        raise GrowpruneError(
            f"the model is deployed on {tensor.device}, and cannot be moved to {changed.device}: {DEPLOY_AGAIN}"
        )
    if changed.dtype != tensor.dtype:
        is_of_kernels = (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)
        told = "keep to it, as kernels on a CPU are for no other" if is_of_kernels else DEPLOY_AGAIN
        raise GrowpruneError(f"the model is deployed in {tensor.dtype}, and cannot become {changed.dtype}: {told}")


class Part(nn.Module):
    """A module that runs as programs."""

    __reduce_ex__ = refuse_to_copy
    _apply = stay_as_made

    def __init__(self, module: nn.Module, skeleton: Skeleton, *, seconds: float, chosen: Mapping[str, Chosen]) -> None:
        super().__init__()
        self.__dict__["_module"] = module  # not a child: its parameters hold nothing
        self._skeleton, self._seconds, self._chosen = skeleton, seconds, chosen
        self._plans: OrderedDict[object, Compiled | None] = OrderedDict()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """What else its owner may ask of the module."""
        try:
            return nn.Module.__getattr__(self, name)  # not super(): LinearPart has this method too
        except AttributeError:
            return getattr(self.__dict__["_module"], name)

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compiled:
        """Make the first plan. Raises NotTraceable."""
        compiled = self._compile(args, kwargs, self._seconds, self._chosen)
        self._plans[_key(args, kwargs)] = compiled
        return compiled

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            key = _key(args, kwargs)
            if key not in self._plans:
                self._add(key, args, kwargs)
            self._plans.move_to_end(key)
            compiled = self._plans[key]
            if compiled is None:
                return self.__dict__["_module"](*args, **kwargs)
            return compiled.program(pytree.tree_leaves((args, kwargs)))

    def _add(self, key: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _check(args, kwargs)
        name = type(self.__dict__["_module"]).__name__
        if len(self._plans) == 1:
            warn(
                f"{name} is deployed for other inputs than these: a plan is made for each new shape, which takes a "
                f"while, and {MOST_PLANS} are kept"
            )
        try:
            self._plans[key] = self._compile(args, kwargs, min(self._seconds, 2.0), {})
        except NotTraceable as error:
            warn(f"{name} runs in torch with these inputs: {error}")
            fill_in(self._skeleton)
            self._plans[key] = None
        if len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)

    def _compile(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seconds: float, chosen: Mapping[str, Chosen]
    ) -> Compiled:
        module, threads = self.__dict__["_module"], torch.get_num_threads()
        return compile_module(module, self._skeleton, args, kwargs, seconds=seconds, threads=threads, chosen=chosen)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What a plan depends on."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return shapes, spec, torch.get_num_threads()


def _check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise GrowpruneError(f"an input is on {leaf.device}, but the model is deployed on the CPU: move it there")


class LinearPart(nn.Module):
    """A Linear (or transformers' Conv1D) by itself, for any number of tokens: they are rounded up to few numbers."""

    def __init__(
        self, module: nn.Module, name: str, skeleton: Skeleton, *, seconds: float, known: Chosen | None
    ) -> None:
        super().__init__()
        self.__dict__["_module"] = module
        bias = getattr(module, "bias", None)
        self._name, self._matrix = name, skeleton.matrices[f"{name}.weight"]
        self._bias = None if bias is None else bias.detach()
        self._calls, self._lock = OrderedDict[tuple[int, int], _Call](), threading.Lock()
        self._seconds, self._known = seconds, known
        self._chosen: dict[tuple[int, int], Chosen] = {}
        """What was measured, of shapes whose calls are no longer kept too."""
        self.row: Row | None = None

    __getattr__, __reduce_ex__, _apply = Part.__getattr__, refuse_to_copy, stay_as_made

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self._matrix.rows, x.numel() // max(1, x.shape[-1])
        if not columns or x.dtype != torch.float32:
            return self.__dict__["_module"](x)  # type: ignore[no-any-return]
        with self._lock:
            call = self._call(columns)
            call.x[:, :columns].copy_(x.reshape(columns, -1).t())
            call.run()
            return call.out[:, :columns].t().reshape(*x.shape[:-1], rows).clone()

    def _call(self, columns: int) -> _Call:
        key = rounded(columns), torch.get_num_threads()
        if key not in self._calls:
            self._calls[key] = self._make_call(key)
            if len(self._calls) > MOST_PLANS:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        return self._calls[key]

    def _make_call(self, key: tuple[int, int]) -> _Call:
        geometry = Geometry.linear(self._matrix.columns, key[0])
        fused = Fused(self._name, self._matrix, geometry, self._bias, 1, is_sparse=True)
        known = self._known if self.row is None else self._chosen.get(key)  # what was given is of the first shape
        layer, row = choose_layer(fused, seconds=self._seconds, threads=key[1], known=known)
        self.row = self.row or row
        self._chosen[key] = Chosen(row.choice == "sparse", row.tile)
        x, out = torch.zeros(self._matrix.columns, key[0]), torch.empty(self._matrix.rows, key[0])
        return _Call(x, out, layer.bind(x, out))


class _Call:
    def __init__(self, x: Tensor, out: Tensor, run: Callable[[], object]) -> None:
        self.x, self.out, self.run = x, out, run


def rounded(columns: int) -> int:
    """The number of columns that a layer is made for.

    >>> [rounded(n) for n in (1, 3, 8, 9, 33, 70, 300)]
    [1, 4, 8, 16, 48, 80, 320]
    """
    if columns <= 8:
        return 1 << (columns - 1).bit_length()
    step = 16 if columns <= 128 else 64
    return -(-columns // step) * step
