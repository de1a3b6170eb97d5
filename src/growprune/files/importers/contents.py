"""Read tensors by name from safetensors, from files of torch.save, and from folders of transformers.

Nothing in a file is trusted, and reading it runs no code. Tensors are views of the file where possible.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.reader import one_line
from growprune.files.weights_file import DENSE, single_file

PICKLED, INDEX = "pytorch_model.bin", "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20

STATES = ("state_dict", "model_state_dict", "model", "net", "module")
"""The entries of a checkpoint that may hold the model's tensors. The first one found is used."""

WRAPPINGS = ("module.", "_orig_mod.")
"""The prefixes that DataParallel and torch.compile add to all names."""

SPARE_BYTES = 64 << 20
"""The most bytes by which the overlapping tensors of a checkpoint may exceed its file."""

Source: TypeAlias = str | os.PathLike[str] | nn.Module | Mapping[str, Any]


@dataclass(frozen=True)
class Contents:
    """The contents of a source of any format."""

    where: str
    """The path, or the name of the source in errors."""
    tensors: Mapping[str, Tensor]
    """The tensors by their first names."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The strings in the header of safetensors."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """{other name: first name} of tensors with several names."""
    path: Path | None = None
    """The file, if it is a single one."""
    notes: tuple[str, ...] = ()


def open_contents(source: Source) -> Contents:
    """Read a file, a folder, a module or a state dict."""
    if isinstance(source, nn.Module):
        return from_checkpoint(source.state_dict(), f"the {type(source).__name__}")
    if isinstance(source, Mapping):
        return from_checkpoint(source, "the state dict")
    if not isinstance(source, str | os.PathLike):
        raise GrowpruneError(f"source must be a path, a module or a state dict, got a {type(source).__name__}")
    path = Path(source)
    if path.is_dir():
        file = single_file(path) or path / PICKLED
        return _of_file(file) if file.is_file() else _of_index(path)
    if not path.is_file():
        raise GrowpruneError(f"{path} does not exist: pass a file or a folder with weights")
    return _of_file(path)


def _of_index(path: Path) -> Contents:
    """Read the files that the index of a folder lists."""
    if not (path / INDEX).is_file():
        raise GrowpruneError(f"{path} has no weights: pass a folder with {DENSE}, {PICKLED} or {INDEX}")
    try:
        if (path / INDEX).stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        names = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a name points outside the folder")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise GrowpruneError(f"{path / INDEX} is damaged ({one_line(error)}): download the folder again") from None
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (path / name).is_file():
            raise GrowpruneError(f"{path} lacks {name}, which its {INDEX} lists: download it too")
        tensors |= _read_safetensors(path / name)[0]
    return Contents(str(path), tensors)


def _of_file(path: Path) -> Contents:
    with path.open("rb") as file:
        start = file.read(16)
    # the first bytes of safetensors are a length, which may look like the first byte of a pickle
    is_safetensors = start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size
    if not is_safetensors and start.startswith((b"PK\x03\x04", b"\x80")):
        return from_checkpoint(_read_torch(path), str(path), path.stat().st_size)
    if start[8:9] != b"{":
        raise GrowpruneError(
            f"{path} is neither safetensors nor a torch.save file: pass one of them, or a folder with one"
        )
    tensors, metadata = _read_safetensors(path)
    aliases = {alias: name for alias, name in metadata.items() if name in tensors and alias not in tensors}
    return Contents(str(path), tensors, metadata=metadata, aliases=aliases, path=path)


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors, as private views of the file, and the strings of the header."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{path} is not a safetensors file that torch can read, or is incomplete ({one_line(error)})"
        raise GrowpruneError(f"{what}: download or save it again") from None


def _read_torch(path: Path) -> Any:
    """Read a file of torch.save, without running any code in it."""
    try:
        if is_zip := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:  # torch never compresses; a compressed member could become any size
                packed = [m.filename for m in archive.infolist() if m.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise GrowpruneError(f"{path} has a compressed {packed[0]!r}, which torch.save never writes: unpack it")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)|`?([\w.]+)`? was not an allowed global", str(error))
        why = f"it has {next(filter(None, refused.groups()))}" if refused else one_line(error)
        raise GrowpruneError(
            f"{path} is a pickle that would run code, or is damaged ({why}). No code is run: save only state_dict()"
        ) from None
    except GrowpruneError:
        raise
    except Exception as error:  # torch raises almost any for a damaged or forged checkpoint, and documents none
        raise GrowpruneError(
            f"{path} is not a complete checkpoint of torch.save ({one_line(error)}): download or save it again"
        ) from None


def from_checkpoint(found: Any, where: str, num_bytes: int | None = None) -> Contents:
    """Read a checkpoint that is a state dict, or a dict with one as an entry.

    Args:
        num_bytes: the size of its file, which overlapping tensors may not exceed by much.
    """
    if not isinstance(found, Mapping):
        kind = type(found).__name__
        raise GrowpruneError(f"{where} must hold tensors by name, as state_dict() returns them, got a {kind}")
    inner = [found[key] for key in STATES if isinstance(found.get(key), Mapping)]
    state = next((some for some in (found, *inner) if any(isinstance(v, Tensor) for v in some.values())), None)
    if state is None:
        has = ", ".join(str(key)[:40] for key in [*found][:6]) or "nothing"
        raise GrowpruneError(f"{where} holds no tensors, only {has}: save model.state_dict(), alone or as 'state_dict'")
    tensors = {str(name): value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in state.items() if not isinstance(value, Tensor)]
    notes = (f"skipped {', '.join(others[:3])}: not a tensor",) if others else ()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or type(tensor) is not Tensor:
            what = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__} of {tensor.layout}"
            raise GrowpruneError(f"{where} has {name}, which is {what}: save it as a plain dense tensor")
    left = list(WRAPPINGS)  # each is removed once: below it, a submodule may have the same name
    while prefix := next((p for p in left if tensors and all(name.startswith(p) for name in tensors)), ""):
        left.remove(prefix)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else (name,)
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if num_bytes is not None and size > num_bytes + SPARE_BYTES:
        raise GrowpruneError(f"{where} has overlapping tensors, {size} bytes in a file of {num_bytes}: save copies")
    return Contents(where, tensors, aliases=aliases, notes=notes)
