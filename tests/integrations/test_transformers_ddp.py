"""GrowPruneCallback in a Trainer of two processes: they agree to the last bit."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from replicas import on_two_processes
from transformers_cases import train

from growprune import GrowpruneError


def replica(folder: Path) -> dict[Any, Any]:
    args = {"ddp_backend": "gloo", "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    args |= {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    ends = {}
    for method, resume in itertools.product(("rigl", "cyclic_gap", "snip"), (None, "checkpoint-3")):
        place = folder / method
        last = None if resume is None else str(place / resume)
        trainer, callback = train(place, "bert", method, allocation="uniform", args=args, resume=last)
        assert callback.sparse is not None and callback.sparse.is_at_target
        allowed = (6, 8) if method == "cyclic_gap" else (3, 6, 8)  # where none is grown
        assert trainer.state.best_global_step in allowed
        ends[method, resume] = {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(GrowpruneError, match="storage='compact' does not work with DDP"):
        train(folder, "bert", storage="compact", args=args)
    return ends


@pytest.mark.slow
def test_two_processes_have_the_same_bits_after_edits_and_when_resumed(
    tmp_path: Path, server: ProcessPoolExecutor
) -> None:
    told = server.submit(on_two_processes, replica, tmp_path).result()
    for (method, _), end in [*told[0].items(), *told[1].items()]:
        whole = told[0][method, None]
        assert [name for name, array in whole.items() if array.tobytes() != end[name].tobytes()] == []
