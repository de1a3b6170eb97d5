"""The deployed model that `deploy` returns, which cannot be copied, moved or trained, and its folder:

    model.safetensors   the weights, a sparse file
    deployed.json       the table, the choice for each layer, the machine, and the shape of the example

A folder contains no code, so loading it needs the model's code. On a machine of the same kind, the choices are kept. On
any other machine, they are measured again. Nothing in the JSON is trusted.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from growprune.deployment.cpu.library import Tile, cpu_model
from growprune.deployment.cuda.products import Tile as GpuTile
from growprune.deployment.example import Example
from growprune.deployment.layer_table import Row, Table
from growprune.deployment.skeleton import Skeleton
from growprune.errors import GrowpruneError, first_line
from growprune.files import checkpoint
from growprune.files import sparse_file as file
from growprune.files.disk import NUMBER, Names, fault, read_json, write_json
from growprune.masks.inspection import masks_of_zeros
from growprune.sparse.model import SparseModel

DEPLOY_AGAIN = "change the original model and deploy it again, with device='cpu' or 'cuda'"
WEIGHTS, ABOUT = "model.safetensors", "deployed.json"
FORMAT = 3
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that modified JSON can cause."""
MAX_EXAMPLE_BYTES = 256 << 20
"""The most bytes of a tensor of the example, when its shape is read from a file."""
MAX_TILE = 1 << 20
"""The largest number in a tile, such as a cache size or a number of threads."""
CHOICES = ("sparse", "dense", "torch")
AGAIN = "deploy the model again"
NAMES: Names = {
    **{"device": str, "machine": dict, "is_whole": bool, "runs": str, "example": dict, "origin": dict},
    **{"deployed_ms?": NUMBER, "torch_ms?": NUMBER, "in_torch.*": str},
    **{f"rows.*.{name}": str for name in ("layer", "shape", "choice")},
    **{"rows.*.sparsity": NUMBER, "rows.*.dense_ms?": NUMBER, "rows.*.sparse_ms?": NUMBER, "rows.*.tile?": dict},
}
"""Required names in the JSON besides `format`, and their types."""


@dataclass(frozen=True)
class Replaced:
    """A part, and the module that it replaced."""

    owner: nn.Module
    name: str
    part: nn.Module
    module: nn.Module
    """Its sparse weights may be empty; see `Skeleton.fill_in`."""


@dataclass
class Swapped:
    """A module and the parts that were replaced in it."""

    module: nn.Module
    rows: list[Row] = field(default_factory=list)
    in_torch: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)

    def put(self, *, deployed: bool) -> None:
        """Put in the parts, or the modules that they replaced."""
        for one in self.replaced:
            one.owner._modules[one.name] = one.part if deployed else one.module


def refuse_to_copy(module: nn.Module, protocol: object) -> Any:
    """Refuse copy, deepcopy, pickle and torch.save, because kernels are bound to memory that a copy does not have."""
    del protocol
    raise GrowpruneError(
        f"{type(module).__name__} is deployed and can be neither copied nor pickled: use deployed.save(folder) and "
        f"growprune.load_deployed(folder, model), or deploy the model again"
    )


