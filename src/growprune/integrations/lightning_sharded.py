"""`GrowPrune` with Lightning's ModelParallelStrategy, under which a module's `configure_model` shards it by FSDP2.

There, Lightning loads all tensors of a checkpoint in one go, before it calls callbacks. Compact weights are as
long as masks say, so that masks have to be read first: `read_first` sees to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import distributed

from growprune.errors import GrowpruneError
from growprune.sparse.checks import is_fsdp2
from growprune.sparse.rng import rng_state, set_rng_state

METADATA = "meta.pt"
"""What a checkpoint that is a folder has all in but tensors of the model and the optimizers."""


def is_sharding(trainer: Trainer) -> bool:
    return isinstance(trainer.strategy, ModelParallelStrategy)


def check_storage(trainer: Trainer, storage: str) -> None:
    """Refuse to shard dense weights, before anything is done."""
    if is_sharding(trainer) and storage != "compact":
        raise GrowpruneError(
            f"GrowPrune with ModelParallelStrategy needs storage='compact', got {storage!r}: give storage='compact'"
        )


def check_sharded(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a module that nobody has sharded, so that nobody would average its gradients either."""
    if is_sharding(trainer) and not is_fsdp2(module.modules()):
        raise GrowpruneError(
            "configure_model has not sharded the module: call fully_shard (torch.distributed.fsdp) there, with "
            "mesh=self.device_mesh['data_parallel']; tensor parallelism alone cannot train a sparse model"
        )


def read_first(trainer: Trainer, look: Callable[[Mapping[str, Any]], None]) -> None:
    """Show what a checkpoint has beside tensors before they are loaded."""
    if is_sharding(trainer):
        vars(trainer.strategy)["load_checkpoint"] = functools.partial(_load, trainer.strategy, look)


def read_as_before(trainer: Trainer) -> None:
    vars(trainer.strategy).pop("load_checkpoint", None)


def _load(
    strategy: Any, look: Callable[[Mapping[str, Any]], None], checkpoint_path: Any, *rest: Any, **settings: Any
) -> dict[str, Any]:
    path = Path(strategy.broadcast(checkpoint_path))  # as the strategy itself does
    file = path / METADATA if path.is_dir() else path
    look(torch.load(file, mmap=True, map_location="cpu", weights_only=settings.get("weights_only")))
    loaded: dict[str, Any] = type(strategy).load_checkpoint(strategy, checkpoint_path, *rest, **settings)
    return loaded


def random_numbers(trainer: Trainer) -> Any:
    """The state of the random numbers: of each rank if the module is sharded, which all ranks ask for, else our own."""
    if not is_sharding(trainer):
        return rng_state()
    found: list[Any] = [None] * trainer.world_size
    distributed.all_gather_object(found, rng_state())
    return found


def set_random_numbers(trainer: Trainer, state: Any) -> None:
    """Continue with the random numbers of a checkpoint, on as many ranks; replicas have only those of the first."""
    if not is_sharding(trainer):
        if trainer.world_size == 1:
            set_rng_state(state)
    elif len(state) == trainer.world_size:
        set_rng_state(state[trainer.global_rank])
