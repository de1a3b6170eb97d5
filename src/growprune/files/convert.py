"""Convert weights between formats: growprune, dense safetensors, folders of transformers, ONNX.

Without the model's code, only names and shapes are known: a tensor with two or more dimensions is a matrix. It is
sparse if the source has a mask for it, or if at least 5 % of it is zero.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from torch import nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.disk import replacing
from growprune.files.exporters import export_onnx, write_dense
from growprune.files.importers import Imported, bare_model, read
from growprune.files.pretrained import build_with_example, save_pretrained
from growprune.files.weights_file import weights_file
from growprune.masks.bits import pack
from growprune.masks.layers import first_names
from growprune.sparse.model import SparseModel, named_tensors

FORMATS = ("sparse", "dense", "hf", "onnx")
"""The formats that can be written."""

MAX_ESCAPED = 1000
"""The most names with characters of globs. Each of them is matched against all names."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".index.json", "growprune.json")
"""The endings of files in a folder that are not copied."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: what was written, and from what."""

    source: Path
    dest: Path
    format: str
    """The format of the source."""
    to: str
    source_bytes: int
    dest_bytes: int
    dense_bytes: int
    """The bytes of all tensors when dense."""
    matrices: dict[str, dict[str, Any]]
    """The shape and the number of live weights of each sparse matrix, by name."""
    sparsity: float
    """The sparsity of these matrices."""
    notes: tuple[str, ...]


def convert(
    source: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    to: str | None = None,
    model: nn.Module | None = None,
    example: Any = None,
    sparse: bool = False,
    force: bool = False,
) -> Converted:
    """Write the weights of a source in another format, completely or not at all.

    Args:
        source: a file or folder that growprune or another tool wrote; see `growprune.files.importers.read`.
        to: one of FORMATS; by default chosen by the name of `dest`. A .safetensors is sparse, unless the source is.
        model: the model of the weights, for ONNX, unless the source is a folder of transformers. It also
            defines which weights are prunable.
        example: an input of the model, for ONNX.
        sparse: for ONNX, store only the non-zero weights; see `growprune.export_onnx`.
        force: allow `dest` to be replaced; if it is a link, its target.
    """
    source, dest = Path(source), Path(dest)
    found = read(source)
    endings = {".safetensors": "dense" if found.format == "growprune" else "sparse", ".onnx": "onnx", "": "hf"}
    to = to or ("hf" if dest.is_dir() else endings.get(dest.suffix))
    if to is None:
        raise GrowpruneError(
            f"the name {dest} does not say which format to write: use the ending .safetensors or .onnx, or none "
            f"for a folder, or choose one of {', '.join(FORMATS)}"
        )
    if to not in FORMATS:
        raise GrowpruneError(f"to must be one of {', '.join(FORMATS)}, got {to!r}")
    if sparse and to != "onnx":
        raise GrowpruneError(f"--sparse is for ONNX, but the destination is {to}: use a name that ends with .onnx")
    if to == "onnx" and model is None and (source / "config.json").is_file():
        model, found_example = build_with_example(source)
        example = found_example if example is None else example
    if to == "onnx" and (model is None or example is None):
        raise GrowpruneError(
            "onnx is a graph and needs the model's code: pass --model and --example-shape (1,128:int for integers), or "
            "a --model that returns the model and an example"
        )
    _check_dest(source, dest, to, force)
    notes = list(found.notes)
    if not found.masks:
        notes.append("the source has no sparse weights: no matrix has a mask, or 5 % zeros")
    elif model is None and to in ("sparse", "hf"):
        notes.append(
            "matrices are read as (out, in, ...): transposed layers, stacked experts and tied weights need --model"
        )
    if to == "hf" and not source.is_dir() and not hasattr(model, "save_pretrained"):
        notes.append("the folder has no config.json: add that of the model, transformers needs it")
    before, sparsity = num_bytes(source), found.sparsity
    dense_bytes = sum(tensor.nbytes for tensor in found.tensors.values())
    masks = sorted(found.masks.items())
    matrices = {name: {"shape": [*mask.shape], "alive": int(mask.count_nonzero())} for name, mask in masks}
    dest.parent.mkdir(parents=True, exist_ok=True)
    if to == "sparse" and found.format == "growprune" and model is None:
        with weights_file(source).open("rb") as opened, replacing(dest) as written:  # with its settings
            shutil.copyfileobj(opened, written)
    elif to == "dense":
        write_dense(found.tensors, found.aliases, dest)
    else:
        if model is None:
            filled = bare_sparse_model(found, str(source))
        else:
            for name, tensor in named_tensors(model).items():  # the model gets the dtypes of the weights
                theirs = found.tensors.get(found.aliases.get(name, name))
                if theirs is not None and theirs.dtype != tensor.dtype and tensor.is_floating_point():
                    tensor.data = tensor.data.to(theirs.dtype)
            is_ours = found.format == "growprune"
            filled = file.load(weights_file(source), model) if is_ours else found.into(model)
        if to == "sparse":
            file.save(filled, dest)
        elif to == "hf":
            _write_folder(filled, source, dest)
        else:
            export_onnx(filled, dest, example, sparse=sparse)
    sizes = before, num_bytes(dest), dense_bytes
    return Converted(source, dest, found.format, to, *sizes, matrices, sparsity, tuple(notes))


