"""When each phase of a plan is trained, in iterations of the run, and which learning-rate schedule it is part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from growprune.plan import ScheduledPhase


@dataclass(frozen=True)
class Span:
    """A phase in time. The branches of a fork run side by side, however many machines there are."""

    start: int
    length: int
    schedule_start: int = 0
    """At which iteration the learning-rate schedule began that the phase is part of."""
    schedule_length: int = 0


def timeline(schedule: Sequence[ScheduledPhase], per_epoch: int) -> list[Span]:
    """The span of each phase. A learning-rate schedule goes from one phase that restarts to the next that does."""
    spans: list[Span] = []
    begins, now = [0], 0
    for _, group in groupby(schedule, key=lambda scheduled: scheduled.stage):
        phases = [scheduled.phase for scheduled in group]
        lengths = [phase.num_iterations(per_epoch) for phase in phases]
        if any(phase.restart and phase.is_trained for phase in phases) and now > begins[-1]:
            begins.append(now)
        spans += [Span(now, length, begins[-1]) for length in lengths]
        now += max(lengths, default=0)
    lengths_of = {begin: end - begin for begin, end in zip(begins, [*begins[1:], now], strict=True)}
    return [replace(span, schedule_length=lengths_of[span.schedule_start]) for span in spans]


def work_before(
    schedule: Sequence[ScheduledPhase], spans: Sequence[Span], is_local: Callable[[int], bool]
) -> list[int]:
    """How many iterations one process trains before each phase, branch after branch, and last how many in all.

    Args:
        is_local: which branches of a fork it trains.
    """
    mine = (scheduled.branch is None or is_local(scheduled.branch) for scheduled in schedule)
    return [0, *accumulate(span.length if is_mine else 0 for span, is_mine in zip(spans, mine, strict=True))]


def last_trained(schedule: Sequence[ScheduledPhase]) -> int:
    """The number of the last phase that is trained, after which others may only edit."""
    trained = [scheduled for scheduled in schedule if scheduled.phase.is_trained]
    return trained[-1].index if trained and trained[-1].branch is None else len(schedule) - 1
