"""Our state in a trainer's checkpoint that is a folder, as safetensors and JSON."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from growprune.engine.checkpoint import load, save
from growprune.errors import GrowpruneError

FOLDER = "growprune"
"""What a trainer's checkpoint, which is a folder, has our state in."""
NAME = "00000000"
"""What is in there: the one state, as `engine.checkpoint` numbers them."""


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Add a state to a trainer's checkpoint."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)  # of an earlier training, whose weights are overwritten too
    save(folder / FOLDER, int(NAME), state)


def has_state(folder: Path) -> bool:
    """Whether a trainer's checkpoint has a state that was written to its end."""
    return (folder / FOLDER / NAME / "COMPLETE").is_file()


def read_state(folder: Path, remedy: str = "resume from another checkpoint") -> dict[str, Any]:
    """The state in a trainer's checkpoint; it is refused if it is damaged or not there."""
    if not has_state(folder):
        raise GrowpruneError(
            f"{folder} has no folder {FOLDER!r}: it was saved without growprune, or not to its end; {remedy}"
        )
    return load(folder / FOLDER / NAME)
