"""Rows of a table: runs that differ only by seed, their names, and what they are compared with.

`compare`, `report`, the command line and the scripts of experiments/ make their rows here, so that they agree on the
name of a row, on the reference that "vs dense" means, and on what missed its target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from growprune.errors import GrowpruneError
from growprune.runs.comparable import check, is_allowed, terms_of
from growprune.runs.metric import Metric, deviation, in_full, mean
from growprune.runs.record import Record
from growprune.runs.result import Json

Key = TypeVar("Key")

TOLERANCE = 0.0005
"""Difference from the target sparsity above which a row is off its target."""

Figure = str | Callable[[Record], float | None]
"""A number of a run: an attribute of Record or a field of its result, or a function that returns it."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds. None where there are too few numbers; the mean is nan if any is."""

    mean: float | None
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """
        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        return cls(mean(values), deviation(values), len(values))


@dataclass(frozen=True)
class Gap:
    """The mean difference of two rows over their common seeds, and its standard error."""

    mean: float
    standard_error: float | None
    """None for a single seed."""
    count: int


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Gap | None:
    """The difference ours minus theirs of scores by seed. None without a common seed.

    >>> paired({0: 5.0, 1: 7.0, 2: 9.0}, {0: 4.0, 1: 4.0})
    Gap(mean=2.0, standard_error=1.0, count=2)
    """
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    average, spread = mean(gaps), deviation(gaps)
    if average is None:
        return None
    return Gap(average, None if spread is None else spread / math.sqrt(len(gaps)), len(gaps))


@dataclass(frozen=True)
class RunRow:
    """One row of a table: runs that differ only by seed, finished or not."""

    name: str
    """Method, allocation, options, and settings that tell it apart. See `rows_of`."""
    runs: tuple[Record, ...]
    """At least one."""
    dense_epochs: float | None = None
    """Epochs of the dense training that training FLOPs are a share of. None: as many as the row's own."""

    @property
    def first(self) -> Record:
        return self.runs[0]

    @property
    def method(self) -> str:
        """Name of the method. Empty if no run has started."""
        return self.first.method if self.first.recipe else ""

    @property
    def allocation(self) -> str:
        return str(self.first.recipe.get("allocation", ""))

    @property
    def options(self) -> Json:
        return dict(self.first.recipe.get("options") or {})

    @property
    def sparsity(self) -> float:
        """The target sparsity."""
        return self.first.sparsity

    @property
    def label(self) -> str:
        """Name, and the sparsity if it has one."""
        return f"{self.name} {in_full(self.sparsity)}" if self.has_sparsity else self.name

    @property
    def is_dense(self) -> bool:
        """True for the dense baseline. False for small dense models."""
        return self.first.is_dense

    @property
    def has_sparsity(self) -> bool:
        """True if the row has a target sparsity. The dense baseline has none; before a run starts it is unknown."""
        return bool(self.first.recipe) and not self.is_dense

    @property
    def small(self) -> Json:
        """For a small dense model, its target and size. Empty for all others."""
        return self.first.small

    @property
    def tuning(self) -> Json:
        """How the row was tuned, as in `tuning.json`. Empty without tuning."""
        return self.first.tuning

    @property
    def finished(self) -> tuple[Record, ...]:
        return tuple(run for run in self.runs if run.is_finished)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == len(self.runs)

    @cached_property
    def metric(self) -> Metric:
        return next((run.metric for run in self.runs if run.metric.name), Metric(""))

    @property
    def epochs(self) -> float | None:
        """Epochs of its trainings. None if no run is finished."""
        return next((run.epochs for run in self.finished), None)

    @property
    def reached(self) -> float | None:
        """Mean sparsity of the last models."""
        return self.mean("reached")

    @property
    def is_off(self) -> bool:
        """True if it ends at another sparsity than its target. Always False for a small dense model."""
        return not self.small and self.reached is not None and abs(self.reached - self.sparsity) > TOLERANCE

    def values(self, figure: Figure) -> dict[int, float]:
        """A number of each finished run by seed, for runs that have it."""
        found = {run.seed: self.value(run, figure) for run in self.finished}
        return {seed: value for seed, value in found.items() if value is not None}

    def value(self, run: Record, figure: Figure) -> float | None:
        """A number of one of its runs."""
        if not isinstance(figure, str):
            return figure(run)
        if figure == "training_flops":
            return run.training_flops(self.dense_epochs)
        found: float | None = getattr(run, figure) if hasattr(run, figure) else run.figure(figure)
        return found

    def mean(self, figure: Figure) -> float | None:
        return mean(self.values(figure).values())

    def spread(self, figure: Figure) -> Spread:
        return Spread.of([*self.values(figure).values()])

    def minus(self, other: RunRow, figure: Figure = "test") -> Gap | None:
        """The difference to another row, paired by seed: on test data, if nothing else is said."""
        return paired(self.values(figure), other.values(figure))


