"""Where a model stands in a plan: one cursor for every loop, whoever owns it.

    for phase in cursor: ...                 # your own loop over phases
    cursor.advance(iteration)                # a trainer's loop: does every edit that is due
    optimizer = cursor.attach(optimizer)     # a plain loop over epochs: each step advances by itself

Iterations are optimizer steps, counted from the start of the plan, the branches of a fork one after the other, those
that are trained elsewhere too.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from growprune.errors import GrowpruneError
from growprune.masks.bits import Snapshot
from growprune.plan import By, Part, Phase, Plan, ScheduledPhase, Stage, next_edits, prunes_after_fork, walk
from growprune.plan.settings import check_counts, check_state, plain
from growprune.sparse.internals import Internals, internals
from growprune.sparse.model import SparseModel, check_sparse_model
from growprune.sparse.optimizers import is_skipped, unwrapped
from growprune.sparse.rules import running
from growprune.sparse.rules.base import RunningRule

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

Combine = Callable[[Snapshot, list[tuple[str, ...]], Snapshot], Snapshot]
"""Given the parts returned here, by branch the names each returns, and a copy of the model as it was before the fork,
gives the parts of all branches."""

OnPhase = Callable[[ScheduledPhase], None]

_ADVANCING: weakref.WeakKeyDictionary[SparseModel, weakref.ref[Cursor]] = weakref.WeakKeyDictionary()
"""By model: the cursor that the steps of attached optimizers advance."""


def cursor_of(sparse: SparseModel) -> Cursor | None:
    """The cursor that the steps of a model's optimizers advance; None if there is none."""
    reference = _ADVANCING.get(sparse)
    return None if reference is None else reference()


