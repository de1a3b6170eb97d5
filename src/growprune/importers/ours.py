"""Our own sparse files, so that everything that reads an import reads them too."""

from __future__ import annotations

from pathlib import Path

from growprune.file import MAX_EXPANSION
from growprune.file.reader import open_sparse
from growprune.file.versions import FORMAT
from growprune.importers.contents import Contents
from growprune.importers.imported import Imported, Importer


def signs(contents: Contents) -> str:
    return "a manifest of growprune" if contents.path and contents.metadata.get("format") == FORMAT else ""


def read(contents: Contents) -> Imported:
    with open_sparse(contents.path or Path()) as file:
        size, limit = sum(entry.num_bytes for entry in file.entries.values()), MAX_EXPANSION * file.num_bytes
        if size > limit:
            file.refuse(f"would take {size} bytes, over {MAX_EXPANSION} times its size", "load it into its model")
        masks = {entry.name: file.mask(entry) for entry in file.prunable if entry.is_sparse}
        tensors = {entry.name: file.dense(entry) for entry in file.entries.values()}
        return Imported("growprune", tensors, masks, file.aliases, contents.notes)


GROWPRUNE = Importer("a sparse file of growprune", "the metadata of growprune", signs, read)
