"""The versions of the format, and how the manifest of each is read: in the words of the newest, whatever its own are.

The format itself is specified in `growprune.files.sparse_file`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from growprune.errors import GrowpruneError

FORMAT = "growprune"


def write_metadata(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The strings in the header that say what the file is, in the oldest version that can say it."""
    text = _to_json(manifest)
    version = "3" if _has_gaps(manifest) else "2"
    return {"format": FORMAT, "version": version, "manifest": text, "manifest_sha256": _digest(text)}


def _to_json(manifest: Mapping[str, Any]) -> str:
    for name, value in manifest.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise GrowpruneError(
                f"{name} is {repr(value)[:60]}, which a file cannot hold ({error}): make the SparseModel with plain "
                f"Python numbers and texts"
            ) from error
    return json.dumps(manifest)


def _read_version_1(metadata: Mapping[str, str]) -> dict[str, Any]:
    manifest = _parse(metadata["manifest"])
    manifest["include"] = manifest.pop("also")
    if manifest["pattern"] == "free":
        manifest["pattern"] = "unstructured"
    for about in manifest["tensors"].values():
        about["sha256"] = None
    return manifest


def _read_version_2(metadata: Mapping[str, str]) -> dict[str, Any]:
    manifest = _checked(metadata)
    if _has_gaps(manifest):
        raise GrowpruneError("it has gaps, which version 2 has not")
    return manifest


def _read_version_3(metadata: Mapping[str, str]) -> dict[str, Any]:
    manifest = _checked(metadata)
    if not _has_gaps(manifest):
        raise GrowpruneError("it has no gaps, as version 3 has")  # so that a changed version never goes unseen
    return manifest


def _checked(metadata: Mapping[str, str]) -> dict[str, Any]:
    if _digest(metadata["manifest"]) != metadata["manifest_sha256"]:
        raise GrowpruneError("its SHA-256 is not the one beside it")
    return _parse(metadata["manifest"])


def _has_gaps(manifest: Mapping[str, Any]) -> bool:
    return any("gaps" in about for about in manifest["tensors"].values())


VERSIONS: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "1": _read_version_1,
    "2": _read_version_2,
    "3": _read_version_3,
}
"""How to read the manifest from the metadata, by version. What is invalid raises whatever it raises."""


def _parse(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise GrowpruneError("it is not an object")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
