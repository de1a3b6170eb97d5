"""The parts of a model that are deployed on a CPU, each in the place of the module that it replaces.

A part takes inputs of any shape. It makes a plan for each shape, and keeps the last few.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.deployment.cpu.geometry import Geometry
from growprune.deployment.cpu.prepared import LayerSpec
from growprune.deployment.cpu.tuning import choose
from growprune.deployment.deployed import Replaced, Swapped, refuse_to_copy, stay_as_made
from growprune.deployment.example import Example, first_inputs
from growprune.deployment.graph.fuse import fuse
from growprune.deployment.graph.lower import Lowering
from growprune.deployment.graph.operations import KNOWN
from growprune.deployment.graph.program import Program, is_ours
from growprune.deployment.graph.trace import NotTraceable, drop_identities, fold_constants, trace
from growprune.deployment.layer_table import Row
from growprune.deployment.skeleton import Skeleton, is_linear
from growprune.errors import GrowpruneError, warn

MOST_PLANS = 8
"""The most plans that a part keeps. The least recently used plan is dropped first."""


class _InPlaceOf(nn.Module):
    """The replacement of a module. The module is not registered as a child, because its parameters may be empty."""

    __reduce_ex__ = refuse_to_copy
    _apply = stay_as_made

    def __init__(self, module: nn.Module, *, seconds: float) -> None:
        super().__init__()
        self.__dict__["_module"] = module
        self._seconds, self._lock = seconds, threading.Lock()
        self.plans: OrderedDict[object, Any] = OrderedDict()

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the replaced module, which its owner may need."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_module"], name)

    def _plan(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self.plans:
            with torch.inference_mode(False), torch.no_grad():  # later calls write to its memory in any mode
                self.plans[key] = make()
            if len(self.plans) > MOST_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(key)
        return self.plans[key]


class Part(_InPlaceOf):
    """A module that runs as programs, one for each input shape."""

    def __init__(self, module: nn.Module, skeleton: Skeleton, *, seconds: float, known: Sequence[Row]) -> None:
        super().__init__(module, seconds=seconds)
        self._skeleton, self._known = skeleton, {row.layer: row for row in known}

    def plan(self, example: Example) -> Swapped:
        """Make the first plan. Raise NotTraceable if the module cannot be traced."""
        program, rows, in_torch = self._compile(example, self._seconds)
        self.plans[_key(example)], self._known = program, {row.layer: row for row in rows}
        return Swapped(self, rows, in_torch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(*args, **kwargs)
        example = Example(args, kwargs)
        with self._lock:
            program = self._plan(_key(example), lambda: self._next(example))
            return self.__dict__["_module"](*args, **kwargs) if program is None else program(example.leaves)

    def _next(self, example: Example) -> Program | None:
        """Make the plan for another shape, with the choices of the first; None if it must run in torch."""
        for leaf in example.leaves:
            if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
                raise GrowpruneError(
                    f"an input is on {leaf.device}, but the model is deployed on the CPU: call .cpu() on it"
                )
        name = type(self.__dict__["_module"]).__name__
        if len(self.plans) == 1:
            warn(
                f"{name} was deployed with other input shapes: each new shape is prepared once, which takes a while, "
                f"and the last {MOST_PLANS} are kept"
            )
        try:
            return self._compile(example.outside_inference_mode(), 0)[0]
        except NotTraceable as error:
            warn(f"{name} runs in torch for these inputs: {error}")
            self._skeleton.fill_in()
            return None

    def _compile(self, example: Example, seconds: float) -> tuple[Program, list[Row], list[str]]:
        """Compile the module to a program: trace, fold, fuse, lower, choose layers and bind.

        Return the program, the rows of its layers, and its operations that stay in torch.
        """
        skeleton, traced = self._skeleton, trace(self.__dict__["_module"], example)
        parameters = {id(p): name for name, p in skeleton.module.named_parameters()}
        names = {node: parameters[id(t)] for node, t in traced.tensors.items() if id(t) in parameters}
        drop_identities(traced.graph)
        fold_constants(traced, skeleton, names)
        fuse(traced.graph, skeleton)
        lowered = Lowering(traced, KNOWN).run()
        specs, all_else_is_ours = [step.fused for step in lowered.layers], is_ours(lowered.steps)
        options: Any = {"threads": torch.get_num_threads(), "known": self._known, "all_else_is_ours": all_else_is_ours}
        chosen = choose(specs, seconds=seconds, **options)
        for step, (layer, _) in zip(lowered.layers, chosen, strict=True):
            step.layer = layer
        return Program(lowered, traced.out_spec), [row for _, row in chosen], lowered.in_torch


def _key(example: Example) -> object:
    """Return everything that a plan depends on: shapes and dtypes, other arguments, and the number of threads."""
    if example.is_plain:
        return *((x.shape, x.dtype) for x in example.args), torch.get_num_threads()
    leaves, spec = pytree.tree_flatten((example.args, example.kwargs))
    shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return shapes, spec, torch.get_num_threads()


class LinearPart(_InPlaceOf):
    """A single Linear (or Conv1D of transformers) for any number of tokens, with plans for rounded numbers."""

    def __init__(
        self, module: nn.Module, name: str, skeleton: Skeleton, *, seconds: float, known: Sequence[Row]
    ) -> None:
        super().__init__(module, seconds=seconds)
        bias = getattr(module, "bias", None)
        self._name, self._matrix = name, skeleton.matrices[f"{name}.weight"]
        self._bias, self.num_inputs = None if bias is None else bias.detach(), self._matrix.columns
        self._measured = {
            (int(row.shape.rpartition(" ")[2]), torch.get_num_threads()): row for row in known if row.layer == name
        }
        """Rows by the number of columns and threads, including those of dropped plans."""
        self.is_timed = True
        """True until the model is deployed, so that no later call waits for measurements."""
        self.rows: list[Row] = []
        """The choices made during deployment. Later shapes take the choice of the nearest shape, untimed."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self._matrix.rows, x.numel() // max(1, x.shape[-1])
        if not columns or x.dtype != torch.float32:
            return self.__dict__["_module"](x)  # type: ignore[no-any-return]
        key = rounded(columns), torch.get_num_threads()
        with self._lock:
            plan = self._plan(key, lambda: self._next(key))
            if plan is None:
                return self.__dict__["_module"](x)  # type: ignore[no-any-return]
            source, out, run = plan
            source[:, :columns].copy_(x.reshape(columns, -1).t())
            run()
            return out[:, :columns].t().reshape(*x.shape[:-1], rows).clone()  # type: ignore[no-any-return]

    def _next(self, key: tuple[int, int]) -> tuple[Tensor, Tensor, Callable[[], object]] | None:
        """Make the plan for a number of columns and threads; None if the dense module is faster."""
        columns, threads = key
        geometry = Geometry.linear(self._matrix.columns, columns)
        spec = LayerSpec(self._name, self._matrix, geometry, self._bias)
        row = self._measured.get(key)
        if row is None and self._measured and not self.is_timed:
            row = self._measured[min(self._measured, key=lambda other: abs(math.log(other[0] / columns)))]
        known = {} if row is None else {self._name: row}
        ((layer, row),) = choose([spec], seconds=self._seconds if self.is_timed else 0, threads=threads, known=known)
        self._measured[key] = row
        if self.is_timed:
            self.rows.append(row)
        if row.choice == "dense":
            return None
        x, out = torch.zeros(self._matrix.columns, columns), torch.empty(self._matrix.rows, columns)
        return x, out, layer.bind(x, out)


