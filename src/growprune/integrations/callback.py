"""What the callbacks of all trainers have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from growprune.errors import GrowpruneError
from growprune.integrations.averages import Copies
from growprune.integrations.common import Settings, num_processes
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import PartitionConfig
from growprune.plan import By, Plan
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import rng_state, set_rng_state
from growprune.storage.kernels import count_bits


class SparseCallback:
    """A callback of some trainer that makes a model sparse: its settings, its cursor, and copies of the model."""

    _has_bare_copies = False
    """Whether an attribute of another callback that is of the model's own class is a copy; it may be a teacher too."""

    def __init__(
        self,
        method: str | Callable[..., Plan] = "gradual_gap",
        *,
        sparsity: float = 0.9,
        kappa: int | None = None,
        storage: str = "masked",
        lr_scaling: float | Literal["auto"] = "auto",
        allocation: str | None = None,
        pattern: str = "unstructured",
        keep_dense: str | Sequence[str] = "auto",
        include: Sequence[str] = (),
        partition: str | Partition | PartitionConfig | Sequence[Sequence[str]] | None = None,
        seed: int = 0,
        iterations_per_epoch: int | None = None,
        log_layers: bool = False,
        **options: Any,
    ) -> None:
        self.settings = Settings(
            method=method,
            sparsity=sparsity,
            kappa=kappa,
            storage=storage,
            lr_scaling=lr_scaling,
            allocation=allocation,
            pattern=pattern,
            keep_dense=keep_dense,
            include=include,
            partition=partition,
            seed=seed,
            iterations_per_epoch=iterations_per_epoch,
            options=options,
        )
        self._cursor: Cursor | None = None
        self._lengths: tuple[int, int | None] = (0, None)
        """The optimizer steps of the training that the plan was made for, in all and in an epoch."""
        self._copies = Copies(are_bare=self._has_bare_copies)
        self._log_layers = log_layers

    @property
    def cursor(self) -> Cursor:
        """Where the model stands in its plan."""
        if self._cursor is None:
            raise GrowpruneError(
                f"{type(self).__name__} has no model yet: it gets one when the trainer begins to train with it"
            )
        return self._cursor

    @property
    def sparse(self) -> SparseModel:
        """The sparse model."""
        return self.cursor.sparse

    def add_copy(self, copy: nn.Module) -> None:
        """Make a copy of the model, such as a moving average, as sparse as the model after each edit.

        Copies that a callback keeps as an attribute are found automatically: `AveragedModel`, timm's `ModelEmaV3`, and
        in Lightning also a plain copy, as in `StochasticWeightAveraging`.
        """
        self._copies.add(copy)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values and tensors."""
        return {
            "settings": self.settings.to_save(),
            "lengths": self._lengths,
            "sparse": self.sparse.state_dict(),
            "cursor": self.cursor.state_dict(),
        }

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        """Raise if the state of a checkpoint was written with other settings."""
        check_state(saved, "settings", "lengths", "sparse", "cursor")
        mine = self.settings.to_save()
        for name, value in saved["settings"].items():
            if value != mine[name]:
                raise GrowpruneError(
                    f"the checkpoint was trained with {name}={value!r}, but {type(self).__name__} has "
                    f"{name}={mine[name]!r}: resume with {name}={value!r}"
                )

    def _check_place(self, saved: Mapping[str, Any]) -> None:
        """Raise if the state of a checkpoint belongs to another plan."""
        if not self.cursor.is_place(saved["cursor"]):
            raise GrowpruneError(
                f"the checkpoint is of another plan than {self.settings.name} has with these settings, by its phase "
                f"{saved['cursor']['position']}: give {type(self).__name__} the same method, options, kappa, "
                f"partition, keep_dense and include as when the checkpoint was written"
            )


@contextlib.contextmanager
def looking(by: By) -> Iterator[None]:
    """A context for losses that are computed before the first step, for an edit by gradient.

    It restores the random numbers, so that the training draws what it would have drawn anyway. GraSP differentiates
    twice, which the fast kernels of attention cannot.
    """
    if by is By.GRASP and num_processes() > 1:
        raise GrowpruneError("by is grasp, which one process computes from its own batches: use one process, or snip")
    before = rng_state()
    with sdpa_kernel(SDPBackend.MATH) if by is By.GRASP else contextlib.nullcontext():
        yield
    set_rng_state(before)


class Figures:
    """The figures of a sparse model that a trainer logs.

    Args:
        by_weight: whether the density of each weight is among them.
    """

    def __init__(self, cursor: Cursor, *, by_weight: bool = False) -> None:
        self._cursor, self._by_weight = cursor, by_weight
        self._num_changes = internals(cursor.sparse).num_mask_changes
        self._masks = internals(cursor.sparse).packed_masks()

    def read(self) -> dict[str, float]:
        """Sparsity, live weights, phase, and churn: the share of live weights that were dead at the last reading."""
        sparse = self._cursor.sparse
        alive = internals(sparse).alive_by_weight()
        total = sum(alive.values())
        figures: dict[str, float] = {
            "sparsity": 1 - total / sparse.num_prunable,
            "live_weights": total,
            "phase": self._cursor.position,
            "churn": self._born() / max(1, total),
        }
        if self._by_weight:
            figures |= {f"density/{weight.name}": alive[weight.name] / weight.numel for weight in sparse.weights}
        rule = self._cursor.rule
        return figures if rule is None else figures | rule.figures()

    def _born(self) -> int:
        """The number of live weights that were dead at the last reading."""
        sparse = self._cursor.sparse
        if internals(sparse).num_mask_changes == self._num_changes:
            return 0
        before, self._masks = self._masks, internals(sparse).packed_masks()
        self._num_changes = internals(sparse).num_mask_changes
        born = (mask & ~before[name].to(mask.device) for name, mask in self._masks.items())
        return sum(count_bits(bits.cpu()) for bits in born)
