"""`deploy`: from a trained sparse model to one that runs on sparse kernels."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from growprune.deployment.apart import Found, deploy_parts, rows_in_torch
from growprune.deployment.cuda.deploying import GpuRow, checked_device, deploy_linears
from growprune.deployment.measure import Chosen
from growprune.deployment.parts import Part, check_no_change, refuse_to_copy
from growprune.deployment.skeleton import Skeleton, empty, fill_in, skeleton_of
from growprune.deployment.state import keeps_state, restored
from growprune.deployment.table import Table
from growprune.deployment.trace import NotTraceable
from growprune.errors import GrowpruneError, warn
from growprune.files import sparse_file as file
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

SECONDS = 10.0
"""How long layers are timed if nobody says."""
STATEFUL = (
    "the model gives something else when it is called again with the same input, as it keeps a state from call to "
    "call, which a program of ours would not: it stays in torch; with whole=False its single layers are swapped, and "
    "its own code keeps the state"
)


@dataclass
class Example:
    """Arguments of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, example: Any) -> Example:
        if isinstance(example, dict):
            return cls((), dict(example))
        return cls(tuple(example) if isinstance(example, (tuple, list)) else (example,))


@dataclass
class Made:
    """What a model was deployed of."""

    found: Found | None
    """None if it runs in torch."""
    skeleton: Skeleton
    example: Example
    settings: dict[str, Any]
    """Of the SparseModel."""
    whole: bool
    device: torch.device


