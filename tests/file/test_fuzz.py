"""Damaged and forged files by the hundred: each is refused in one line, or is what it was."""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growprune import file
from growprune.errors import GrowpruneError
from growprune.file.contents import contents, live_tensor
from growprune.sparse import SparseModel

ODD: list[Any] = [0, 1, -1, 65_536, 2**31, 2**63 - 1, 2**64, 10**30, 0.5, None, True, "", "1x8", "U16", "F32", [], {}]
ODD += [[1], [[0, 1]], [0] * 70, ["U8", 3], "9" * 50]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.conv = nn.Conv2d(8, 8, 3)
        self.attention = nn.MultiheadAttention(16, 2)


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_manifest(header: dict[str, Any], manifest: Any) -> dict[str, Any]:
    """With a digest that fits, as somebody who forges a file would make it."""
    text = json.dumps(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**header, "__metadata__": {**header["__metadata__"], "manifest": text, "manifest_sha256": digest}}


def changed_json(draw: random.Random, found: Any, depth: int = 0) -> Any:
    """The same, with something else at one place."""
    if isinstance(found, dict) and found and (depth == 0 or draw.random() < 0.85):
        key = draw.choice(list(found))
        if draw.random() < 0.1:
            return {other: value for other, value in found.items() if other != key}
        return {**found, key: changed_json(draw, found[key], depth + 1)}
    if isinstance(found, list) and found and draw.random() < 0.7:
        place = draw.randrange(len(found))
        return [*found[:place], changed_json(draw, found[place], depth + 1), *found[place + 1 :]]
    if type(found) is int and draw.random() < 0.4:
        return found + draw.choice([-1, 1, 8, 1000])
    return draw.choice(ODD)


def flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for place in draw.sample(range(len(content)), draw.choice([1, 2, 8, 64])):
        changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut_out(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[draw.randrange(start + 1, len(content) + 1) :]


def with_another_header(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    name, other = draw.sample([name for name in header if name != "__metadata__"], 2)
    if draw.random() < 0.5:
        return join({**header, name: changed_json(draw, header[name], 1)}, data)
    return join({**header, name: {**header[name], "data_offsets": header[other]["data_offsets"]}}, data)


def with_another_manifest(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    return join(with_manifest(header, changed_json(draw, json.loads(header["__metadata__"]["manifest"]))), data)


def with_forged_tensors(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    name = draw.choice([name for name in header if name.endswith((".mask", ".gaps", ".values"))])
    start, end = header[name]["data_offsets"]
    forged = bytearray(data)
    for place in draw.choices(range(start, end), k=draw.choice([1, 2, 16])):
        forged[place] = draw.choice([0, 1, 254, 255])
    manifest = json.loads(header["__metadata__"]["manifest"])
    before = "" if name.endswith(".values") else "mask_"
    sums = {"sha256": hashlib.sha256(forged[start:end]).hexdigest(), "crc32": zlib.crc32(forged[start:end])}
    manifest["tensors"][name.rpartition(".")[0]] |= {f"{before}{key}": value for key, value in sums.items()}
    return join(with_manifest(header, manifest), bytes(forged))


DAMAGES = {"flipped": flipped, "cut out": cut_out, "another header": with_another_header}
FORGERIES = {"another manifest": with_another_manifest, "forged tensors": with_forged_tensors}
"""What digests cannot tell: the file is refused, or is another valid file."""

READERS: dict[str, Callable[[Path], Any]] = {
    "read": file.read,
    "load": lambda path: file.load(path, Net()).model.state_dict(),
    "compact": lambda path: file.load(path, Net(), storage="compact").model.state_dict(),
    "mapped": lambda path: file.load(path, Net(), storage="compact", mapped=True).model.state_dict(),
    "manifest": file.manifest,
    "contents": contents,
    "live": lambda path: live_tensor(path, "linear.weight"),
}


def read_by(reader: Callable[[Path], Any], path: Path) -> dict[str, Tensor] | None:
    """What a reader makes of a file; None if it refuses it, which it must do in one short line."""
    try:
        found: dict[str, Tensor] = reader(path)
    except GrowpruneError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return None
    return found


@pytest.mark.parametrize("kind", [*DAMAGES, *FORGERIES])
@pytest.mark.parametrize(("sparsity", "pattern"), [(0.97, "unstructured"), (0.5, "unstructured"), (0.75, "1x8")])
@pytest.mark.filterwarnings("ignore")  # a forged setting may well be worth a warning
def test_a_damaged_or_forged_file_is_refused_or_read(sparsity: float, pattern: str, kind: str, tmp_path: Path) -> None:
    path, draw = tmp_path / "model", random.Random(f"{sparsity} {pattern} {kind}")
    sparse = SparseModel(Net(), sparsity=sparsity, pattern=pattern)
    sparse.prune()
    file.save(sparse, path)
    content, expected = path.read_bytes(), sparse.model.state_dict()
    for _ in range(20):
        path.write_bytes((DAMAGES | FORGERIES)[kind](draw, content))
        for name, reader in READERS.items():
            found = read_by(reader, path)
            if found is not None and kind in DAMAGES and name in ("read", "load", "compact"):
                assert all(torch.equal(found[tensor], value) for tensor, value in expected.items())
