"""Keep copies of a model, such as moving averages, as sparse as the model itself.

An average over an edit has the live weights of both masks. So copies are masked after each edit, and after each step of
a rule that changes masks, such as DeepR's. A copy is found automatically if a callback keeps it as an attribute:
`torch.optim.swa_utils.AveragedModel`, timm's `ModelEmaV3`, or any other module with a copy of the model inside. Name
others with `add`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from growprune.errors import GrowpruneError
from growprune.sparse.model import SparseModel


class Copies:
    """The copies of one model.

    Args:
        are_bare: whether an attribute that is itself of the model's class is one. It may be a teacher as well.
    """

    def __init__(self, *, are_bare: bool = False) -> None:
        self._are_bare = are_bare
        self._added: list[nn.Module] = []
        self._num_changes = -1
        """How many changes of masks there had been when copies were masked last."""

    def add(self, copy: nn.Module) -> None:
        """Mask a copy from now on that is not found automatically."""
        if not any(copy is other for other in self._added):
            self._added.append(copy)
        self._num_changes = -1

    def check(self, sparse: SparseModel, owners: Iterable[object]) -> None:
        """Raise if there are copies that cannot follow edits."""
        if sparse.storage == "compact" and self._all(sparse, owners):
            raise GrowpruneError(
                "a callback averages the weights, but storage='compact' changes their number with each edit: use "
                "storage='masked'"
            )

    def follow(self, sparse: SparseModel, owners: Iterable[object]) -> None:
        """If masks have changed, by an edit or by a rule, make all copies as sparse as it is.

        Args:
            owners: what may have copies as attributes.
        """
        if sparse.num_mask_changes == self._num_changes:
            return
        self.check(sparse, owners)
        for copy in self._all(sparse, owners):
            sparse.mask_copy(copy)
        self._num_changes = sparse.num_mask_changes

    def _all(self, sparse: SparseModel, owners: Iterable[object]) -> list[nn.Module]:
        values = [value for owner in owners for value in vars(owner).values() if isinstance(value, nn.Module)]
        return [*self._added, *(copy for value in values for copy in self._copies_in(value, sparse))]

    def _copies_in(self, value: nn.Module, sparse: SparseModel) -> Iterator[nn.Module]:
        for inner in value.modules() if value is not sparse.model else ():
            if (self._are_bare or inner is not value) and is_copy(inner, sparse):
                yield inner


def is_copy(module: object, sparse: SparseModel) -> bool:
    """Whether something is of the class of a model, with the same names, and not the model itself."""
    if not isinstance(module, type(sparse.model)) or module is sparse.model:
        return False
    return {weight.parameter for weight in sparse.weights} <= {name for name, _ in module.named_parameters()}
