"""What the callbacks of all trainers have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from growprune.errors import GrowpruneError, warn
from growprune.integrations.averages import Copies
from growprune.plan import By, Plan
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel, is_replicated
from growprune.sparse.rng import rng_state, set_rng_state
from growprune.storage.kernels import count_bits
from growprune.training.first_mask import FirstMask
from growprune.training.settings import PartsLike, Settings


class SparseCallback:
    """A callback of some trainer that makes a model sparse: its arguments, its cursor, and copies of the model."""

    _has_bare_copies = False
    """Whether an attribute of another callback that is of the model's own class is a copy; it may be a teacher too."""

    def __init__(
        self,
        method: str | Callable[..., Plan] = "gradual_gap",
        *,
        sparsity: float,
        iterations: int | None = None,
        epochs: int | None = None,
        iterations_per_epoch: int | None = None,
        parts: PartsLike = None,
        allocation: str | None = None,
        pattern: str = "unstructured",
        keep_dense: str | Sequence[str] = "auto",
        include: Sequence[str] = (),
        storage: str = "masked",
        initial_mask: str = "auto",
        calibration: Iterable[Any] | None = None,
        lr_scaling: float | Literal["auto"] = "auto",
        seed: int = 0,
        example: Any = None,
        log_layers: bool = False,
        **options: Any,
    ) -> None:
        self.arguments = Settings.among(locals())
        self._cursor: Cursor | None = None
        self._lengths: tuple[int, int | None] = (0, None)
        """The optimizer steps of the training that the plan was made for, in all and in an epoch."""
        self._first: FirstMask | None = None
        """How the first mask was chosen, if the model was made sparse, or the checkpoint says it."""
        self._copies = Copies(are_bare=self._has_bare_copies)
        self._log_layers = log_layers
        self._figures: Figures | None = None

    @property
    def cursor(self) -> Cursor:
        """The place in the plan."""
        if self._cursor is None:
            raise GrowpruneError(
                f"{type(self).__name__} has no model yet: it gets one when the trainer starts to train, so give it to "
                f"a trainer as callbacks=[...] and train first"
            )
        return self._cursor

    @property
    def sparse(self) -> SparseModel:
        """The sparse model."""
        return self.cursor.sparse

    def add_copy(self, copy: nn.Module) -> None:
        """Keep a copy of the model, such as a moving average, as sparse as the model itself.

        Copies that a callback keeps as an attribute are found automatically: `AveragedModel`, timm's `ModelEmaV3`, and
        in Lightning also a plain copy, as in `StochasticWeightAveraging`.
        """
        self._copies.add(copy)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain values and tensors."""
        first = self._first or FirstMask(None)
        return {
            "arguments": self.arguments.to_save(),
            "first": [first.initial_mask, first.found],
            "lengths": self._lengths,
            "sparse": self.sparse.state_dict(),
            "cursor": self.cursor.state_dict(),
            "figures": {} if self._figures is None else self._figures.state_dict(),
        }

    def _make_figures(self, saved: Mapping[str, Any] | None) -> None:
        """Begin to log figures; after a resume, compare with what the interrupted training would have compared with."""
        self._figures = Figures(self.cursor, by_weight=self._log_layers)
        if saved is not None and saved["figures"]:
            self._figures.load_state_dict(saved["figures"])

    def _check_arguments(self, saved: Mapping[str, Any]) -> None:
        """Raise if the state of a checkpoint was written with other settings."""
        check_state(saved, "arguments", "first", "lengths", "sparse", "cursor", "figures")
        mine = self.arguments.to_save()
        for name, value in saved["arguments"].items():
            if value != mine[name]:
                raise GrowpruneError(
                    f"the checkpoint was trained with {name}={value!r}, but {type(self).__name__} has "
                    f"{name}={mine[name]!r}: resume with {name}={value!r}"
                )

    def _take_over(self, saved: Mapping[str, Any]) -> None:
        """Take from a checkpoint what the plan was made with, before the cursor is made."""
        self._check_arguments(saved)
        mask, found = saved["first"]
        self._lengths, self._first = saved["lengths"], FirstMask(mask, found)

    def _make_cursor_of(self, model: nn.Module, *, remedy: Callable[[int], str], **how: Any) -> Cursor:
        iterations, per_epoch = self._lengths
        lengths: dict[str, Any] = {"iterations": iterations, "iterations_per_epoch": per_epoch}
        resolved = self.arguments.resolve(model, first=self._first, remedy=remedy, **lengths)
        self._first = resolved.first
        return resolved.cursor(model, **how)

    def _warn_if_stopped(self, remedy: str) -> None:
        """Warn if the training ended before the model is at its target sparsity."""
        if self._cursor is not None and not self.sparse.is_at_target:
            warn(
                f"the training ended at step {self.cursor.iteration} of {self._lengths[0]} of the plan, at sparsity "
                f"{self.sparse.sparsity:.4g} (target {self.sparse.target_sparsity:.4g}): resume with {remedy}"
            )

    def _check_place(self, saved: Mapping[str, Any]) -> None:
        """Raise if the state of a checkpoint belongs to another plan."""
        if not self.cursor.is_place(saved["cursor"]):
            raise GrowpruneError(
                f"the checkpoint belongs to another plan of {self.arguments.name}: give {type(self).__name__} the same "
                f"options, parts, keep_dense, include and initial_mask as when it was written"
            )


@contextlib.contextmanager
def looking(by: By) -> Iterator[None]:
    """A context for losses that are computed before the first step, for an edit by gradient.

    It restores the random numbers, so that the training draws what it would have drawn anyway. GraSP differentiates
    twice, which the fast kernels of attention cannot.
    """
    if by is By.GRASP and is_replicated():
        raise GrowpruneError(
            f"grasp does not work in several processes, got {distributed.get_world_size()}: use one process, or snip"
        )
    before = rng_state()
    with sdpa_kernel(SDPBackend.MATH) if by is By.GRASP else contextlib.nullcontext():
        yield
    set_rng_state(before)


def call_only_if(is_due: Callable[[], bool], owner: Any, method: str) -> None:
    """Have a method of another callback do nothing unless a condition holds; `del` of the attribute undoes it."""
    own = getattr(type(owner), method)

    def conditional(*args: Any, **kwargs: Any) -> Any:
        return own(owner, *args, **kwargs) if is_due() else None

    vars(owner)[method] = conditional


class Figures:
    """The figures of a sparse model that a trainer logs.

    Args:
        by_weight: whether the density of each weight is among them.
    """

    def __init__(self, cursor: Cursor, *, by_weight: bool = False) -> None:
        self._cursor, self._by_weight = cursor, by_weight
        self._num_changes = cursor.sparse.num_mask_changes
        self._masks = cursor.sparse.packed_masks()
        self.last: dict[str, float] = {}
        """What was read last."""

    def state_dict(self) -> dict[str, Any]:
        """What the next reading compares with."""
        return {"masks": self._masks, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._masks, self.last = state["masks"], state["last"]
        self._num_changes = -1  # another count than that of this process: compare

    def read(self) -> dict[str, float]:
        """Sparsity, live weights, phase, and churn: the share of live weights that were dead at the last reading."""
        sparse = self._cursor.sparse
        alive = sparse.alive_by_weight()
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
        self.last = figures if rule is None else figures | rule.figures()
        return self.last

    def _born(self) -> int:
        """The number of live weights that were dead at the last reading."""
        sparse = self._cursor.sparse
        if sparse.num_mask_changes == self._num_changes:
            return 0
        before, self._masks = self._masks, sparse.packed_masks()
        self._num_changes = sparse.num_mask_changes
        born = (mask & ~before[name].to(mask.device) for name, mask in self._masks.items())
        return sum(count_bits(bits.cpu()) for bits in born)
