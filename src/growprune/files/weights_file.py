"""Find the weights in a folder, such as a run or a pretrained model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from growprune.errors import GrowpruneError

DENSE, SPARSE, ABOUT = "model.safetensors", "growprune.safetensors", "growprune.json"


def dense_digests(folder: Path) -> dict[str, str]:
    paths = sorted(path for path in folder.glob("*.safetensors") if path.name != SPARSE)
    return {path.name: digest_of(path) for path in paths}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_file(path: str | os.PathLike[str]) -> Path:
    """Return the weights file for a path: the file itself, or that of a folder, such as a run or a pretrained model."""
    path = Path(path)
    if path.is_file():
        return path
    if (found := single_file(path)) is None:
        raise GrowpruneError(
            f"{path} has no weights: pass a .safetensors file, or a folder with {SPARSE} or {DENSE}, such as that of a "
            f"finished run"
        )
    return found


def single_file(folder: Path) -> Path | None:
    """Return the safetensors file with all weights of a folder; the sparse one, if it is up to date."""
    if (folder / SPARSE).is_file() and _is_up_to_date(folder):
        return folder / SPARSE
    return folder / DENSE if (folder / DENSE).is_file() else None


def _is_up_to_date(folder: Path) -> bool:
    """True if the dense files of a folder are those that its sparse file was saved with."""
    try:
        found = dense_digests(folder)
        return not found or bool(json.loads((folder / ABOUT).read_text())["dense"] == found)
    except (OSError, KeyError, RecursionError, TypeError, ValueError):
        return False