def rounded(columns: int) -> int:
    """Round a number of columns up to one of the few numbers that get a plan.

    >>> [rounded(n) for n in (1, 3, 8, 9, 33, 70, 300)]
    [1, 4, 8, 16, 48, 80, 320]
    """
    if columns <= 8:
        return 1 << (columns - 1).bit_length()
    step = 16 if columns <= 128 else 64
    return -(-columns // step) * step


def deploy_parts(
    skeleton: Skeleton,
    example: Example,
    *,
    seconds: float,
    known: Sequence[Row],
    by_layer: bool = False,
    reasons: Sequence[str] = (),
) -> Swapped:
    """Replace the largest parts of a model that can be deployed, or only its single layers (`by_layer`).

    The module gets its dense weights back, because other code may use modules inside the parts.
    """
    skeleton.fill_in()
    inputs, share = first_inputs(skeleton.module, example), seconds / max(1, len(skeleton.matrices))
    swapped, taken = Swapped(skeleton.module, in_torch=[*reasons]), list[str]()
    for path, child in list(skeleton.module.named_modules())[1:]:  # a module comes before the modules inside it
        num_weights = sum(weight.startswith(f"{path}.") for weight in skeleton.matrices)
        is_layer, is_inside = f"{path}.weight" in skeleton.matrices, path.startswith(tuple(taken))
        if not num_weights or path not in inputs or is_inside or (by_layer and not is_layer):
            continue
        part: Part | LinearPart
        if is_layer and is_linear(child):
            part = LinearPart(child, path, skeleton, seconds=share / 2, known=known)
        else:
            part = Part(child, skeleton, seconds=share * num_weights, known=known)
            try:
                planned = part.plan(inputs[path])
            except NotTraceable as error:
                swapped.in_torch.append(f"{path} ({type(child).__name__}: {error})")
                continue
            swapped.rows += planned.rows
            swapped.in_torch += planned.in_torch
            if all(row.choice == "torch" for row in planned.rows):
                continue
        parent, _, name = path.rpartition(".")
        owner = skeleton.module.get_submodule(parent)
        owner._modules[name] = part
        taken.append(f"{path}.")
        swapped.replaced.append(Replaced(owner, name, part, child))
    example.call(skeleton.module)  # single layers are chosen when they see their first input
    batch = next((len(leaf) for leaf in example.leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
    for one in swapped.replaced:
        if isinstance(one.part, LinearPart):
            if by_layer:
                one.part(torch.zeros(batch, one.part.num_inputs))  # a step of decoding: one token of each sample
            one.part.is_timed = False
            swapped.rows += one.part.rows
    return swapped
