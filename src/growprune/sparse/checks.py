"""What cannot be made sparse, and what does not belong to a sparse model: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from growprune.errors import GrowpruneError
from growprune.masks.layers import is_compact
from growprune.plan import Part
from growprune.sparse.sharded import sharding
from growprune.sparse.snapshot import named_tensors
from growprune.sparse.wrapped import check_not_wrapped, check_parameter, is_fsdp2
from growprune.storage import SparseParameter


def check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise GrowpruneError(f"the model is a {type(model).__name__}, but must be a module of torch")


def check_model(model: nn.Module, *, sharded: Container[str] = ()) -> None:
    """Refuse what cannot be made sparse, or already is.

    Args:
        sharded: the names of parameters that FSDP2 has sharded, where that is no hindrance.
    """
    check_module(model)
    check_not_wrapped(model.modules(), dict(model.named_parameters()), sharded)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise GrowpruneError(f"{name} has no shape yet: run a batch through the model first")
    for path, module in model.named_modules():
        if is_compact(module):
            raise GrowpruneError(f"{path or 'the model'} is stored compact by another SparseModel: use a fresh model")


def sharded_in(model: nn.Module, storage: str) -> Container[str]:
    """What FSDP2 has sharded of a model; refused if it cannot be trained that way."""
    if not is_fsdp2(model.modules()):
        return ()
    names: Container[str] = sharding().sharded_names(model, storage)
    return names


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
        saved: those of the state; states of before say nothing of them.
    """
    if differing := [name for name, value in mine.items() if saved.get(name, value) != value]:
        its, own = (", ".join(f"{name}={given[name]!r}" for name in differing) for given in (saved, mine))
        raise GrowpruneError(
            f"the state is of a SparseModel with {its}, but this one has {own}: make it as that one was, or take its "
            f"weights and masks alone, with restore(that.snapshot())"
        )
