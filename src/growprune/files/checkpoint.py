"""Checkpoints: nested plain values and tensors, written atomically to a numbered folder.

The folder `<number>/` has

    tensors.safetensors   every tensor, under a running number
    state.json            the nested values, with {"tensor": "<number>"} in place of each tensor
    COMPLETE              JSON with the digests of the two files; written last

It is written under a temporary name, each file is fsynced, and the folder is renamed at the end. A folder without a
valid COMPLETE is never loaded. Reading it runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.disk import plain_file, sync

FILES = ("tensors.safetensors", "state.json")
_NAME = re.compile("[0-9]{8,12}")


def save(folder: Path, number: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint. On failure, nothing is left behind and earlier checkpoints are unchanged."""
    final = folder / f"{number:08d}"
    temporary = folder / f".writing-{number:08d}"
    tensors: dict[str, Tensor] = {}
    nest = encode(state, tensors)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / FILES[0])
        (temporary / FILES[1]).write_text(json.dumps(nest))
        sync(temporary / FILES[0], temporary / FILES[1])
        (temporary / "COMPLETE").write_text(json.dumps({name: _digest(temporary / name) for name in FILES}))
        sync(temporary / "COMPLETE", temporary)
        temporary.rename(final)
        sync(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"cannot write checkpoint {final}: {error}; earlier checkpoints are intact") from error
        raise
    return final


def load(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint. Raise GrowpruneError if it is incomplete or damaged."""
    try:
        digests = json.loads(plain_file(checkpoint / "COMPLETE").read_text())
        wrong = [name for name in FILES if _digest(checkpoint / name) != digests[name]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GrowpruneError(f"checkpoint {checkpoint} is incomplete ({error})") from error
    if wrong:
        raise GrowpruneError(f"checkpoint {checkpoint} is damaged: {', '.join(wrong)} has changed since it was written")
    try:
        return dict(decode(json.loads((checkpoint / FILES[1]).read_text()), load_file(checkpoint / FILES[0])))
    except (SafetensorError, OSError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise GrowpruneError(f"checkpoint {checkpoint} is damaged ({error}), although its digests match") from error


def load_newest(folder: Path, warn: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
    """Return the newest valid checkpoint with its number; call `warn` for each newer one that is invalid."""
    found = numbers(folder)
    for number in reversed(found):
        try:
            return number, load(folder / f"{number:08d}")
        except ValueError as error:
            remedy = "using the previous checkpoint" if number > found[0] else "no other checkpoint, so starting over"
            warn(f"{error}; {remedy}")
    return None


def numbers(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder, valid or not, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if _NAME.fullmatch(path.name))


def remove_old(folder: Path, keep: Sequence[int]) -> None:
    """Remove all checkpoints except `keep`, and the leftovers of interrupted writes."""
    for path in folder.glob("*"):
        is_old = _NAME.fullmatch(path.name) and int(path.name) not in keep
        if path.is_dir() and (is_old or path.name.startswith(".writing-")):  # a file of such a name is not ours
            with contextlib.suppress(FileNotFoundError):  # without its marker it is no checkpoint, however far we get
                (path / "COMPLETE").unlink()
            shutil.rmtree(path, ignore_errors=True)


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().contiguous().cpu().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        return {"items": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    return {decode(k, tensors): decode(v, tensors) for k, v in content}


def _digest(path: Path) -> str:
    with plain_file(path).open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
