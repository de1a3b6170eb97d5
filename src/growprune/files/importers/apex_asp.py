"""apex ASP: `weight`, pruned in place, beside the buffer `__weight_mma_mask`.

With `allow_recompute_mask`, what was pruned is kept in `__weight_mma_pruned_p`, which is not taken over.
"""

from __future__ import annotations

import re

from growprune.errors import GrowpruneError
from growprune.files.importers.contents import Contents
from growprune.files.importers.imported import Imported, Importer, with_masks

MASK = re.compile(r"(.*\.)?__([^.]+)_mma_mask")
PRUNED = re.compile(r"(.*\.)?__([^.]+)_mma_pruned_p")


def masks_in(contents: Contents) -> dict[str, str]:
    """By the name of a mask, that of its weight."""
    found = {name: MASK.fullmatch(name) for name in contents.tensors}
    return {name: f"{match[1] or ''}{match[2]}" for name, match in found.items() if match}


def signs(contents: Contents) -> str:
    return next(iter(masks_in(contents)), "")


def read(contents: Contents) -> Imported:
    masks = masks_in(contents)
    for name, weight in masks.items():
        if weight not in contents.tensors:
            raise GrowpruneError(f"{contents.where} has {name}, but no {weight}: it is damaged, fetch or save it again")
    tensors = {n: t for n, t in contents.tensors.items() if n not in masks and not PRUNED.fullmatch(n)}
    return with_masks(contents, "apex-asp", tensors, {weight: contents.tensors[n] for n, weight in masks.items()})


APEX_ASP = Importer("a checkpoint of apex ASP", "masks named __weight_mma_mask", signs, read)
