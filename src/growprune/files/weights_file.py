"""Find the weights in a folder, such as a run or a pretrained model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from growprune.errors import GrowpruneError

DENSE, SPARSE, ABOUT = "model.safetensors", "growprune.safetensors", "growprune.json"


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
    """Return the safetensors file with all weights of a folder: growprune's own, or else the dense one."""
    own = sparse_file(folder)
    return own if own is not None or not (folder / DENSE).is_file() else folder / DENSE


def sparse_file(folder: Path) -> Path | None:
    """Return growprune's own file of a folder, if it has one. Raise if the dense files beside it were changed since."""
    others = {path.name for path in folder.glob("*.safetensors")} - {SPARSE}
    if not (folder / SPARSE).is_file():
        return None
    if not others:
        return folder / SPARSE  # no other file can disagree with it
    try:
        known = dict(json.loads((folder / ABOUT).read_text())["dense"].items())
    except OSError:
        reason = f"{folder} has {SPARSE} and {', '.join(sorted(others))}, but no {ABOUT} of save_pretrained"
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GrowpruneError(f"{folder / ABOUT} is damaged ({error!r}): download or save the folder again") from None
    else:
        changed = [name for name in sorted(known) if name not in others or known[name] != digest_of(folder / name)]
        if not changed:
            return folder / SPARSE
        reason = f"{folder} has other dense weights than growprune saved ({', '.join(changed)} changed)"
    raise GrowpruneError(
        f"{reason}, so {SPARSE} may be out of date: delete it, or pass the file that you mean, or load the model with "
        f"its own from_pretrained and call growprune.SparseModel.from_zeros(model)"
    )
