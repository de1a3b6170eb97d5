"""Models and optimizers that another library has taken apart already, and what to do instead. Read by attributes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from growprune.errors import GrowpruneError

INSTEAD = "shard it with sparse.shard(mesh), which is torch's FSDP2 (fully_shard)"


def check_not_wrapped(modules: Iterable[Any], parameters: Mapping[str, Any], sharded: Container[str] = ()) -> None:
    """Raise if a model of which a SparseModel is to be made is taken apart in a way that it cannot train in.

    Args:
        sharded: the names of parameters that FSDP2 has sharded, where that is no hindrance.
    """
    for module in modules:
        check_wrapper(module)
    for name, parameter in parameters.items():
        if hasattr(parameter, "device_mesh") and name not in sharded:
            raise GrowpruneError(
                f"{name} is sharded already (it is a DTensor): make the SparseModel of the plain model, and shard it "
                f"after that"
            )
        check_parameter(name, parameter)


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
