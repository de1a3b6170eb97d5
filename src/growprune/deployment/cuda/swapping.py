"""`deploy(..., device="cuda")`: a model whose sparse linear layers are each the fastest that this GPU can run.

The model is copied without these layers' weights; what waits in their places notes how many samples the example brings
them. Then each is chosen.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growprune.deployment.cuda.formats import MOST_COLUMNS, Entries, from_dense, from_live, to_int8
from growprune.deployment.cuda.fusing import Readers, Siblings, alike
from growprune.deployment.cuda.linear import DenseLinear, is_two_of_four
from growprune.deployment.cuda.products import DTYPES, Tile, kernel_failures
from growprune.deployment.cuda.tuning import FORMATS, Choice, choose, make
from growprune.deployment.deployed import Replaced, Swapped
from growprune.deployment.example import Example, first_line, of_the_example, restored
from growprune.deployment.layer_table import GpuRow, Row
from growprune.deployment.skeleton import does_more, module_of
from growprune.errors import warn
from growprune.files.quantized import INT8
from growprune.sparse.model import SparseModel
from growprune.storage.adapters import leaving_masks
from growprune.storage.compact_modules import layouts_of, make_plain

LEAST_SPARSITY = 0.4
"""Layers with fewer zeros than this stay as they are, untimed: no format would be faster."""


class Waiting(nn.Module):
    """In the place of a linear layer that is yet to be chosen: notes how many samples it is called with."""

    bias: Tensor | None

    def __init__(self, entries: Entries, bias: Tensor | None, *, is_transposed: bool) -> None:
        super().__init__()
        self.entries = entries
        self.is_transposed = is_transposed
        """Whether the model has the weight as (in, out): transformers' Conv1D."""
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.note: Callable[[Tensor], object] = lambda x: None
        """Called with each input."""
        self.samples: int | None = None
        self.error: float | None = None
        """What rounding the values to int8 changed, relative to their norm."""

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        if self.samples is None:
            self.samples = x.numel() // max(1, x.shape[-1])
        return F.linear(x, self.entries.dense(), self.bias)


def sparse_layers(model: nn.Module | SparseModel) -> dict[str, Waiting]:
    """By path, the linear layers that are sparse enough to be timed; not those that share a weight with others."""
    module, found = module_of(model), {}
    stored = model.stored if isinstance(model, SparseModel) else {}
    for path, part in module.named_modules():
        if path and is_linear(part) and part._parameters["weight"] is not None:
            one = stored.get(f"{path}.weight")
            waiting = waiting_for(part, None if one is None or layouts_of(part) else one.mask().clone())
            if waiting is not None and waiting.entries.sparsity >= LEAST_SPARSITY:
                found[path] = waiting
    shared = _shared(module, found)
    return {path: waiting for path, waiting in found.items() if path not in shared}


def _shared(module: nn.Module, found: Iterable[str]) -> set[str]:
    """Those whose weight another module has too, such as an embedding, or that have several names themselves."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    places = Counter(id(parameter) for part in parts for parameter in part._parameters.values())
    return {path for path in found if places[id(module.get_submodule(path)._parameters["weight"])] > 1}


def is_linear(module: nn.Module) -> bool:
    """Whether it is a plain Linear, or transformers' Conv1D, in either storage."""
    plain = getattr(type(module), "_plain_class", type(module))
    return (plain is nn.Linear or _is_conv1d(plain)) and not does_more(module)


def _is_conv1d(kind: type[nn.Module]) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


@torch.no_grad()
def waiting_for(module: nn.Module, mask: Tensor | None = None) -> Waiting | None:
    """Copies of a layer's live weights, without a mask those that are not zero; None of a type we have no kernel for.

    Compact storage is not expanded, but for Conv1D's.
    """
    layout, weight = layouts_of(module).get("weight"), module._parameters["weight"]
    assert weight is not None
    if weight.dtype not in DTYPES or weight.is_meta:
        return None
    is_transposed = not issubclass(getattr(type(module), "_plain_class", type(module)), nn.Linear)
    mask = mask if layout is None else layout.mask()
    mask = None if mask is None else mask.to(weight.device)
    if layout is not None and mask is not None and not is_transposed:
        entries = from_live(weight.detach().clone(), mask)
    else:
        dense = weight.detach() if layout is None else layout.expand(weight.detach())
        if is_transposed:
            dense, mask = dense.t(), None if mask is None else mask.t()
        entries = from_dense(dense, mask)
    return Waiting(entries, module._parameters.get("bias"), is_transposed=is_transposed)