# Rows and their names


def without_tried(runs: Sequence[Record]) -> list[Record]:
    """Drop the runs of points that were not chosen. A row without a choice keeps one run without a result."""
    kept = []
    undecided: set[Path] = set()
    for run in runs:
        cell = run.folder.parent.parent
        if run.is_passed_over and (run.tuning.get("chosen") is not None or cell in undecided):
            continue
        if run.is_passed_over:
            undecided.add(cell)
        kept.append(replace(run, result=None) if run.is_passed_over else run)
    return kept


def rows_of(runs: Sequence[Record], shown: Sequence[str] | None = None) -> list[RunRow]:
    """Group runs that differ only by seed into rows, in the given order.

    A row is called as it was typed for `growprune compare`, else by method, allocation and options. If runs of that
    name and one sparsity differ in a setting, it is added to the name.

    Args:
        shown: settings that names may have, beside options and parts. None: all.
    """
    names = [_name(run) for run in runs]
    found = [_told(run) for run in runs]
    differing: dict[str, dict[str, None]] = {name: {} for name in names}
    seen: dict[tuple[str, float, str], Any] = {}
    for run, name, told in zip(runs, names, found, strict=True):
        for field, value in told.items():
            may_be_shown = shown is None or field == "parts" or is_allowed(field, ["options", *shown])
            if may_be_shown and seen.setdefault((name, run.sparsity, field), value) != value:
                differing[name][field] = None
    rows: dict[tuple[str, float], list[Record]] = {}
    for run, name, told in zip(runs, names, found, strict=True):
        words = name.split()
        said = [f"{field.removeprefix('options.')}={told[field]}" for field in differing[name] if field in told]
        rows.setdefault((" ".join([name, *(word for word in said if word not in words)]), run.sparsity), []).append(run)
    return [RunRow(name, tuple(same)) for (name, _), same in rows.items()]


def _name(run: Record) -> str:
    """The row as typed; else method, allocation and options, without epochs, which have a column of their own."""
    if not run.recipe:
        return str(run.path)
    if row := run.origin.get("row"):
        return str(row)
    options = run.recipe.get("options") or {}
    hidden = ("epochs", "iterations", "small") if _is_plain(options) else ()
    name = run.method if run.trains_dense else f"{run.recipe['method']}:{run.recipe.get('allocation')}"
    return " ".join([name, *(f"{key}={value}" for key, value in options.items() if key not in hidden)])


def _is_plain(options: Mapping[str, Any]) -> bool:
    """True if its epochs are those of the whole training."""
    return not {"steps", "finetune"} & options.keys()


def _told(run: Record) -> dict[str, str]:
    """The settings that can tell a run from others of its name."""
    if not run.recipe:
        return {}
    options = run.recipe.get("options") or {}
    found = dict(terms_of(run, "").fields)
    if run.origin.get("row"):  # whose name has only the options that were typed
        told = {f"options.{key}": value for key, value in options.items() if key not in ("epochs", "small")}
        found |= {key: value for key, value in told.items() if key not in run.tuning.get("grid", {})}
    epochs = run.final_epochs or options.get("epochs")
    if epochs is not None and _is_plain(options):
        found["epochs"] = epochs
    if not run.trains_dense and (parts := run.recipe.get("parts")):
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(parts.get("name"))).lower()
        found["parts"] = f"{kind}({', '.join(str(value) for key, value in parts.items() if key != 'name')})"
    return {name: str(value) for name, value in found.items()}


