"""Read pruned checkpoints of other tools as tensors and masks.

A format is recognized by its content. IMPORTERS lists the formats in the order in which they are tried. If a source has
masks, a live weight that happens to be zero stays live. If it has none, zeros are pruned.

Nothing in a file is trusted, and reading it runs no code: pickles are read with `torch.load(weights_only=True)`, and
what that rejects is an error. Tensors are views of the file where possible.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.files import sparse_file
from growprune.files.reader import FORMAT, matching_names, one_line, open_sparse
from growprune.files.weights_file import DENSE, single_file, weights_file
from growprune.masks.bits import pack
from growprune.masks.inspection import LEAST, masks_of_zeros
from growprune.masks.layers import prunable_weights
from growprune.masks.patterns import Pattern, parse_pattern
from growprune.sparse.model import SparseModel

PICKLED, INDEX = "pytorch_model.bin", "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20

STATES = ("state_dict", "model_state_dict", "model", "net", "module")
"""The entries of a checkpoint that may hold the model's tensors. The first one found is used."""

WRAPPINGS = ("module.", "_orig_mod.")
"""The prefixes that DataParallel and torch.compile add to all names."""

SPARE_BYTES = 64 << 20
"""The most bytes by which the overlapping tensors of a checkpoint may exceed its file."""

MAX_DEPTH = 64
"""The most dots in a name. Walking a deeper model would overflow Python's stack."""

Source: TypeAlias = str | os.PathLike[str] | nn.Module | Mapping[str, Any]


@dataclass(frozen=True)
class Imported:
    """Dense tensors by their plain names, and their masks."""

    format: str
    """The name of its importer."""
    tensors: dict[str, Tensor]
    masks: dict[str, Tensor] = field(default_factory=dict)
    """The masks of sparse matrices: tensors with two or more dimensions that are not fully live."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """{other name: first name} of tensors with several names."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as what was not imported."""

    @property
    def num_alive(self) -> int:
        """The number of live weights of the sparse matrices."""
        return sum(int(torch.count_nonzero(mask)) for mask in self.masks.values())

    @property
    def sparsity(self) -> float:
        """The sparsity of the sparse matrices; 0 if there are none."""
        return 1 - self.num_alive / sum(mask.numel() for mask in self.masks.values()) if self.masks else 0.0

    def names_in(self, model: nn.Module, where: str) -> dict[str, str]:
        """Map each tensor of a model to its first name here. Raise unless they are the same, with the same shapes."""
        theirs = {name: name for name in self.tensors} | dict(self.aliases)
        shapes = {name: tuple(self.tensors[first].shape) for name, first in theirs.items()}
        return {ours: theirs[name] for ours, name in matching_names(shapes, model, where).items()}

    def into(self, model: nn.Module, *, pattern: str | Pattern = "unstructured", **settings: Any) -> SparseModel:
        """Fill a model, and return it as a SparseModel with these masks; see `growprune.files.importers.load`.

        The model is checked before it is changed.
        """
        pattern = parse_pattern(pattern)
        names = self.names_in(model, f"the {self.format} source")
        chosen = {name: settings.get(name, ()) for name in ("keep_dense", "include")}
        weights = prunable_weights(model, **chosen)
        if not self.masks:
            warn(f"the {self.format} source has no sparse weights, so all weights are live")
        prunable = {weight.parameter for weight in weights}
        if dense := [name for name, theirs in names.items() if theirs in self.masks and name not in prunable]:
            warn(f"{', '.join(dense[:5])} is sparse in the source, but dense in the model: add it to include")
        masks = {name: self.masks[names[name]] for name in prunable if names[name] in self.masks}
        if masks and not pattern.is_single:  # a block is live if any of its weights is
            as_model = bare_model({name: mask.to(torch.uint8) for name, mask in masks.items()})
            masks = masks_of_zeros(as_model.get_parameter, [w for w in weights if w.parameter in masks], pattern)
        total = sum(math.prod(weight.shape) for weight in weights)
        dead = sum(
            weight.numel - int(torch.count_nonzero(weight.of(masks[weight.parameter])))
            for weight in weights
            if weight.parameter in masks
        )
        if dead == total:
            raise GrowpruneError("all prunable weights of the source are zero, so there is nothing to load")
        sparse = SparseModel(
            model, **{"pattern": pattern, "sparsity": dead / total, "allocation": "global", **settings}
        )
        fill_model(sparse, names, lambda name: self.tensors[names[name]], masks.get)
        return sparse


