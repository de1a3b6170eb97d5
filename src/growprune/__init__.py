"""growprune: train sparse neural networks by scheduled grow-and-prune.

Names are loaded when first used, so that `import growprune` is instant and `growprune --help` needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growprune import methods, tasks
    from growprune.deployment.api import deploy, load_deployed
    from growprune.deployment.deployed import Deployed
    from growprune.engine import resume, train
    from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
    from growprune.errors import GrowpruneError
    from growprune.files.onnx_export import export_onnx
    from growprune.files.onnx_import import from_onnx
    from growprune.files.pretrained import from_pretrained, save_pretrained
    from growprune.files.sharded_checkpoints import (
        load_sharded_checkpoint,
        newest_sharded_checkpoint,
        save_sharded_checkpoint,
    )
    from growprune.files.sparse_file import load, manifest, read, save
    from growprune.masks.layers import register_layer
    from growprune.masks.partition import Partition, balanced, contiguous, named, per_layer
    from growprune.plan import Branch, By, Fork, Part, Phase, Plan, Spread, grow, method, prune
    from growprune.sparse.cursor import Cursor
    from growprune.sparse.flops import count_flops
    from growprune.sparse.init import sparse_init
    from growprune.sparse.model import SparseModel
    from growprune.sparse.pretrained_pruning import prune_pretrained
    from growprune.sparse.text import perplexity, text_batches
    from growprune.training.sparsifier import Sparsifier, sparsify

_HOMES = {
    "growprune": ("methods", "tasks"),
    "growprune.sparse.cursor": ("Cursor",),
    "growprune.deployment.api": ("deploy", "load_deployed"),
    "growprune.deployment.deployed": ("Deployed",),
    "growprune.engine": ("resume", "train"),
    "growprune.errors": ("GrowpruneError",),
    "growprune.engine.recipe": ("LRSchedule", "OptimizerConfig", "Recipe"),
    "growprune.files.onnx_export": ("export_onnx",),
    "growprune.files.onnx_import": ("from_onnx",),
    "growprune.files.sparse_file": ("load", "manifest", "read", "save"),
    "growprune.sparse.flops": ("count_flops",),
    "growprune.sparse.init": ("sparse_init",),
    "growprune.sparse.text": ("perplexity", "text_batches"),
    "growprune.masks.layers": ("register_layer",),
    "growprune.masks.partition": ("Partition", "balanced", "contiguous", "named", "per_layer"),
    "growprune.plan": ("Branch", "By", "Fork", "Part", "Phase", "Plan", "Spread", "grow", "method", "prune"),
    "growprune.files.pretrained": ("from_pretrained", "save_pretrained"),
    "growprune.files.sharded_checkpoints": (
        "load_sharded_checkpoint",
        "newest_sharded_checkpoint",
        "save_sharded_checkpoint",
    ),
    "growprune.sparse.model": ("SparseModel",),
    "growprune.sparse.pretrained_pruning": ("prune_pretrained",),
    "growprune.training.sparsifier": ("Sparsifier", "sparsify"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Branch",
    "By",
    "Cursor",
    "Deployed",
    "Fork",
    "GrowpruneError",
    "LRSchedule",
    "OptimizerConfig",
    "Part",
    "Partition",
    "Phase",
    "Plan",
    "Recipe",
    "SparseModel",
    "Sparsifier",
    "Spread",
    "balanced",
    "contiguous",
    "count_flops",
    "deploy",
    "export_onnx",
    "from_onnx",
    "from_pretrained",
    "grow",
    "load",
    "load_deployed",
    "load_sharded_checkpoint",
    "manifest",
    "method",
    "methods",
    "named",
    "newest_sharded_checkpoint",
    "per_layer",
    "perplexity",
    "prune",
    "prune_pretrained",
    "read",
    "register_layer",
    "resume",
    "save",
    "save_pretrained",
    "save_sharded_checkpoint",
    "sparse_init",
    "sparsify",
    "tasks",
    "text_batches",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'growprune' has no attribute {name!r}")
    home = _HOME[name]
    return (
        importlib.import_module(f"{home}.{name}") if home == __name__ else getattr(importlib.import_module(home), name)
    )


def _version() -> str:
    try:
        return importlib.metadata.version("growprune")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def __dir__() -> list[str]:
    return __all__
