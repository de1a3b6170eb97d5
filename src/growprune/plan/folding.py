"""Show a plan of thousands of phases in a few rows: neighbours that differ only in degree share a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from growprune.plan import ScheduledPhase

MAX_ROWS = 60
"""The most rows of a file before phases that edit different parts in the same way are folded too."""


@dataclass(frozen=True)
class Row:
    """Consecutive phases that are alike."""

    phases: tuple[ScheduledPhase, ...]

    @property
    def first(self) -> ScheduledPhase:
        return self.phases[0]

    @property
    def last(self) -> ScheduledPhase:
        return self.phases[-1]

    def __str__(self) -> str:
        """Describe the phases: "prune all to 0.1 ... 0.9"."""
        phase = self.first.phase
        if any(_parts(other) != _parts(self.first) for other in self.phases):
            return phase.say(f"{', '.join(edit.action.value for edit in phase.edits)} of changing parts")
        said = []
        for first, last in zip(phase.edits, self.last.phase.edits, strict=True):
            begin, end = (f"{edit.share if edit.to is None else edit.to:.4g}" for edit in (first, last))
            is_one = first == last
            said.append(
                str(first) if is_one else str(first).replace("dense", "0").replace(begin, f"{begin} ... {end}", 1)
            )
        return phase.say(", ".join(said))

    def to_dict(self) -> dict[str, Any]:
        phase = self.first.phase
        length = {"epochs": phase.epochs} if phase.epochs else {"iterations": phase.iterations}
        about = {"stage": self.first.stage, "edits": str(self), **length, "restart": phase.restart}
        if self.first.returns is not None:
            about |= {"branch": self.first.branch, "returns": self.first.returns.name}
        return about | ({"times": len(self.phases)} if len(self.phases) > 1 else {})


def fold(schedule: Iterable[ScheduledPhase], most: int = MAX_ROWS) -> list[Row]:
    """Fold a schedule into rows, each for one or more consecutive phases that are alike.

    Args:
        most: the most rows before phases that edit different parts in the same way are folded too.

    >>> from growprune import methods, Partition
    >>> from growprune.plan import Part, walk
    >>> S = Partition((Part("S0", ("w",)),))
    >>> [f"{len(row.phases)} x {row}" for row in fold(walk(methods.gmp(S, sparsity=0.9, iterations=1000, every=10)))]
    ['1 x train', '65 x prune all to 0 ... 0.9', '1 x prune all to 0.9']
    """
    schedule = list(schedule)
    rows = [Row(tuple(group)) for _, group in groupby(schedule, key=_alike)]
    if len(rows) > most:
        rows = [Row(tuple(group)) for _, group in groupby(schedule, key=lambda s: _alike(s)[:-1])]
    return rows


def _alike(scheduled: ScheduledPhase) -> tuple[Any, ...]:
    """Return a key that is equal for phases that differ only in the degree of their edits. Its last item: the parts."""
    phase = scheduled.phase
    what = tuple((edit.action, edit.by, edit.to is None, edit.spread, edit.within) for edit in phase.edits)
    return (what, phase.epochs, phase.iterations, phase.restart, phase.rule, scheduled.returns, _parts(scheduled))


def _parts(scheduled: ScheduledPhase) -> tuple[str, ...]:
    return tuple(edit.part.name for edit in scheduled.phase.edits)
