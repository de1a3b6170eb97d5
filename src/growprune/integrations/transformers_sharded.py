"""`GrowPruneCallback` with FSDP2, by which accelerate shards the model before callbacks hear of the training.

Two methods are taken over, of the one Trainer that the callback is given to. Its loading of weights (by the callback):
compact ones are as long as masks say, so that masks are read first. And accelerate's gathering of a model that is to be
saved: it would give live values, while others want plain tensors with zeros.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import whole
from growprune.masks.layers import first_names
from growprune.sparse.model import SparseModel

INSTEAD = "use FSDP2 with storage='compact' (TrainingArguments(fsdp=True)), or DDP"


def check_sharding(*, uses_deepspeed: bool, fsdp_version: int | None, storage: str) -> None:
    """Refuse what cannot train a sparse model, before anything is done.

    Args:
        fsdp_version: 1 or 2; None without FSDP.
    """
    if uses_deepspeed:
        raise GrowpruneError(f"GrowPruneCallback does not work with DeepSpeed, which flattens weights: {INSTEAD}")
    if fsdp_version == 1:
        raise GrowpruneError(f"GrowPruneCallback does not work with FSDP1, which flattens weights: {INSTEAD}")
    if fsdp_version is not None and storage != "compact":
        raise GrowpruneError(
            f"GrowPruneCallback with FSDP needs storage='compact', got {storage!r}: give storage='compact'"
        )


def version_asked_for(args: Any) -> int | None:
    """Which FSDP TrainingArguments ask for; None also where only accelerate knows."""
    return (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version") if args.fsdp else None


def version_in_use(trainer: Any) -> int | None:
    """Which FSDP a Trainer uses, by its arguments or by how accelerate was launched."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return None if plugin is None else int(getattr(plugin, "fsdp_version", 1))


def is_sharding(trainer: Any) -> bool:
    return version_in_use(trainer) == 2


def check_trainer(trainer: Any) -> None:
    """Refuse settings under which weights would have other names, or not be saved."""
    if not is_sharding(trainer):
        return
    if trainer.accelerator.state.fsdp_plugin.activation_checkpointing:
        raise GrowpruneError(
            "GrowPruneCallback does not work with activation_checkpointing in fsdp_config, which renames weights: use "
            "TrainingArguments(gradient_checkpointing=True)"
        )
    if trainer.args.auto_find_batch_size:
        raise GrowpruneError(
            "GrowPruneCallback does not work with FSDP and auto_find_batch_size, which cannot restart a sharded model: "
            "give per_device_train_batch_size"
        )
    if hasattr(trainer.model, "peft_config"):
        raise GrowpruneError(
            "GrowPruneCallback does not work with FSDP and PEFT, whose checkpoints leave out sparse weights: use DDP "
            "with storage='masked'"
        )


def save_dense(trainer: Any, sparse: SparseModel) -> None:
    """Let `trainer.save_model`, with FULL_STATE_DICT, write plain tensors with zeros."""
    vars(trainer.accelerator)["get_state_dict"] = functools.partial(_dense_state, trainer.accelerator, sparse)


def _dense_state(accelerator: Any, sparse: SparseModel, model: Any, *rest: Any, **settings: Any) -> dict[str, Tensor]:
    """Of the sparse model all tensors, on the CPU of the first process; all ask, for one after the other."""
    if plain(model) is not sparse.model:
        state: dict[str, Tensor] = type(accelerator).get_state_dict(accelerator, model, *rest, **settings)
        return state
    sparse.notice_shards()
    first = first_names(sparse.model)
    found: dict[str, Tensor] = {}
    for name, tensor in sparse.model.state_dict().items():
        if (other := first.get(name, name)) in found:
            found[name] = found[other]  # tied
            continue
        stored = sparse.stored.get(name)
        dense = whole(tensor.detach()) if stored is None else stored.to_dense(tensor.detach())
        found[name] = dense.cpu() if accelerator.is_main_process else dense.new_empty(0)
    return found if accelerator.is_main_process else {}


def agree_on_the_best(args: Any, state: Any) -> None:
    """Let all processes know the same best checkpoint, once it is written.

    Each looks for its folder by itself, and with SHARDED_STATE_DICT some do so before it is there (transformers 5.22).
    """
    best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
    if state.best_global_step and best.is_dir():
        state.best_model_checkpoint = str(best)


def plain(model: Any) -> nn.Module:
    """A model itself, where it is compiled: a Trainer has the compiled one as its model then, if it is sharded."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found
