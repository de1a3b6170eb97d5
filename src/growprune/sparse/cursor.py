"""Cursor: carries out a plan on a model, in any kind of training loop.

    for phase in cursor: ...                 # your own loop over phases
    cursor.advance(iteration)                # a trainer's loop: applies every edit that is due
    optimizer = cursor.attach(optimizer)     # a plain loop over epochs: each optimizer step advances the plan

Iterations are optimizer steps, counted from the start of the plan. Plans with forks, such as P-GaP's, need the cursor
of the engine (engine/state.py).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from growprune.errors import GrowpruneError
from growprune.plan import By, Phase, Plan, ScheduledPhase, Stage, declaration_of, next_edits, onward, walk
from growprune.plan.settings import as_float, check_counts, check_state, plain
from growprune.sparse.model import SparseModel, check_sparse_model, sparse_model_of
from growprune.sparse.rules import RunningRule, running
from growprune.sparse.stepper import unwrapped

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

OnPhase = Callable[[ScheduledPhase], None]


def cursor_of(model: SparseModel | nn.Module) -> Cursor | None:
    """Return the cursor whose plan is carried out on a model, or that waits to begin; None if there is none."""
    sparse = model if isinstance(model, SparseModel) else sparse_model_of(model)
    return None if sparse is None else sparse.waiting or sparse.cursor


class Cursor:
    """Apply the edits of a plan to a sparse model when they are due: iterate over phases, `advance`, or `attach`.

    Args:
        iterations_per_epoch: the optimizer steps of an epoch; needed by `advance` if phases have epochs.
        is_begun: True if the edits of the first phase are done already, such as the random prune of `sparse_init`.
        score: called if an edit needs gradients before the first iteration; it calls `sparse.score`.
        on_enter, on_leave: called with each phase, after its edits and before the model leaves it.

    Examples:
        >>> from growprune import Partition, SparseModel, methods
        >>> model = torch.nn.Linear(10, 10)
        >>> plan = methods.gmp(Partition.contiguous(model, 1), sparsity=0.9, iterations=10, every=2)
        >>> cursor = Cursor(SparseModel(model, sparsity=0.9, allocation="global"), plan)
        >>> for iteration in range(10 + 1):
        ...     phase = cursor.advance(iteration)
        >>> cursor.sparse.num_alive, cursor.is_over
        (10, True)
    """

    takes_forks = False

    def __init__(
        self,
        sparse: SparseModel,
        plan: Plan | Sequence[Stage],
        *,
        iterations_per_epoch: int | None = None,
        is_begun: bool = False,
        score: Callable[[By], None] | None = None,
        on_enter: OnPhase = lambda scheduled: None,
        on_leave: OnPhase = lambda scheduled: None,
    ) -> None:
        if iterations_per_epoch is not None:
            check_counts(1, iterations_per_epoch=iterations_per_epoch)
        check_sparse_model(sparse, "Cursor")
        self.sparse, self.plan = sparse, plan
        self.schedule = tuple(walk(plan))
        if not self.takes_forks and any(scheduled.branch is not None for scheduled in self.schedule):
            raise GrowpruneError("Cursor trains no branches of a fork, as parallel_gap has them: use `growprune train`")
        sparse.check(*{id(part): part for scheduled in self.schedule for part in scheduled.parts}.values())
        for by in {edit.by for scheduled in self.schedule for edit in scheduled.phase.edits}:
            sparse.check_by(by)
        for rule in {scheduled.phase.rule for scheduled in self.schedule if scheduled.phase.rule is not None}:
            running(rule, sparse)  # raises if it does not fit
        if isinstance(plan, Plan):
            check_plan(sparse, plan)
        self._per_epoch = plain(iterations_per_epoch)
        self._is_begun = is_begun
        self._score, self._on_enter, self._on_leave = score, on_enter, on_leave
        self._is_counting = False  # until `advance` or an optimizer counts iterations
        self._lengths: tuple[int, ...] = ()  # of each phase in iterations, once they are counted
        self._clock: weakref.ref[torch.optim.Optimizer] | None = None
        self._is_fresh = False  # whether a phase that began with the last advance has a fresh optimizer
        self.iteration = 0
        """The number of iterations of the plan that are done."""
        self.start = 0
        """The iteration at which the current phase began."""
        self.position = -1
        """The number of the current phase; -1 before the first."""
        self.is_over = False
        self._trail = ""
        """A digest of the phases up to the current one, so that a state of another plan is refused."""
        self.num_steps_after = 0
        """The number of steps of the attached optimizer after the end of the plan."""
        if sparse.cursor is None or sparse.cursor.is_over:
            sparse.wait_for(self)

    # Three ways to go through a plan

    def __iter__(self) -> Iterator[Phase]:
        current = self.current or self._enter_next()
        while current is not None:
            yield current.phase
            current = self._enter_next()

    def advance(self, iteration: int) -> Phase | None:
        """Apply every edit that is due after this many iterations. Return the phase that began, or None.

        Call it with 0 before the first iteration.
        """
        whole = plain(iteration)
        if isinstance(whole, bool) or not isinstance(whole, int):
            raise GrowpruneError(
                f"advance takes the number of iterations that are done, an integer such as 3, got {iteration!r}"
            )
        if whole < self.iteration:
            raise GrowpruneError(
                f"advance({iteration}) goes backwards: {self.iteration} iterations of the plan are done. To go back, "
                f"load the states of the model and of the cursor from a checkpoint"
            )
        return self._advance(whole)

    def _advance(self, iteration: int) -> Phase | None:
        self._begin_counting()
        self.iteration, self._is_fresh = iteration, False
        began = self._enter_next(start=0) if self.position < 0 else None
        while self.current is not None and self.iteration - self.start >= self.length:
            began = self._enter_next(start=self.start + self.length)
        self._watch()
        return began.phase if began is not None and not self.is_over else None

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep pruned weights exactly zero under this optimizer, and advance the plan with each of its steps.

        Starts the plan if it has not begun. The optimizer's state is cleared where a phase restarts, and at the start
        and end of a branch. Its learning rate is up to you. Returns the optimizer, so that you can create and attach it
        in one line. Of several optimizers, the one attached last advances the plan, so let it step last. Of several
        cursors of a model, the one attached last is active.
        """
        self.sparse.attach(optimizer)  # before any edit, which may give the model other parameters
        self._clock = weakref.ref(unwrapped(optimizer))
        if self.position < 0:
            self._advance_all(0)
        self.sparse.begin(self)
        return optimizer

    @property
    def clock(self) -> torch.optim.Optimizer | None:
        """The optimizer whose steps advance the plan: the one attached last."""
        return None if self._clock is None else self._clock()

    @property
    def is_clocked(self) -> bool:
        """True if an optimizer advances the plan, or did so while it existed."""
        return self._clock is not None

    def step(self) -> None:
        """Advance by a step that the clock has made."""
        if self.is_over:
            self.num_steps_after += 1
        else:
            self._advance_all(self.iteration + 1)

    def _advance_all(self, iteration: int) -> None:
        """Advance, and reset attached optimizers where a phase restarts."""
        self._advance(iteration)
        for optimizer in self.sparse.optimizers() if self._is_fresh else ():
            optimizer.state.clear()

    def _begin_counting(self) -> None:
        """Start counting iterations. Raise, before anything is done, if the length of a phase is unknown."""
        self._lengths = self._lengths or tuple([self.length_of(scheduled.phase) for scheduled in self.schedule])
        self._is_counting = True

    # Where it stands

    @property
    def current(self) -> ScheduledPhase | None:
        """The current phase; None before the first and after the last."""
        return None if self.position < 0 or self.is_over else self.schedule[self.position]

    @property
    def rule(self) -> RunningRule | None:
        """What happens around each step in the current phase, if it has a rule."""
        return self.sparse.rule

    @property
    def length(self) -> int:
        """The number of iterations of the current phase."""
        assert self.current is not None
        return self._lengths[self.position] if self._lengths else self.length_of(self.current.phase)

    @property
    def left(self) -> int:
        """The number of iterations left in the current phase."""
        return self.start + self.length - self.iteration

    def length_of(self, phase: Phase) -> int:
        """Return the number of iterations of a phase."""
        if phase.epochs and self._per_epoch is None:
            raise GrowpruneError(
                f"a phase of the plan has {phase.epochs} epochs ({phase}): pass iterations_per_epoch=len(loader) to "
                f"Cursor"
            )
        return phase.num_iterations(self._per_epoch or 0)

    @property
    def num_iterations(self) -> int:
        """The number of iterations of the plan."""
        return sum(self._lengths or [self.length_of(scheduled.phase) for scheduled in self.schedule])

    @property
    def progress(self) -> float:
        """The share of the plan that is done; 1 if nobody counts its iterations."""
        total = sum(self._lengths) if self._is_counting and not self.is_over else 0
        return self.iteration / total if total else 1.0

    def __repr__(self) -> str:
        name = self.plan.method.__name__ if isinstance(self.plan, Plan) else "a list of phases"
        place = "before its first phase" if self.position < 0 else f"phase {self.position + 1} of {len(self.schedule)}"
        return f"Cursor({name}, {'over' if self.is_over else place}, {self.iteration} iterations done)"

    # Phases

    def _enter_next(self, start: int | None = None) -> ScheduledPhase | None:
        """Leave the current phase and enter the next, with its edits; None if there is none."""
        if self.current is not None:
            self._on_leave(self.current)
        if self.position + 1 == len(self.schedule):
            self.end()
            return None
        before, self.start = self.start, self.iteration if start is None else start
        try:
            self._enter(self.schedule[self.position + 1])
        except GrowpruneError:
            self.start = before
            raise
        return self.current

    def end(self) -> None:
        """Leave the last phase: no rule runs, and no gradients are watched, any more."""
        self.is_over = True
        self.sparse.rule = None
        self.sparse.watch(())

    def _enter(self, scheduled: ScheduledPhase) -> None:
        try:
            if not (self._is_begun and scheduled.index == 0):
                if self._score is not None:
                    for by in {edit.by for edit in scheduled.phase.edits if edit.by.needs_gradients}:
                        if not self.sparse.gradients.are_seen(by):
                            self._score(by)
                self.sparse.apply(*scheduled.phase.edits)
        except GrowpruneError as error:
            raise GrowpruneError(f"{scheduled}, at iteration {self.start}: {error}") from error
        self._is_fresh |= scheduled.phase.restart
        self._place_at(scheduled)
        self._begin_rule(scheduled.phase)
        if self.rule is not None:
            self.rule.enter()
        self._on_enter(scheduled)
        if not self._is_counting:
            self._watch()

    def _begin_rule(self, phase: Phase | None) -> None:
        self.sparse.rule = None if phase is None or phase.rule is None else running(phase.rule, self.sparse)

    def _place_at(self, scheduled: ScheduledPhase) -> None:
        self.position, self._trail = scheduled.index, onward(self._trail, scheduled)
        self.sparse.begin(self)

    def _watch(self) -> None:
        """Collect gradients for the next edits if they need them."""
        edits = [] if self.current is None else next_edits(self.schedule, self.current)
        is_last = not self._is_counting or (self.current is not None and self.left == 1)
        by = {edit.by for edit in edits if edit.by.needs_gradients}
        is_due = bool(by) and (is_last or By.MOMENTUM in by)
        if is_due or self.sparse.gradients.is_watching:
            self.sparse.watch(edits if is_due else ())

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the plan. An exact resume also needs the states of SparseModel, model and optimizer."""
        place = {"position": self.position, "trail": self._trail, "is_over": self.is_over}
        count = {"iteration": self.iteration, "start": self.start, "is_counting": self._is_counting}
        rule = {} if self.rule is None else self.rule.state_dict()
        return {**place, **count, "num_steps_after": self.num_steps_after, "rule": rule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a cursor of the same plan. Load the SparseModel's state first."""
        counts = "iteration", "start", "is_counting", "num_steps_after"
        check_state(state, "position", "trail", "is_over", *counts)
        self.check_place(state)
        if state["is_counting"]:
            self._begin_counting()
        self.position, self._trail, self.is_over = state["position"], state["trail"], state["is_over"]
        self.iteration, self.start, self._is_counting = state["iteration"], state["start"], state["is_counting"]
        self.num_steps_after = state["num_steps_after"]
        if self.position >= 0:
            self.sparse.begin(self)
        self._begin_rule(None if self.current is None else self.current.phase)
        if self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        self._watch()

    def check_place(self, state: Mapping[str, Any]) -> None:
        """Raise unless a state belongs to this plan, up to its place, and holds what the rule there needs."""
        position, is_end = state["position"], state["position"] == len(self.schedule) - 1
        known = self.schedule[: position + 1]
        is_of_plan = position < len(self.schedule) and functools.reduce(onward, known, "") == state["trail"]
        if not is_of_plan or (state["is_over"] and not is_end):
            raise GrowpruneError(
                f"the state belongs to phase {position} of another plan: resume with the same method, options, parts, "
                f"keep_dense, include and initial_mask as when it was saved"
            )
        phase = None if state["is_over"] or position < 0 else self.schedule[position].phase
        if phase is not None and phase.rule is not None:
            running(phase.rule, self.sparse).check_state(state["rule"])


def check_plan(own: SparseModel, plan: Plan) -> None:
    """Raise if a plan was made for another sparsity, allocation or keep_dense than the model."""
    target, method = plan.options.get("sparsity"), plan.method.__name__
    if target is not None and not math.isclose(as_float(target), own.target_sparsity, abs_tol=1e-9):
        raise GrowpruneError(
            f"{method} has sparsity={target}, but the SparseModel has {own.target_sparsity}: use the same for both"
        )
    meant = declaration_of(plan.method).allocation
    if meant != own.allocation and not own.is_allocation_given:
        raise GrowpruneError(
            f"{method} is designed for allocation={meant!r}, but the SparseModel has the default, {own.allocation!r}: "
            f"use SparseModel(..., allocation={meant!r}), or pass {own.allocation!r} explicitly to keep it"
        )
    sizes = getattr(plan.partition, "sizes", ())
    prunable = sum(weight.numel for weight in own.weights)
    if sizes and sum(sizes) != prunable:
        raise GrowpruneError(
            f"the partition has {sum(sizes):,} prunable weights, but the SparseModel has {prunable:,}: use the same "
            f"keep_dense and include for both"
        )
