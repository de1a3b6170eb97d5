"""The interface of all storages of a sparse parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.patterns import Pattern


class SparseParameter(Protocol):
    """One parameter of a model and the mask of its live weights."""

    module: nn.Module
    """The module that has the parameter."""

    shape: torch.Size
    """The shape of the weight, and of its mask."""

    _local: str

    record: Callable[[Tensor], None] | None
    """If set: called in each backward pass with the dense gradient of the weight, before it is masked.

    With masked storage this is the content of `parameter.grad`, including earlier masked gradients that accumulate
    there. A copy of the model records nothing. It needs an attached optimizer, and does not work under torch.compile.
    """

    def __init__(self, model: nn.Module, name: str, pattern: Pattern) -> None:
        """Store the parameter of this name, fully live. Its masks will have the pattern."""
        del pattern
        path, _, self._local = name.rpartition(".")
        self.module = model.get_submodule(path)
        self.shape = self.parameter.shape

    @staticmethod
    def check(model: nn.Module, names: Collection[str]) -> None:
        """Raise if one of these parameters of a model cannot be stored this way."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the optimizer trains."""

    @property
    def is_first_gradient(self) -> bool:
        """True, while `record` is called, if there was no gradient before this backward pass."""

    @property
    def adds_up_gradients(self) -> bool:
        """True if `record` gets the gradients of live weights as sums over the backward passes of an iteration."""

    @property
    def is_known_full(self) -> bool:
        """True if all weights are live, as far as is known without waiting for the device."""

    def num_alive(self) -> int:
        """The number of live weights. It may wait for the device."""

    def mask(self) -> Tensor:
        """Return the mask: bool, with the shape of the weight. Change it only to pass it to `set_mask`."""

    def weight(self) -> Tensor:
        """Return the dense weight, exactly zero where the mask is False."""

    def set_mask(self, mask: Tensor) -> None:
        """Set the mask. New live weights are zero, and pruned values are lost."""

    def preview(self, mask: Tensor) -> Callable[[], None]:
        """Apply a smaller mask, and return a function that restores the old mask and values."""

    def load(self, live: Tensor, packed: Tensor, *, keep: bool = False) -> None:
        """Set the mask, and the live values in row-major order.

        Args:
            packed: the mask, packed by `growprune.masks.bits.pack`.
            keep: keep and write to both tensors without a copy, if they fit; otherwise copy them.
        """

    def to_dense(self, tensor: Tensor) -> Tensor:
        """Convert a tensor with the shape of the parameter (optimizer state) to the shape of the weight."""
        return tensor

    def from_dense(self, dense: Tensor) -> Tensor:
        """The inverse of `to_dense`."""
        return dense

    def to_live(self, tensor: Tensor) -> Tensor:
        """Return the live elements of a tensor with the shape of the parameter, in row-major order."""
        return self.to_dense(tensor)[self.mask()]

    def from_live(self, live: Tensor) -> Tensor:
        """The inverse of `to_live`: return the shape of the parameter, zero where the mask is False."""
        mask = self.mask()
        dense = torch.zeros(mask.shape, dtype=live.dtype, device=mask.device)
        dense[mask] = live.to(mask.device)
        return self.from_dense(dense)

    def release(self) -> None:
        """Restore the plain dense parameter and its module. Do not use the SparseParameter afterwards."""
        return

    @staticmethod
    def enforce(shaped_alike: Sequence[tuple[Any, Sequence[Tensor]]]) -> None:
        """Set tensors with the shapes of their parameters to exactly zero where the masks are False."""
        return

    def hook_gradients(self) -> None:
        """Mask gradients from the next backward pass on."""
        return

    def mask_gradient(self, *, again: bool = False) -> None:
        """Mask the present gradient; if it is known to be masked, only if `again` is set."""
        return


def no_parameter(module: nn.Module, local: str) -> GrowpruneError:
    """Return the error for a parameter that was replaced by a computed tensor."""
    return GrowpruneError(
        f"a {type(module).__name__} of the sparse model has no parameter {local} any more, as after weight_norm or "
        f"another parametrization: create the SparseModel after those, or remove them"
    )


Hook = TypeVar("Hook", bound=Callable[..., Any])


def uncompiled(hook: Hook) -> Hook:
    """Wrap a hook so that torch.compile breaks the graph at it.

    Use it where a hook is registered, and not as a decorator: it loads the compiler, as every optimizer does.
    """
    reason = "growprune masks gradients and edits masks around each optimizer step: compile with fullgraph=False"
    return torch.compiler.disable(hook, reason=reason)  # type: ignore[no-any-return,no-untyped-call]
