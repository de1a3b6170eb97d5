"""Checkpoints of sharded training with torch's distributed checkpoint (DCP): each rank writes its own shards.

A checkpoint is a folder with the files of DCP (values, optimizer state, masks, gradients for the next edit) and an
index, `growprune.json`, which is written last: a folder without it is incomplete. It can be read on any number of
ranks, including a single process without sharding. The metadata of DCP is a pickle: read only folders that you trust.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from growprune.errors import GrowpruneError
from growprune.files import disk
from growprune.files.disk import replacing
from growprune.masks.bits import pack
from growprune.sharding.units import ShardedCompact
from growprune.sparse.model import named_tensors

if TYPE_CHECKING:
    from growprune.sparse.cursor import Cursor
    from growprune.sparse.model import SparseModel

INDEX = "growprune.json"
VERSION = 3
ALONE = "torch.distributed is disabled, unavailable or uninitialized"
"""The warning of DCP about a single process, which we support."""


def save_sharded_checkpoint(
    folder: str | os.PathLike[str],
    sparse: SparseModel,
    optimizer: Optimizer | None = None,
    *,
    cursor: Cursor | None = None,
) -> None:
    """Write a checkpoint of a sharded model to a new folder. All ranks must call it.

    Args:
        folder: a new folder.
        sparse, optimizer: the model, and the optimizer that is attached to it.
        cursor: the cursor of the plan, if the model is trained with one.
    """
    folder = Path(folder)
    sparse.notice_shards()
    if (folder / INDEX).exists():
        raise GrowpruneError(f"{folder} already has a checkpoint: use a new folder, such as state-{{iteration}}")
    if sparse.storage != "compact":
        raise GrowpruneError(
            f"sharded checkpoints need storage='compact', got {sparse.storage!r}: use torch.save with the state_dict "
            f"of a Sparsifier"
        )
    place = None if cursor is None else cursor.state_dict()
    if place is not None and place["rule"]:
        raise GrowpruneError("a sharded model cannot be checkpointed inside a phase with a rule")
    masks = {f"masks.{name}": pack(parameter.mask()).cpu() for name, parameter in sparse.stored.items()}
    gradients = {  # for the next edit; in a sharded model, the part of each rank
        f"gradients.{name}": _as_sharded(sparse, name, part) for name, part in sparse.gradients.all_shares().items()
    }
    tensors = {**_model(sparse), **masks, **_optimizer_tensors(sparse, optimizer), **gradients}
    index = {
        "format": "growprune-state",
        "version": VERSION,
        "num_edits": sparse.editor.num_edits,
        "settings": sparse.decisive,
        "alive": {name: parameter.parameter.numel() for name, parameter in sparse.stored.items()},
        "cursor": place,
        "gradients": sparse.gradients.flags(),
        "watched": list(gradients),
        "optimizer": None if optimizer is None else _optimizer_index(sparse, optimizer),
    }
    text = json.dumps(index)  # before anything is written: settings of an optimizer may be no JSON
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ALONE)
        state_dict_saver.save(tensors, checkpoint_id=folder, no_dist=not _is_distributed())
    if not _is_distributed() or distributed.get_rank() == 0:
        with replacing(folder / INDEX) as file:
            file.write(text.encode())
    if _is_distributed():
        distributed.barrier()


def load_sharded_checkpoint(
    folder: str | os.PathLike[str],
    sparse: SparseModel,
    optimizer: Optimizer | None = None,
    *,
    cursor: Cursor | None = None,
) -> None:
    """Resume from a sharded checkpoint, on any number of ranks. All ranks must call it.

    Build and shard the model and attach its optimizer first, as in the first run. Then this loads the weights, masks
    and optimizer state of the checkpoint.

    Args:
        folder: a folder that `save_sharded_checkpoint` wrote.
        sparse: the model to fill.
        cursor: the cursor of the plan, if it was saved with one.
    """
    folder = Path(folder)
    sparse.notice_shards()
    index = _read_index(folder)
    if differing := sorted(set(index["alive"]) ^ set(sparse.stored)):
        raise GrowpruneError(f"{folder} belongs to another model: only one of the two has {differing[0]}")
    if optimizer is not None and (saved := index["optimizer"]) is not None:
        if saved["kind"] != (mine := type(optimizer).__name__):
            has = f"{folder} has the state of {saved['kind']}, but the optimizer is {mine}"
            raise GrowpruneError(f"{has}: resume with the same optimizer")
        names = _names(sparse)
        groups = [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        if groups != [group["params"] for group in saved["groups"]]:
            raise GrowpruneError(f"{folder} has other parameter groups than the optimizer: resume with the same groups")
    if cursor is not None and index["cursor"] is None:
        raise GrowpruneError(f"{folder} was saved without a cursor: leave cursor out")
    if cursor is not None:
        try:
            cursor.check_place(index["cursor"])
        except GrowpruneError as error:
            raise GrowpruneError(f"{folder}: {error}") from None
    masks = {
        f"masks.{name}": torch.zeros(-(-p.shape.numel() // 8), dtype=torch.uint8) for name, p in sparse.stored.items()
    }
    _read(folder, masks)
    seen = {"sums": {}, "averages": {}, **index["gradients"]}
    made = {"num_edits": index["num_edits"], "settings": index["settings"]}
    sparse.load_state_dict(
        {"masks": {key.removeprefix("masks."): mask for key, mask in masks.items()}, "gradients": seen, **made}
    )
    tensors = _model(sparse)
    if optimizer is not None and index["optimizer"] is not None:
        prepare_optimizer(sparse, optimizer, index["optimizer"])
        tensors |= _optimizer_tensors(sparse, optimizer)
    watched = {}
    for key in index["watched"]:
        name = key.removeprefix("gradients.")
        stored = sparse.stored[name]
        wide = torch.promote_types(stored.parameter.dtype, torch.float32)  # as gradients are summed
        flat = torch.zeros(1, dtype=wide, device=stored.parameter.device).expand(stored.shape.numel())
        part = flat if sparse.ranks is None else sparse.ranks.local_shard(flat)
        watched[key] = _as_sharded(sparse, name, part.clone())
    _read(folder, {**tensors, **watched})
    shares = {key: part.to_local() if isinstance(part, DTensor) else part for key, part in watched.items()}
    sparse.gradients.take_shares({key.removeprefix("gradients."): part for key, part in shares.items()})
    if cursor is not None:
        cursor.load_state_dict(index["cursor"])


def newest_sharded_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder of checkpoints; None if there is none."""
    found = [index.parent for index in Path(folder).glob(f"*/{INDEX}")]
    return max(found, key=lambda path: (path / INDEX).stat().st_mtime_ns, default=None)


