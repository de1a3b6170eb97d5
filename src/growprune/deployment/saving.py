"""Folders of deployed models.

    model.safetensors   the weights, a sparse file
    deployed.json       the table, what was chosen for each layer, on which machine, and the shape of the example

No code is in it: who loads it brings the model's. What was chosen is taken over on a machine of the same kind, and
measured again on any other.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growprune.deployment import build
from growprune.deployment.cuda import deploying as gpu
from growprune.deployment.deployed import SECONDS, Deployed, Example, Made, deploy_model, deploy_on_gpu, load_sparse
from growprune.deployment.measure import Chosen
from growprune.deployment.parsing import UNREADABLE, read_device, read_example, read_table
from growprune.deployment.skeleton import Skeleton, fill_in
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.atomic import replacing
from growprune.masks.zeros import masks_of_zeros
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel

WEIGHTS, ABOUT = "model.safetensors", "deployed.json"
FORMAT = 1


def save(deployed: Deployed, folder: Path, origin: Mapping[str, Any] | None = None) -> None:
    """Write the folder; `deployed.json` comes last, so that a folder without it is known to be incomplete.

    Args:
        origin: where the model's code is, for the command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    with deployed.taken_apart() as made:
        _save_weights(made, folder / WEIGHTS)
    about = {
        "format": FORMAT,
        "device": made.device.type,
        "machine": machine(made.device),
        "is_whole": made.whole,
        "runs": "torch" if deployed.is_in_torch else "deployed",
        "example": [_encode(made.example.args), _encode(made.example.kwargs)],
        "origin": dict(origin or {}),
        **deployed.table.to_dict(),
    }
    with replacing(folder / ABOUT) as written:
        written.write((json.dumps(about, indent=1) + "\n").encode())


def machine(device: torch.device) -> dict[str, Any]:
    """What a measurement is good for."""
    if device.type == "cuda":
        return gpu.machine(device)
    digest = hashlib.sha256(build.cpu().encode()).hexdigest()[:16]
    return {"cpu": digest, "threads": torch.get_num_threads(), "torch": torch.__version__}


def load_deployed(
    folder: str | os.PathLike[str], model: nn.Module, *, seconds: float = SECONDS, example: Any = None
) -> Deployed:
    """Load a folder that `Deployed.save` wrote.

    Args:
        model: the model that was deployed, freshly made (its weights may be on the meta device); it is filled.
        seconds: how long layers may be timed, if the folder is from another kind of machine.
        example: an input of another shape to be made ready for.
    """
    folder = Path(folder)
    about = read_about(folder)
    device = gpu.checked_device(about["device"])
    sparse = load_sparse(folder / WEIGHTS, model)
    try:
        table = read_table(about, is_gpu=device.type == "cuda")
        given = read_example(about["example"]) if example is None else Example.of(example)
        is_same, in_torch = about["machine"] == machine(device) and example is None, about["runs"] == "torch"
        whole = bool(about["is_whole"])
        if is_same and any(row.tile is not None and row.tile.threads > torch.get_num_threads() for row in table):
            raise ValueError("a layer has more threads than the machine it was measured on")
    except UNREADABLE as error:
        raise GrowpruneError(f"{folder / ABOUT} is damaged ({_one_line(error)}): deploy the model again") from None
    left = 0 if is_same else seconds
    with contextlib.nullcontext() if example is not None else _blaming(folder / ABOUT):
        if device.type == "cuda":
            known = {row.layer: row for row in table if isinstance(row, gpu.GpuRow)} if is_same else {}
            deployed = deploy_on_gpu(sparse, given, device=device, seconds=left, chosen=known)
        else:
            chosen = {row.layer: Chosen(row.choice == "sparse", row.tile) for row in table} if is_same else {}
            deployed = deploy_model(sparse, given, seconds=left, whole=whole, chosen=chosen)
    if is_same:
        deployed.table = table
        if in_torch:
            deployed.stay_in_torch()
    return deployed


@contextlib.contextmanager
def _blaming(path: Path) -> Iterator[None]:
    """What a model says of an example that it cannot take, with where that came from."""
    try:
        yield
    except (*UNREADABLE, RuntimeError) as error:
        raise GrowpruneError(
            f"the model cannot be run with the example of {path} ({_one_line(error)}): give another example, or deploy "
            f"it again"
        ) from error


def read_about(folder: Path) -> dict[str, Any]:
    """The JSON of a folder."""
    path = folder / ABOUT
    if not path.is_file():
        raise GrowpruneError(f"{folder} holds no deployed model: give a folder that Deployed.save or deploy wrote")
    try:
        about = json.loads(path.read_text())
        known = about["format"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise GrowpruneError(f"{path} is damaged ({error!r}): deploy the model again") from None
    if known != FORMAT:
        raise GrowpruneError(f"{path} has format {known!r}, this growprune reads {FORMAT}: update growprune")
    try:
        return {**about, "device": read_device(about)}
    except UNREADABLE as error:
        raise GrowpruneError(f"{path} is damaged ({_one_line(error)}): deploy the model again") from None


def _save_weights(made: Made, path: Path) -> None:
    skeleton = made.skeleton
    memo: dict[int, Any] = {id(parameter): parameter for parameter in skeleton.module.parameters()}
    bare = Skeleton(copy.deepcopy(skeleton.module, memo), skeleton.matrices, skeleton.transposed)
    fill_in(bare)
    is_sparse = skeleton.matrices or (made.found is not None and made.found.rows)  # though it may run dense
    file.save(_of_zeros(bare.module, made.settings) if is_sparse else SparseModel(bare.module, sparsity=0.0), path)


def _of_zeros(module: nn.Module, settings: Mapping[str, Any]) -> SparseModel:
    """As `SparseModel.from_zeros`, however few: what is dense may outweigh the layers that are not."""
    sparse = SparseModel(module, **{"sparsity": 0.0, "allocation": "global", **settings})
    for name, mask in masks_of_zeros(module, sparse.weights, internals(sparse).pattern).items():
        internals(sparse).stored[name].set_mask(mask)
    internals(sparse).sparsity = settings.get("sparsity", 1 - sparse.num_alive / sparse.num_prunable)
    return sparse


def _encode(value: Any) -> Any:
    """An example as JSON: of tensors, their shapes and types."""
    if isinstance(value, Tensor):
        return {"tensor": {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise GrowpruneError(f"the example has a {type(value).__name__}, which cannot be saved: give tensors")


def _one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(character if character.isprintable() else " " for character in text[:200])