class Deployed(nn.Module):
    """A model that takes what the model took, and returns what it returned, on sparse kernels. Made by `deploy`.

    Attributes:
        module: what runs: a module of the model's own class, if it could not be taken as a whole or was asked for by
            its layers. Its other methods are there too.
        table: how each layer runs, with what was measured.
    """

    def __init__(
        self,
        found: Found | None,
        skeleton: Skeleton,
        table: Table,
        example: Example,
        *,
        whole: bool = True,
        settings: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.table = table
        self._made = Made(found, skeleton, example, dict(settings or {}), whole, device or torch.device("cpu"))
        if found is None:
            fill_in(skeleton)
        self.module: nn.Module = skeleton.module if found is None else found.module
        self.eval()

    __reduce_ex__ = refuse_to_copy

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What half(), to(), cuda() and their kin ask for: nothing, if it is so already, and no more is done then."""
        del recurse
        tensors = itertools.chain(self.parameters(), self.buffers())
        for dtype in {tensor.dtype for tensor in tensors if tensor.is_floating_point()} or {torch.float32}:
            check_no_change(change, torch.empty(0, dtype=dtype, device=self._made.device))
        return self

    def train(self, mode: bool = True) -> Self:
        """Only `train(False)`, which is eval(), and changes nothing."""
        if mode:
            raise GrowpruneError("a deployed model cannot be trained: train the model itself, and deploy it again")
        return super().train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only of what stays in torch: what kernels read is no state dict, and one without it would look whole."""
        self._check_in_torch()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Only into what stays in torch."""
        self._check_in_torch()
        return super().load_state_dict(*args, **kwargs)

    def _check_in_torch(self) -> None:
        if not self.is_in_torch:
            raise GrowpruneError(
                "a deployed model has no state dict: deployed.save(FOLDER) keeps it, and the model itself has one"
            )

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @property
    def is_in_torch(self) -> bool:
        """Whether nothing of it runs on sparse kernels."""
        found = self._made.found
        return self.module is self._made.skeleton.module and (found is None or not found.replaced)

    def stay_in_torch(self) -> None:
        """Run the model in torch after all."""
        made = self._made
        fill_in(made.skeleton)
        if made.found is not None:
            made.found.put(deployed=False)
        made.found, self.module = None, made.skeleton.module

    @contextlib.contextmanager
    def taken_apart(self) -> Iterator[Made]:
        """While it lasts, the model as it was before parts of it were replaced. It must not be called meanwhile."""
        made = self._made
        if made.found is not None:
            made.found.put(deployed=False)
        try:
            yield made
        finally:
            if made.found is not None:
                made.found.put(deployed=True)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a folder that `load_deployed` reads: the weights as a sparse file, the table and choices as JSON."""
        from growprune.deployment.saving import save

        save(self, Path(folder))


def deploy(
    model: nn.Module | SparseModel | str | os.PathLike[str],
    example: Any,
    *,
    into: nn.Module | None = None,
    device: str | torch.device = "cpu",
    seconds: float = SECONDS,
    whole: bool = True,
) -> Deployed:
    """Make a trained sparse model run on sparse kernels. The model is left as it is, and not needed afterwards.

    Each layer is timed sparse and dense, on this machine, and the faster one stays; see `table`. What is not known
    stays in torch, and so does a model that keeps a state from call to call, with a warning.

    Args:
        model: a SparseModel, or any module whose zeros are dead, or the path of a sparse file.
        example: the input, or a tuple of positional or a dict of keyword arguments. The model is made for its shape;
            for others it makes itself ready when they come.
        into: for a file, the model that was saved, freshly made.
        device: "cpu" or "cuda". On a GPU single linear layers are swapped, for the number of samples (tokens) that the
            example brings them, in the model's own dtype: give the input of a decode step. See `graphed` in
            `growprune.deployment.cuda`, too.
        seconds: how long layers may be timed, about; with 0 nothing is timed, and what is sparse runs sparse. On a GPU
            the kernels are compiled on top of it.
        whole: False swaps only single layers, and takes any shape: for models that are used by other methods
            than their forward, as in decoding. Use the `module` of what is returned.

    Examples:
        >>> sparse = SparseModel(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), sparsity=0.9)
        >>> sparse.prune()
        >>> x = torch.randn(8, 64)
        >>> fast = deploy(sparse, x, seconds=0)
        >>> torch.allclose(fast(x), sparse.model(x), atol=1e-6)
        True
    """
    where = checked_device(device)
    if where.type == "cuda":
        return deploy_on_gpu(_model(model, into), Example.of(example), device=where, seconds=seconds, chosen={})
    on_the_cpu = _on_the_cpu(_model(model, into))
    return deploy_model(on_the_cpu, Example.of(example), seconds=seconds, whole=whole, chosen={})


def _on_the_cpu(model: nn.Module | SparseModel) -> nn.Module | SparseModel:
    found = model.model if isinstance(model, SparseModel) else model
    if any(tensor.device.type != "cpu" for tensor in found.parameters()):
        raise GrowpruneError("the model is not on the CPU, where it is to be deployed: call model.cpu() first")
    return model


def _model(model: Any, into: nn.Module | None) -> nn.Module | SparseModel:
    if isinstance(model, (nn.Module, SparseModel)):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise GrowpruneError(f"deploy was given a {type(model).__name__}: give a SparseModel, a module, or a file")
    if into is None:
        raise GrowpruneError(f"{os.fspath(model)} is a file, which has no code: give the model that was saved as into=")
    return load_sparse(model, into)


def load_sparse(path: str | os.PathLike[str], into: nn.Module) -> SparseModel:
    """A file in compact storage, so that its sparse weights are never dense."""
    try:
        return file.load(path, into, storage="compact")
    except GrowpruneError as error:
        if "compact" not in str(error):
            raise
        return file.load(path, into)


def deploy_model(
    model: nn.Module | SparseModel, example: Example, *, seconds: float, whole: bool, chosen: Mapping[str, Chosen]
) -> Deployed:
    """What `deploy` does, with what may have been measured before."""
    skeleton, settings = skeleton_of(model), _settings_of(model)
    if not skeleton.matrices:
        warn(f"the model has no sparse weights{_of_other_dtypes(skeleton.module)}: it stays in torch as it is")
        table = Table((), in_torch=("the whole model",))
        return Deployed(None, skeleton, table, example, whole=whole, settings=settings)
    module = model.model if isinstance(model, SparseModel) else model
    if keeps_state(module, example.args, example.kwargs) and whole:
        warn(STATEFUL)
        table = Table(tuple(rows_in_torch(skeleton, ())), in_torch=("the whole model (it keeps a state)",))
        return Deployed(None, skeleton, table, example, whole=whole, settings=settings)
    with restored(list(skeleton.module.modules())):
        found = _found(skeleton, example, seconds=seconds, whole=whole, chosen=chosen)
        times = _times(skeleton, found, example, seconds / 4) if seconds > 0 else None
    rows = (*found.rows, *rows_in_torch(skeleton, found.rows))
    deployed_ms, torch_ms = times or (None, None)
    table = Table(rows, deployed_ms, torch_ms, tuple(dict.fromkeys(found.in_torch)))
    deployed = Deployed(found, skeleton, table, example, whole=whole, settings=settings)
    if whole and times is not None and times[0] > times[1]:
        warn(f"deployed, the model takes {times[0]:.3g} ms, and in torch {times[1]:.3g} ms: it stays in torch")
        deployed.stay_in_torch()
    return deployed


def _of_other_dtypes(module: nn.Module) -> str:
    found = {str(p.dtype) for p in module.parameters() if p.dim() > 1 and p.is_floating_point()} - {"torch.float32"}
    return f" in float32, which kernels on a CPU are for, but some in {', '.join(sorted(found))}" if found else ""


def deploy_on_gpu(
    model: nn.Module | SparseModel,
    example: Example,
    *,
    device: torch.device,
    seconds: float,
    chosen: Mapping[str, GpuRow],
) -> Deployed:
    """The same for a GPU, layer by layer. (What a whole model takes there depends on whether it is `graphed`.)"""
    found = deploy_linears(model, example.args, example.kwargs, device=device, seconds=seconds, chosen=chosen)
    if not found.rows:
        warn("the model has no sparse linear layers: it stays in torch as it is")
    table = Table(tuple(found.rows), in_torch=tuple(found.in_torch) if found.rows else ("the whole model",))
    settings = _settings_of(model)
    return Deployed(found, Skeleton(found.module, {}), table, example, whole=False, settings=settings, device=device)


def _found(skeleton: Skeleton, example: Example, *, seconds: float, whole: bool, chosen: Mapping[str, Chosen]) -> Found:
    if whole:
        part = Part(skeleton.module, skeleton, seconds=seconds, chosen=chosen)
        try:
            compiled = part.plan(example.args, example.kwargs)
            return Found(part, compiled.rows, compiled.in_torch)
        except NotTraceable as error:
            reasons = [f"{type(skeleton.module).__name__} as a whole ({error})"]
    else:
        reasons = []
    options: dict[str, Any] = {"seconds": seconds, "chosen": chosen, "by_layer": not whole, "reasons": reasons}
    return deploy_parts(skeleton, example.args, example.kwargs, **options)


def _times(skeleton: Skeleton, found: Found, example: Example, seconds: float) -> tuple[float, float]:
    """How long the deployed model takes, and how long it takes in torch."""
    fill_in(skeleton)

    def in_torch() -> None:
        found.put(deployed=False)
        skeleton.module(*example.args, **example.kwargs)
        found.put(deployed=True)

    times = _milliseconds([lambda: found.module(*example.args, **example.kwargs), in_torch], seconds)
    if isinstance(found.module, Part):
        empty(skeleton)
    return times


@torch.no_grad()
def _milliseconds(calls: Sequence[Callable[[], object]], seconds: float) -> tuple[float, float]:
    """Of each call, in turns, the 30th percentile."""
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(taken[0]) < 4 or time.perf_counter() < end:
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    first, second = (1e3 * sorted(times[1:])[int(0.3 * (len(times) - 2))] for times in taken)
    return first, second


def _settings_of(model: nn.Module | SparseModel) -> dict[str, Any]:
    """What a sparse file says of the model."""
    if not isinstance(model, SparseModel):
        return {}
    names = ("sparsity", "allocation", "pattern", "keep_dense", "include", "seed")
    return {name: getattr(internals(model), name) for name in names}
