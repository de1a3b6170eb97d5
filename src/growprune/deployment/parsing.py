"""What the JSON of a deployed folder says, of which nothing is trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from growprune.deployment.cuda.choosing import FORMATS
from growprune.deployment.cuda.deploying import GpuRow
from growprune.deployment.cuda.products import BitmaskTile, LaneTile
from growprune.deployment.deployed import Example
from growprune.deployment.library import Tile
from growprune.deployment.measure import Row
from growprune.deployment.table import Table

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of JSON that is not as it was written."""

MAX_EXAMPLE_BYTES = 256 << 20
"""How large an example may be that a few numbers in a file ask for."""

MAX_TILE = 1 << 20
"""What no number of a tile exceeds: sizes of caches and counts of threads."""

CHOICES = ("sparse", "dense", "torch")


def read_table(about: Mapping[str, Any], *, is_gpu: bool = False) -> Table:
    rows = tuple(map(_gpu_row if is_gpu else _row, about["rows"]))
    deployed_ms, torch_ms = (_milliseconds(about[name]) for name in ("deployed_ms", "torch_ms"))
    return Table(rows, deployed_ms, torch_ms, tuple(map(_text, about["in_torch"])))


def read_device(about: Mapping[str, Any]) -> str:
    device = _text(about.get("device", "cpu"))
    if device not in ("cpu", "cuda"):
        raise ValueError(f"its device is {device[:20]!r}")
    return device


def read_example(content: Any) -> Example:
    args, kwargs = (_decode(part) for part in content)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TypeError("the example is no arguments")
    return Example(args, kwargs)


def _gpu_row(row: Mapping[str, Any]) -> GpuRow:
    kind = "sparse" if row["choice"] == "2:4" else row["choice"]
    plain = _row({**row, "choice": kind, "tile": None})
    if row["format"] not in (*FORMATS, "2:4", "dense"):
        raise ValueError(f"a format is {str(row['format'])[:20]}")
    tile = BitmaskTile if row["format"] == "bitmask" else LaneTile
    tiles = {_whole(int(batch), 1, MAX_TILE): _gpu_tile(tile, about) for batch, about in row["tiles"].items()}
    return GpuRow(**{**vars(plain), "choice": row["choice"]}, format=row["format"], tiles=tiles)


def _gpu_tile(kind: type[LaneTile] | type[BitmaskTile], about: Mapping[str, Any]) -> LaneTile | BitmaskTile:
    options: dict[str, Any] = {
        name: value if isinstance(value, bool) else _whole(value, 0, MAX_TILE) for name, value in about.items()
    }
    return kind(**options)


def _row(row: Mapping[str, Any]) -> Row:
    if row["choice"] not in CHOICES:
        raise ValueError(f"a choice is {row['choice']!r}")
    dense_ms, sparse_ms = _milliseconds(row["dense_ms"]), _milliseconds(row["sparse_ms"])
    tile = None if row["tile"] is None else _tile(row["tile"])
    layer, shape, sparsity = _text(row["layer"]), _text(row["shape"]), _share(row["sparsity"])
    return Row(layer, shape, sparsity, dense_ms, sparse_ms, row["choice"], tile)


def _tile(tile: Mapping[str, Any]) -> Tile:
    return Tile(**{field.name: _whole(tile[field.name], 1, MAX_TILE) for field in fields(Tile)})


def _decode(content: Any) -> Any:
    ((kind, value),) = content.items()
    if kind == "tensor":
        return _tensor(value)
    if kind in ("tuple", "list"):
        items = [_decode(item) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_text(key): _decode(item) for key, item in value.items()}
    if kind != "value" or not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError(f"an argument is a {str(kind)[:20]}")
    return value


def _tensor(about: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = getattr(torch, _text(about["dtype"])), [_whole(size, 0, 1 << 40) for size in about["shape"]]
    if not isinstance(dtype, torch.dtype) or len(shape) > 64:
        raise TypeError(f"a tensor is {len(shape)}-dimensional and of {about['dtype']!r}")
    if math.prod(shape) * dtype.itemsize > MAX_EXAMPLE_BYTES:
        raise ValueError(f"a tensor of the example takes over {MAX_EXAMPLE_BYTES} bytes")
    return torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _whole(number: object, low: int, high: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ValueError(f"{str(number)[:20]} is not from {low} to {high}")
    return number


def _share(number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 1:
        raise ValueError(f"{str(number)[:20]} is no sparsity")
    return float(number)


def _milliseconds(number: object) -> float | None:
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < 1e12:
        raise ValueError(f"{str(number)[:20]} is no time")
    return float(number)


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{str(text)[:20]} is no text")
    return text
