"""Checkpoints of Lightning, with its ModelPruning: masks as torch.nn.utils.prune has them, or zeros alone.

The callback makes pruning permanent in what it saves, unless told otherwise; what is left then are zeros.
"""

from __future__ import annotations

from growprune.files.importers import torch_prune
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, with_zeros

VERSION = "pytorch-lightning_version"


def signs(contents: Contents) -> str:
    return f"{VERSION} {contents.beside[VERSION]}" if VERSION in contents.beside else ""


def read(contents: Contents) -> Imported:
    if torch_prune.pruned_names(contents):
        return torch_prune.read_as(contents, "lightning")
    return with_zeros(contents, "lightning", dict(contents.tensors))


LIGHTNING = Importer("a checkpoint of Lightning", f"the entry {VERSION}", signs, read)
