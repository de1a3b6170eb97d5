"""Folders of deployed models.

    model.safetensors   the weights, a sparse file
    deployed.json       the table, the choice for each layer, on which machine, and the shape of the example

No code is in it: whoever loads it brings the model's code. Choices are kept on a machine of the same kind, and
measured again on any other. Nothing that the JSON says is trusted.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.library import Tile, cpu_model
from growprune.deployment.cuda.products import Tile as GpuTile
from growprune.deployment.cuda.tuning import DENSE, FORMATS
from growprune.deployment.example import Example, first_line
from growprune.deployment.layer_table import Row, Table
from growprune.deployment.skeleton import Skeleton
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.masks.inspection import masks_of_zeros
from growprune.sparse.model import SparseModel

WEIGHTS, ABOUT = "model.safetensors", "deployed.json"
FORMAT = 1
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of JSON that is not as it was written."""
MAX_EXAMPLE_BYTES = 256 << 20
"""How large an example may be that a few numbers in a file ask for."""
MAX_TILE = 1 << 20
"""What no number of a tile exceeds: sizes of caches and counts of threads."""
CHOICES = ("sparse", "dense", "torch")


# Writing


def save_weights(folder: Path, skeleton: Skeleton, settings: Mapping[str, Any]) -> None:
    """Begin the folder. Until its JSON ends it, it is known to be incomplete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in skeleton.module.parameters()}
    bare = Skeleton(copy.deepcopy(skeleton.module, memo), skeleton.matrices, skeleton.transposed)
    bare.fill_in()
    module = bare.module
    if skeleton.matrices:  # as `SparseModel.from_zeros`, however few: what is dense may outweigh the other layers
        sparse = SparseModel(module, **{"sparsity": 0.0, "allocation": "global", **settings})
        for name, mask in masks_of_zeros(module.get_parameter, sparse.weights, sparse.pattern).items():
            sparse.stored[name].set_mask(mask)
        sparse.target_sparsity = settings.get("sparsity", 1 - sparse.num_alive / sparse.num_prunable)
    else:
        sparse = SparseModel(module, sparsity=0.0)
    file.save(sparse, folder / WEIGHTS)


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement is valid for."""
    is_gpu = device.type == "cuda"
    model = torch.cuda.get_device_name(device) if is_gpu else cpu_model()
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return {device.type: digest, "threads": 0 if is_gpu else torch.get_num_threads(), "torch": torch.__version__}


def encoded(value: Any) -> Any:
    """An argument of an example as JSON: of tensors, their shapes and types."""
    if isinstance(value, Tensor):
        return {"tensor": {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: encoded(item) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise GrowpruneError(
        f"the example contains a {type(value).__name__}, which cannot be saved: use tensors, numbers, strings, lists, "
        f"tuples and dicts"
    )


# Reading


def read_about(folder: Path) -> dict[str, Any]:
    """The JSON of a folder."""
    path = folder / ABOUT
    if not path.is_file():
        raise GrowpruneError(
            f"{folder} holds no deployed model: give a folder that Deployed.save or `growprune deploy` wrote"
        )
    try:
        about = json.loads(path.read_text())
        known, device = about["format"], about.get("device")
    except UNREADABLE as error:
        raise damaged(folder, error) from None
    if known != FORMAT:
        raise GrowpruneError(f"{path} has format {known!r}, but this growprune reads {FORMAT}: update growprune")
    if device not in ("cpu", "cuda"):
        raise damaged(folder, ValueError(f"its device is {str(device)[:20]!r}"))
    return dict(about)


def damaged(folder: Path, error: BaseException) -> GrowpruneError:
    return GrowpruneError(f"{folder / ABOUT} is damaged ({first_line(error)}): deploy the model again")


def read_table(about: Mapping[str, Any]) -> Table:
    deployed_ms, torch_ms = (_milliseconds(about[name]) for name in ("deployed_ms", "torch_ms"))
    return Table(tuple(map(_row, about["rows"])), deployed_ms, torch_ms, tuple(map(_text, about["in_torch"])))


def _row(row: Mapping[str, Any]) -> Row:
    choice, format = row["choice"], row["format"]
    if choice not in CHOICES or format not in ("", DENSE, *FORMATS):
        raise ValueError(f"a choice is {str(choice)[:20]!r} in the format {str(format)[:20]!r}")
    tile: Any = None
    kind: Any = Tile if format in ("", DENSE) else GpuTile
    if row["tile"] is not None:
        low = 1 if kind is Tile else 0
        numbers = {field.name: row["tile"][field.name] for field in fields(kind)}
        options: dict[str, Any] = {
            name: value if name == "is_pinned" and isinstance(value, bool) else _whole(value, low, MAX_TILE)
            for name, value in numbers.items()
        }
        tile = kind(**options)
    dense_ms, sparse_ms = (_milliseconds(row[name]) for name in ("dense_ms", "sparse_ms"))
    layer, shape, sparsity = _text(row["layer"]), _text(row["shape"]), _number(row["sparsity"], 1)
    return Row(layer, shape, sparsity, dense_ms, sparse_ms, choice, tile, format)


def read_example(content: Any) -> Example:
    args, kwargs = (_decode(part) for part in content)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TypeError("the example is not a tuple and a dict")
    return Example(args, kwargs)


def _decode(content: Any) -> Any:
    ((kind, value),) = content.items()
    if kind == "tensor":
        dtype, shape = getattr(torch, _text(value["dtype"])), [_whole(size, 0, 1 << 40) for size in value["shape"]]
        if not isinstance(dtype, torch.dtype) or len(shape) > 64:
            raise TypeError(f"a tensor is {len(shape)}-dimensional and of {value['dtype']!r}")
        if math.prod(shape) * dtype.itemsize > MAX_EXAMPLE_BYTES:
            raise ValueError(f"a tensor of the example takes over {MAX_EXAMPLE_BYTES} bytes")
        return torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    if kind in ("tuple", "list"):
        items = [_decode(item) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_text(key): _decode(item) for key, item in value.items()}
    if kind != "value" or not (value is None or isinstance(value, (bool, int, float, str))):
        raise ValueError(f"an argument is a {str(kind)[:20]}")
    return value


def _whole(number: object, low: int, high: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ValueError(f"{str(number)[:20]} is not an integer from {low} to {high}")
    return number


def _number(number: object, high: float) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= high:
        raise ValueError(f"{str(number)[:20]} is not a number from 0 to {high}")
    return float(number)


def _milliseconds(number: object) -> float | None:
    return None if number is None else _number(number, 1e12)


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{str(text)[:20]} is not a string")
    return text
