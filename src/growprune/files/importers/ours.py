"""Our own sparse files, so that everything that reads an import reads them too."""

from __future__ import annotations

from pathlib import Path

from growprune.files import sparse_file as file
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer
from growprune.files.reader import open_sparse
from growprune.files.versions import FORMAT


def signs(contents: Contents) -> str:
    return "a manifest of growprune" if contents.path and contents.metadata.get("format") == FORMAT else ""


def read(contents: Contents) -> Imported:
    path = contents.path or Path()
    tensors = file.read(path)
    with open_sparse(path) as opened:
        masks = {entry.name: opened.mask(entry) for entry in opened.prunable if entry.is_sparse}
        plain = {name: tensor for name, tensor in tensors.items() if name not in opened.aliases}
        return Imported("growprune", plain, masks, opened.aliases, contents.notes)


GROWPRUNE = Importer("a sparse file of growprune", "the metadata of growprune", signs, read)
