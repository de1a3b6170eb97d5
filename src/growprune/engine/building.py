"""The device of a run, its versions and hardware, and its model: sparse from the start if the plan begins so."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import growprune
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.files.importers import load_weights
from growprune.plan import By, Plan, prune
from growprune.sparse.init import dense_init, sparse_init
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import seed_all
from growprune.tasks.task import map_tensors

SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")


def choose_device(name: str) -> torch.device:
    """The device of a recipe, set up for deterministic results."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise GrowpruneError(f"device is {name!r}, but torch finds no CUDA device. Use device=cpu or device=auto")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        if device.index is not None:  # streams, events and graphs use the current device
            if device.index >= (count := torch.cuda.device_count()):
                raise GrowpruneError(
                    f"device must be one of cuda:0 to cuda:{count - 1} on this machine, got '{device}'"
                )
            torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return device


def move(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple, list or dict of tensors, to another device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a result depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    of_source = commit()
    is_known = of_source and not of_source.endswith("-dirty")
    return {
        "growprune": growprune.__version__,
        "commit": of_source,
        **({} if is_known else {"source": source_digest()}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The git commit of growprune's source, marked if there are local changes. Empty for an installed package."""
    package = Path(__file__).parents[1]
    root = package.parents[1]
    if not (root / ".git").exists() or package != root / "src" / "growprune":
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10, env=plain).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # without git, or not ours to look at
        return ""


def source_digest() -> str:
    """A digest of growprune's own source, for a tree that no commit tells."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix in SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the GPU if the run used one, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def build(recipe: Recipe, device: torch.device, per_epoch: int) -> tuple[SparseModel, Plan, bool]:
    """Build the model and its plan. Also return True if the first edit of the plan is already done.

    If the task can initialise its model module by module, the model is built that way for every storage, so that the
    bits are the same. With compact storage, only one layer is then dense at a time.
    """
    task = recipe.task
    seed_all(recipe.seed, "model")
    model = recipe.shapes()  # if the task does not initialise modules, it has its weights
    resolved = recipe.resolve(model, per_epoch)
    plan = resolved.plan
    recipe.optimizer.build(model)  # on trial: if it cannot be built, better to hear of it before there is a folder
    edits = plan.schedule[0].phase.edits if plan.schedule else ()
    if task.initialises_modules:
        at_random = (prune(plan.partition.whole, to=recipe.sparsity, by=By.RANDOM),)
        if recipe.storage == "compact" and not recipe.weights and edits == at_random and recipe.sparsity > 0:
            sparse = sparse_init(task.build_model, initialise=task.initialise, **resolved.sparse_settings())
            sparse.model.to(device)
            return sparse, plan, True
        model = dense_init(task.build_model, initialise=task.initialise)
    if not recipe.weights:
        return resolved.make_sparse(model.to(device)), plan, False
    sparse = resolved.make_sparse(model)  # before it goes to its device
    load_weights(sparse, recipe.weights, with_masks=any(edit.by is By.AS_IS for edit in edits))
    sparse.model.to(device)
    return sparse, plan, False


def shard(sparse: SparseModel, recipe: Recipe, mesh: Mesh, device: torch.device) -> None:
    """Shard a model over the replicas of this process group, if the recipe asks for it and there are several."""
    if recipe.shard == "none" or mesh.data_group is None:
        return
    for name, module in sparse.model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):  # whose statistics cannot be shared
            raise GrowpruneError(
                f"shard='fsdp' does not support BatchNorm, but {name} is one. Use replicas instead (shard='none')"
            )
    from torch.distributed.device_mesh import DeviceMesh  # FSDP2 takes a second to load

    with mesh.waiting("sharding the model"):
        sparse.shard(DeviceMesh.from_group(mesh.data_group, device.type))
