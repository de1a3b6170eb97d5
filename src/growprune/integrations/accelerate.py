"""Sparse training in your own loop with accelerate.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sparsifier = gp.sparsify(model, optimizer, sparsity=0.9, iterations=epochs * len(loader))
keep_in_checkpoints(accelerator, sparsifier)      # accelerator.save_state() and load_state() keep the masks
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError
from growprune.integrations.callback import check_saved
from growprune.integrations.checkpoint_folders import read_state, write_state
from growprune.training.sparsifier import Sparsifier


def keep_in_checkpoints(accelerator: Any, sparsifier: Sparsifier) -> None:
    """Save the masks and the place in the plan with `accelerator.save_state`, and load them with `load_state`.

    Call it once, after `accelerator.prepare` and `growprune.sparsify`.
    """
    if not isinstance(sparsifier, Sparsifier):
        raise GrowpruneError(
            f"keep_in_checkpoints takes a Sparsifier, got {type(sparsifier).__name__}: give what gp.sparsify returns"
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise GrowpruneError(
            f"keep_in_checkpoints does not work with {kind}: use DDP, or sparse.shard(mesh) and "
            f"growprune.save_sharded_checkpoint"
        )
    if accelerator.num_processes > 1 and sparsifier.sparse.storage == "compact":
        raise GrowpruneError(
            f"storage='compact' does not work with DDP ({accelerator.num_processes} processes), since accelerate wraps "
            f"the model only once: use storage='masked'"
        )

    def save(models: Any, weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            write_state(Path(folder), sparsifier.state_dict(only_masks=True))

    def load(models: Any, folder: str) -> None:
        state = read_state(Path(folder))
        check_saved(state, sparsifier.settings)
        sparsifier.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
