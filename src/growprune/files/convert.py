"""From one file or folder of weights to another: ours, dense safetensors, folders of transformers, ONNX, OpenVINO.

Without the model's code, names and shapes are all that is known: a matrix is a tensor of two dimensions and more, and
is sparse if the source has a mask for it, or if at least 5 % of it is zero.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.exporters import to_dense, to_onnx, to_openvino, write_dense
from growprune.files.importers import Imported, read
from growprune.files.importers.imported import bare_model
from growprune.files.pretrained import save_pretrained, weights_file
from growprune.masks.bits import pack
from growprune.masks.layers import first_names, matches
from growprune.sparse.model import SparseModel

SUFFIXES = {".onnx": "onnx", ".xml": "openvino", "": "hf"}

MAX_GLOBS = 1000
"""How many globs may be needed to name the matrices of a model without code: each is held against all names."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".index.json", "growprune.json")
"""The endings of what is not taken over with a folder."""

COMPRESSED = ("quantization_config", "compression_config", "sparsity_config")
"""What a config says of compressed weights, which are no longer so."""


@dataclass(frozen=True)
class Matrix:
    name: str
    shape: tuple[int, ...]
    alive: int


@dataclass(frozen=True)
class Converted:
    """What was written, and from what."""

    source: Path
    dest: Path
    format: str
    """What the source was read as."""
    to: str
    source_bytes: int
    dest_bytes: int
    dense_bytes: int
    """What all tensors take when dense."""
    matrices: tuple[Matrix, ...]
    """The sparse ones."""
    sparsity: float
    """Of these."""
    notes: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    to: str | None = None,
    format: str | None = None,
    model: nn.Module | None = None,
    example: Any = None,
    force: bool = False,
) -> Converted:
    """Write the weights of a source in another format, all at once or not at all.

    Args:
        source: a file or folder that growprune or another tool wrote; see `growprune.files.importers.read`.
        to: a name of WRITERS; by the name of `dest` if not given, where a .safetensors is sparse, unless the source is.
        format: what the source is; found out by its content, if not given.
        model: the model of the weights. ONNX and OpenVINO need it. It also says what is prunable, and how.
        example: an input of it, for ONNX and OpenVINO.
        force: whether what is at `dest` may be replaced.
    """
    source, dest = Path(source), Path(dest)
    found = read(source, format=format)
    to = to or target_by_name(dest, found.format)
    _check(source, dest, to, model, example, force)
    before, notes, sparsity = num_bytes(source), _notes(found, source, to, model), found.sparsity
    alive = {name: (tuple(mask.shape), int(mask.count_nonzero())) for name, mask in sorted(found.masks.items())}
    dest.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[to](_Job(found, source, dest, model, example))
    return Converted(
        source=source,
        dest=dest,
        format=found.format,
        to=to,
        source_bytes=before,
        dest_bytes=num_bytes(dest),
        dense_bytes=found.dense_bytes,
        matrices=tuple(Matrix(name, shape, count) for name, (shape, count) in alive.items()),
        sparsity=sparsity,
        notes=notes,
    )


@dataclass(frozen=True)
class _Job:
    found: Imported
    source: Path
    dest: Path
    model: nn.Module | None
    example: Any

    def sparse(self) -> SparseModel:
        """What was read, in the model; without one, in a bare one that has the names."""
        if self.model is None:
            return bare_sparse_model(self.found, str(self.source))
        is_ours = self.found.format == "growprune"
        return file.load(weights_file(self.source), self.model) if is_ours else self.found.into(self.model)


def target_by_name(dest: Path, format: str) -> str:
    """What the name of a file or folder asks for."""
    if dest.is_dir():
        return "hf"
    if dest.suffix == ".safetensors":
        return "dense" if format == "growprune" else "sparse"
    if dest.suffix not in SUFFIXES:
        raise GrowpruneError(
            f"{dest} does not say what to write: end it with .safetensors, .onnx or .xml, let it have no ending for a "
            f"folder, or choose one of {', '.join(WRITERS)}"
        )
    return SUFFIXES[dest.suffix]