class Cursor:
    """A place in a plan, and the model that stands there. It can be iterated over once, for the phases that are left.

    Args:
        iterations_per_epoch: how many optimizer steps an epoch has; `advance` needs it if phases are told in epochs.
        accumulate: how many backward passes an iteration has, if that is known. With 1, compact storage keeps of the
            gradients that an edit looks at only what it may choose.
        is_begun: whether the edits of the first phase are done already, as `sparse_init` does a random prune.
        is_local: which branches of a fork are trained here; the others are trained elsewhere.
        combine: collects the parts of all branches.
        score: called where an edit looks at gradients and there was no iteration to see them; calls `sparse.score`.
        on_enter, on_leave: told of each phase once its edits are done, and before the model leaves it.

    Examples:
        >>> from growprune import Partition, SparseModel, methods
        >>> model = torch.nn.Linear(10, 10)
        >>> plan = methods.gmp(Partition.contiguous(model, 1), sparsity=0.9, iterations=10, every=2)
        >>> cursor = Cursor(SparseModel(model, sparsity=0.9), plan)
        >>> for iteration in range(10 + 1):
        ...     phase = cursor.advance(iteration)
        >>> cursor.sparse.num_alive, cursor.is_over
        (10, True)
    """

    def __init__(
        self,
        sparse: SparseModel,
        plan: Plan | Sequence[Stage],
        *,
        iterations_per_epoch: int | None = None,
        accumulate: int | None = None,
        is_begun: bool = False,
        is_local: Callable[[int], bool] = lambda branch: True,
        combine: Combine = lambda returned, parts, like: returned,
        score: Callable[[By], None] | None = None,
        on_enter: OnPhase = lambda scheduled: None,
        on_leave: OnPhase = lambda scheduled: None,
    ) -> None:
        given = {"iterations_per_epoch": iterations_per_epoch, "accumulate": accumulate}
        check_counts(1, **{name: count for name, count in given.items() if count is not None})
        check_sparse_model(sparse, "Cursor")
        self.sparse = sparse
        self._own = internals(sparse)
        self.schedule = tuple(walk(plan))
        _check(self._own, self.schedule)
        self._per_epoch, self._accumulate = plain(iterations_per_epoch), plain(accumulate)
        self._is_begun, self._is_local, self._combine = is_begun, is_local, combine
        self._score, self._on_enter, self._on_leave = score, on_enter, on_leave
        self._is_counting = False
        """Whether somebody advances; if not, phases are handed out and nobody says when they are over."""
        self._attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._clock: weakref.ref[torch.optim.Optimizer] | None = None
        """The optimizer whose steps advance: the one attached last."""
        self._is_fresh = False
        """Whether a phase that began with the last advance has a fresh optimizer."""
        self.iteration = 0
        """How many iterations of the plan are done."""
        self.start = 0
        """At which iteration the current phase began."""
        self.position = -1
        """The number of the phase that is being trained; -1 before the first."""
        self.is_over = False
        self._trail = ""
        """A digest of the phases up to the current one, so that no other plan is gone on with."""
        self._base: Snapshot | None = None
        """The model as it was when the fork began that it is in."""
        self._returned: Snapshot = {}

    # Three ways to go through a plan

    def __iter__(self) -> Iterator[Phase]:
        current = self.current or self._enter_next()
        while current is not None:
            yield current.phase
            current = self._enter_next()

    def advance(self, iteration: int) -> Phase | None:
        """Say how many iterations are done. Does every edit that is due, and gives the phase that began, if one did.

        Call it with 0 before the first iteration.
        """
        iteration = _whole(iteration)
        if iteration < self.iteration:
            raise GrowpruneError(
                f"advance({iteration}) goes backwards: {self.iteration} iterations of the plan are done; "
                f"to go back, load the state of the model and of the cursor from then"
            )
        return self._advance(iteration)

    def _advance(self, iteration: int) -> Phase | None:
        self._begin_counting()
        self.iteration, self._is_fresh = iteration, False
        began = self._enter_next(start=0) if self.position < 0 else None
        while self.current is not None and self.iteration - self.start >= self.length:
            began = self._enter_next(start=self.start + self.length)
        self._watch()
        return began.phase if began is not None and not self.is_over else None

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Keep what is pruned exactly zero under this optimizer, and advance the plan with each of its steps.

        Begins the plan, if that was not done. Where a phase restarts, and at the beginning and the end of a branch, the
        optimizer's state is emptied; its learning rate is yours. Returns the optimizer, so that it can be made and
        attached in one line. Of several, the one attached last advances: let it be the last to step. Of several cursors
        of a model, too, the one attached last goes on.
        """
        self.sparse.attach(optimizer)  # before any edit, which may give the model other parameters
        inner = unwrapped(optimizer)
        if inner not in self._attached:
            self._attached.add(inner)
            inner.register_step_post_hook(self._stepped)  # which keeps the cursor as long as there is the optimizer
        self._clock, _ADVANCING[self.sparse] = weakref.ref(inner), weakref.ref(self)
        if self.position < 0:
            self._advance_all(0)
        return optimizer

    def _stepped(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        is_clock = self._clock is not None and self._clock() is optimizer
        if is_clock and cursor_of(self.sparse) is self and not self.is_over and not is_skipped(optimizer):
            self._advance_all(self.iteration + 1)

    def _advance_all(self, iteration: int) -> None:
        """Advance, and see to the attached optimizers."""
        self._advance(iteration)
        if self._is_fresh:
            self._own.optimizers.reset()

    def _begin_counting(self) -> None:
        """From now on somebody says when phases are over: raise, before anything is done, if one cannot be told."""
        if not self._is_counting:
            for scheduled in self.schedule:
                self.length_of(scheduled.phase)
            self._is_counting = True

    # Where it stands

    @property
    def current(self) -> ScheduledPhase | None:
        """The phase that is being trained; None before the first and after the last."""
        return None if self.position < 0 or self.is_over else self.schedule[self.position]

    @property
    def _is_in_branch(self) -> bool:
        return self.position >= 0 and self.schedule[self.position].branch is not None

    @property
    def rule(self) -> RunningRule | None:
        """What happens around each step in the current phase, if it has a rule."""
        return self._own.rule

    @property
    def length(self) -> int:
        """How many iterations the current phase has."""
        assert self.current is not None
        return self.length_of(self.current.phase)

    @property
    def left(self) -> int:
        """How many iterations of the current phase are left."""
        return self.start + self.length - self.iteration

    def length_of(self, phase: Phase) -> int:
        """How many iterations a phase has."""
        if phase.epochs and self._per_epoch is None:
            raise GrowpruneError(
                f"a phase of the plan has {phase.epochs} epochs ({phase}): give Cursor iterations_per_epoch=len(loader)"
            )
        return phase.num_iterations(self._per_epoch or 0)

    def skip_to(self, done: int) -> None:
        """Note that so many iterations of the current phase are done already."""
        self.iteration = self.start + done

    # Phases

    def _enter_next(self, start: int | None = None) -> ScheduledPhase | None:
        """Leave the current phase and enter the next that is trained here, with its edits; None if there is none."""
        if self.current is not None:
            self._leave(self.current)
        while self.position + 1 < len(self.schedule):
            scheduled = self.schedule[self.position + 1]
            if self._is_mine(scheduled):
                self.start = self.iteration if start is None else start
                self._enter(scheduled)
                return scheduled
            self._pass(scheduled)
            if start is not None:
                self.iteration += self.length_of(scheduled.phase)
                start += self.length_of(scheduled.phase)
        self.is_over = True
        self._own.set_rule(None)
        self._own.watch(())
        return None

    def _is_mine(self, scheduled: ScheduledPhase) -> bool:
        return scheduled.branch is None or self._is_local(scheduled.branch)

    def _enter(self, scheduled: ScheduledPhase) -> None:
        if scheduled.branch is not None:
            self._begin_branch(scheduled)
        try:
            if not (self._is_begun and scheduled.index == 0):
                self._look(scheduled.phase)
                self._own.apply(scheduled.phase.edits)
        except GrowpruneError as error:
            raise GrowpruneError(f"{scheduled}, at iteration {self.start}: {error}") from error
        self._is_fresh |= scheduled.phase.restart or scheduled.branch is not None or self._is_in_branch
        self._place_at(scheduled)
        self._begin_rule(scheduled.phase)
        if self.rule is not None:
            self.rule.enter()
        self._on_enter(scheduled)
        if not self._is_counting:
            self._watch()

    def _begin_rule(self, phase: Phase | None) -> None:
        self._own.set_rule(None if phase is None or phase.rule is None else running(phase.rule, self._own))

    def _look(self, phase: Phase) -> None:
        for by in {edit.by for edit in phase.edits if edit.by.needs_gradients}:
            if self._score is not None and not self._own.gradients.are_seen(by):
                self._score(by)

    def _leave(self, scheduled: ScheduledPhase) -> None:
        self._on_leave(scheduled)
        if scheduled.returns is not None:
            # no more than one part is ever dense then, and only live weights have to be sent
            self._own.prune_early(prunes_after_fork(scheduled, self.schedule), scheduled.returns)
            self._returned |= self._own.snapshot(scheduled.returns)
            self._end_fork_after(scheduled)

    def _pass(self, scheduled: ScheduledPhase) -> None:
        """Go past a branch that is trained elsewhere."""
        if self._base is None:
            self._base, self._returned = self._own.snapshot(), {}
        self._own.skip(scheduled.phase.edits)
        self._place_at(scheduled)
        self._end_fork_after(scheduled)

    def _begin_branch(self, scheduled: ScheduledPhase) -> None:
        if self._base is None:
            self._base, self._returned = self._own.snapshot(), {}
        elif scheduled.branch:
            self._own.restore(self._base)

    def _end_fork_after(self, scheduled: ScheduledPhase) -> None:
        if not scheduled.is_last_branch:
            return
        assert self._base is not None
        same = self.schedule[scheduled.index - (scheduled.branch or 0) : scheduled.index + 1]
        parts = [s.returns.tensors for s in same if s.returns is not None]
        # every tensor comes from the branch that returns it, and what none returns is as it was
        self._own.restore(self._base | self._combine(self._returned, parts, self._base))
        self._base, self._returned = None, {}

    def _place_at(self, scheduled: ScheduledPhase) -> None:
        self.position, self._trail = scheduled.index, _onward(self._trail, scheduled)

    def _watch(self) -> None:
        """See to it that gradients are there when the edits to come look at them."""
        edits = [] if self.current is None else next_edits(self.schedule, self.current)
        is_last = not self._is_counting or (self.current is not None and self.left == 1)
        by = {edit.by for edit in edits if edit.by.needs_gradients}
        is_due = bool(by) and (is_last or By.MOMENTUM in by)
        if is_due or self._own.gradients.is_watching:
            self._own.watch(edits if is_due else (), is_one_backward=self._accumulate == 1)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Beside the state of the model, of its SparseModel and of the optimizer, what an exact resume needs."""
        place = {"position": self.position, "trail": self._trail, "is_over": self.is_over}
        count = {"iteration": self.iteration, "start": self.start, "is_counting": self._is_counting}
        rule = {} if self.rule is None else self.rule.state_dict()
        return {**place, **count, "rule": rule, "base": self._base, "returned": dict(self._returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another cursor of the same plan stood. Load the SparseModel's state before."""
        check_state(state, "position", "trail", "is_over", "iteration", "start", "is_counting", "base", "returned")
        if not self.is_place(state):
            raise GrowpruneError(
                f"the state is of phase {state['position']} of another plan: make the Cursor with that plan, or begin "
                f"this one without loading the state"
            )
        self.position, self._trail, self.is_over = state["position"], state["trail"], state["is_over"]
        self.iteration, self.start, self._is_counting = state["iteration"], state["start"], state["is_counting"]
        self._base, self._returned = state["base"], dict(state["returned"])
        self._begin_rule(None if self.current is None else self.current.phase)
        if self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        self._watch()

    def is_place(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this plan, as far as it went."""
        position, is_end = state["position"], state["position"] == len(self.schedule) - 1
        known = self.schedule[: position + 1]
        return (
            position < len(self.schedule)
            and functools.reduce(_onward, known, "") == state["trail"]
            and (is_end or not state["is_over"])
        )


def _whole(iteration: int) -> int:
    whole = plain(iteration)
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise GrowpruneError(
            f"advance was given {iteration!r}, but takes how many iterations are done: give a whole number, such as 3"
        )
    return whole


def _check(own: Internals, schedule: Sequence[ScheduledPhase]) -> None:
    """Raise, before anything is done, if the plan is one of another model, or does not go with how it is stored."""
    own.check(*{id(part): part for scheduled in schedule for part in scheduled.parts}.values())
    for by in {edit.by for scheduled in schedule for edit in scheduled.phase.edits}:
        own.check_by(by)
    for rule in {scheduled.phase.rule for scheduled in schedule}:
        running(rule, own)


def _onward(trail: str, scheduled: ScheduledPhase) -> str:
    phase, returns = scheduled.phase, scheduled.returns
    edits = [(e.action.value, _digest(e.part), e.by.value, e.to, e.share, e.spread, e.within) for e in phase.edits]
    place = (scheduled.stage, scheduled.branch, None if returns is None else _digest(returns))
    how = (phase.epochs, phase.iterations, phase.restart, repr(phase.rule))
    return hashlib.sha256(f"{trail}{edits}{place}{how}".encode()).hexdigest()


@functools.lru_cache(maxsize=4096)
def _digest(part: Part) -> str:
    return hashlib.sha256(repr(part).encode()).hexdigest()
