"""growprune's state in the checkpoint folders of accelerate and of the Trainer of transformers.

The Trainer writes its files one after the other, and its own state last. It resumes from the folder with the highest
number, even if it is incomplete. Our state is written as a whole, just before the Trainer's own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from growprune.errors import GrowpruneError
from growprune.files.checkpoint import load, save
from growprune.masks.layers import first_names
from growprune.plan import Part

FOLDER = "growprune"
"""The folder of our state, in the folder of a checkpoint."""
NAME = "00000000"
"""The name of the only state in that folder, a number as in `files.checkpoint`."""


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Add a state to a trainer's checkpoint."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)  # from an earlier training; its weights are overwritten, too
    save(folder / FOLDER, int(NAME), state)


def has_state(folder: Path) -> bool:
    """True if a trainer's checkpoint has a state that was written completely."""
    return (folder / FOLDER / NAME / "COMPLETE").is_file()


def read_state(folder: Path, remedy: str = "resume from another checkpoint") -> dict[str, Any]:
    """Return the state in a trainer's checkpoint; raise if it is damaged or missing."""
    if not has_state(folder):
        raise GrowpruneError(
            f"{folder} has no complete folder {FOLDER!r}: it was saved without growprune, or its writing was "
            f"interrupted; {remedy}"
        )
    return load(folder / FOLDER / NAME)


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest complete checkpoint of a Trainer, or None if there is none.

        trainer.train(resume_from_checkpoint=last_checkpoint("run"))

    starts a training, or resumes one that was killed. `resume_from_checkpoint=True` takes the newest checkpoint even if
    it is incomplete, and fails if there is none.
    """
    numbers = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    found = sorted((int(number), path) for path, number in numbers.items() if number.isdecimal())
    return next((str(path) for _, path in reversed(found) if _is_finished(path)), None)


def _is_finished(folder: Path) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):  # the file that the Trainer writes last is missing or incomplete
        return False
    return has_state(folder)


def left_out(model: nn.Module, folder: Path) -> Part:
    """Return the parameters that the Trainer would not load from its checkpoint.

    It saves experts under names that it does not find again (transformers 5.22, issue 48805). For a model with
    adapters, it saves only the adapters.
    """
    first = first_names(model)
    saved = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            saved |= {first.get(name, name) for name in opened.keys()}  # noqa: SIM118  it is no dict
    return Part("left out", tuple(name for name in dict.fromkeys(first.values()) if name not in saved))
