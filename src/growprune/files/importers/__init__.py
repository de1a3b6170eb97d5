"""Read pruned checkpoints of other tools as tensors and masks.

A format is recognized by its content. IMPORTERS lists them in the order in which they are tried.
Reading runs no code: pickles are read with `torch.load(weights_only=True)`, and what that rejects is an error.
If a source has masks, a live weight that happens to be zero stays live. If it has none, zeros are pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from growprune.files.importers.compressed_tensors import read_compressed_tensors
from growprune.files.importers.contents import Contents, Source, open_contents
from growprune.files.importers.foreign_formats import read_dense, read_growprune, read_torch_prune
from growprune.files.importers.imported import Imported
from growprune.sparse.model import SparseModel

IMPORTERS: tuple[Callable[[Contents], Imported | None], ...] = (
    read_growprune,
    read_compressed_tensors,
    read_torch_prune,
    read_dense,
)
"""Each returns None for a source of another format. The first that recognizes a source reads it."""


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
    return next(found for importer in IMPORTERS if (found := importer(contents)) is not None)


def load(source: Source, model: nn.Module, **settings: Any) -> SparseModel:
    """Fill a model from a source, and return it as a SparseModel with the masks of the source, ready for training.

    Args:
        model: the same model, without the additions of the other tool.
        settings: arguments of SparseModel. By default, sparsity is that of the source and allocation is "global".
    """
    return read(source).into(model, **settings)


__all__ = ["IMPORTERS", "Imported", "load", "read"]
