"""Trainings that are killed and resumed through the trainer's own resume, and what they leave."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # which the first step of an optimizer would import
import transformers as hf
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_cases import Loader, Module
from safetensors.torch import load_file
from transformers_cases import make_data, make_model, make_trainer

from growprune.integrations.lightning import GrowPrune
from growprune.integrations.transformers import GrowPruneCallback, last_checkpoint

STEPS = 18
OPTIONS: dict[str, dict[str, Any]] = {
    "gradual_gap": {"every": 2, "parts": 2},
    "rigl": {"every": 3, "parts": 2},
    "cyclic_gap": {"parts": 2, "steps": 2, "epochs": 4, "finetune": 10, "iterations_per_epoch": 1},
}


def tell(folder: Path) -> None:
    """Let whoever kills know that one more step is done."""
    with (folder / "steps").open("a") as file:
        file.write(".\n")


class Telling(hf.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        tell(Path(args.output_dir))


class TellingToo(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, *args: Any) -> None:
        tell(self.folder)


def in_transformers(folder: Path, name: str, method: str, storage: str) -> None:
    """Train from wherever an earlier life has come to; of the checkpoints, only the newest is kept."""
    torch.set_num_threads(1)
    callback = GrowPruneCallback(method, sparsity=0.75, storage=storage, **OPTIONS[method])
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": STEPS}
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(folder, make_model(name), make_data(name), callback, Telling(), **saving)
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    (folder / "done").touch()


def left_by_transformers(folder: Path) -> dict[str, Any]:
    """Weights, masks, place in the plan, optimizer, schedule and random numbers of the last checkpoint."""
    last = folder / f"checkpoint-{STEPS}"
    ours = last / "growprune" / "00000000"
    weights = {**load_file(last / "model.safetensors")}
    state = {"ours": load_file(ours / "tensors.safetensors"), "place": json.loads((ours / "state.json").read_text())}
    parts = {file: torch.load(last / file, weights_only=True) for file in ("optimizer.pt", "scheduler.pt")}
    return flat({"weights": weights, **state, **parts})


def in_lightning(folder: Path, name: str, method: str, storage: str) -> None:
    """Train from the last checkpoint, if there is one; that is what ckpt_path="last" does by itself."""
    del name
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    folder.mkdir(exist_ok=True)
    callback = GrowPrune(method, sparsity=0.75, storage=storage, **OPTIONS[method])
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [callback, saving, TellingToo(folder)]
        trainer = pl.Trainer(max_steps=STEPS, callbacks=callbacks, default_root_dir=folder, **quiet)
        trainer.fit(Module(), Loader(), ckpt_path="last")
    (folder / "done").touch()


def left_by_lightning(folder: Path) -> dict[str, Any]:
    newest = max(folder.glob("last*.ckpt"), key=os.path.getmtime)
    state = torch.load(newest, weights_only=True)
    assert state["global_step"] == STEPS
    ours = state["callbacks"]["GrowPrune"]
    return flat({"weights": state["state_dict"], "optimizer": state["optimizer_states"], "ours": ours})


def flat(nest: Any, path: str = "") -> dict[str, Any]:
    """By path, all values of a nest, tensors as bytes."""
    if isinstance(nest, torch.Tensor):
        return {path: nest.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if nest.ndim else nest.item()}
    items = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, list | tuple) else None
    if items is None:
        return {path: nest}
    return {name: value for key, inner in items for name, value in flat(inner, f"{path}/{key}").items()}


def wait_for_steps(file: Path, count: int, process: Any) -> None:
    """Until so many more steps are done, or the process has ended."""
    before = len(file.read_bytes()) if file.exists() else 0
    while process.is_alive() and (len(file.read_bytes()) if file.exists() else 0) < before + 2 * count:
        time.sleep(0.001)


def run_with_kills(train: Any, folder: Path, case: tuple[str, ...], kills: int) -> int:
    """Train in one process after another, the first of which are killed; gives how many were.

    They are forked from this one, which has loaded all that they need, and has trained nothing.
    """
    context, chance, killed = multiprocessing.get_context("fork"), random.Random(str(case)), 0
    while not (folder / "done").exists():
        process = context.Process(target=train, args=(folder, *case))
        process.start()
        if killed < kills:
            wait_for_steps(folder / "steps", chance.randrange(0, 5), process)
            time.sleep(chance.random() * 0.05)
            process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
    return killed


TRAINERS: dict[str, Any] = {
    "transformers": (in_transformers, left_by_transformers),
    "lightning": (in_lightning, left_by_lightning),
}
