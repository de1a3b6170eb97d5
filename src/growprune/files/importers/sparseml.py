"""SparseML: a `state_dict` of plain names, beside the recipe and, where modifiers were saved too, their masks.

The masks lie in the entry `manager`, under the modifier (and, in a recipe of stages, its stage), by the name
`<parameter>.sparsity_mask`. Without them, zeros are what is left. Everything was saved in float32, counters too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, with_masks, with_zeros

MASK, MANAGER, RECIPE = ".sparsity_mask", "manager", "recipe"
MAX_LEVELS = 4
"""Stage, modifier, kind of mask, name."""
QUANTIZED = ("fake_quant", "activation_post_process", "weight_scale")


def signs(contents: Contents) -> str:
    if "modifiers" in str(contents.beside.get(RECIPE, ""))[:1_000_000]:
        return "a recipe with modifiers"
    return "masks of modifiers" if masks_in(contents) else ""


def masks_in(contents: Contents) -> dict[str, Tensor]:
    """By parameter; of several modifiers, only what lives for all of them."""
    masks: dict[str, Tensor] = {}
    for name, mask in _walk(contents.beside.get(MANAGER), MAX_LEVELS):
        if name.endswith(MASK):
            parameter = name.removesuffix(MASK)
            masks[parameter] = masks[parameter] * mask if parameter in masks else mask
    return masks


def _walk(found: Any, levels: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in found.items() if isinstance(found, Mapping) else ():
        if isinstance(value, Tensor):
            yield str(name), value
        elif levels > 1 and name != "grad_masks":  # which weights of Top-KAST are trained, and not which live
            yield from _walk(value, levels - 1)


def read(contents: Contents) -> Imported:
    if quantized := [name for name in contents.tensors if any(sign in name for sign in QUANTIZED)]:
        raise GrowpruneError(
            f"{contents.where} is quantized ({quantized[0]}), which is not read: save it before quantization begins"
        )
    tensors, masks = dict(contents.tensors), masks_in(contents)
    if unknown := sorted(set(masks) - set(tensors)):
        raise GrowpruneError(f"{contents.where} has a mask of {unknown[0]}, but no such tensor: it is damaged")
    return with_masks(contents, "sparseml", tensors, masks) if masks else with_zeros(contents, "sparseml", tensors)


SPARSEML = Importer("a checkpoint of SparseML", "a recipe with modifiers beside its state_dict", signs, read)
