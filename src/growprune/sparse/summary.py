"""Summaries: the live weights of a sparse model per layer and in total, and the FLOPs and bytes they save in theory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from growprune.masks.allocation import num_kept
from growprune.masks.bits import encode_mask, num_mask_bytes, num_outside
from growprune.masks.layers import Weight, tensors_of
from growprune.plan import prune
from growprune.sparse.flops import count_flops

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel


@dataclass(frozen=True)
class Row:
    """One weight of a summary."""

    name: str
    shape: tuple[int, ...]
    target: float | None
    """The target sparsity; None if layers are ranked together and only their total has a target."""
    alive: int
    flops_dense: int | None
    """The dense FLOPs for the example, if there was one."""
    flops_sparse: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        return 1 - self.alive / self.size if self.size else 0.0

    def to_dict(self) -> dict[str, Any]:
        keys = ("name", "shape", "size", "target", "alive", "sparsity", "flops_dense", "flops_sparse")
        return {key: getattr(self, key) for key in keys} | {"shape": list(self.shape)}


@dataclass(frozen=True)
class Summary:
    """The live weights of a sparse model. Print it for a table."""

    rows: tuple[Row, ...]
    """The prunable weights; everything else is dense."""
    target: float
    """The target sparsity of all rows together."""
    parameters: int
    """The elements of all parameters, prunable or not."""
    bytes_dense: int
    """The bytes of dense parameters and buffers."""
    bytes_sparse: int
    """Their bytes in a sparse file (see docs/file-format.md), without its header."""
    flops_dense: int | None
    flops_sparse: int | None
    about: str = ""
    """What is pruned, what stays dense and why, and how long; of the summary of a Sparsifier."""

    @property
    def prunable(self) -> int:
        return sum(row.size for row in self.rows)

    @property
    def alive(self) -> int:
        """The number of live prunable weights."""
        return sum(row.alive for row in self.rows)

    @property
    def sparsity(self) -> float:
        """The fraction of the prunable weights that are pruned."""
        return 1 - self.alive / self.prunable if self.prunable else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return "rows" and "totals" as plain values, for JSON."""
        counts = ("target", "prunable", "alive", "sparsity", "parameters")
        costs = ("bytes_dense", "bytes_sparse", "flops_dense", "flops_sparse")
        totals = {key: getattr(self, key) for key in (*counts, *costs)}
        return {"rows": [row.to_dict() for row in self.rows], "totals": totals}

    def __str__(self) -> str:
        with_flops = self.flops_dense is not None
        head = ["weight", "shape", "size", "target", "alive", "sparsity", *(["FLOPs dense", "sparse"] * with_flops)]
        lines = [head]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            cells = [row.name, shape, *_numbers(row.size, row.target, row.alive, row.sparsity)]
            lines.append(cells + [_count(flops) for flops in (row.flops_dense, row.flops_sparse)] * with_flops)
        total = ["prunable", "", *_numbers(self.prunable, self.target, self.alive, self.sparsity)]
        flops = [_count(sum(getattr(row, key) or 0 for row in self.rows)) for key in ("flops_dense", "flops_sparse")]
        about = self.about.split(" || ") if self.about else []
        kept = self.parameters - self.prunable
        footer = [
            f"parameters: {self.parameters:,}, of which {kept:,} always dense; {kept + self.alive:,} left",
            f"bytes: {self.bytes_dense:,} dense, {self.bytes_sparse:,} in the sparse format",
        ]
        if self.flops_dense is not None and self.flops_sparse is not None:
            footer.append(f"FLOPs of the example, in theory: {self.flops_dense:,} dense, {self.flops_sparse:,} sparse")
        lines.append(total + flops * with_flops)
        # the first two columns (strings) to the left, the others (numbers) to the right
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        template = "  ".join([f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths)])
        return "\n".join([*about, *(template.format(*line).rstrip() for line in lines), *footer])


def summarise(sparse: SparseModel, example: Any = None) -> Summary:
    """Count the live weights of a sparse model, and its FLOPs if given an example input (see `count_flops`).

    >>> from growprune import SparseModel
    >>> sparse = SparseModel(torch.nn.Linear(10, 4), sparsity=0.75)
    >>> sparse.prune()
    >>> print(summarise(sparse))
    weight    shape  size  target  alive  sparsity
    weight    4x10     40  0.7500     10    0.7500
    prunable           40  0.7500     10    0.7500
    parameters: 44, of which 4 always dense; 14 left
    bytes: 176 dense, 61 in the sparse format
    """
    aims, counts = targets(sparse), sparse.alive_by_weight()
    flops = None if example is None else count_flops(sparse.model, example)
    rows, densities = [], {}
    by_parameter: dict[str, list[Weight]] = {}
    for weight in sparse.weights:
        by_parameter.setdefault(weight.parameter, []).append(weight)
        alive = counts[weight.name]
        densities[weight.name] = alive / weight.numel if weight.numel else 1.0
        dense_cost = None if flops is None else flops.by_weight[weight.name]
        sparse_cost = None if flops is None else flops.of(weight.name, densities[weight.name])
        rows.append(Row(weight.name, weight.shape, aims[weight.name], alive, dense_cost, sparse_cost))
    bytes_dense = bytes_sparse = 0
    for name, tensor in tensors_of(sparse.model)[0].items():
        if name not in by_parameter:
            bytes_dense, bytes_sparse = bytes_dense + tensor.nbytes, bytes_sparse + tensor.nbytes
            continue
        weights, mask = by_parameter[name], sparse.stored[name].mask()
        alive, as_bits = int(torch.count_nonzero(mask)), num_mask_bytes(weights, sparse.pattern)
        bytes_dense += mask.numel() * tensor.itemsize
        bytes_sparse += alive * tensor.itemsize
        if alive == mask.numel():  # its mask is not stored
            continue
        if alive - num_outside(mask.shape, weights) > as_bits // 2:  # each live weight has a gap of a byte at least
            bytes_sparse += as_bits
            continue
        values = alive * tensor.itemsize
        bits, gaps = encode_mask(mask, weights, sparse.pattern, tensor.itemsize, name, value_bytes=values)
        bytes_sparse += (bits if gaps is None else gaps).nbytes
    sizes = {name: parameter.numel() for name, parameter in sparse.model.named_parameters()}
    sizes |= {name: stored.shape.numel() for name, stored in sparse.stored.items()}  # a compact parameter is shorter
    return Summary(
        rows=tuple(rows),
        target=sparse.target_sparsity,
        parameters=sum(sizes.values()),
        bytes_dense=bytes_dense,
        bytes_sparse=bytes_sparse,
        flops_dense=None if flops is None else flops.dense,
        flops_sparse=None if flops is None else flops.at(densities),
    )


def targets(sparse: SparseModel) -> dict[str, float | None]:
    """Return the target sparsity of each weight; None if weights are ranked together and only their total has one."""
    found: dict[str, float | None] = dict.fromkeys((weight.name for weight in sparse.weights), None)
    for pool in sparse.editor.pools(prune(sparse.whole, to=sparse.target_sparsity)):
        if len(pool.weights) == 1:
            groups = sparse.pattern.num_groups(pool.weights[0])
            is_as_asked = pool.kept == num_kept(sparse.target_sparsity, groups)
            found[pool.weights[0].name] = sparse.target_sparsity if is_as_asked else 1 - pool.kept / groups
    return found


def _numbers(size: int, target: float | None, alive: int, sparsity: float) -> list[str]:
    return [_count(size), "-" if target is None else f"{target:.4f}", _count(alive), f"{sparsity:.4f}"]


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"
