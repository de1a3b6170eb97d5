"""Sparse training in a loop of your own with accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    cursor.attach(optimizer)
    keep_in_checkpoints(accelerator, cursor)               # accelerator.save_state() and load_state() have masks too

`accelerator.register_for_checkpointing(sparse, cursor)` does the same for masked storage, as accelerate's own pickles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from growprune.errors import GrowpruneError
from growprune.integrations.checkpoint_folders import read_state, write_state
from growprune.integrations.common import share_gradients
from growprune.sparse.cursor import Cursor


def keep_in_checkpoints(accelerator: Any, cursor: Cursor) -> None:
    """Have the masks and the place in the plan saved with `accelerator.save_state`, and loaded with `load_state`.

    They are loaded before the weights, as compact storage needs it. In several processes, edits that look at gradients
    see those of all. Call it once, after `accelerator.prepare`.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "FSDP" and getattr(accelerator, "is_fsdp2", False):
        raise GrowpruneError(
            "accelerate loads sharded weights before hooks are called, and compact ones are as long as masks say: keep "
            "a model sharded by FSDP2 with growprune.save_state and growprune.load_state"
        )
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise GrowpruneError(
            "growprune does not work with FSDP1 or DeepSpeed, which take weights apart: use FSDP2 (fsdp_version=2), or "
            "DDP"
        )
    share_gradients(cursor.sparse)

    def save(models: Any, weights: Any, folder: str) -> None:
        if accelerator.is_main_process:
            write_state(Path(folder), {"sparse": cursor.sparse.state_dict(), "cursor": cursor.state_dict()})

    def load(models: Any, folder: str) -> None:
        state = read_state(Path(folder))
        cursor.sparse.load_state_dict(state["sparse"])
        cursor.load_state_dict(state["cursor"])

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
