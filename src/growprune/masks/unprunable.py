"""Messages that say why a model, or one of its parameters, cannot be pruned. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any


def why_nothing(model: Any, holders: Collection[str]) -> str:
    """Say why none of a model's layers can be pruned: they are of unknown kinds, or in keep_dense.

    Args:
        holders: the paths of the modules whose weights could be pruned if they were not in keep_dense.
    """
    kinds = {p: type(m).__name__ for p, m in model.named_modules() if [*m.parameters(recurse=False)]}
    known = dict.fromkeys(kind for path, kind in kinds.items() if path in holders)
    others = dict.fromkeys(kind for kind in kinds.values() if kind not in known)
    if not known:
        has = f"none of its layers ({few(others)}) can be" if others else "it has no parameters that can be"
        return f"{has} pruned; name parameters in include=[...], or add your layer class with register_layer"
    rest = f", and {few(others)} cannot be pruned" if others else ""
    return f"the weights of {few(known)} are all in keep_dense{rest}; remove some, or name parameters in include=[...]"


def not_prunable(module: Any, local: str) -> str:
    """Say why a parameter cannot be sparse and what to do; empty if it can."""
    if getattr(module, "sparse", False) is True and hasattr(module, "num_embeddings"):
        return "of an embedding with sparse=True, whose gradients cannot be masked: create it with sparse=False"
    is_by_parametrization = any(type(child).__name__ == "_WeightNorm" for _, child in module.named_children())
    stem, _, letter = local.rpartition("_")
    is_by_hook = letter == "v" and f"{stem}_g" in dict(module.named_parameters(recurse=False))
    if (is_by_parametrization and local == "original1") or is_by_hook:
        return "which weight_norm divides by its norm, 0 for a row without live weights: remove the weight_norm first"
    return ""


def few(names: Iterable[str]) -> str:
    """Join the first five names for a message."""
    names = list(names)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
