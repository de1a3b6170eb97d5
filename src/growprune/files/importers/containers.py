"""The files that tensors come in: safetensors, what torch.save writes, and folders as transformers has."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.weights import digest_of

OURS, ABOUT = "growprune.safetensors", "growprune.json"
"""What `growprune.save_pretrained` writes beside the dense files."""
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
)
"""What torch raises of a checkpoint that is damaged or forged: it says nothing of what it may be."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, as views of the file that are written to nowhere else, and the strings of the header."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{path} is not a safetensors file that torch can hold, or not all of it ({_one_line(error)})"
        raise GrowpruneError(f"{what}: fetch or save it again") from None


def read_torch(path: Path) -> Any:
    """What torch.save wrote, without running any code of it."""
    try:
        if is_zip := zipfile.is_zipfile(path):
            _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)|`?([\w.]+)`? was not an allowed global", str(error))
        why = f"it has {next(filter(None, refused.groups()))}" if refused else _one_line(error)
        raise GrowpruneError(
            f"{path} is a pickle that would run code, or damaged ({why}): no code is run, so save state_dict() alone"
        ) from None
    except GrowpruneError:
        raise
    except UNREADABLE as error:
        raise GrowpruneError(
            f"{path} is not a whole checkpoint of torch.save ({_one_line(error)}): fetch or save it again"
        ) from None


def _check_stored(path: Path) -> None:
    """Refuse what torch never writes: members that are compressed, and could become any size."""
    with zipfile.ZipFile(path) as archive:
        if packed := [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]:
            raise GrowpruneError(f"{path} has compressed {packed[0]!r}, which torch.save does not write: unpack it")


def read_folder(path: Path) -> list[Path]:
    """The files of a folder that hold its weights; our own, if it is of the same model as the dense ones."""
    if (path / OURS).is_file() and _is_up_to_date(path):
        return [path / OURS]
    for name in SINGLE:
        if (path / name).is_file():
            return [path / name]
    if not (path / INDEX).is_file():
        raise GrowpruneError(f"{path} holds no weights: give a folder with {', '.join(SINGLE)} or {INDEX}")
    try:
        if (path / INDEX).stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a name leads out of the folder")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise GrowpruneError(f"{path / INDEX} is damaged ({_one_line(error)}): fetch the folder again") from None
    if missing := [name for name in names if not (path / name).is_file()]:
        raise GrowpruneError(f"{path} lacks {missing[0]}, which its {INDEX} names: fetch it too")
    return [path / name for name in names]


def _is_up_to_date(path: Path) -> bool:
    """Whether the dense files of a folder are still those that our own was saved with."""
    try:
        known = dict(json.loads((path / ABOUT).read_text())["dense"])
    except (OSError, KeyError, RecursionError, TypeError, ValueError):
        return False
    found = (file for file in path.glob("*.safetensors") if file.name != OURS)
    return known == {file.name: digest_of(file) for file in found}


def weights_of(path: Path) -> Path:
    """The file that a path means: itself, or that with the weights of a folder."""
    return read_folder(path)[0] if path.is_dir() else path


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text[:200])
