"""Builds the model of a run: sparse from the start if the plan begins with a random mask, or with trained weights. Then
shards it if asked."""

from __future__ import annotations

import torch

from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.files.filling import load_weights
from growprune.files.weights_file import digest_of, weights_file
from growprune.plan import Action, By, Edit, Phase, Plan, walk
from growprune.sparse.init import dense_init, sparse_init
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import seed_all


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
    if task.initialises_modules:
        if recipe.storage == "compact" and not recipe.weights and _begins_at_random(plan, recipe.sparsity):
            sparse = sparse_init(task.build_model, initialise=task.initialise, **resolved.sparse_settings())
            sparse.model.to(device)
            return sparse, plan, True
        model = dense_init(task.build_model, initialise=task.initialise)
    if not recipe.weights:
        return resolved.make_sparse(model.to(device)), plan, False
    sparse = resolved.make_sparse(model)  # before it goes to its device
    first = next(walk(plan), None)
    is_as_is = first is not None and any(edit.by is By.AS_IS for edit in first.phase.edits)
    load_weights(sparse, recipe.weights, with_masks=is_as_is)
    sparse.model.to(device)
    return sparse, plan, False


def _begins_at_random(plan: Plan, sparsity: float) -> bool:
    """True if the only edit of the first phase is a random mask of the whole model at its sparsity."""
    first = next(iter(plan), None)
    if not isinstance(first, Phase) or len(first.edits) != 1:
        return False
    return first.edits[0] == Edit(Action.PRUNE, plan.partition.whole, By.RANDOM, sparsity) and sparsity > 0


def shard(sparse: SparseModel, recipe: Recipe, mesh: Mesh, device: torch.device) -> None:
    """Shard a model over the replicas of this process group, if the recipe asks for it and there are several."""
    if recipe.shard == "none" or mesh.data_group is None:
        return
    check_shardable(sparse.model)
    from torch.distributed.device_mesh import DeviceMesh  # FSDP2 takes a second to load

    with mesh.waiting("sharding the model"):
        sparse.shard(DeviceMesh.from_group(mesh.data_group, device.type))


def check_shardable(model: torch.nn.Module) -> None:
    """Raise if a model has BatchNorm layers, whose statistics a sharded recipe cannot share."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise GrowpruneError(
                f"shard='fsdp' does not support BatchNorm, but {name} is one. Use replicas instead (shard='none')"
            )


def about_weights(recipe: Recipe) -> dict[str, str] | None:
    """Name and digest of the weights file that a run starts from."""
    if not recipe.weights:
        return None
    file = weights_file(recipe.weights)
    return {"file": file.name, "sha256": digest_of(file)}