def num_bytes(path: Path) -> int:
    """Return the bytes of a file (with the weights beside a graph), or of all files in a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    beside = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (beside.stat().st_size if path.suffix == ".onnx" and beside.is_file() else 0)


def _check_dest(source: Path, dest: Path, to: str, force: bool) -> None:
    if dest.exists() and dest.resolve() == source.resolve():
        raise GrowpruneError(f"{dest} is the source itself: use another destination")
    if os.path.lexists(dest) and not force:
        what = os.path.realpath(dest)
        link = f" (a link to {what})" if dest.is_symlink() else ""
        replaced = what if link else "it"
        raise GrowpruneError(f"{dest} already exists{link}: use another name, or --force to replace {replaced}")
    if dest.is_dir() != (to == "hf") and dest.exists():
        now, needs = ("folder", "file") if dest.is_dir() else ("file", "folder")
        raise GrowpruneError(f"{dest} is a {now}, but {to} writes a {needs}: use another name")
    models = ("model.safetensors", "config.json", "growprune.json", "model.safetensors.index.json")
    if dest.is_dir() and any(dest.iterdir()) and not any((dest / name).is_file() for name in models):
        raise GrowpruneError(f"{dest} is a folder without a model, so it is not replaced: use another name")


def bare_sparse_model(found: Imported, where: str) -> SparseModel:
    """Return the imported weights in a bare module without code, and move the masks out of `found`.

    Its prunable weights are the sparse matrices, read as (out, in, ...); if there are none, all matrices.
    """
    floats = {name: tensor for name, tensor in found.tensors.items() if tensor.is_floating_point()}
    names = [name for name, tensor in floats.items() if tensor.ndim >= 2 and tensor.numel()]
    if not names:
        raise GrowpruneError(f"{where} has no matrix that can be sparse: write it with --to dense")
    if (count := sum(escape(name) != name for name in names)) > MAX_ESCAPED:
        raise GrowpruneError(f"{where} has {count} matrices with *, ? or [ in their names: pass --model")
    chosen = [name for name in names if name in found.masks] or names
    include, keep_dense = map(escape, chosen), map(escape, sorted(set(names) - set(chosen)))
    model = bare_model(found.tensors, found.aliases)
    sparsity = min(found.sparsity, 1 - 2**-53)
    sparse = SparseModel(model, sparsity, allocation="global", include=include, keep_dense=keep_dense)
    first = first_names(model)  # a tensor of several names may come first under another one
    masks = {first[name]: pack(found.masks.pop(name)) for name in [*found.masks]}  # which are large, and held twice
    state = sparse.state_dict()
    sparse.load_state_dict(state | {"masks": state["masks"] | masks})
    return sparse


def _write_folder(sparse: SparseModel, source: Path, dest: Path) -> None:
    """Write a folder and move it into place when it is complete. The old one is removed last; a link stays a link."""
    dest, token = dest.resolve(), secrets.token_hex(4)
    new, old = dest.with_name(f".{dest.name}.{token}.tmp"), dest.with_name(f".{dest.name}.{token}.old")
    try:
        save_pretrained(sparse, new)
        if source.is_dir():
            for path in sorted(source.iterdir()):  # the config, the tokenizer and others beside the weights
                if path.is_file() and not path.name.endswith(WEIGHTS) and not (new / path.name).exists():
                    shutil.copyfile(path, new / path.name)
        if dest.exists():
            dest.replace(old)
        new.replace(dest)
    finally:
        if old.exists() and not dest.exists():  # interrupted just here
            old.replace(dest)
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