def waiting_copy(module: nn.Module, layers: Mapping[str, Waiting], device: torch.device) -> nn.Module:
    """A copy of a model on a device, in eval mode, without these layers' weights; all else of it is plain."""
    memo = leaving_masks(module)
    for path in layers:
        weight = module.get_submodule(path)._parameters["weight"]
        memo[id(weight)] = nn.Parameter(torch.empty(0), requires_grad=False)
    bare: nn.Module = copy.deepcopy(module, memo)
    for path, waiting in layers.items():
        owner, _, local = path.rpartition(".")
        waiting.entries = waiting.entries.to(device)
        bare.get_submodule(owner)._modules[local] = waiting
    for part in bare.modules():
        if layouts_of(part):
            make_plain(part)
    return bare.to(device).eval().requires_grad_(False)


# Swapping


def deploy_linears(
    model: nn.Module | SparseModel,
    example: Example,
    *,
    device: torch.device,
    seconds: float,
    known: Mapping[str, Row],
    values: str | None = None,
    fuse: bool = True,
) -> Swapped:
    """A copy of the model on the device with its sparse linear layers swapped; the model is left as it is.

    Args:
        seconds: how long layers may be timed, about; with 0, whatever is sparse runs sparse.
        known: by layer, what was measured before.
        values: "int8" rounds the weights of these layers.
        fuse: layers that read the same tensor are computed as one, where that is faster.
    """
    layers, module = sparse_layers(model), module_of(model)
    for path, waiting in layers.items() if values == INT8 else ():
        waiting.entries, waiting.error = to_int8(waiting.entries, f"{path}.weight")
    bare, readers = waiting_copy(module, layers, device), Readers()
    for path, waiting in layers.items():
        waiting.note = functools.partial(readers.note, path)
    with restored(part for part in bare.modules() if not isinstance(part, Waiting)), of_the_example():
        example.mapped(lambda x: x.to(device) if isinstance(x, Tensor) else x).call(bare)
    swap = _Swap(module, bare, layers, seconds=seconds, known=known)
    for path, waiting in layers.items():
        swap.one(path, waiting)
    for group in readers.groups if fuse else ():
        swap.fuse(group)
    return Swapped(bare, list(swap.rows.values()), swap.in_torch, swap.replaced)


