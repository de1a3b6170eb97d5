"""The common base of the callbacks for all trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from growprune.errors import GrowpruneError, warn
from growprune.plan import By, Plan
from growprune.plan.settings import check_state
from growprune.sparse.cursor import Cursor
from growprune.sparse.model import SparseModel
from growprune.sparse.rng import rng_state, set_rng_state
from growprune.sparse.stepper import LR_RAMP, is_replicated
from growprune.storage.kernels import count_bits
from growprune.training.settings import PartsLike, Settings
from growprune.training.sparsifier import Sparsifier


class SparseCallback:
    """Base class of callbacks that make a model sparse, log its figures, and keep copies of it sparse."""

    _has_bare_copies = False
    """True if an attribute of another callback that has the model's class is a copy. Elsewhere it may be a teacher."""

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
        lr_ramp: float = LR_RAMP,
        seed: int = 0,
        cost_power: float = 0.0,
        rescale: bool | Literal["auto"] = "auto",
        example: Any = None,
        log_layers: bool = False,
        **options: Any,
    ) -> None:
        self.settings = Settings.among(locals())
        self._sparsifier: Sparsifier | None = None
        self._added_copies: list[nn.Module] = []
        self._num_changes = -1
        """The number of mask changes when copies were last masked."""
        self._log_layers = log_layers
        self._figures: Figures | None = None

    @property
    def sparsifier(self) -> Sparsifier:
        """The Sparsifier of the model, as `growprune.sparsify` returns it."""
        if self._sparsifier is None:
            raise GrowpruneError(
                f"{type(self).__name__} has no model yet: it gets one when the trainer starts to train, so give it to "
                f"a trainer as callbacks=[...] and train first"
            )
        return self._sparsifier

    @property
    def cursor(self) -> Cursor:
        """The place in the plan."""
        return self.sparsifier.cursor

    @property
    def sparse(self) -> SparseModel:
        """The sparse model."""
        return self.sparsifier.sparse

    def add_copy(self, copy: nn.Module) -> None:
        """Keep a copy of the model, such as a moving average, as sparse as the model itself.

        An average across an edit has the weights of both masks. So copies are masked after each edit, and after each
        step of a rule that changes masks, such as DeepR's. Copies that a callback keeps as an attribute are found
        automatically: `AveragedModel`, timm's `ModelEmaV3`, and in Lightning also a plain copy, as in
        `StochasticWeightAveraging`.
        """
        if not any(copy is other for other in self._added_copies):
            self._added_copies.append(copy)
        self._num_changes = -1

    def _copies(self, owners: Iterable[object]) -> list[nn.Module]:
        """Return the added copies, and modules with the class and the parameter names of the model.

        Args:
            owners: objects that may have copies as attributes.
        """
        model, names = self.sparse.model, {weight.parameter for weight in self.sparse.weights}
        values = [value for owner in owners for value in vars(owner).values() if isinstance(value, nn.Module)]
        modules = [(v, inner) for v in values if v is not model for inner in v.modules()]
        inside = [inner for v, inner in modules if self._has_bare_copies or inner is not v]
        alike = [inner for inner in inside if isinstance(inner, type(model)) and inner is not model]
        return [*self._added_copies, *(inner for inner in alike if names <= dict(inner.named_parameters()).keys())]

    def _check_copies(self, owners: Iterable[object]) -> None:
        """Raise if there are copies that cannot follow edits."""
        if self.sparse.storage == "compact" and self._copies(owners):
            raise GrowpruneError(
                "a callback averages the weights, but storage='compact' changes their number with each edit: use "
                "storage='masked'"
            )

    def _mask_copies(self, owners: Iterable[object]) -> None:
        """If masks have changed, by an edit or by a rule, make all copies as sparse as the model."""
        if self.sparse.num_mask_changes != self._num_changes:
            self._check_copies(owners)
            for copy in self._copies(owners):
                self.sparse.mask_copy(copy)
            self._num_changes = self.sparse.num_mask_changes

    @contextlib.contextmanager
    def _plain_if_refused(self) -> Iterator[None]:
        """Make the model plain again if its plan is refused before the first edit."""
        try:
            yield
        except GrowpruneError:
            if self._sparsifier is not None and self.cursor.position < 0:
                self._sparsifier.to_dense_()
                self._sparsifier = None
            raise

    def _check_place(self, total: int, step: int, remedy: Callable[[int], str]) -> None:
        """Raise unless the trainer and the plan have the same number of steps and are at the same step.

        Args:
            total, step: the optimizer steps that the trainer makes in total, and has made so far.
            remedy: returns the setting of the trainer for a training of a given number of steps.
        """
        steps, done = self.sparsifier.lengths[0], self.cursor.iteration
        if self.cursor.is_over or steps is None:
            return
        if total != steps:
            raise GrowpruneError(
                f"the plan has {steps} optimizer steps, but the Trainer makes {total}: set {remedy(steps)}, as when "
                f"the plan began"
            )
        if done > step:
            raise GrowpruneError(
                f"the plan is at step {done} of {steps}, but the Trainer is at step {step}: resume from a checkpoint, "
                f"or use a new model and a new {type(self).__name__}"
            )

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain values and tensors."""
        figures = {} if self._figures is None else self._figures.state_dict()
        return {"sparsifier": self.sparsifier.state_dict(only_masks=True), "figures": figures}

    def _load(self, saved: Mapping[str, Any]) -> None:
        """Load what `_state` returned. A trainer loads weights and optimizers after it, so that they fit the masks."""
        self.sparsifier.load_state_dict(saved["sparsifier"])
        self._figures = Figures(self.cursor, by_weight=self._log_layers)
        if saved["figures"]:
            self._figures.load_state_dict(saved["figures"])

    def _warn_if_stopped(self, remedy: str) -> None:
        """Warn if the training ended before the model is at its target sparsity."""
        if self._sparsifier is not None and not self.sparse.is_at_target:
            warn(
                f"the training ended at step {self.cursor.iteration} of {self.cursor.num_iterations} of the plan, at "
                f"sparsity {self.sparse.sparsity:.4g} (target {self.sparse.target_sparsity:.4g}): resume with {remedy}"
            )


def check_saved(saved: Mapping[str, Any], settings: Settings) -> None:
    """Raise unless a saved state has the storage in `settings`, because the optimizer state depends on it."""
    check_state(saved, "settings")
    storage = saved["settings"].get("storage")
    if storage != settings.storage:
        raise GrowpruneError(
            f"the checkpoint was saved with storage={storage!r}, but this training has storage={settings.storage!r}: "
            f"resume with storage={storage!r}"
        )


@contextlib.contextmanager
def scoring(by: By) -> Iterator[None]:
    """A context for losses that are computed before the first step, for an edit by gradient.

    It restores the random number generators, so that training draws the same numbers as without scoring. GraSP
    differentiates twice, which the fast kernels of attention do not support.
    """
    if by is By.GRASP and is_replicated():
        raise GrowpruneError(
            f"grasp does not work in several processes, got {distributed.get_world_size()}: use one process, or snip"
        )
    before = rng_state()
    with sdpa_kernel(SDPBackend.MATH) if by is By.GRASP else contextlib.nullcontext():
        yield
    set_rng_state(before)


def call_first(owner: Any, method: str, first: Callable[..., None]) -> None:
    """Call a function before a method of an object, with the same arguments; `del` of the attribute undoes it."""
    own = getattr(type(owner), method, None)
    if own is None:  # nothing would call the function
        raise GrowpruneError(
            f"{type(owner).__name__} has no method {method}: install a version of the trainer that growprune supports"
        )

    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return own(owner, *args, **kwargs)

    vars(owner)[method] = both


def call_only_if(is_due: Callable[[], bool], owner: Any, method: str) -> None:
    """Make a method of another callback do nothing unless a condition holds; `del` of the attribute undoes it."""
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
        """The figures of the last reading."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next reading compares with."""
        return {"masks": self._masks, "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._masks, self.last = state["masks"], state["last"]
        self._num_changes = -1  # the saved count is from another process, so compare masks

    def read(self) -> dict[str, float]:
        """Return sparsity, live weights, phase, and churn: the fraction of live weights that were pruned last time."""
        sparse, born = self._cursor.sparse, 0
        if sparse.num_mask_changes != self._num_changes:
            before, self._masks, self._num_changes = self._masks, sparse.packed_masks(), sparse.num_mask_changes
            for name, mask in self._masks.items():
                born += count_bits((mask & ~before[name].to(mask.device)).cpu())
        alive = sparse.alive_by_weight()
        total = sum(alive.values())
        figures: dict[str, float] = {
            "sparsity": 1 - total / sparse.num_prunable,
            "live_weights": total,
            "phase": self._cursor.position,
            "churn": born / max(1, total),
        }
        if self._by_weight:
            figures |= {f"density/{weight.name}": alive[weight.name] / weight.numel for weight in sparse.weights}
        rule = self._cursor.rule
        self.last = figures if rule is None else figures | rule.figures()
        return self.last
