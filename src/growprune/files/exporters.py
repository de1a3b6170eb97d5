"""Export sparse models to OpenVINO and dense safetensors, with exact zeros; onnx_export.py: to ONNX.

The exports are as large and as fast as the dense model. Files are written completely or not at all.
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
from typing import Any

from torch import Tensor, nn

from growprune.errors import GrowpruneError, need
from growprune.files.disk import meant, replacing, sync
from growprune.files.manifest import DTYPES
from growprune.files.writer import write_safetensors
from growprune.masks.layers import is_compact, tensors_of
from growprune.sparse.model import SparseModel


def to_openvino(model: SparseModel | nn.Module, path: str | os.PathLike[str], example: Any) -> None:
    """Write OpenVINO's IR: the graph to PATH, which ends with .xml, and the weights to a .bin file beside it.

    Args:
        example: an input of the model, or a tuple of them.
    """
    if Path(path).suffix != ".xml":
        raise GrowpruneError(f"the path of OpenVINO's IR must end with .xml, got {path}")
    path = meant(Path(path))
    openvino = need("openvino", "openvino", "growprune needs the package openvino to write OpenVINO's IR")
    with plain(model) as module, to_be_moved(path) as folder, quiet():
        example = example[0] if isinstance(example, tuple) and len(example) == 1 else example
        converted = openvino.convert_model(module, example_input=example)
        openvino.save_model(converted, folder / path.name, compress_to_fp16=False)


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
def quiet(logger: str = "") -> Iterator[None]:
    """Silence a logger, and the warnings of exporters about themselves and Python code in the model."""
    logged = logging.getLogger(logger or __name__)
    level = logged.level
    logged.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logged.setLevel(level)


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
