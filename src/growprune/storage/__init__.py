"""How sparse parameters are stored while they train: one interface, `SparseParameter`, and one file for each way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.bits import pack, unpack
from growprune.masks.patterns import Pattern
from growprune.storage.adapters import check_adapters, forget_masks, keep_masks
from growprune.storage.compact import Compact
from growprune.storage.masked import Masked


class SparseParameter(Protocol):
    """One parameter of a model and the mask of its live weights."""

    module: nn.Module
    """Whose parameter it is."""

    record: Callable[[Tensor], None] | None
    """If set: called once for each backward pass with the dense gradient of the weight, before anything is masked.

    With masked storage it is what `parameter.grad` holds then, earlier masked gradients that add up there included.
    A copy of the model records nothing. It works once an optimizer is attached, and not under torch.compile.
    """

    @property
    def is_first_gradient(self) -> bool:
        """Asked while `record` is called: whether there was no gradient before this backward pass."""

    @property
    def adds_up_gradients(self) -> bool:
        """Whether `record` is given the gradients of live weights as sums over the backward passes of an iteration."""

    @staticmethod
    def check(model: nn.Module, name: str) -> None:
        """Raise if a parameter of a model cannot be stored this way."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer sees."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, and of its mask."""

    @property
    def is_known_full(self) -> bool:
        """Whether all weights live, as far as is known without asking the device."""

    def num_alive(self) -> int:
        """The number of live weights; may wait for the device."""

    def mask(self) -> Tensor:
        """Which weights live: bool, shaped like the weight. Edit it only to give it back to `set_mask`."""

    def weight(self) -> Tensor:
        """The values, exactly zero where no weight lives, shaped like the weight."""

    def set_mask(self, mask: Tensor) -> None:
        """Let exactly these live. A weight that is new is zero, and one that is gone is gone."""

    def preview(self, mask: Tensor) -> Callable[[], None]:
        """Let only these of the live weights live, until what is returned is called: then all is as it was."""

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        """Let exactly these live, with these values in row-major order.

        Args:
            packed: the mask, as `growprune.masks.bits.pack` has it.
            keep: whether both may be kept, and written to, where they fit as they are; otherwise they are copied.
        """

    def to_dense(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the parameter (optimizer state), shaped like the weight."""

    def from_dense(self, dense: Tensor) -> Tensor:
        """The inverse of `to_dense`."""

    def to_live(self, tensor: Tensor) -> Tensor:
        """The live elements of a tensor shaped like the parameter, in row-major order."""

    def from_live(self, live: Tensor) -> Tensor:
        """The inverse of `to_live`: shaped like the parameter, zero where nothing lives."""

    def release(self) -> None:
        """Make it a plain dense parameter again, in a module that is as it was. Do not use the SparseParameter then."""

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]], /) -> None:
        """Make tensors shaped like the parameters they are listed with exactly zero off their masks."""

    def hook_gradients(self) -> None:
        """See to it that gradients off the mask are zero from the next backward pass on."""

    def mask_gradient(self, *, again: bool) -> None:
        """Make the gradient that is there now zero off the mask; if it is known to be, only if `again` is set."""


STORAGES: dict[str, type[Masked] | type[Compact]] = {"masked": Masked, "compact": Compact}
"""By name: made of a model, the name of one of its parameters, and the pattern its masks will keep to."""


def parse_storage(name: str) -> type[Masked] | type[Compact]:
    if name not in STORAGES:
        raise GrowpruneError(f"storage is {name!r}, but must be one of {', '.join(STORAGES)}")
    return STORAGES[name]


def store(model: nn.Module, names: Collection[str], storage: str, pattern: Pattern) -> dict[str, SparseParameter]:
    """Store the parameters of these names as asked; all are checked first, since storing may change the model."""
    kind = parse_storage(storage)
    for name in names:
        kind.check(model, name)
    check_adapters(model, names if storage == "compact" else ())
    parameters: dict[str, SparseParameter] = {name: kind(model, name, pattern) for name in names}
    keep_masks(model, parameters)
    return parameters


def make_plain(model: nn.Module, parameters: dict[str, SparseParameter], pattern: Pattern) -> None:
    """Make stored parameters plain ones that happen to hold zeros. What lives of them can still be asked."""
    masks = {name: pack(parameter.mask()) for name, parameter in parameters.items()}
    for parameter in parameters.values():  # which lets go of all that its layer holds: of several, none is asked after
        parameter.release()
    for name, mask in masks.items():
        parameters[name] = plain = parse_storage("masked")(model, name, pattern)
        plain.set_mask(unpack(mask, plain.shape, plain.parameter.device))
    forget_masks(model)


__all__ = ["STORAGES", "Compact", "Masked", "SparseParameter", "make_plain", "parse_storage", "store"]