def num_bytes(path: Path) -> int:
    """Of a file, or of all files in a folder; of a graph, with the weights beside it."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    beside = {".xml": path.with_suffix(".bin"), ".onnx": path.with_name(f"{path.name}.data")}.get(path.suffix)
    return path.stat().st_size + (beside.stat().st_size if beside is not None and beside.is_file() else 0)


def _check(source: Path, dest: Path, to: str, model: nn.Module | None, example: Any, force: bool) -> None:
    if to not in WRITERS:
        raise GrowpruneError(f"to is {to!r}, but known are {', '.join(WRITERS)}")
    if to in ("onnx", "openvino") and (model is None or example is None):
        raise GrowpruneError(f"{to} is a graph, which is made of the model's code: give the model and an example input")
    if dest.exists() and dest.resolve() == source.resolve():
        raise GrowpruneError(f"{dest} is the source itself: write to another place")
    if dest.exists() and not force:
        raise GrowpruneError(f"{dest} is there already: give another name, or --force to replace it")
    if dest.is_dir() != (to == "hf") and dest.exists():
        raise GrowpruneError(f"{dest} is {'a folder' if dest.is_dir() else 'a file'}, which {to} is not: give another")
    if dest.is_dir() and any(dest.iterdir()) and not any((dest / name).is_file() for name in _MODELS):
        raise GrowpruneError(f"{dest} is a folder without a model, and is not replaced: give another name")


_MODELS = ("model.safetensors", "config.json", "growprune.json", "model.safetensors.index.json")


def _write_sparse(job: _Job) -> None:
    if job.found.format == "growprune" and job.model is None:
        raise GrowpruneError(f"{job.source} is a sparse file already: give --model to write it anew, or another --to")
    file.save(job.sparse(), job.dest)


def _write_dense(job: _Job) -> None:
    if job.model is None:
        write_dense(job.found.tensors, job.found.aliases, job.dest)
    else:
        to_dense(job.sparse(), job.dest)


def _write_hf(job: _Job) -> None:
    sparse = job.sparse()

    def write(folder: Path) -> None:
        save_pretrained(sparse, folder)
        if job.source.is_dir():
            _copy_others(job.source, folder)

    _replace_folder(job.dest, write)


def _write_onnx(job: _Job) -> None:
    to_onnx(job.sparse(), job.dest, job.example)


def _write_openvino(job: _Job) -> None:
    to_openvino(job.sparse(), job.dest, job.example)


WRITERS: dict[str, Callable[[_Job], None]] = {
    "sparse": _write_sparse,
    "dense": _write_dense,
    "hf": _write_hf,
    "onnx": _write_onnx,
    "openvino": _write_openvino,
}
"""What can be written, by name."""


def bare_sparse_model(found: Imported, where: str) -> SparseModel:
    """What was read, in a model that has names and shapes, and no code; the masks are taken out of `found`.

    Its prunable weights are the sparse matrices, read as (out, in, ...); if there are none, all matrices.
    """
    names = [name for name, tensor in found.tensors.items() if tensor.ndim >= 2 and tensor.is_floating_point()]
    if not names:
        raise GrowpruneError(f"{where} has no matrix that could be sparse: write it with --to dense")
    chosen = [name for name in names if name in found.masks] or names
    include = _globs(chosen, {*found.tensors, *found.aliases} - set(chosen))
    keep_dense = _globs(sorted(set(names) - set(chosen)), [*chosen, *found.aliases])
    if (count := len(include) + len(keep_dense)) > MAX_GLOBS:
        raise GrowpruneError(f"{where} has matrices of {count} kinds of names, more than {MAX_GLOBS}: give --model")
    model = bare_model(found.tensors, found.aliases)
    sparse = SparseModel(
        model,
        sparsity=min(found.sparsity, 1 - 2**-53),
        allocation="global",
        include=include,
        keep_dense=keep_dense,
    )
    first = first_names(model)  # a tensor of several names may come first under another one
    masks = {first[name]: pack(found.masks.pop(name)) for name in [*found.masks]}  # which are large, and held twice
    state = sparse.state_dict()
    sparse.load_state_dict(state | {"masks": state["masks"] | masks})
    return sparse


def _globs(names: Iterable[str], others: Collection[str]) -> list[str]:
    """What matches all the names and none of the others: globs of names that differ in numbers, or the names.

    >>> _globs(["layers.0.fc.weight", "layers.1.fc.weight", "head.1.weight"], {"head.2.weight"})
    ['layers.*.fc.weight', 'head.1.weight']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    found: list[str] = []
    for glob, group in alike.items():
        is_right = all(matches(name, glob) for name in group) and not any(matches(other, glob) for other in others)
        found += [glob] if len(found) <= MAX_GLOBS and is_right else group
    return found


def _notes(found: Imported, source: Path, to: str, model: nn.Module | None) -> tuple[str, ...]:
    notes = list(found.notes)
    if not found.masks:
        notes.append("nothing in it is sparse: no matrix has a mask, or 5 % zeros")
    if model is None and to in ("sparse", "hf") and found.masks:
        notes.append(
            "matrices are read as (out, in, ...): transposed layers, stacked experts, tied weights need --model"
        )
    if to == "hf" and not source.is_dir() and not hasattr(model, "save_pretrained"):
        notes.append("there is no config.json in it: transformers needs that of the model beside it")
    return tuple(notes)


def _replace_folder(dest: Path, write: Callable[[Path], None]) -> None:
    """Write a folder that takes its place when it is whole; what was there before goes last. A link stays one."""
    dest, token = dest.resolve(), secrets.token_hex(4)
    new, old = dest.with_name(f".{dest.name}.{token}.tmp"), dest.with_name(f".{dest.name}.{token}.old")
    try:
        write(new)
        if dest.exists():
            dest.replace(old)
        new.replace(dest)
    finally:
        if old.exists() and not dest.exists():  # interrupted just here
            old.replace(dest)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def _copy_others(source: Path, folder: Path) -> None:
    """The config, the tokenizer and what else lies beside the weights, but what a model has written itself."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    try:
        found = json.loads(config.read_text()) if config.is_file() else {}
    except (RecursionError, ValueError):
        return  # transformers will say what is wrong with it
    if isinstance(found, dict) and any(name in found for name in COMPRESSED):
        config.write_text(json.dumps({k: v for k, v in found.items() if k not in COMPRESSED}, indent=2) + "\n")
