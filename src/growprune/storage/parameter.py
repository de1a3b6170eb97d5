"""What all ways to store a sparse parameter have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.patterns import Pattern


class SparseParameter(Protocol):
    """One parameter of a model and the mask of its live weights."""

    module: nn.Module
    """Whose parameter it is."""

    shape: torch.Size
    """The shape of the weight, and of its mask."""

    _local: str

    record: Callable[[Tensor], None] | None
    """If set: called once for each backward pass with the dense gradient of the weight, before anything is masked.

    With masked storage it is what `parameter.grad` holds then, earlier masked gradients that add up there included.
    A copy of the model records nothing. It works once an optimizer is attached, and not under torch.compile.
    """

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        """Store the parameter of this name, all of it alive; its masks will keep to the pattern."""
        del pattern
        path, _, self._local = name.rpartition(".")
        self.module = model.get_submodule(path)
        self.shape = self.parameter.shape

    @staticmethod
    def check(model: nn.Module, name: str) -> None:
        """Raise if a parameter of a model cannot be stored this way."""

    @property
    def parameter(self) -> nn.Parameter:
        """What the optimizer sees."""

    @property
    def is_first_gradient(self) -> bool:
        """Asked while `record` is called: whether there was no gradient before this backward pass."""

    @property
    def adds_up_gradients(self) -> bool:
        """Whether `record` is given the gradients of live weights as sums over the backward passes of an iteration."""

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
        return tensor

    def from_dense(self, dense: Tensor) -> Tensor:
        """The inverse of `to_dense`."""
        return dense

    def to_live(self, tensor: Tensor) -> Tensor:
        """The live elements of a tensor shaped like the parameter, in row-major order."""
        return self.to_dense(tensor)[self.mask()]

    def from_live(self, live: Tensor) -> Tensor:
        """The inverse of `to_live`: shaped like the parameter, zero where nothing lives."""
        mask = self.mask()
        dense = torch.zeros(mask.shape, dtype=live.dtype, device=mask.device)
        dense[mask] = live.to(mask.device)
        return self.from_dense(dense)

    def release(self) -> None:
        """Make it a plain dense parameter again, in a module that is as it was. Do not use the SparseParameter then."""
        return

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]]) -> None:
        """Make tensors shaped like the parameters they are listed with exactly zero off their masks."""
        return

    def hook_gradients(self) -> None:
        """See to it that gradients off the mask are zero from the next backward pass on."""
        return

    def mask_gradient(self, *, again: bool) -> None:
        """Make the gradient that is there now zero off the mask; if it is known to be, only if `again` is set."""
        return


def no_parameter(module: nn.Module, local: str) -> GrowpruneError:
    """The error for a parameter that has become something that is computed."""
    return GrowpruneError(
        f"a {type(module).__name__} of the sparse model has no parameter {local} any more, as after weight_norm or "
        f"another parametrization of it: make the SparseModel after those, or remove them"
    )
