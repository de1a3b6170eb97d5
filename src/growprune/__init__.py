"""growprune: train sparse neural networks by scheduled grow-and-prune.

Names are loaded when first used, so that `import growprune` is instant and `growprune --help` needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from growprune import methods as methods
    from growprune import tasks as tasks
    from growprune.deployment.api import deploy as deploy
    from growprune.deployment.api import load_deployed as load_deployed
    from growprune.deployment.deployed import Deployed as Deployed
    from growprune.engine import resume as resume
    from growprune.engine import train as train
    from growprune.engine.recipe import LRSchedule as LRSchedule
    from growprune.engine.recipe import OptimizerConfig as OptimizerConfig
    from growprune.engine.recipe import Recipe as Recipe
    from growprune.errors import GrowpruneError as GrowpruneError
    from growprune.files.exporters import export_onnx as export_onnx
    from growprune.files.onnx_import import from_onnx as from_onnx
    from growprune.files.pretrained import from_pretrained as from_pretrained
    from growprune.files.pretrained import save_pretrained as save_pretrained
    from growprune.files.sharded_checkpoints import load_sharded_checkpoint as load_sharded_checkpoint
    from growprune.files.sharded_checkpoints import newest_sharded_checkpoint as newest_sharded_checkpoint
    from growprune.files.sharded_checkpoints import save_sharded_checkpoint as save_sharded_checkpoint
    from growprune.files.sparse_file import load as load
    from growprune.files.sparse_file import manifest as manifest
    from growprune.files.sparse_file import read as read
    from growprune.files.sparse_file import save as save
    from growprune.masks.layers import register_layer as register_layer
    from growprune.masks.partition import Partition as Partition
    from growprune.masks.partition import balanced as balanced
    from growprune.masks.partition import contiguous as contiguous
    from growprune.masks.partition import named as named
    from growprune.masks.partition import per_layer as per_layer
    from growprune.plan import Branch as Branch
    from growprune.plan import By as By
    from growprune.plan import Fork as Fork
    from growprune.plan import Part as Part
    from growprune.plan import Phase as Phase
    from growprune.plan import Plan as Plan
    from growprune.plan import Spread as Spread
    from growprune.plan import grow as grow
    from growprune.plan import method as method
    from growprune.plan import prune as prune
    from growprune.sparse.cursor import Cursor as Cursor
    from growprune.sparse.flops import count_flops as count_flops
    from growprune.sparse.init import sparse_init as sparse_init
    from growprune.sparse.model import SparseModel as SparseModel
    from growprune.sparse.pretrained_pruning import prune_pretrained as prune_pretrained
    from growprune.sparse.text import perplexity as perplexity
    from growprune.sparse.text import text_batches as text_batches
    from growprune.training.sparsifier import Sparsifier as Sparsifier
    from growprune.training.sparsifier import sparsify as sparsify

_HOMES = {
    "growprune": ("methods", "tasks"),
    "growprune.sparse.cursor": ("Cursor",),
    "growprune.deployment.api": ("deploy", "load_deployed"),
    "growprune.deployment.deployed": ("Deployed",),
    "growprune.engine": ("resume", "train"),
    "growprune.errors": ("GrowpruneError",),
    "growprune.engine.recipe": ("LRSchedule", "OptimizerConfig", "Recipe"),
    "growprune.files.exporters": ("export_onnx",),
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

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return importlib.metadata.version("growprune")
        except importlib.metadata.PackageNotFoundError:
            return "not installed"
    if name not in _HOME:
        raise AttributeError(f"module 'growprune' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return importlib.import_module(f"growprune.{name}") if _HOME[name] == __name__ else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