def check_rows(rows: Sequence[RunRow], allowed: Sequence[str] = (), *, with_epochs: bool = True) -> list[str]:
    """Raise if the runs of a table are not comparable, or if a row has a seed twice. Return the allowed differences."""
    terms = []
    for row in rows:
        for run in [run for run in row.runs if run.recipe]:
            epochs = run.final_epochs if with_epochs else None
            terms.append(terms_of(run, f"{row.name} {in_full(row.sparsity)} seed {run.seed}", epochs=epochs))
    differences = check(terms, allowed)
    for row in rows:
        by_seed: dict[int, Record] = {}
        for run in row.runs:
            if (other := by_seed.setdefault(run.seed, run)) is not run:
                raise GrowpruneError(
                    f"{other.folder} and {run.folder} have the same row and seed. Leave one of them out"
                )
    return differences


# What rows are compared with


def reference(rows: Sequence[RunRow]) -> RunRow | None:
    """The dense row that "vs dense" compares with: the best by validation, of those as long as a sparse row if any.

    Without validation data it is the first, because test data selects nothing.
    """
    dense = [row for row in rows if row.is_dense and row.finished]
    lengths = {row.epochs for row in rows if not row.is_dense and row.finished}
    fitting = [row for row in dense if row.epochs in lengths] or dense
    return best_by_validation(fitting) or next(iter(fitting), None)


def best_by_validation(rows: Sequence[RunRow]) -> RunRow | None:
    """The row with the best mean on validation data. None without validation data."""
    scores = {n: score for n, row in enumerate(rows) if (score := row.mean("validation")) is not None}
    best = rows[0].metric.best(scores) if rows else None
    return None if best is None else rows[best]


def baseline(row: RunRow, rows: Sequence[RunRow]) -> RunRow | None:
    """The best baseline of a row on validation data: another method at its sparsity that reaches it.

    Methods that miss it count only if all do. The same method with other options, such as a control, counts only if
    there is no other.
    """
    if row.is_dense:
        return None
    sparse = [other for other in rows if other.sparsity == row.sparsity and not other.is_dense and not other.small]
    fair = [other for other in sparse if not other.is_off] or sparse
    fair = [other for other in fair if other.method != row.method] or fair
    others = {n: other.values("validation") for n, other in enumerate(fair) if other is not row}
    best = best_baseline(row.values("validation"), others, row.metric)
    return None if best is None else fair[best]


def best_baseline(own: Mapping[int, float], others: Mapping[Key, Mapping[int, float]], metric: Metric) -> Key | None:
    """The best of others by mean score, among those with the most seeds in common with our own scores by seed.

    With fewer seeds one could win by luck. Means are of differences to ours, so that different seeds compare. Among
    equals, the first wins. A mean of nan is never chosen.

    >>> best_baseline({0: 9.0}, {"a": {0: 1.0, 1: 99.0}, "b": {0: 2.0}}, Metric("accuracy"))
    'b'
    """
    ours = {seed: score if math.isfinite(score) else 0.0 for seed, score in own.items()}
    gaps = {key: gap for key, scores in others.items() if (gap := paired(scores, ours))}
    most = max((gap.count for gap in gaps.values()), default=0)
    return metric.best({key: gap.mean for key, gap in gaps.items() if gap.count == most})


def notes_on_versions(runs: Sequence[Record]) -> list[str]:
    """Say which versions of growprune and of the user's own files made the runs, if they differ or are unknown."""
    files: dict[str, set[str]] = {}
    for run in runs:
        for name, digest in (run.origin.get("files") or {}).items() if run.is_finished else ():
            files.setdefault(name, set()).add(digest)
    notes = [f"{name} is not the same in all runs" for name, found in files.items() if len(found) > 1]
    made: dict[str, int] = {}
    for run in runs:
        if run.result is not None:
            name = version_of(run.result.environment)
            made[name] = made.get(name, 0) + 1
    if len(made) < 2 and not any("unknown" in name for name in made):
        return notes
    ordered = sorted(made.items(), key=lambda item: -item[1])
    counts = "; ".join(f"{name} ({count} run{'' if count == 1 else 's'})" for name, count in ordered)
    return [*notes, f"made by {'different versions of ' if len(made) > 1 else ''}growprune: {counts}"]


def version_of(environment: Json) -> str:
    """The version of growprune that made a result: its commit, else a digest of its source, else its number."""
    commit, source = str(environment.get("commit") or ""), str(environment.get("source") or "")
    if commit and not commit.endswith("-dirty"):
        return f"commit {commit}"
    if source:
        return f"source {source}"
    return f"commit {commit} with local changes that are unknown" if commit else "commit unknown"