def _read_index(folder: Path) -> dict[str, Any]:
    path, remedy = folder / INDEX, "resume from a complete checkpoint (gp.newest_sharded_checkpoint finds it)"
    if not path.is_file():
        why = "its checkpoint is incomplete" if folder.is_dir() else "the folder does not exist"
        raise GrowpruneError(f"{folder} has no {INDEX}, because {why}: {remedy}")
    index = disk.read_json(path, {"format": str}, remedy)
    if index.get("format") != "growprune-state" or index.get("version") != VERSION:
        found = f"{path} has version {index.get('version')!r}, this growprune reads {VERSION}"
        raise GrowpruneError(f"{found}: train again, or update growprune")
    return index


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _read(folder: Path, tensors: dict[str, Any]) -> None:
    """Fill tensors in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ALONE)
        if tensors:
            state_dict_loader.load(tensors, checkpoint_id=folder, no_dist=not _is_distributed())


def _model(sparse: SparseModel) -> dict[str, Any]:
    return {f"model.{name}": tensor.detach() for name, tensor in named_tensors(sparse.model).items()}


def _names(sparse: SparseModel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in sparse.model.named_parameters()}


def _states(sparse: SparseModel, optimizer: Optimizer) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the state of each parameter of the model that has any, by name."""
    names = _names(sparse)
    for parameter, entries in optimizer.state.items():
        if id(parameter) in names:
            yield names[id(parameter)], parameter, entries


def _optimizer_tensors(sparse: SparseModel, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    return {
        f"optimizer.{name}.{key}": entry
        for name, _, entries in _states(sparse, optimizer)
        for key, entry in entries.items()
        if isinstance(entry, Tensor)
    }


def _optimizer_index(sparse: SparseModel, optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of an optimizer that are not tensors, and the names of those that are."""
    names, groups = _names(sparse), []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({**plain, "params": [names[id(p)] for p in group["params"]]})
    states = {}
    for name, parameter, entries in _states(sparse, optimizer):
        tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor)}
        states[name] = {
            "like": [k for k, v in tensors.items() if v.shape == parameter.shape],
            "own": {k: [list(v.shape), str(v.dtype)[6:]] for k, v in tensors.items() if v.shape != parameter.shape},
            "plain": {k: v for k, v in entries.items() if not isinstance(v, Tensor)},
        }
    return {"kind": type(optimizer).__name__, "groups": groups, "states": states}


def prepare_optimizer(sparse: SparseModel, optimizer: Optimizer, index: Mapping[str, Any]) -> None:
    """Restore an optimizer's settings, and allocate its state to be filled."""
    for group, saved in zip(optimizer.param_groups, index["groups"], strict=True):
        for key, value in saved.items():  # JSON has lists for tuples and numbers for tensors
            now = group.get(key)
            if isinstance(now, Tensor):
                group[key] = torch.as_tensor(value, dtype=now.dtype, device=now.device)
            elif key != "params":
                group[key] = tuple(value) if isinstance(value, list) else value
    on_device = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    counting = {id(parameter) for group in on_device for parameter in group["params"]}
    parameters = dict(sparse.model.named_parameters())
    optimizer.state.clear()
    for name, about in index["states"].items():
        parameter = parameters[name]
        state = {key: torch.zeros_like(parameter.detach()) for key in about["like"]}
        for key, (shape, dtype) in about["own"].items():
            # torch keeps the number of steps on the CPU, but for kernels that count on the device
            is_apart = key == "step" and id(parameter) not in counting
            state[key] = torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu" if is_apart else parameter.device)
        optimizer.state[parameter] = {**state, **about["plain"]}


def _as_sharded(sparse: SparseModel, name: str, part: Tensor) -> Any:
    """Wrap a rank's part of a flat tensor for DCP."""
    parameter = sparse.stored[name]
    if not isinstance(parameter, ShardedCompact):
        return part
    return parameter.handle.as_sharded(part, torch.Size([parameter.shape.numel()]), (1,))
