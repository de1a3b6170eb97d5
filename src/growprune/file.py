"""The sparse file: a model whose dead weights take no room. This page is its specification.

A sparse file is a safetensors file: 8 bytes that give the length of the header (little-endian), the header (JSON),
and the bytes of the tensors, each row-major and little-endian. Reading it runs no code.

**Tensors.** Every parameter and persistent buffer of the model is in the file once, by its first name in the
model's `state_dict`. A parameter that is prunable and not all alive is *sparse*, and is stored as two tensors; every
other is *dense*, and is stored under its plain name.

    <name>.values   1-D, the parameter's dtype: its live values, in row-major order of the parameter
    <name>.mask     1-D, uint8: which weights live, one bit each (or one a block, see below). Bit i is bit i % 8 of
                    byte i // 8, counted from the lowest. What is left over in the last byte is 0

**Bits.** A prunable parameter is one or more *matrices*, each a range [start, stop) of its dimension 0; attention's
`in_proj_weight` has three, for q, k and v. The bits of the matrices follow one another without a gap. What lies in
no matrix is alive and has no bits. The bits of one matrix are, by the file's pattern:

    free, N:M       one a weight, in row-major order
    AxB             one a block. If the parameter is `transposed`, its dimensions 0 and 1 are swapped. Then dimension 1
                    goes last, and all but dimension 0 are flattened, so that (out, in, kh, kw) becomes
                    (out, kh * kw * in); a 1-D parameter becomes a single column. Blocks of A rows x B columns are laid
                    on from the top left, overhanging at the right and the bottom, and are read row by row of blocks.
                    A and B are at most 1024

**Metadata.** Three strings in the header's `__metadata__`: `format` is "growprune", `version` is "1", and `manifest`
is a JSON object:

    sparsity, allocation, pattern, scope, keep_dense, also, seed    the arguments of the SparseModel
    num_edits   how many edits it has had, so that random edits to come draw new numbers
    aliases     {other name: first name} of tensors that the model holds under several names
    tensors     {name: about}. All have `shape` and `dtype` (as safetensors writes it: F32, BF16, ...). Those that
                are prunable also have
                    matrices     [[start, stop], ...] in order
                    transposed   whether the parameter is stored (in, out, ...)
                    target       the sparsity aimed at; null where layers are ranked together
                    nnz          how many weights live (one that lives may be 0, as grown weights are at first)
                    mask_sha256  of the bytes of <name>.mask (which a dense one would have), in hexadecimal
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from growprune.layers import Weight
from growprune.patterns import Block, Free, Pattern, parse_pattern, walk_groups, write_groups
from growprune.plan import Part, prune
from growprune.selection import num_kept
from growprune.snapshot import pack, unpack
from growprune.sparse import SparseModel

FORMAT, VERSION = "growprune", "1"

SETTINGS = ("sparsity", "allocation", "pattern", "scope", "keep_dense", "also", "seed")

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

MAX_BLOCK_SIDE, MAX_DIMENSIONS = 1024, 64
MAX_EXPANSION = 1000
"""How many times its own size a file may become when it is read without a model that says how large it should be."""


def save(sparse: SparseModel, path: str | os.PathLike[str]) -> None:
    """Write a sparse model to a file, all at once: if that fails, an old file of that name is as it was.

    What was written is read back and counted before it takes the name.
    """
    path = Path(path)
    _warn_of_unsaved(sparse.model)
    entries, tensors = _stored(sparse)
    metadata = {"format": FORMAT, "version": VERSION, "manifest": json.dumps(_describe(sparse, entries))}
    with replacing(path) as file:
        _write_safetensors(file, tensors, metadata)
        file.flush()
        with _open(Path(file.name)) as written:
            alive = {entry.name: int(written.mask(entry).sum()) for entry in written.prunable}
        assert alive == {entry.name: entry.nnz for entry in entries if entry.weights}, f"{path} was written wrongly"


def load(path: str | os.PathLike[str], model: nn.Module, *, storage: str = "masked") -> SparseModel:
    """Fill a model from a sparse file, and return it as the SparseModel that was saved, ready to train on.

    The file is checked in full before the model is touched.

    Args:
        storage: how sparse weights are held, see SparseModel; whatever it was when the file was saved.
    """
    with _open(path) as file:
        _match_model(file, model)
        masks = {entry.name: pack(file.mask(entry)) for entry in file.prunable}
        sparse = file.make_sparse(model, storage)
        sparse.restore({name: (file.values(entry), masks.get(name)) for name, entry in file.entries.items()})
        sparse.load_state_dict({**sparse.state_dict(), "num_edits": file.num_edits})
    return sparse


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a sparse file, dense, by name: what `state_dict` of the model that was saved would give."""
    with _open(path) as file:
        size, limit = sum(entry.num_bytes for entry in file.entries.values()), MAX_EXPANSION * file.num_bytes
        if size > limit:
            file.refuse(f"would take {size} bytes, over {MAX_EXPANSION} times its size", "load it into its model")
        tensors = {entry.name: file.dense(entry) for entry in file.entries.values()}
        return tensors | {alias: tensors[first] for alias, first in file.aliases.items()}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a sparse file (see this module's docstring), and the totals. Reads the header only."""
    with _open(path) as file:
        totals = {
            "elements": sum(entry.numel for entry in file.entries.values()),
            "prunable": sum(entry.numel - entry.num_outside for entry in file.prunable),
            "prunable_nnz": sum(entry.nnz - entry.num_outside for entry in file.prunable),
            "bytes": file.num_bytes,
            "dense_bytes": sum(entry.num_bytes for entry in file.entries.values()),
        }
        return {"format": FORMAT, "version": VERSION, **file.manifest, "totals": totals}


def targets(sparse: SparseModel) -> dict[str, float | None]:
    """The sparsity that each weight aims at; None where weights are ranked together and only their total has one."""
    found: dict[str, float | None] = dict.fromkeys((weight.name for weight in sparse.weights), None)
    whole = Part("all", tuple(weight.parameter for weight in sparse.weights))
    for pool in sparse.pools(prune(whole, to=sparse.sparsity)):
        if len(pool.weights) == 1:
            groups = sparse.pattern.num_groups(pool.weights[0])
            is_as_asked = pool.kept == num_kept(sparse.sparsity, groups)
            found[pool.weights[0].name] = sparse.sparsity if is_as_asked else 1 - pool.kept / groups
    return found


def num_bytes(sparse: SparseModel) -> tuple[int, int]:
    """How many bytes the model's tensors take as they are, and in a sparse file, its header not counted."""
    dense = in_file = 0
    for name, tensor in _tensors(sparse.model)[0].items():
        weights = [weight for weight in sparse.weights if weight.parameter == name]
        size = alive = tensor.numel()
        if weights:
            mask = sparse.mask(name)
            size, alive = mask.numel(), int(torch.count_nonzero(mask))
        dense += size * tensor.element_size()
        in_file += alive * tensor.element_size() + (_num_mask_bytes(weights, sparse.pattern) if alive < size else 0)
    return dense, in_file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` at once, and only if the block ends well and it is safely on disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}; make room or choose another folder"
        raise OSError(error.errno, f"{what} (an old file of that name is as it was)") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone if all went well, and was never there on a read-only disk
            temporary.unlink()
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a renaming in a folder last through a power cut, where the system can open folders."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# From a model to tensors and entries


@dataclass(frozen=True)
class _Entry:
    """A tensor of the model, as the manifest knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    weights: tuple[Weight, ...] = ()
    """The matrices of a prunable parameter, in order."""
    target: float | None = None
    nnz: int = 0
    mask_sha256: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_outside(self) -> int:
        """How many elements lie in no matrix, and so always live."""
        return self.numel - sum(weight.numel for weight in self.weights)

    @property
    def is_sparse(self) -> bool:
        return bool(self.weights) and self.nnz < self.numel

    def to_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"shape": list(self.shape), "dtype": DTYPES[self.dtype]}
        if self.weights:
            about["matrices"] = [list(weight.rows or (0, self.shape[0])) for weight in self.weights]
            about["transposed"] = self.weights[0].transposed
            about |= {"target": self.target, "nnz": self.nnz, "mask_sha256": self.mask_sha256}
        return about


def _stored(sparse: SparseModel) -> tuple[list[_Entry], dict[str, Tensor]]:
    """What a model's file says and holds. Tensors that are not prunable are not copied."""
    aims = targets(sparse)
    entries: list[_Entry] = []
    stored: dict[str, Tensor] = {}
    for name, tensor in _tensors(sparse.model)[0].items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which a file cannot hold: convert it to another dtype")
        weights = tuple(weight for weight in sparse.weights if weight.parameter == name)
        if not weights:
            entries.append(_Entry(name, tuple(tensor.shape), tensor.dtype))
            stored[name] = tensor
            continue
        mask = sparse.mask(name)
        values = _live_values(sparse, name, tensor)
        packed = _pack_mask(mask, weights, sparse.pattern, name)
        aim = [aims[weight.name] for weight in weights]
        target = None if None in aim else sum(a for a in aim if a is not None) / len(aim)
        shape, nnz = tuple(mask.shape), values.numel()
        entries.append(_Entry(name, shape, tensor.dtype, weights, target, nnz, _sha256(packed)))
        if entries[-1].is_sparse:
            stored |= {f"{name}.values": values, f"{name}.mask": packed}
        else:
            stored[name] = values.view(shape)
    return entries, stored


def _describe(sparse: SparseModel, entries: Sequence[_Entry]) -> dict[str, Any]:
    """The manifest."""
    return {
        "sparsity": sparse.sparsity,
        "allocation": sparse.allocation,
        "pattern": sparse.pattern.name,
        "scope": sparse.scope.value,
        "keep_dense": list(sparse.keep_dense),
        "also": list(sparse.also),
        "seed": sparse.seed,
        "num_edits": sparse.state_dict()["num_edits"],
        "aliases": _tensors(sparse.model)[1],
        "tensors": {entry.name: entry.to_dict() for entry in entries},
    }


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by their first names, and which other names mean the same tensors."""
    passing = set()
    for path, module in model.named_modules(remove_duplicate=False):
        passing |= {f"{path}.{local}" if path else local for local in module._non_persistent_buffers_set}
    buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n not in passing]
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first[id(tensor)]
    return tensors, aliases


def _warn_of_unsaved(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            what = f"the extra state of {path or 'the model'} ({type(module).__name__})"
            warnings.warn(f"{what} is not saved: a sparse file holds parameters and buffers only", stacklevel=3)


def _live_values(sparse: SparseModel, name: str, parameter: Tensor) -> Tensor:
    """The live values, in row-major order, whatever the storage; its parameter must hold nothing else."""
    values, _ = sparse.snapshot(Part(name, (name,)))[name]
    if torch.count_nonzero(values) != torch.count_nonzero(parameter):
        raise ValueError(f"{name} is not zero everywhere its mask says it is pruned: call enforce() before saving")
    return values


def _bit_pattern(pattern: Pattern) -> Pattern:
    """What a bit stands for: only blocks have fewer bits than weights."""
    if not isinstance(pattern, Block):
        return Free()
    if max(pattern.height, pattern.width) > MAX_BLOCK_SIDE:
        raise ValueError(f"pattern is {pattern.name}, but blocks in a file have sides of at most {MAX_BLOCK_SIDE}")
    return pattern


def _num_bits(weights: Sequence[Weight], pattern: Pattern) -> int:
    return sum(_bit_pattern(pattern).num_groups(weight) for weight in weights)


def _num_mask_bytes(weights: Sequence[Weight], pattern: Pattern) -> int:
    return -(-_num_bits(weights, pattern) // 8)


def _pack_mask(mask: Tensor, weights: Sequence[Weight], pattern: Pattern, name: str) -> Tensor:
    bits_of = _bit_pattern(pattern)
    walks = (walk_groups(bits_of, weight.of(mask), weight) for weight in weights)
    none = torch.zeros(0, dtype=torch.bool)
    packed = pack(torch.cat([none, *(groups.cpu() for walk in walks for groups in walk)]))
    if not torch.equal(_unpack_mask(packed, tuple(mask.shape), weights, pattern), mask.cpu()):
        raise ValueError(f"the mask of {name} does not keep to pattern {pattern.name}: prune it before saving")
    return packed


def _unpack_mask(packed: Tensor, shape: tuple[int, ...], weights: Sequence[Weight], pattern: Pattern) -> Tensor:
    bits_of = _bit_pattern(pattern)
    bits = unpack(packed, (_num_bits(weights, pattern),))
    mask = torch.ones(shape, dtype=torch.bool)
    for weight in weights:
        view, size = weight.of(mask), bits_of.num_groups(weight)
        write_groups(bits_of, view, weight, _cut_like(walk_groups(bits_of, view, weight), bits[:size]))
        bits = bits[size:]
    return mask


def _cut_like(walk: Iterator[Tensor], flat: Tensor) -> Iterator[Tensor]:
    """A flat tensor, cut like a walk."""
    start = 0
    for chunk in walk:
        yield flat[start : start + chunk.numel()]
        start += chunk.numel()


def _sha256(packed: Tensor) -> str:
    return hashlib.sha256(packed.numpy().tobytes()).hexdigest()


def _write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The safetensors format. Its own `save_file` does not tell why it failed, nor lets us sync what it wrote."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# From a file to tensors


class _File:
    """An open sparse file. Its header has been checked: whatever it says agrees with the tensors it holds."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size
        self._handle = handle
        self.manifest = self._read_manifest(handle.metadata() or {})
        try:
            self.pattern = parse_pattern(self.manifest["pattern"])
            self.num_edits = _whole(self.manifest["num_edits"])
            self.entries = {name: _parse(name, about) for name, about in self.manifest["tensors"].items()}
            self.aliases = {str(alias): str(name) for alias, name in self.manifest["aliases"].items()}
            _bit_pattern(self.pattern)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            self.refuse(f"has a manifest that makes no sense ({type(error).__name__}: {error})")
        self._check_header()

    @property
    def prunable(self) -> list[_Entry]:
        return [entry for entry in self.entries.values() if entry.weights]

    def mask(self, entry: _Entry) -> Tensor:
        """Which weights live. The bits must agree with the manifest and with the number of values."""
        if not entry.is_sparse:
            return torch.ones(entry.shape, dtype=torch.bool)
        packed = self._handle.get_tensor(f"{entry.name}.mask")
        used = _num_bits(entry.weights, self.pattern) % 8
        if used and int(packed[-1]) >> used:
            self.refuse(f"has a mask of {entry.name} with bits set behind its end")
        if _sha256(packed) != entry.mask_sha256:
            self.refuse(f"has a mask of {entry.name} whose SHA-256 is not the one in the manifest")
        mask = _unpack_mask(packed, entry.shape, entry.weights, self.pattern)
        if (alive := int(torch.count_nonzero(mask))) != entry.nnz:
            self.refuse(f"has a mask of {entry.name} with {alive} alive, but {entry.nnz} values")
        return mask

    def values(self, entry: _Entry) -> Tensor:
        """The tensor; of a prunable parameter, the live values in row-major order. It is a view of the file."""
        tensor = self._handle.get_tensor(f"{entry.name}.values" if entry.is_sparse else entry.name)
        assert isinstance(tensor, Tensor)
        return tensor.view(-1) if entry.weights else tensor

    def dense(self, entry: _Entry) -> Tensor:
        if not entry.is_sparse:
            return self.values(entry).view(entry.shape).clone()
        return torch.zeros(entry.shape, dtype=entry.dtype).masked_scatter_(self.mask(entry), self.values(entry))

    def make_sparse(self, model: nn.Module, storage: str) -> SparseModel:
        try:
            sparse = SparseModel(model, storage=storage, **{name: self.manifest[name] for name in SETTINGS})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} does not fit the model: {error}") from error
        for name in dict.fromkeys([*(w.parameter for w in sparse.weights), *(e.name for e in self.prunable)]):
            mine = [(w.rows, w.transposed) for w in sparse.weights if w.parameter == name]
            if mine != [(w.rows, w.transposed) for w in self.entries[name].weights]:
                self.refuse(f"prunes {name} otherwise than the model allows", "build the model that was saved")
        return sparse

    def refuse(self, why: str, what_to_do: str = "it is damaged, fetch or save it again") -> NoReturn:
        raise ValueError(f"{self.path} {why}: {what_to_do}")

    def _read_manifest(self, metadata: Mapping[str, str]) -> dict[str, Any]:
        if metadata.get("format") != FORMAT:
            self.refuse("is not a growprune file", "load plain safetensors with safetensors.torch.load_file")
        if metadata.get("version") != VERSION:
            version = metadata.get("version")
            self.refuse(f"has version {version!r} of the format, this growprune reads {VERSION!r}", "update growprune")
        try:
            found = json.loads(metadata["manifest"])
        except (KeyError, RecursionError, ValueError):
            found = None
        return found if isinstance(found, dict) else self.refuse("has no manifest that can be read")

    def _check_header(self) -> None:
        """Whether there are just the tensors that the manifest promises, with its dtypes and shapes."""
        expected: dict[str, tuple[str, list[int]]] = {}
        for entry in self.entries.values():
            dtype = DTYPES[entry.dtype]
            if entry.is_sparse:
                expected[f"{entry.name}.values"] = dtype, [entry.nnz]
                expected[f"{entry.name}.mask"] = "U8", [_num_mask_bytes(entry.weights, self.pattern)]
            else:
                expected[entry.name] = dtype, list(entry.shape)
        for name in sorted(expected.keys() ^ set(self._handle.keys())):
            self.refuse(f"lacks tensor {name}" if name in expected else f"has tensor {name}, which its manifest lacks")
        for name, (dtype, shape) in expected.items():
            held = self._handle.get_slice(name)
            if (held.get_dtype(), held.get_shape()) != (dtype, shape):
                has = f"{held.get_dtype()} {held.get_shape()}"
                self.refuse(f"has tensor {name} as {has}, but its manifest asks for {dtype} {shape}")
        for alias, name in self.aliases.items():
            if alias in self.entries or name not in self.entries:
                self.refuse(f"calls {name} also {alias}, which cannot be")


@contextlib.contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[_File]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: give the path of a file that growprune saved")
    try:
        handle = safe_open(path, framework="pt")
    except SafetensorError as error:
        reason = str(error).rpartition(": ")[2]
        raise ValueError(
            f"{path} is not a safetensors file, or not all of it ({reason}): fetch or save it again"
        ) from None
    with handle:
        yield _File(path, handle)


def _parse(name: str, about: Mapping[str, Any]) -> _Entry:
    """An entry from the manifest. Nothing in it is trusted."""
    dtypes = {text: dtype for dtype, text in DTYPES.items()}
    if len(about["shape"]) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has more than {MAX_DIMENSIONS} dimensions")
    shape = tuple(_whole(length) for length in about["shape"])
    _whole(math.prod(shape))
    entry = _Entry(name, shape, dtypes[about["dtype"]])
    if "matrices" not in about:
        return entry
    weights: list[Weight] = []
    end = 0
    for start, stop in about["matrices"]:
        if not end <= _whole(start) < _whole(stop) <= shape[0] or (about["transposed"] and len(shape) < 2):
            raise ValueError(f"the matrices of {name} do not fit its shape")
        rows = None if (start, stop) == (0, shape[0]) else (start, stop)
        weights.append(Weight(name, name, (stop - start, *shape[1:]), rows, about["transposed"] is True))
        end = stop
    nnz, digest = _whole(about["nnz"]), str(about["mask_sha256"])
    return _Entry(name, shape, entry.dtype, tuple(weights), nnz=nnz, mask_sha256=digest)


def _whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
        raise ValueError(f"{str(number)[:20]} is not a size")
    return number


def _match_model(file: _File, model: nn.Module) -> None:
    """Refuse a model whose tensors are not those of the file in name, shape and dtype."""
    tensors, aliases = _tensors(model)
    build = "build the model that was saved"
    held, needed = {**file.entries, **file.aliases}, {**tensors, **aliases}
    for name in sorted(held.keys() ^ needed.keys()):
        file.refuse(
            f"lacks {name}, which the model has" if name in needed else f"has {name}, which the model lacks", build
        )
    for alias, name in sorted(aliases.items() ^ file.aliases.items()):
        where = "model" if alias in aliases else "file"
        file.refuse(f"does not fit the model: {alias} and {name} are one tensor in the {where} only", build)
    for name, tensor in tensors.items():
        entry = file.entries[name]
        if entry.shape != tuple(tensor.shape):
            file.refuse(f"has {name} with shape {entry.shape}, but the model with {tuple(tensor.shape)}", build)
        if entry.dtype != tensor.dtype:
            file.refuse(
                f"has {name} as {entry.dtype}, but the model as {tensor.dtype}", f"call model.to({entry.dtype}) first"
            )
        if tensor.is_meta:
            file.refuse(f"cannot fill {name}, which is on the meta device", 'call model.to_empty(device="cpu") first')