class _Swap:
    """Chooses layers one by one; those of one kind share what was measured."""

    def __init__(
        self,
        module: nn.Module,
        bare: nn.Module,
        layers: Mapping[str, Waiting],
        *,
        seconds: float,
        known: Mapping[str, Row],
    ) -> None:
        self._module, self._bare, self._known = module, bare, known
        self._keys = {path: _key(waiting) for path, waiting in layers.items()}
        self._samples = {path: waiting.samples for path, waiting in layers.items()}
        self._seconds = seconds / max(1, len(set(self._keys.values())))
        self._measured: dict[object, Choice] = {}
        self._tiles: dict[object, Mapping[int, Tile] | None] = {}
        self._layers: dict[str, nn.Module] = {}
        self.rows: dict[str, GpuRow] = {}
        self.in_torch: list[str] = []
        self.replaced: list[Replaced] = []

    def one(self, path: str, waiting: Waiting) -> None:
        owner_path, _, name = path.rpartition(".")
        owner = self._bare.get_submodule(owner_path)
        layer, row = self._layer(path, waiting)
        self._layers[path], self.rows[path] = layer, row
        plain = _plain_linear(self._module.get_submodule(path), waiting)
        is_transposed = waiting.is_transposed  # not all of it, or its entries would stay on the device

        def dense() -> nn.Module:
            weight = layer.dense_weight()  # type: ignore[operator]
            weight = weight.t().contiguous() if is_transposed else weight
            plain._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            return plain

        if isinstance(layer, DenseLinear) and layer.kind == DenseLinear.kind:
            owner._modules[name] = dense()
        else:
            owner._modules[name] = layer
            self.replaced.append(Replaced(owner, name, layer, dense))

    def _layer(self, path: str, waiting: Waiting) -> tuple[nn.Module, GpuRow]:
        entries, bias, samples = waiting.entries, waiting.bias, waiting.samples
        shape = f"{entries.rows}x{entries.columns} x {samples or '-'}"
        row = GpuRow(path, shape, entries.sparsity, None, None, "sparse", error=waiting.error)
        if samples is None:
            self.in_torch.append(f"{path} (the example does not call it)")
            return make(entries, "dense", bias=bias), dataclasses.replace(row, choice="torch", format="dense")
        known = self._known.get(path)
        if isinstance(known, GpuRow):
            return make(entries, known.format, bias=bias, tiles=known.tiles), known
        if self._seconds <= 0:
            kind = "bitmask" if entries.columns > MOST_COLUMNS else "offsets"  # the likeliest
            return make(entries, kind, bias=bias), dataclasses.replace(row, format=kind)
        return self._measure(row, waiting, samples)

    def _measure(self, row: GpuRow, waiting: Waiting, samples: int) -> tuple[nn.Module, GpuRow]:
        key, entries, bias = self._keys[row.layer], waiting.entries, waiting.bias
        is_new = key not in self._measured
        if is_new:
            self._measured[key] = choose(entries, bias=bias, batch=samples, seconds=self._seconds)
            for kind, why in self._measured[key].failed.items():
                warn(f"{row.layer} was not timed as {kind}: {why}")
        found = self._measured[key]
        layer = found.layer if is_new else make(entries, found.kind, bias=bias, tiles=found.tiles)
        dense, sparse = found.dense_us / 1e3, None if found.sparse_us is None else found.sparse_us / 1e3
        choice = found.kind if found.kind in ("dense", "2:4") else "sparse"
        return layer, dataclasses.replace(
            row, dense_ms=dense, sparse_ms=sparse, choice=choice, format=found.kind, tiles=found.tiles
        )

    def fuse(self, readers: Sequence[str]) -> None:
        """Compute layers that read the same tensor as one, where that is possible and faster."""
        for group in alike({path: self._layers[path] for path in readers}):
            is_known = any(path in self._known for path in group)
            if is_known and any(self.rows[path].choice != "fused" for path in group):
                continue
            layers = list(group.values())
            siblings = Siblings(layers)
            tiles = siblings.whole.tiles if is_known or self._seconds <= 0 else self._measure_fused(siblings, [*group])
            if tiles is not None:
                siblings.whole.tiles = dict(tiles)
                siblings.adopt(layers)
                for path in group:
                    self.rows[path] = dataclasses.replace(self.rows[path], choice="fused", tiles=dict(tiles))

    def _measure_fused(self, siblings: Siblings, paths: Sequence[str]) -> Mapping[int, Tile] | None:
        """The fastest tiles of layers computed as one; None if they are faster one by one."""
        key, alone = tuple(self._keys[path] for path in paths), [self.rows[path].sparse_ms for path in paths]
        if key not in self._tiles:
            self._tiles[key] = None
            try:
                taken = siblings.tune(self._samples[paths[0]] or 1, self._seconds / (1 + len(FORMATS)))
                if taken < 1e3 * sum(ms for ms in alone if ms is not None):
                    self._tiles[key] = siblings.whole.tiles
            except kernel_failures() as error:
                warn(f"{' and '.join(paths)} were not timed as one: {first_line(error)}")
        return self._tiles[key]


def _key(waiting: Waiting) -> object:
    """Layers of one kind take the same time."""
    entries: Entries = waiting.entries
    about = entries.rows, entries.columns, round(entries.sparsity, 1), entries.values.dtype, entries.dtype
    return *about, waiting.bias is not None, waiting.samples, is_two_of_four(entries)


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
