"""Folders of deployed models.

    model.safetensors   the weights, a sparse file
    deployed.json       the table, the choice for each layer, on which machine, and the shape of the example

No code is in it: whoever loads it brings the model's code. Choices are kept on a machine of the same kind, and
measured again on any other. Nothing that the JSON says is trusted.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.library import Tile, cpu_model
from growprune.deployment.cuda.products import Tile as GpuTile
from growprune.deployment.example import Example
from growprune.deployment.layer_table import Row, Table
from growprune.deployment.skeleton import Skeleton
from growprune.errors import GrowpruneError
from growprune.files import checkpoint
from growprune.files import sparse_file as file
from growprune.files.disk import NUMBER, Names, fault, read_json
from growprune.masks.inspection import masks_of_zeros
from growprune.sparse.model import SparseModel

WEIGHTS, ABOUT = "model.safetensors", "deployed.json"
FORMAT = 3
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of JSON that is not as it was written."""
MAX_EXAMPLE_BYTES = 256 << 20
"""How large an example may be that a few numbers in a file ask for."""
MAX_TILE = 1 << 20
"""What no number of a tile exceeds: sizes of caches and counts of threads."""
CHOICES = ("sparse", "dense", "torch")
AGAIN = "deploy the model again"
NAMES: Names = {
    **{"device": str, "machine": dict, "is_whole": bool, "runs": str, "example": dict, "origin": dict},
    **{"deployed_ms?": NUMBER, "torch_ms?": NUMBER, "in_torch.*": str},
    **{f"rows.*.{name}": str for name in ("layer", "shape", "choice")},
    **{"rows.*.sparsity": NUMBER, "rows.*.dense_ms?": NUMBER, "rows.*.sparse_ms?": NUMBER, "rows.*.tile?": dict},
}
"""What the JSON must have, beside its format."""


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
        sparse.aim(settings.get("sparsity", 1 - sparse.num_alive / sparse.num_prunable), sparse.lr_scaling)
    else:
        sparse = SparseModel(module, sparsity=0.0)
    file.save(sparse, folder / WEIGHTS)


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement is valid for."""
    is_gpu = device.type == "cuda"
    model = torch.cuda.get_device_name(device) if is_gpu else cpu_model()
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return {device.type: digest, "threads": 0 if is_gpu else torch.get_num_threads(), "torch": torch.__version__}


def encoded(example: Example) -> dict[str, Any]:
    """An example as JSON: of tensors, their shapes and types."""
    tensors = dict[str, Tensor]()
    try:
        nest = checkpoint.encode([example.args, example.kwargs], tensors)
    except TypeError as error:
        raise GrowpruneError(
            f"the example cannot be saved ({error}): use tensors, numbers, strings, lists, tuples and dicts"
        ) from None
    about = {key: [list(x.shape), str(x.dtype).removeprefix("torch.")] for key, x in tensors.items()}
    return {"arguments": nest, "tensors": about}


# Reading


def read_about(folder: Path) -> dict[str, Any]:
    """The JSON of a folder."""
    path = folder / ABOUT
    if not path.is_file():
        raise GrowpruneError(
            f"{folder} holds no deployed model: give a folder that Deployed.save or `growprune deploy` wrote"
        )
    about = read_json(path, {"format": int}, AGAIN)
    if about["format"] != FORMAT:
        raise GrowpruneError(
            f"{path} has format {about['format']}, but this growprune reads {FORMAT}: {AGAIN}, or update growprune"
        )
    if wrong := fault(about, NAMES):
        raise damaged(folder, wrong)
    if about["device"] not in ("cpu", "cuda"):
        raise damaged(folder, f"its device is {about['device'][:20]!r}")
    return about


def damaged(folder: Path, why: str) -> GrowpruneError:
    return GrowpruneError(f"{folder / ABOUT} is damaged ({why}): {AGAIN}")


def read_table(about: Mapping[str, Any]) -> Table:
    rows = []
    for row in (Row(**one) for one in about["rows"]):
        if row.choice not in CHOICES:
            raise ValueError(f"a choice is {row.choice[:20]!r}")
        numbers: Any = row.tile
        if numbers is not None:
            _check_whole(numbers.values(), MAX_TILE)
            numbers = (Tile if about["device"] == "cpu" else GpuTile)(**numbers)
        rows.append(replace(row, tile=numbers))
    return Table(tuple(rows), about["deployed_ms"], about["torch_ms"], tuple(about["in_torch"]))


def read_example(content: Mapping[str, Any]) -> Example:
    tensors = {key: _tensor(*about) for key, about in content["tensors"].items()}
    args, kwargs = checkpoint.decode(content["arguments"], tensors)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TypeError("the example is not a tuple and a dict")
    return Example(args, kwargs)


def _tensor(shape: list[int], name: str) -> Tensor:
    dtype = getattr(torch, name)
    _check_whole(shape, 1 << 40)
    if not isinstance(dtype, torch.dtype) or len(shape) > 64:
        raise TypeError(f"a tensor is {len(shape)}-dimensional and of {name!r}")
    if math.prod(shape) * dtype.itemsize > MAX_EXAMPLE_BYTES:
        raise ValueError(f"a tensor of the example takes over {MAX_EXAMPLE_BYTES} bytes")
    return torch.rand(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _check_whole(numbers: Iterable[object], high: int) -> None:
    for number in numbers:
        if not isinstance(number, int) or not 0 <= number <= high:
            raise ValueError(f"{str(number)[:20]} is not an integer from 0 to {high}")
