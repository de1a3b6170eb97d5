"""Our part of the checkpoints that the Trainer of transformers writes, and which of them can be resumed from.

The Trainer writes its files one after the other, its own state last, and takes the folder with the highest number for
the last checkpoint, whether it was written to its end or not. Ours is written as a whole, just before that state.
"""

from __future__ import annotations

import json
from collections.abc import Container
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.integrations.checkpoints import has_state
from growprune.masks.bits import unpack
from growprune.masks.layers import first_names
from growprune.plan import Part
from growprune.sparse.model import SparseModel


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint of a Trainer that was written to its end; None if there is none.

        trainer.train(resume_from_checkpoint=last_checkpoint("run"))

    begins, or goes on wherever an earlier training was killed. `resume_from_checkpoint=True` takes the newest one
    even if it was being written then, and fails if there is none yet.
    """
    numbers = {path: path.name.removeprefix("checkpoint-") for path in Path(output_dir).glob("checkpoint-*")}
    found = sorted((int(number), path) for path, number in numbers.items() if number.isdecimal())
    return next((str(path) for _, path in reversed(found) if _is_finished(path)), None)


def _is_finished(folder: Path) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):  # the file that the Trainer writes last is not there, or breaks off
        return False
    return has_state(folder)


def left_out(model: nn.Module, folder: Path) -> Part:
    """What the Trainer would not load from its checkpoint.

    It saves experts under names that it does not find again (transformers 5.22, issue 48805), and of a model with
    adapters only these.
    """
    first = first_names(model)
    saved = {first.get(name, name) for file in folder.glob("*.safetensors") for name in _names_in(file)}
    return Part("left out", tuple(name for name in dict.fromkeys(first.values()) if name not in saved))


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def check_zeros(sparse: SparseModel, masks: dict[str, Tensor], left_out: Container[str]) -> None:
    """Raise if weights that were loaded are not zero where masks are: they are of another moment, and would be lost."""
    parameters = dict(sparse.model.named_parameters())
    for weight in sparse.weights:
        name, parameter = weight.parameter, parameters[weight.parameter]
        if name not in masks or name in left_out or parameter.ndim < len(weight.shape):  # or compact already
            continue
        if torch.count_nonzero(parameter.detach()[~unpack(masks[name], parameter.shape, parameter.device)]):
            raise GrowpruneError(
                f"{name} has weights where its mask of the checkpoint has none: they were not saved together; resume "
                f"from another checkpoint"
            )
