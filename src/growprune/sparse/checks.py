"""Refuse what cannot be made sparse, or does not belong to a sparse model; warn about large layers that stay dense.

Models and optimizers that another library has already wrapped are recognised by their attributes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from growprune.errors import GrowpruneError
from growprune.masks.layers import Weight, adapter_parameters, computed_weights, first_names, is_compact, matching
from growprune.plan import Part
from growprune.sparse.sharded import sharding
from growprune.storage import SparseParameter

LARGE = 0.01
"""The share of a model's parameters from which on one that stays dense is worth a warning."""

INSTEAD = "shard it with sparse.shard(mesh), which is torch's FSDP2 (fully_shard)"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model, as they are stored."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_model(model: nn.Module, *, storage: str | None = None) -> None:
    """Refuse what cannot be made sparse, or already is, or is taken apart in a way that it cannot train in.

    Args:
        storage: how weights will be stored, where FSDP2 may have sharded some already.
    """
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"the model is a {type(model).__name__}, but must be a module of torch")
    may_be_sharded = storage is not None and is_fsdp2(model.modules())
    sharded = sharding().sharded_names(model, storage) if may_be_sharded else ()
    for path, module in model.named_modules():
        check_wrapper(module)
        if is_compact(module):
            raise GrowpruneError(f"{path or 'the model'} is stored compact by another SparseModel: use a fresh model")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and name not in sharded:
            raise GrowpruneError(
                f"{name} is sharded already (it is a DTensor): make the SparseModel of the plain model, and shard it "
                f"after that"
            )
        check_parameter(name, parameter)
        if is_lazy(parameter):
            raise GrowpruneError(f"{name} has no shape yet: run a batch through the model first")


def check_not_taken(parameters: Mapping[str, SparseParameter]) -> None:
    """Raise if another library has taken stored parameters for itself since."""
    for name, parameter in parameters.items():
        check_parameter(name, parameter.module._parameters.get(name.rpartition(".")[2]))


def check_same_layers(model: nn.Module, parameters: Mapping[str, SparseParameter]) -> None:
    """Raise if a model has other layers than when its parameters were stored."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in parameters.items():
        if id(parameter.module._parameters.get(name.rpartition(".")[2])) not in own:
            raise GrowpruneError(
                f"{name} is not the parameter it was when the SparseModel was made: make a new one after changing "
                f"layers"
            )


def check_parts(model: nn.Module, parts: Iterable[Part]) -> None:
    """Raise if parts name what a model has not."""
    known = named_tensors(model)
    for part in parts:
        if not isinstance(part, Part):
            raise GrowpruneError(f"the part is {part!r}, but must be a Part: take one of a Partition of the model")
        if foreign := [name for name in part.tensors if name not in known]:
            raise GrowpruneError(
                f"part {part.name} has {foreign[0]!r}, but the model has names like {next(iter(known))!r}: make "
                f"the partition and the SparseModel of the same model"
            )


def check_settings(saved: Mapping[str, object], mine: Mapping[str, object]) -> None:
    """Refuse the state of a model that was made sparse with other settings, under which edits to come would differ.

    Args:
        saved: those of the state.
    """
    if differing := [name for name, value in mine.items() if saved[name] != value]:
        its, own = (", ".join(f"{name}={given[name]!r}" for name in differing) for given in (saved, mine))
        raise GrowpruneError(
            f"the state is of a SparseModel with {its}, but this one has {own}: make it as that one was, or take its "
            f"weights and masks alone, with growprune.save and growprune.load"
        )


def is_fsdp2(modules: Iterable[Any]) -> bool:
    """Whether `fully_shard` was called for some of a model's modules: it gives them a class with methods of its own."""
    return any(hasattr(type(module), "set_reshard_after_backward") for module in modules)


def check_wrapper(module: Any) -> None:
    homes = [kind.__module__ for kind in type(module).__mro__]
    if "torch.distributed.fsdp.fully_sharded_data_parallel" in homes:
        raise GrowpruneError(f"FSDP1 (FullyShardedDataParallel) flattens weights, and sparse ones are lost: {INSTEAD}")
    if any(home.split(".")[0] == "deepspeed" for home in homes):
        raise GrowpruneError(f"DeepSpeed cannot train a sparse model: {INSTEAD}")


def check_parameter(name: str, parameter: Any) -> None:
    """Raise if the parameter of a sparse model belongs to somebody else since."""
    if getattr(parameter, "_fsdp_flattened", False):
        raise GrowpruneError(f"{name} was flattened by FSDP1 (FullyShardedDataParallel): {INSTEAD}")
    if hasattr(parameter, "ds_id"):
        raise GrowpruneError(f"{name} belongs to DeepSpeed's ZeRO, which cannot train a sparse model: {INSTEAD}")


def check_optimizer(optimizer: Any) -> None:
    if type(optimizer).__module__.split(".")[0] == "deepspeed":
        raise GrowpruneError(f"DeepSpeed's {type(optimizer).__name__} cannot train a sparse model: {INSTEAD}")
    if not hasattr(optimizer, "register_step_pre_hook"):
        what = "an optimizer of torch, such as torch.optim.SGD(model.parameters(), 0.1)"
        raise GrowpruneError(f"attach was given a {type(optimizer).__name__}, but takes {what}")


def unpruned(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> Iterator[str]:
    """Warnings about weights that stay dense: computed from others, or large and of no known kind of layer.

    Args:
        weights: those that may become sparse.
        keep_dense: names or globs of what is meant to stay dense.
    """
    if computed := _computed_and_dense(model, weights, keep_dense):
        yield (
            f"not pruned, since computed from other parameters (as by weight_norm): {_listed(computed)}; remove the "
            f"parametrization first, or name them in keep_dense=[...]"
        )
    if large := _large_and_dense(model, weights, keep_dense):
        yield (
            f"left dense, being the weight of no known kind of layer: {_listed(large)}; name them in include=[...] to "
            f"prune them, or in keep_dense=[...]"
        )


def _computed_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Layers whose weight is computed, unless the parameters it is computed from are pruned or meant to be dense."""
    computed = computed_weights(model)
    named = _matched(keep_dense, [*computed, *itertools.chain.from_iterable(computed.values())])
    known = named | {weight.parameter for weight in weights}
    return [name for name, sources in computed.items() if name not in named and known.isdisjoint(sources)]


def _large_and_dense(model: Any, weights: Sequence[Weight], keep_dense: Sequence[str]) -> list[str]:
    """Matrices with at least 1 % of the model's parameters that are not pruned, and not meant to be dense."""
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
        if hasattr(module, "num_embeddings") or "Norm" in type(module).__name__:
            dense |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return dense


def _matched(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    return set(itertools.chain.from_iterable(matching(patterns, names)))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