def read(source: Source) -> Imported:
    """Read the dense tensors of a source under their plain names, and the masks of the sparse ones.

    Args:
        source: a file (safetensors or torch.save), a folder of transformers, a module, or a state dict.

    Examples:
        >>> from torch.nn.utils import prune
        >>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=6)
        >>> found = read(layer)
        >>> found.format, int(found.masks["weight"].sum()), sorted(found.tensors)
        ('torch-prune', 2, ['bias', 'weight'])
    """
    contents = open_contents(source)
    return next(found for importer in IMPORTERS if (found := importer(contents)))


def load(source: Source, model: nn.Module, **settings: Any) -> SparseModel:
    """Fill a model from a source, and return it as a SparseModel with the masks of the source, ready for training.

    Args:
        model: the same model, without the additions of the other tool.
        settings: arguments of SparseModel. By default, sparsity is that of the source and allocation is "global".
    """
    return read(source).into(model, **settings)


def load_weights(sparse: SparseModel, path: str | os.PathLike[str], *, with_masks: bool = False) -> None:
    """Fill a model whose weights are all live from a file that has exactly its tensors.

    Args:
        path: a file, or a folder such as that of a run.
        with_masks: apply the masks of the file; in a dense file, the non-zero weights are live.
    """
    path = weights_file(path)
    found = read(path)
    names = found.names_in(sparse.model, str(path))

    def mask(name: str) -> Tensor | None:
        if not with_masks:
            return None
        return found.tensors[names[name]] != 0 if found.format == "dense" else found.masks.get(names[name])

    fill_model(sparse, names, lambda name: found.tensors[names[name]], mask)


# Formats


def read_growprune(contents: Contents) -> Imported | None:
    if contents.path is None or contents.metadata.get("format") != FORMAT:
        return None
    tensors = sparse_file.read(contents.path)
    with open_sparse(contents.path) as opened:
        masks = {entry.name: opened.mask(entry) for entry in opened.prunable if entry.is_sparse}
        plain = {name: tensor for name, tensor in tensors.items() if name not in opened.aliases}
        return Imported("growprune", plain, masks, opened.aliases, contents.notes)


def read_torch_prune(contents: Contents) -> Imported | None:
    """Read what `weight_orig` and the buffer `weight_mask` store. Masked weights become exactly zero."""
    stored = contents.tensors
    stems = [name.removesuffix("_orig") for name in stored if name.endswith("_orig")]
    pruned = {stem for stem in stems if f"{stem}_mask" in stored and stem not in stored}
    if not pruned:
        return None
    masks: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for full, tensor in stored.items():
        name = full.removesuffix("_orig")
        if full.removesuffix("_mask") in pruned:
            continue
        if name not in pruned:
            tensors[full] = tensor
            continue
        mask = stored[f"{name}_mask"].detach() != 0
        if mask.shape != tensor.shape:
            has = f"{tuple(tensor.shape)} and its mask {tuple(mask.shape)}"
            raise GrowpruneError(
                f"{contents.where} has {name} with shape {has}: it is damaged, download or save it again"
            )
        tensors[name] = torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype))
        if mask.ndim >= 2 and not mask.all():
            masks[name] = mask
    zeros = [name for name in masks_by_zeros(tensors) if name not in pruned]
    notes = [f"{name} has zeros but no mask, so all of it is live" for name in zeros[:3]]
    aliases = {alias: name for alias, name in contents.aliases.items() if name in tensors}
    return Imported("torch-prune", tensors, masks, aliases, (*contents.notes, *notes))


