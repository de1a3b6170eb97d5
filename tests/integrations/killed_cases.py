"""Trainings that are killed and resumed through the trainer's own resume, and what they leave."""

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import forked
import lightning.pytorch as pl
import torch
import torch._dynamo  # which the first step of an optimizer would import
import transformers as hf
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_cases import Loader, Module, examples, mlp
from replicas import become_rank
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers_cases import make_data, make_model, make_trainer

import growprune as gp
from growprune.integrations.accelerate import keep_in_checkpoints
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


def in_lightning(folder: Path, method: str, storage: str) -> None:
    """Train from the last checkpoint, if there is one; that is what ckpt_path="last" does by itself."""
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


def in_own_loop(folder: Path, method: str, storage: str) -> None:
    """Train in a plain loop, which keeps the state of the Sparsifier, of the schedule and of dropout."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model, file = mlp(), folder / "checkpoint.pt"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    options = {"iterations": STEPS, **OPTIONS[method]}
    sparsifier = gp.sparsify(model, optimizer, method, sparsity=0.75, storage=storage, **options)
    if file.exists():
        state = torch.load(file, weights_only=True)
        sparsifier.load_state_dict(state["sparsifier"])
        schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
    for step in range(sparsifier.cursor.iteration, STEPS):
        x, y = examples(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        state = {"sparsifier": sparsifier.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**state, "random": torch.get_rng_state()}, folder / "new.pt")
        (folder / "new.pt").replace(file)
        tell(folder)
    (folder / "done").touch()


def left_by_own_loop(folder: Path) -> dict[str, Any]:
    return flat(torch.load(folder / "checkpoint.pt", weights_only=True))


def in_accelerate(folder: Path, method: str) -> None:
    """Train on one of two processes, which save into a new folder that gets its name when both are done."""
    folder.mkdir(exist_ok=True)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = mlp()
    # with a generator of its own, or each life draws a seed for the loader's workers before its first dropout
    loader: Any = DataLoader(TensorDataset(*examples(0, 8 * STEPS)), 4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
    sparsifier = gp.sparsify(model, optimizer, method, sparsity=0.75, iterations=STEPS, **OPTIONS[method])
    keep_in_checkpoints(accelerator, sparsifier)
    if saved := sorted(folder.glob("step-*")):
        accelerator.load_state(str(saved[-1]))
    for x, y in accelerator.skip_first_batches(loader, sparsifier.cursor.iteration):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        accelerator.save_state(str(folder / "new"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "new").replace(folder / f"step-{sparsifier.cursor.iteration:02}")
            tell(folder)
        accelerator.wait_for_everyone()
    (folder / "done").touch()


def left_by_accelerate(folder: Path) -> dict[str, Any]:
    last = folder / f"step-{STEPS}"
    files = {file.name: load_file(file) for file in last.rglob("*.safetensors")}
    assert files.keys() == {"model.safetensors", "tensors.safetensors"}
    (place,) = last.rglob("state.json")
    optimizer = torch.load(last / "optimizer.bin", weights_only=True)
    return flat({**files, "place": json.loads(place.read_text()), "optimizer": optimizer})


def flat(nest: Any, path: str = "") -> dict[str, Any]:
    """By path, all values of a nest, tensors as bytes."""
    if isinstance(nest, torch.Tensor):
        return {path: nest.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if nest.ndim else nest.item()}
    items = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, list | tuple) else None
    if items is None:
        return {path: nest}
    return {name: value for key, inner in items for name, value in flat(inner, f"{path}/{key}").items()}


def run_with_kills(trainer: str, folder: Path, case: tuple[str, ...], kills: int) -> int:
    """Train in one life after another, the first of which are killed at random moments; gives how many were.

    A life is one process, or two with accelerate. They are forked from this one, which has loaded all that they need,
    and has trained nothing.
    """
    train, _ = TRAINERS[trainer]
    context, chance, killed = multiprocessing.get_context("fork"), random.Random(f"{trainer} {case} {kills}"), 0
    while not (folder / "done").exists():
        world, port = (2 if trainer == "accelerate" else 1), forked.free_port()
        lives = [context.Process(target=live, args=(rank, world, port, train, folder, *case)) for rank in range(world)]
        before = steps_in(folder)
        for process in lives:
            process.start()
        if killed < kills:
            until = before + chance.randrange(0, 4)
            while steps_in(folder) < until and all(process.is_alive() for process in lives):
                time.sleep(0.001)
            time.sleep(chance.random() * 0.05)
            chance.shuffle(lives)
            for process in lives:
                process.kill()
        for process in lives:
            process.join()
        codes = {process.exitcode for process in lives}
        assert codes == {0} or -signal.SIGKILL in codes
        killed += codes != {0}
    return killed


def live(rank: int, world: int, port: int, train: Any, folder: Path, *case: str) -> None:
    if world > 1:
        become_rank(rank, port)
    train(folder, *case)


def steps_in(folder: Path) -> int:
    """Return how many steps are done in a folder."""
    file = folder / "steps"
    return file.read_text().count(".") if file.exists() else 0


TRAINERS: dict[str, Any] = {
    "own loop": (in_own_loop, left_by_own_loop),
    "transformers": (in_transformers, left_by_transformers),
    "lightning": (in_lightning, left_by_lightning),
    "accelerate": (in_accelerate, left_by_accelerate),
}
