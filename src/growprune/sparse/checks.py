"""Refuse models that cannot be made sparse, and warn about large layers that stay dense.

Models that another library has already wrapped are recognised by their attributes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight, adapter_parameters, computed_weights, first_names, is_norm, matching
from growprune.storage.compact_layers import LAYOUTS

LARGE = 0.01
"""The least share of the model's parameters at which a dense parameter is worth a warning."""

INSTEAD = "shard it with sparse.shard(mesh), which is torch's FSDP2 (fully_shard)"


def is_fsdp2(modules: Iterable[Any]) -> bool:
    """True if `fully_shard` was called on any of the modules. It changes their class."""
    return any([hasattr(kind, "set_reshard_after_backward") for kind in {type(module) for module in modules}])


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
        homes = {home for kind in type(module).__mro__ for home in (kind.__module__, kind.__module__.split(".")[0])}
        if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
            raise GrowpruneError(f"FSDP1 (FullyShardedDataParallel) flattens weights and loses sparse ones: {INSTEAD}")
        if "deepspeed" in homes:
            raise GrowpruneError(f"DeepSpeed cannot train a sparse model: {INSTEAD}")
        if vars(module).get(LAYOUTS):  # also while all weights are live
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


def check_parameter(name: str, parameter: Any) -> None:
    """Raise if FSDP1 or DeepSpeed has taken over a parameter."""
    if getattr(parameter, "_fsdp_flattened", False):
        raise GrowpruneError(f"{name} was flattened by FSDP1 (FullyShardedDataParallel): {INSTEAD}")
    if hasattr(parameter, "ds_id"):
        raise GrowpruneError(f"{name} belongs to DeepSpeed's ZeRO, which cannot train a sparse model: {INSTEAD}")


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