def stay_as_made(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Refuse half(), to(), cuda() and similar methods, unless they would change nothing."""
    del recurse
    tensors = itertools.chain(module.parameters(), module.buffers())
    device = vars(module).get("device", torch.device("cpu"))  # a Deployed has one; parts are on the CPU
    for dtype in {tensor.dtype for tensor in tensors if tensor.is_floating_point()} or {torch.float32}:
        try:
            changed = change(torch.empty(0, dtype=dtype, device=device))
        except (AssertionError, RuntimeError) as error:  # AssertionError: torch has no CUDA here
            said = first_line(error)
            raise GrowpruneError(f"a deployed model cannot be converted ({said}): {DEPLOY_AGAIN}") from None
        if (changed.device, changed.dtype) != (device, dtype):
            raise GrowpruneError(
                f"the model is deployed in {dtype} on {device} and cannot become {changed.dtype} on {changed.device}: "
                f"{DEPLOY_AGAIN} (the CPU kernels only support float32)"
            )
    return module


class Deployed(nn.Module):
    """A model on sparse kernels, with the inputs and outputs of the original model. Made by `deploy`.

    Attributes:
        module: the module that runs. It has the original class, with its other methods, if only layers were replaced.
        table: how each layer runs, with the measured times.
        device: the device it runs on.
    """

    __reduce_ex__ = refuse_to_copy
    _apply = stay_as_made

    def __init__(
        self,
        swapped: Swapped,
        skeleton: Skeleton,
        table: Table,
        example: Example,
        *,
        whole: bool = True,
        settings: Mapping[str, Any],
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        self.table, self.device = table, torch.device(device)
        self._skeleton, self._example, self._whole, self._settings = skeleton, example, whole, dict(settings)
        self._swapped, self.module = swapped, swapped.module
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Refuse training mode; `train(False)` does nothing."""
        if mode:
            raise GrowpruneError("a deployed model cannot be trained: train the original model and deploy it again")
        return super().train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, because sparse kernels have no state."""
        raise GrowpruneError(
            "a deployed model has no state_dict: use deployed.save(folder), or the state_dict of the original model"
        )

    load_state_dict = state_dict

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._modules["module"]
        if not torch.is_grad_enabled():  # switching it off takes as long as a small layer
            return module(*args, **kwargs)
        with torch.no_grad():
            return module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the `generate` method of the module, which models of transformers have."""
        if not callable(own := getattr(self.module, "generate", None)):
            raise GrowpruneError(
                "the module that runs has no method generate: deploy a model that has one, with whole=False"
            )
        return own(*args, **kwargs)

    @property
    def is_in_torch(self) -> bool:
        """True if nothing runs on sparse kernels."""
        return self.module is self._skeleton.module and not self._swapped.replaced

    def stay_in_torch(self) -> None:
        """Run the whole model in torch."""
        self._swapped.put(deployed=False)
        self._skeleton.fill_in()
        self.module = self._skeleton.module
        self._swapped = Swapped(self.module, self._swapped.rows)

    def save(self, folder: str | os.PathLike[str], *, origin: Mapping[str, Any] | None = None) -> None:
        """Write a folder that `load_deployed` reads: the weights as a sparse file, the table and choices as JSON.

        Args:
            folder: the folder to write.
            origin: where the model's code is, for the command line.
        """
        folder, skeleton = Path(folder), self._skeleton
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)  # without this file, the folder is known to be incomplete
        self._swapped.put(deployed=False)
        try:
            parameters = skeleton.module.parameters()
            memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in parameters}
            bare = Skeleton(copy.deepcopy(skeleton.module, memo), skeleton.matrices, skeleton.transposed)
        finally:
            self._swapped.put(deployed=True)
        bare.fill_in()
        if skeleton.matrices:  # like `SparseModel.from_zeros`, but for any number of zeros
            sparse = SparseModel(bare.module, **{"sparsity": 0.0, "allocation": "global", **self._settings})
            for name, mask in masks_of_zeros(bare.module.get_parameter, sparse.weights, sparse.pattern).items():
                sparse.stored[name].set_mask(mask)
            sparse.aim(self._settings.get("sparsity", 1 - sparse.num_alive / sparse.num_prunable), sparse.lr_scaling)
        else:
            sparse = SparseModel(bare.module, sparsity=0.0)
        file.save(sparse, folder / WEIGHTS)
        tensors = dict[str, Tensor]()
        try:
            nest = checkpoint.encode([self._example.args, self._example.kwargs], tensors)
        except TypeError as error:
            raise GrowpruneError(
                f"the example cannot be saved ({error}): use tensors, numbers, strings, lists, tuples and dicts"
            ) from None
        shapes = {key: [list(x.shape), str(x.dtype).removeprefix("torch.")] for key, x in tensors.items()}
        about = {
            "format": FORMAT,
            "device": self.device.type,
            "machine": machine(self.device),
            "is_whole": self._whole,
            "runs": "torch" if self.is_in_torch else "deployed",
            "example": {"arguments": nest, "tensors": shapes},
            "origin": dict(origin or {}),
            **self.table.to_dict(),
        }
        write_json(folder / ABOUT, about)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device, the number of threads and the version of torch that a measurement is valid for."""
    is_gpu = device.type == "cuda"
    model = torch.cuda.get_device_name(device) if is_gpu else cpu_model()
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]
    return {device.type: digest, "threads": 0 if is_gpu else torch.get_num_threads(), "torch": torch.__version__}


def read_folder(folder: Path) -> tuple[dict[str, Any], Table, Example]:
    """Read the JSON of a folder. Return its content, its table and its example."""
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
    rows, tensors = list[Row](), dict[str, Tensor]()
    try:
        for row in (Row(**one) for one in about["rows"]):
            if row.choice not in CHOICES:
                raise ValueError(f"a choice is {row.choice[:20]!r}")
            tile: Any = row.tile
            if tile is not None:
                if not all(isinstance(number, int) and 0 <= number <= MAX_TILE for number in tile.values()):
                    raise ValueError(f"a tile has numbers that are not from 0 to {MAX_TILE}")
                tile = (Tile if about["device"] == "cpu" else GpuTile)(**tile)
            rows.append(replace(row, tile=tile))
        for key, (shape, name) in about["example"]["tensors"].items():
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype) or len(shape) > 64:
                raise TypeError(f"a tensor is {len(shape)}-dimensional and of {name!r}")
            if math.prod(shape) * dtype.itemsize > MAX_EXAMPLE_BYTES:
                raise ValueError(f"a tensor of the example takes over {MAX_EXAMPLE_BYTES} bytes")
            is_float = dtype.is_floating_point
            tensors[key] = torch.rand(shape).to(dtype) if is_float else torch.zeros(shape, dtype=dtype)
        args, kwargs = checkpoint.decode(about["example"]["arguments"], tensors)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise TypeError("the example is not a tuple and a dict")
        table = Table(tuple(rows), about["deployed_ms"], about["torch_ms"], tuple(about["in_torch"]))
    except UNREADABLE as error:
        raise damaged(folder, first_line(error)) from None
    return about, table, Example(args, kwargs)


def damaged(folder: Path, why: str) -> GrowpruneError:
    return GrowpruneError(f"{folder / ABOUT} is damaged ({why}): {AGAIN}")
