"""Read pruned checkpoints of other tools as tensors and masks.

A format is recognized by its content. IMPORTERS lists them in the order in which they are tried.
Reading runs no code: pickles are read with `torch.load(weights_only=True)`, and what that rejects is an error.
If a source has masks, a live weight that happens to be zero stays live. If it has none, zeros are pruned.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from growprune.files.importers.compressed_tensors import COMPRESSED_TENSORS
from growprune.files.importers.contents import Source, open_contents
from growprune.files.importers.foreign_formats import DENSE, GROWPRUNE, TORCH_PRUNE
from growprune.files.importers.imported import Imported, Importer
from growprune.sparse.model import SparseModel

IMPORTERS: dict[str, Importer] = {
    "growprune": GROWPRUNE,
    "compressed-tensors": COMPRESSED_TENSORS,
    "torch-prune": TORCH_PRUNE,
    "dense": DENSE,
}
"""The importers by name. The first that recognizes a source reads it."""


def read(source: Source) -> Imported:
    """Read the dense tensors of a source under their plain names, and the masks of the sparse ones.

    Args:
        source: a file (safetensors or torch.save), a folder of transformers, a module, or a state dict.

    Examples:
        >>> import torch
        >>> from torch.nn.utils import prune
        >>> layer = prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=6)
        >>> found = read(layer)
        >>> found.format, int(found.masks["weight"].sum()), sorted(found.tensors)
        ('torch-prune', 2, ['bias', 'weight'])
    """
    contents = open_contents(source)
    return next(importer for importer in IMPORTERS.values() if importer.recognizes(contents)).read(contents)


def load(source: Source, model: nn.Module, **settings: Any) -> SparseModel:
    """Fill a model from a source, and return it as a SparseModel with the masks of the source, ready for training.

    Args:
        model: the same model, without the additions of the other tool.
        settings: arguments of SparseModel. By default, sparsity is that of the source and allocation is "global".
    """
    return read(source).into(model, **settings)


__all__ = ["IMPORTERS", "Imported", "Importer", "load", "read"]
