"""Refuse what cannot be made sparse, or does not belong to a sparse model; warn about large layers that stay dense.

Models and optimizers that another library has already wrapped are recognised by their attributes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from growprune.errors import MAX_VALUE, GrowpruneError, shorten
from growprune.masks.layers import Weight, adapter_parameters, computed_weights, first_names, is_norm, matching
from growprune.plan import Part, Plan, declaration_of
from growprune.plan.settings import as_float, check_state
from growprune.storage import SparseParameter
from growprune.storage.compact_modules import layouts_of

if TYPE_CHECKING:
    from growprune.sparse.model import SparseModel

LARGE = 0.01
"""The least share of the model's parameters at which a dense parameter is worth a warning."""

INSTEAD = "shard it with sparse.shard(mesh), which is torch's FSDP2 (fully_shard)"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model, as they are stored."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_model(model: nn.Module, *, storage: str | None = None) -> None:
    """Raise if a model cannot be made sparse, is already wrapped, or is sharded in an unsupported way.

    Args:
        storage: how weights will be stored, if FSDP2 may have sharded some already.
    """
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    sharded: Collection[str] = ()
    if storage is not None and is_fsdp2(model.modules()):
        from growprune import sharding  # FSDP2 takes a second to load

        sharded = sharding.sharded_names(model, storage)
    for path, module in model.named_modules():
        check_wrapper(module)
        if layouts_of(module):  # also while all weights are live
            raise GrowpruneError(
                f"{path or 'the model'} already belongs to another SparseModel (storage='compact'): call its "
                f"to_dense_() first, or use a new model"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and name not in sharded:
            raise GrowpruneError(
                f"{name} is already sharded (it is a DTensor): create the SparseModel from the plain model, then shard "
                f"it"
            )
        check_parameter(name, parameter)
        if is_lazy(parameter):
            raise GrowpruneError(f"{name} has no shape yet: run a batch through the model first")


def check_not_taken(parameters: Mapping[str, SparseParameter]) -> None:
    """Raise if another library has replaced or flattened stored parameters since."""
    for name, parameter in parameters.items():
        check_parameter(name, parameter.module._parameters.get(name.rpartition(".")[2]))


def check_same_layers(model: nn.Module, parameters: Mapping[str, SparseParameter]) -> None:
    """Raise if layers of the model were replaced since its parameters were stored."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in parameters.items():
        if id(parameter.module._parameters.get(name.rpartition(".")[2])) not in own:
            raise GrowpruneError(
                f"{name} was replaced after the SparseModel was created: create a new SparseModel after changing layers"
            )


def check_parts(model: nn.Module, parts: Iterable[Part]) -> None:
    """Raise if a part names a tensor that the model does not have."""
    known = named_tensors(model)
    for part in parts:
        if not isinstance(part, Part):
            raise GrowpruneError(f"part must be a Part of a Partition of the model, got {part!r}")
        if foreign := [name for name in part.tensors if name not in known]:
            raise GrowpruneError(
                f"part {part.name} has {foreign[0]!r}, but the model has names like {next(iter(known))!r}: create "
                f"the partition and the SparseModel from the same model"
            )


def check_plan(own: SparseModel, plan: Plan) -> None:
    """Raise if a plan was made for another sparsity, allocation or keep_dense than the model."""
    target, method = plan.options.get("sparsity"), plan.method.__name__
    if target is not None and not math.isclose(as_float(target), own.target_sparsity, abs_tol=1e-9):
        raise GrowpruneError(
            f"{method} has sparsity={target}, but the SparseModel has {own.target_sparsity}: use the same for both"
        )
    meant = declaration_of(plan.method).allocation
    if meant != own.allocation and not own.is_allocation_given:
        raise GrowpruneError(
            f"{method} is designed for allocation={meant!r}, but the SparseModel has the default, {own.allocation!r}: "
            f"use SparseModel(..., allocation={meant!r}), or pass {own.allocation!r} explicitly to keep it"
        )
    sizes = getattr(plan.partition, "sizes", ())
    prunable = sum(weight.numel for weight in own.weights)
    if sizes and sum(sizes) != prunable:
        raise GrowpruneError(
            f"the partition has {sum(sizes):,} prunable weights, but the SparseModel has {prunable:,}: use the same "
            f"keep_dense and include for both"
        )


def check_settings(saved: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Raise if a state was saved with other settings, because later edits would then differ.

    Args:
        saved: the settings in the state.
    """
    check_state(saved, *mine)
    if differing := [name for name, value in mine.items() if saved[name] != value]:
        its, own = (
            ", ".join(f"{name}={shorten(repr(given[name]), MAX_VALUE)}" for name in differing)
            for given in (saved, mine)
        )
        raise GrowpruneError(
            f"the state was saved with {its}, but this SparseModel has {own}: use the same settings, or load only "
            f"weights and masks, with growprune.save and growprune.load"
        )


def is_fsdp2(modules: Iterable[Any]) -> bool:
    """True if `fully_shard` was called on any of the modules. It changes their class."""
    return any(hasattr(type(module), "set_reshard_after_backward") for module in modules)


def check_wrapper(module: Any) -> None:
    homes = [kind.__module__ for kind in type(module).__mro__]
    if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
        raise GrowpruneError(f"FSDP1 (FullyShardedDataParallel) flattens weights and loses sparse ones: {INSTEAD}")
    if "deepspeed" in [home.split(".")[0] for home in homes]:
        raise GrowpruneError(f"DeepSpeed cannot train a sparse model: {INSTEAD}")


def check_parameter(name: str, parameter: Any) -> None:
    """Raise if FSDP1 or DeepSpeed has taken over a parameter."""
    if getattr(parameter, "_fsdp_flattened", False):
        raise GrowpruneError(f"{name} was flattened by FSDP1 (FullyShardedDataParallel): {INSTEAD}")
    if hasattr(parameter, "ds_id"):
        raise GrowpruneError(f"{name} belongs to DeepSpeed's ZeRO, which cannot train a sparse model: {INSTEAD}")


def check_optimizer(optimizer: Any) -> None:
    """Raise unless this is a torch optimizer that can train sparse weights."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise GrowpruneError(
            "LBFGS cannot train a sparse model, because its state does not have the shape of the weights: use SGD or "
            "Adam"
        )
    if type(optimizer).__module__.split(".")[0] == "deepspeed":
        raise GrowpruneError(f"DeepSpeed's {type(optimizer).__name__} cannot train a sparse model: {INSTEAD}")
    if not hasattr(optimizer, "register_step_pre_hook"):
        what = "a torch optimizer, such as torch.optim.SGD(model.parameters(), 0.1)"
        raise GrowpruneError(f"optimizer must be {what}, got a {type(optimizer).__name__}")


def unpruned(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> Iterator[str]:
    """Yield warnings about large layers that will not be pruned, and about layers with computed weights.

    Args:
        weights: the weights that may become sparse.
        keep_dense: names or globs of what the user keeps dense.
    """
    if computed := _computed_and_dense(model, weights, keep_dense):
        yield (
            f"these weights are computed from other parameters (as by weight_norm) and will not be pruned: "
            f"{_listed(computed)}. Remove the parametrization first, or add them to keep_dense=[...]"
        )
    if large := _large_and_dense(model, weights, keep_dense):
        yield (
            f"these large parameters belong to no known kind of layer and will not be pruned: {_listed(large)}. Add "
            f"them to include=[...] to prune them, or to keep_dense=[...]"
        )


def _computed_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Return the layers with a computed weight, unless its parameters are pruned or in keep_dense."""
    computed = computed_weights(model)
    named = _matched(keep_dense, [*computed, *itertools.chain.from_iterable(computed.values())])
    known = named | {weight.parameter for weight in weights}
    return [name for name, sources in computed.items() if name not in named and known.isdisjoint(sources)]


def _large_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Return matrices with at least 1 % of the model's parameters that are neither pruned nor in keep_dense."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    least = LARGE * sum(map(math.prod, shapes.values()))
    known = {weight.parameter for weight in weights}
    known |= {source for sources in computed_weights(model).values() for source in sources}
    first = first_names(model)
    known |= {first[name] for name in _matched(keep_dense, first)}
    dense = _meant_to_be_dense(model)
    return [
        f"{name} ({'x'.join(map(str, shapes[name]))})"
        for name, parameter in model.named_parameters()
        if len(shapes[name]) >= 2
        and shapes[name][0] > 1  # what is added to every example, such as positions, begins with a 1
        and math.prod(shapes[name]) >= least
        and parameter.is_floating_point()
        and name not in known
        and id(parameter) not in dense
        and not any(word in name.lower() for word in ("embed", "bias"))
    ]


def _meant_to_be_dense(model: Any) -> set[int]:
    """The parameters of embeddings, norms and adapters."""
    dense = adapter_parameters(model)
    for module in model.modules():
        if hasattr(module, "num_embeddings") or is_norm(module):
            dense |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return dense


def _matched(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    return set(itertools.chain.from_iterable(matching(patterns, names)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
