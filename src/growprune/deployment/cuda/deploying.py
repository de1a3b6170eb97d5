"""`deploy(..., device="cuda")`: a model whose linear layers are each the fastest that this GPU can run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from growprune.deployment.apart import Found
from growprune.deployment.cuda.choosing import Choice, choose, make, usual_kind
from growprune.deployment.cuda.entries import Entries
from growprune.deployment.cuda.layers import SparseSource, Waiting, sparse_layers, waiting_copy
from growprune.deployment.cuda.linear import DenseLinear, is_two_of_four
from growprune.deployment.cuda.products import Tile
from growprune.deployment.measure import Row
from growprune.deployment.state import of_the_example, restored
from growprune.errors import GrowpruneError, warn
from growprune.sparse.model import SparseModel


@dataclass(frozen=True)
class GpuRow(Row):
    """A layer, and how it runs on a GPU."""

    format: str = ""
    """"offsets", "columns", "bitmask", "2:4" or "dense"."""
    tiles: Mapping[int, Tile] = field(default_factory=dict)
    """How programs go about batches of up to so many samples."""


@dataclass(frozen=True)
class ReplacedLinear:
    """A prepared layer in the place of a linear one, which is made again when it is asked for."""

    owner: nn.Module
    name: str
    part: nn.Module
    is_transposed: bool
    plain: nn.Module
    """Without its weight."""

    @property
    def module(self) -> nn.Module:
        weight = self.part.dense_weight()  # type: ignore[operator]
        weight = weight.t().contiguous() if self.is_transposed else weight
        self.plain._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        return self.plain


def checked_device(device: str | torch.device) -> torch.device:
    """The device to deploy on; in one line, if it cannot be."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise GrowpruneError(f"device is {str(device)!r}, but models are deployed on 'cpu' or 'cuda'")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise GrowpruneError(
            f"device is {str(device)!r}, but torch sees no CUDA device here: deploy where the GPU is, or on 'cpu'"
        )
    return found


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement is good for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {"gpu": hashlib.sha256(name.encode()).hexdigest()[:16], "torch": torch.__version__}


def deploy_linears(
    model: nn.Module | SparseModel,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    seconds: float,
    chosen: Mapping[str, GpuRow],
) -> Found:
    """A copy of the model on the device with its sparse linear layers swapped; the model is left as it is.

    Args:
        seconds: how long layers may be timed, about; with 0, whatever is sparse runs sparse.
        chosen: by layer, what was measured before.
    """
    sources = sparse_layers(model)
    module = model.model if isinstance(model, SparseModel) else model
    bare = waiting_copy(module, sources, device)
    with restored(part for part in bare.modules() if not isinstance(part, Waiting)), of_the_example():
        _run(bare, args, kwargs, device)
    swap = _Swap(module, bare, seconds=seconds, chosen=chosen)
    for path, source in sources.items():
        swap.one(path, source)
    return Found(bare, list(swap.rows), swap.in_torch, list(swap.replaced))


@torch.no_grad()
def _run(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device) -> None:
    given = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, (args, dict(kwargs)))
    module(*given[0], **given[1])


class _Swap:
    """Chooses layers one by one; those of one kind share what was measured."""

    def __init__(self, module: nn.Module, bare: nn.Module, *, seconds: float, chosen: Mapping[str, GpuRow]) -> None:
        self._module, self._bare, self._chosen = module, bare, chosen
        self._keys = {part: _key(part) for part in bare.modules() if isinstance(part, Waiting)}
        self._seconds = seconds / max(1, len(set(self._keys.values())))
        self._measured: dict[object, Choice] = {}
        self.rows: list[GpuRow] = []
        self.in_torch: list[str] = []
        self.replaced: list[ReplacedLinear] = []

    def one(self, path: str, source: SparseSource) -> None:
        owner_path, _, name = path.rpartition(".")
        owner = self._bare.get_submodule(owner_path)
        waiting = owner._modules[name]
        assert isinstance(waiting, Waiting)
        layer, row = self._layer(path, waiting)
        self.rows.append(row)
        plain = _plain_linear(self._module.get_submodule(path), waiting)
        replaced = ReplacedLinear(owner, name, layer, source.is_transposed, plain)
        if isinstance(layer, DenseLinear) and layer.kind == DenseLinear.kind:
            owner._modules[name] = replaced.module
        else:
            owner._modules[name] = layer
            self.replaced.append(replaced)

    def _layer(self, path: str, waiting: Waiting) -> tuple[nn.Module, GpuRow]:
        entries, bias, samples = waiting.entries, waiting.bias, waiting.samples
        shape = f"{entries.rows}x{entries.columns} x {samples or '-'}"
        row = GpuRow(path, shape, entries.sparsity, None, None, "sparse")
        if samples is None:
            self.in_torch.append(f"{path} (the example does not call it)")
            return make(entries, "dense", bias=bias), dataclasses.replace(row, choice="torch", format="dense")
        known = self._chosen.get(path)
        if known is not None:
            return make(entries, known.format, bias=bias, tiles=known.tiles), known
        if self._seconds <= 0:
            kind = usual_kind(entries)
            return make(entries, kind, bias=bias), dataclasses.replace(row, format=kind)
        return self._measure(row, waiting, samples)

    def _measure(self, row: GpuRow, waiting: Waiting, samples: int) -> tuple[nn.Module, GpuRow]:
        key, entries, bias = self._keys[waiting], waiting.entries, waiting.bias
        is_new = key not in self._measured
        if is_new:
            self._measured[key] = choose(entries, bias=bias, batches=(samples,), seconds=self._seconds)
            for kind, why in self._measured[key].failed.items():
                warn(f"{row.layer} was not timed as {kind}: {why}")
        found = self._measured[key]
        layer = found.layer if is_new else make(entries, found.kind, bias=bias, tiles=found.tiles)
        (timed,) = found.rows
        dense, sparse = timed.dense_us / 1e3, None if timed.sparse_us is None else timed.sparse_us / 1e3
        choice = found.kind if found.kind in ("dense", "2:4") else "sparse"
        return layer, dataclasses.replace(
            row, dense_ms=dense, sparse_ms=sparse, choice=choice, format=found.kind, tiles=found.tiles
        )


def _key(waiting: Waiting) -> object:
    """Layers of one kind take the same time."""
    entries: Entries = waiting.entries
    about = entries.rows, entries.columns, round(entries.sparsity, 1), entries.values.dtype, waiting.bias is not None
    return *about, waiting.samples, is_two_of_four(entries)


def _plain_linear(module: nn.Module, waiting: Waiting) -> nn.Module:
    """A layer of the model's own class that has a bias, and no weight yet."""
    kind = getattr(type(module), "_plain_class", type(module))
    plain: nn.Module = kind.__new__(kind)
    nn.Module.__init__(plain)
    for name in ("in_features", "out_features", "nf", "nx"):
        if name in vars(module):
            setattr(plain, name, vars(module)[name])
    plain.register_parameter("weight", None)
    bias = None if waiting.bias is None else nn.Parameter(waiting.bias, requires_grad=False)
    plain.register_parameter("bias", bias)
    return plain.eval()
