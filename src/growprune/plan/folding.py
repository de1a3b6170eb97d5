"""Show a plan of thousands of phases in a few rows: neighbours that differ only in degree share a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from growprune.plan import Edit, ScheduledPhase

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
        edits = zip(self.first.phase.edits, self.last.phase.edits, strict=True)
        are_same_parts = all(_parts(phase) == _parts(self.first) for phase in self.phases)
        said = ", ".join(_say(a, b) for a, b in edits) if are_same_parts else f"{_kinds(self.first)} of changing parts"
        return self.first.phase.say(said)

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


def _kinds(scheduled: ScheduledPhase) -> str:
    return ", ".join(edit.action.value for edit in scheduled.phase.edits)


def _say(first: Edit, last: Edit) -> str:
    if first == last:
        return str(first)
    text, end = str(first), first.share if first.to is None else first.to
    begin, other = f"{end:.4g}", f"{last.share if last.to is None else last.to:.4g}"
    text = text.replace("dense", "0")
    return text.replace(begin, f"{begin} ... {other}", 1)