def read_dense(contents: Contents) -> Imported:
    """Read a dense checkpoint, where only zeros show what was pruned."""
    for name, tensor in contents.tensors.items():
        stem = name.removesuffix(".values")
        if stem != name and tensor.dim() == 1 and not {f"{stem}.mask", f"{stem}.gaps"}.isdisjoint(contents.tensors):
            raise GrowpruneError(
                f"{contents.where} has {name} and its mask, like a sparse file of growprune, but lacks its metadata: "
                f"it is damaged, download or save it again"
            )
    tensors = dict(contents.tensors)
    return Imported("dense", tensors, masks_by_zeros(tensors), contents.aliases, contents.notes)


IMPORTERS: tuple[Callable[[Contents], Imported | None], ...] = (read_growprune, read_torch_prune, read_dense)
"""Each returns None for a source of another format. The first that recognizes a source reads it."""


# Files, folders, modules and state dicts


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
        if file.is_file():
            return _of_file(file)
        if not (path / INDEX).is_file():
            raise GrowpruneError(f"{path} has no weights: pass a folder with {DENSE}, {PICKLED} or {INDEX}")
        try:  # large models are in several files, which an index lists
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
    if not path.is_file():
        raise GrowpruneError(f"{path} does not exist: pass a file or a folder with weights")
    return _of_file(path)


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


# Models


def fill_model(
    sparse: SparseModel,
    names: Collection[str],
    tensor: Callable[[str], Tensor],
    mask: Callable[[str], Tensor | None],
) -> None:
    """Fill a new SparseModel, one tensor at a time.

    Args:
        names: the names of the model's tensors.
        tensor: returns the dense tensor for a name.
        mask: returns the mask of a prunable tensor; None if all of it is live.
    """
    for name in names:
        dense = tensor(name)
        weights = [weight for weight in sparse.weights if weight.parameter == name]
        if not weights:
            sparse.restore_some({name: (dense, None)})
            continue
        alive = torch.ones(dense.shape, dtype=torch.bool)
        if (theirs := mask(name)) is not None:
            for weight in weights:  # what the model keeps dense lives, whatever it does in the source
                weight.of(alive).copy_(weight.of(theirs))
        sparse.restore_some({name: (dense[alive], pack(alive))})


def masks_by_zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks of the matrices that are at least 5 % zero. Any model may have a few zeros."""
    masks: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.ndim >= 2 and tensor.is_floating_point() and tensor.element_size() > 1  # not float8
        if is_matrix and int(torch.count_nonzero(tensor)) <= (1 - LEAST) * tensor.numel() and tensor.numel():
            masks[name] = tensor != 0
    return masks


def bare_model(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> nn.Module:
    """Return a module that only holds tensors under their names. It shares their memory.

    >>> [name for name, _ in bare_model({"a.weight": Tensor(2, 2), "a.bias": Tensor(2)}).named_parameters()]
    ['a.weight', 'a.bias']
    """
    root = nn.Module()
    made = {name: nn.Parameter(tensor.detach(), requires_grad=False) for name, tensor in tensors.items()}
    for name, parameter in (made | {alias: made[name] for alias, name in (aliases or {}).items()}).items():
        *path, local = name.split(".")
        if len(path) > MAX_DEPTH:
            raise GrowpruneError(f"the name {name[:60]!r} has more than {MAX_DEPTH} dots, which is not supported")
        module = root
        try:
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(local, parameter)
        except (AttributeError, KeyError, TypeError) as error:
            why = f"a model cannot have a tensor named {name!r} with the others ({error.args[0]})"
            raise GrowpruneError(why) from None
    return root
