"""The schedule as a timeline: the density of each part, or of the whole model, over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from growprune.report.chart import Chart, axis, layout
from growprune.report.groups import Cell, Group
from growprune.runs.record import Json, Record

MAX_PARTS = 12
"""With more parts, or sets of layers, only the whole model is shown."""
MIN_SHARE = 0.07
"""Smallest fraction of the time in which a bar shows its density as text."""

_EDIT = re.compile(
    r"(prune|grow) (?:([\d.e-]+) (?:more )?of (.+?)|(.+?) to (dense|[\d.e-]+))"
    r"(?: by \w+| at random)?(?: spread by \w+)?(?: within [\d.e-]+)?$"
)


Row = tuple[str, float, float, float]
"""A bar of the timeline: label, first epoch, last epoch and density."""


@dataclass(frozen=True)
class Span:
    """A time, in epochs, without edits. Branches of a fork have spans of their own."""

    start: float
    end: float
    stage: int
    branch: int | None
    edits: str
    alive: int


def schedule_chart(group: Group) -> Chart | None:
    """The timeline of every method of a group. Of runs that differ only by seed, the first."""
    size = next((found for cell in group.cells for r in cell.records if (found := r.total("prunable"))), None)
    lanes = [lane for cell in group.cells for lane in _lanes(cell, len(group.cells) > 1, size)]
    if not lanes:
        return None
    rows = [row for lane in lanes for row in lane]
    length = max(end for _, _, end, _ in rows)
    return Chart(
        "schedule",
        "Schedule",
        "Each row is a part of a model, or a whole model. Darker (on a dark page: brighter) means that more of its "
        "weights are alive at that time."
        + (" Parts that are dense at the same time are trained on separate machines." if _has_forks(group) else ""),
        [_bars(rows, length)],
        layout(
            axis("epoch", range=[0, length]),
            axis("", autorange="reversed", type="category", ticksuffix=" "),
            bargap=0.12,
        ),
        ["part", "from epoch", "to epoch", "density"],
        rows,
        height=130 + 34 * len(lanes),
    )


def _has_forks(group: Group) -> bool:
    return any(row.get("branch") is not None for cell in group.cells for row in cell.first.history)


def _bars(rows: Sequence[Row], length: float) -> Json:
    """The bars of the timeline, darker where denser."""
    densities = [density for _, _, _, density in rows]
    bars: Json = {"type": "bar", "orientation": "h", "meta": "density", "y": [label for label, _, _, _ in rows]}
    bars |= {"base": [start for _, start, _, _ in rows], "x": [end - start for _, start, end, _ in rows]}
    scale = {"title": {"text": "density"}, "thickness": 12, "tickformat": ".0%"}
    bars["marker"] = {"color": densities, "cmin": 0, "cmax": 1, "colorbar": scale, "line": {"width": 0}}
    bars["text"] = [_name(density) if end - start >= MIN_SHARE * length else "" for _, start, end, density in rows]
    bars |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none"}
    bars["customdata"] = [f"epochs {start:.4g} to {end:.4g}: density {density:.3g}" for _, start, end, density in rows]
    bars["hovertemplate"] = "%{y}<br>%{customdata}<extra></extra>"
    return bars


def _name(density: float) -> str:
    return "dense" if density == 1 else f"{density:.2g}"


def _lanes(cell: Cell, is_named: bool, prunable: int | None) -> list[list[Row]]:
    """The rows of a run in the timeline. An unfinished run uses the model size of other runs, if there are any."""
    record = next((record for record in cell.records if record.phases), cell.first)
    spans = _spans(record)
    if not spans:
        return []
    parts = sorted({part for span in spans for _, part, _, _ in parse_edits(span.edits)} - {"all"}, key=_natural)
    if 0 < len(parts) <= MAX_PARTS and all(_is_known(span.edits) for span in spans):
        before = f"{cell.label}: " if is_named else ""
        return [_lane(f"{before}{part}", states) for part, states in _part_states(record, spans, parts).items()]
    size = record.total("prunable") or prunable or max(span.alive for span in spans)
    whole = [(_end(same), max(span.alive for span in same) / size) for same in _by_time(spans)]
    return [_lane(cell.label if is_named else "whole model", whole)]


def _lane(label: str, states: Sequence[tuple[float, float]]) -> list[Row]:
    """Join neighbours of equal density into one bar."""
    lane: list[Row] = []
    start = 0.0
    for density, same in groupby(states, key=lambda state: state[1]):
        *_, (end, _) = same
        lane.append((label, round(start, 3), round(end, 3), density))
        start = end
    return lane


def _part_states(record: Record, spans: Sequence[Span], parts: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """End time and density of each bar, by part. In a fork, the largest density over branches counts."""
    states: dict[str, list[tuple[float, float]]] = {part: [] for part in parts}
    # a log has the edits of all phases; a history may lack the first ones, in which every method prunes
    now = dict.fromkeys(parts, 1.0 if record.phases else _last_density(record))
    is_forked, stage = not record.phases and any(span.branch is not None for span in spans), 0
    for same in _by_time(spans):
        if is_forked and same[0].stage > stage + 1:  # nor those between forks, which prune what the branches grew
            now = dict.fromkeys(parts, _left(same, record))
        stage = same[0].stage
        branches = [_edited(now, span.edits) for span in same]
        now = {part: max(branch[part] for branch in branches) for part in parts}
        if _end(same) > same[0].start:
            for part in parts:
                states[part].append((_end(same), now[part]))
    return states


def _left(spans: Sequence[Span], record: Record) -> float:
    """Density of the parts after pruning, from the live weights if nothing was grown since."""
    if spans[0].branch is None and (size := record.total("prunable")):
        return float(spans[0].alive / size)
    return _last_density(record)


def _last_density(record: Record) -> float:
    return 1.0 if record.trains_dense else 1 - record.sparsity


def _edited(now: dict[str, float], edits: str) -> dict[str, float]:
    after = dict(now)
    for action, part, to, share in parse_edits(edits):
        for name in after if part == "all" else [part]:
            if to is not None:
                after[name] = 1 - to
            elif share is not None:
                after[name] = min(1.0, after[name] * (1 - share if action == "prune" else 1 + share))
    return {part: round(density, 6) for part, density in after.items()}


def parse_edits(edits: str) -> list[tuple[str, str, float | None, float | None]]:
    """Parse the edits of a phase as logs write them, into (action, part, to, share)."""
    found = []
    for edit in edits.split(", "):
        if match := _EDIT.fullmatch(edit.partition(" (")[0]):
            action, share, of, part, to = match.groups()
            sparsity = None if to is None else 0.0 if to == "dense" else float(to)
            found.append((action, of or part, sparsity, None if share is None else float(share)))
    return found


def _is_known(edits: str) -> bool:
    return edits.startswith("train") or len(parse_edits(edits)) == len(edits.split(", "))


def _spans(record: Record) -> list[Span]:
    """The spans of a run from its log, which has every phase, or else from its history, which has every epoch."""
    if not record.phases:  # its rows have one branch after the other
        of_epochs = [_span(row["epoch"] - 1, row["epoch"], row) for row in record.history]
        return sorted(of_epochs, key=lambda span: (span.stage, span.start))
    rows = [row for row in record.history if row.get("iteration") and row["epoch"]]
    per_epoch = rows[0]["iteration"] / rows[0]["epoch"] if rows else 1.0
    lengths = [(phase["iterations"], phase["epochs"]) for phase in record.phases]
    trained = [iterations / epochs for iterations, epochs in lengths if iterations and epochs]
    per_epoch = trained[0] if trained else per_epoch
    spans: list[Span] = []
    now = 0.0
    for _, group in groupby(record.phases, key=lambda phase: phase["stage"]):
        same = [_span(now, now + phase["iterations"] / per_epoch, phase) for phase in group]
        now = _end(same)
        spans += same
    return spans


def _span(start: float, end: float, row: Json) -> Span:
    return Span(start, end, row["stage"], row["branch"], row["edits"], row["alive"])


def _by_time(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in order of time. Those of the branches of a fork are together."""
    return [list(same) for _, same in groupby(spans, key=lambda span: (span.stage, span.start))]


def _end(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts S2 before S10."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name) if piece]
