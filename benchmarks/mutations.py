"""What damages or forges a file, for fuzz_files.py and the tests: each change takes where it draws from, and bytes."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

ODD: list[Any] = [0, 1, -1, 65_536, 2**31, 2**40, 2**63 - 1, 2**64, 10**30, 0.5, None, True, "", "1x8", "U16", "F32"]
ODD += [[], {}, [1], [[0, 1]], [0] * 70, ["U8", 3], "9" * 50, "../x", "sparse", "float64", 1e308]

Mutate = Callable[[random.Random, bytes], bytes]


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def join(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(draw: random.Random, found: Any, depth: int = 0) -> Any:
    """The same JSON, with something else at one place."""
    if isinstance(found, dict) and found and (depth == 0 or draw.random() < 0.9):
        key = draw.choice(list(found))
        if draw.random() < 0.1:
            return {other: value for other, value in found.items() if other != key}
        if draw.random() < 0.05:
            return {f"{other}x" if other == key else other: value for other, value in found.items()}
        return {**found, key: changed(draw, found[key], depth + 1)}
    if isinstance(found, list) and found and draw.random() < 0.8:
        place = draw.randrange(len(found))
        return [*found[:place], changed(draw, found[place], depth + 1), *found[place + 1 :]]
    if type(found) is int and draw.random() < 0.4:
        return found + draw.choice([-1, 1, 8, 1000])
    return draw.choice(ODD)


def flipped(draw: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for place in draw.choices(range(len(content)), k=draw.choice([1, 2, 8, 64])):
        found[place] ^= 1 << draw.randrange(8)
    return bytes(found)


def cut_off(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def cut_out(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[draw.randrange(start + 1, len(content) + 1) :]


def twice(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content))
    return content[:start] + content[start // 2 :]


def other_length(draw: random.Random, content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    return (draw.choice([0, size - 1, size + 1, 2**31, 2**63, 2**64 - 1])).to_bytes(8, "little") + content[8:]


def other_header(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    names = [name for name in header if name != "__metadata__"]
    one, two = draw.sample(names, 2)
    if draw.random() < 0.7:
        return join(changed(draw, {one: header[one]}) | {n: header[n] for n in header if n != one}, data)
    return join({**header, one: {**header[one], "data_offsets": header[two]["data_offsets"]}}, data)


def other_metadata(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    return join({**header, "__metadata__": changed(draw, header.get("__metadata__") or {"format": "pt"})}, data)


def with_manifest(header: dict[str, Any], manifest: Any) -> dict[str, Any]:
    """With a digest that fits."""
    text = json.dumps(manifest)
    crc32 = str(zlib.crc32(text.encode()))
    return {**header, "__metadata__": {**header["__metadata__"], "manifest": text, "manifest_crc32": crc32}}


def forged_manifest(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    return join(with_manifest(header, changed(draw, json.loads(header["__metadata__"]["manifest"]))), data)


def forged_shape(draw: random.Random, content: bytes) -> bytes:
    """Another shape in manifest and header, where it can fit."""
    header, data = split(content)
    manifest = json.loads(header["__metadata__"]["manifest"])
    name = draw.choice([name for name, about in manifest["tensors"].items() if len(about["shape"]) > 1])
    about, factor = manifest["tensors"][name], draw.choice([2, 8, 2**10, 2**30])
    shape = [about["shape"][0] * factor, *about["shape"][1:]]
    about |= {"shape": shape, "matrices": [[0, draw.choice([shape[0], about["shape"][0]])]]}
    return join(with_manifest(header, manifest), data)


def forged_tensors(draw: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    name = draw.choice([name for name in header if name.endswith((".mask", ".gaps", ".values"))])
    start, end = header[name]["data_offsets"]
    found = bytearray(data)
    for place in draw.choices(range(start, end), k=draw.choice([1, 2, 16])):
        found[place] = draw.choice([0, 1, 127, 128, 254, 255])
    manifest = json.loads(header["__metadata__"]["manifest"])
    key = "crc32" if name.endswith(".values") else "mask_crc32"
    manifest["tensors"][name.rpartition(".")[0]][key] = zlib.crc32(found[start:end])
    return join(with_manifest(header, manifest), bytes(found))


def other_json(draw: random.Random, content: bytes) -> bytes:
    return json.dumps(changed(draw, json.loads(content))).encode()


BYTES: list[Mutate] = [flipped, cut_off, cut_out, twice]
PLAIN: list[Mutate] = [*BYTES, other_length, other_header, other_metadata]
FORGED: list[Mutate] = [forged_manifest, forged_shape, forged_tensors]
JSON: list[Mutate] = [*BYTES, other_json, other_json, other_json]
