"""Export sparse models to dense safetensors, with exact zeros, and what exports to ONNX share (onnx_export.py).

Files are written completely or not at all.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files.disk import replacing, sync
from growprune.files.manifest import DTYPES
from growprune.files.writer import write_safetensors
from growprune.masks.layers import is_compact, tensors_of
from growprune.sparse.model import SparseModel


def to_dense(model: SparseModel | nn.Module, path: str | os.PathLike[str]) -> None:
    """Write dense safetensors under the plain names, as `safetensors.torch.load_model` reads them."""
    with plain(model) as module:
        state = module.state_dict()
        names, aliases = tensors_of(module)
        write_dense({name: state[name].detach() for name in names}, aliases, Path(path))


def write_dense(tensors: Mapping[str, Tensor], aliases: Mapping[str, str], path: Path) -> None:
    """Write tensors as safetensors. Other names of a tensor go to the metadata, as safetensors itself does it."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise GrowpruneError(f"{name} has dtype {tensor.dtype}, which cannot be written here: convert it first")
    with replacing(path) as file:
        write_safetensors(file, dict(sorted(tensors.items())), {"format": "pt", **aliases})


@contextlib.contextmanager
def plain(model: SparseModel | nn.Module) -> Iterator[nn.Module]:
    """Yield the model with plain layers in eval mode, and restore it at the end. A compact model is copied."""
    module = model.model if isinstance(model, SparseModel) else model
    if isinstance(model, SparseModel) and model.storage == "compact":
        module = copy.deepcopy(model).to_dense_()
    elif any(map(is_compact, module.modules())):
        raise GrowpruneError("the model has storage='compact': pass its SparseModel instead")
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield module
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Silence loggers, and the warnings of exporters about themselves and Python code in the model."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


@contextlib.contextmanager
def to_be_moved(path: Path) -> Iterator[Path]:
    """Yield a folder beside a path. Its files are moved into place when all are written, the path itself last."""
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir(parents=True)
    try:
        yield folder
        for written in sorted(folder.iterdir(), key=lambda file: file.name == path.name):
            written.replace(path.with_name(written.name))
        sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
