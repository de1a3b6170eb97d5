"""Folders of pretrained models, which plain transformers loads exactly and growprune loads sparse.

    config.json, ...        written by the model's own `save_pretrained`, if it has one, as in transformers
    model.safetensors       the dense weights with zeros, for other tools (in several files if large)
    growprune.safetensors   the same model as a sparse file with its masks, for growprune
    growprune.json          the SHA-256 of the dense files, to detect later changes

The sparse file has a second copy of the live weights, not only the masks: transformers may store a model differently
than in memory, and compact storage can be filled from it without a dense copy. transformers is not imported: a model is
recognized by its attributes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from growprune.errors import GrowpruneError, first_line
from growprune.files import sparse_file as file
from growprune.files.disk import write_json
from growprune.files.exporters import to_dense
from growprune.files.reader import FORMAT, open_safetensors
from growprune.files.weights_file import ABOUT, DENSE, SPARSE, digest_of, sparse_file
from growprune.sparse.model import SparseModel, check_sparse_model


def save_pretrained(sparse: SparseModel, folder: str | os.PathLike[str]) -> None:
    """Write a folder that transformers' `from_pretrained` loads dense and `growprune.from_pretrained` loads sparse.

    For a model without its own `save_pretrained`, the dense weights are in `model.safetensors`, which
    `safetensors.torch.load_model` reads. With compact storage, saving needs memory for a dense copy of the model.
    """
    check_sparse_model(sparse, "save_pretrained")
    folder = Path(folder)
    if hasattr(sparse.model, "peft_config"):
        raise GrowpruneError(
            f"{type(sparse.model).__name__} has adapters: merge them first with sparse.model.merge_and_unload()"
        )
    _check_not_sparse(folder, "use another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)  # if this is cut short, the folder is known to be incomplete
    file.save(sparse, folder / SPARSE)
    if callable(own := getattr(sparse.model, "save_pretrained", None)):
        own(folder)
    else:
        to_dense(sparse, folder / DENSE)
    dense = sorted(path for path in folder.glob("*.safetensors") if path.name != SPARSE)
    write_json(folder / ABOUT, {"format": 1, "dense": {path.name: digest_of(path) for path in dense}})


def from_pretrained(
    model: nn.Module | Callable[[], nn.Module], folder: str | os.PathLike[str], *, storage: str = "masked"
) -> SparseModel:
    """Load a folder of `save_pretrained` as the SparseModel that was saved, ready for training.

    Args:
        model: a model to fill; a class of transformers (`AutoModelForCausalLM`, `BertModel`), which is built from the
            folder's config in eval mode, as transformers does; or a function that builds the model. With compact
            storage, a model that is built here never has dense weights.
        storage: see SparseModel. It may differ from that of the saved model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise GrowpruneError(f"{folder} is not a folder: pass one that growprune.save_pretrained wrote")
    _check_not_sparse(folder, f"load it with growprune.load({str(folder / DENSE)!r}, model)")
    if sparse_file(folder) is None:
        raise GrowpruneError(
            f"{folder} was not written by growprune.save_pretrained, or is incomplete: load the model with its own "
            f"from_pretrained, then call growprune.SparseModel.from_zeros(model)"
        )
    if not isinstance(model, nn.Module):
        is_of_transformers = isinstance(model, type) and hasattr(model, "from_pretrained")
        with empty_parameters():
            model = _build_by_config(model, folder) if is_of_transformers else model()
    return file.load(folder / SPARSE, model, storage=storage)


def _check_not_sparse(folder: Path, remedy: str) -> None:
    path = folder / DENSE
    if not path.is_file():
        return
    with open_safetensors(path) as handle:
        if (handle.metadata() or {}).get("format") == FORMAT:
            raise GrowpruneError(
                f"{path} is a sparse file of growprune under the name of transformers' dense weights, and only "
                f"growprune can read it: {remedy}"
            )


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Within this context, new parameters of modules have no memory. Buffers are not affected."""

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return None  # which leaves it as it is
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]  # torch says less than it takes
    try:
        yield
    finally:
        handle.remove()


def _build_by_config(kind: Any, folder: Path) -> nn.Module:
    """Build a class of transformers from a folder's config. An Auto class finds the right class first."""
    configs = getattr(kind, "config_class", None) or importlib.import_module("transformers").AutoConfig
    config = configs.from_pretrained(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(config, "dtype", None) or before)
    try:
        model: Any = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    finally:
        torch.set_default_dtype(before)
    if (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(folder)
    assert isinstance(model, nn.Module)
    return model.eval()


def build_with_example(folder: Path) -> tuple[nn.Module, Any]:
    """Build the class of transformers that a folder's config.json names, without its weights, and an example input."""
    try:
        config = json.loads((folder / "config.json").read_text())
        (name,) = config["architectures"]
        kind = getattr(importlib.import_module("transformers"), name)
        model: Any = _build_by_config(kind, folder)
    except Exception as error:  # whatever transformers raises about a config
        why = first_line(error, 200)
        raise GrowpruneError(
            f"cannot build a model of transformers from {folder / 'config.json'} ({why}): pass --model"
        ) from error
    if model.main_input_name == "input_ids":
        tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, 8))
        example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return model, example | ({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})
    return model, None
