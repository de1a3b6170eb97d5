"""Rows of a table: runs that differ only by seed; their names, references and tuning; which can be in one table.

`compare`, `report`, the command line and the scripts of experiments/ make their rows here, so that they agree on the
name of a row, on the reference that "vs dense" means, and on what missed its target.

Runs are comparable if their task, data, budget and all other settings are the same, except for those of the row (ROW)
and those that do not change results (NO_INFLUENCE). `growprune compare` refuses other runs, unless the difference is
allowed. The page of `growprune report` has separate charts for each task, data set and budget, and names what else
differs.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from growprune.errors import GrowpruneError, shorten
from growprune.runs.record import Record, in_full
from growprune.runs.result import Json, Key, Metric, decimals, deviation, mean

ROW = {"method", "options", "sparsity", "allocation", "scope", "parts", "seed"}
"""Fields of a recipe that may differ between rows, or between runs of a row. Older runs have a `scope`."""
MAY_CHANGE = {
    *("task.data", "task.workers", "weights", "storage", "checkpoint_seconds", "exploration", "claim", "log"),
    *("replicas", "shard", "timeout_seconds"),
}
"""Fields that may be other when a run is resumed: they do not change results, or, as for the places of data and
weights, what lies there is checked itself."""
PHASES = {"steps", "finetune"}
"""Options beside which `epochs` are not those of the whole training."""
SPARSE = {"pattern", "keep_dense", "include", "lr_scaling", "lr_ramp", "cost_power", "rescale"}
"""Fields without effect on a dense run."""
NO_INFLUENCE = (MAY_CHANGE - {"storage", "task.data", "weights"}) | {
    *("evaluate_every", "candidates", "device", "graph", "task.in_memory", "task.channels_last"),
}
"""Fields that do not change the numbers of a table."""


def flat(content: Any, prefix: str = "") -> Json:
    """Flatten nested dicts: {"task": {"width": 3}} -> {"task.width": 3}"""
    if not isinstance(content, dict) or not content:
        return {prefix.removesuffix("."): content}
    return {name: value for key, inside in content.items() for name, value in flat(inside, f"{prefix}{key}.").items()}


def settings(run: Record) -> Json:
    """Every setting of a run that can change results, by dotted names such as `task.width`."""
    found = _without(flat(run.recipe), NO_INFLUENCE)
    for name in ("task.data", "weights"):  # which may lie elsewhere on each machine
        if found.get(name):
            found[name] = PurePath(str(found[name])).name
    # a small model stands for the full one, and is compared with its runs
    return found | {f"task.{name}": value for name, value in run.small.get("of", {}).items()}


def deciding(run: Record) -> Json:
    """The settings that can change the results of this run. For a dense run, without those of masks."""
    return _without(settings(run), SPARSE if run.trains_dense else set())


def _without(fields: Mapping[str, Any], names: set[str]) -> Json:
    """Fields without the given names and their nested fields."""
    return {key: value for key, value in fields.items() if not {key, key.partition(".")[0]} & names}


# What runs of one table have in common


@dataclass(frozen=True)
class Terms:
    """The settings and data that must be the same in all runs of a table."""

    name: str
    """Name of the run, for messages."""
    seed: int
    fields: Json
    """Settings by dotted names."""
    data: Json
    """The fingerprint of its data; empty if there is none."""


def terms_of(run: Record, name: str, *, epochs: float | None = None) -> Terms:
    """The terms of a run, which messages call `name`. Epochs are compared if given."""
    grid = run.tuning.get("grid", {})
    fields = _without(deciding(run), ROW | {*grid})
    more = {"epochs": epochs, "signature": run.figure("signature") or None, "tuning": say_grid(grid) or "none"}
    fields |= {key: value for key, value in more.items() if value is not None}
    return Terms(name, run.seed, fields, run.figure("data") or {})


def say_grid(grid: Mapping[str, Sequence[str]]) -> str:
    """The grid as the user typed it.
    >>> say_grid({"optimizer.lr": ["x1", "x2"], "lr_scaling": ["0", "1"]})
    'optimizer.lr=x1,x2 lr_scaling=0,1'
    """
    return " ".join(f"{key}={','.join(values)}" for key, values in grid.items())


def check(terms: Sequence[Terms], allowed: Sequence[str] = ()) -> list[str]:
    """Raise if runs differ in fields that are not allowed. Return the differences, for the table.

    >>> from pathlib import Path
    >>> check([terms_of(Record(Path()), name, epochs=epochs) for name, epochs in (("a", 20), ("b", 40))], ["epochs"])
    ['epochs differ: 20 in a; 40 in b']
    """
    found = _differences(terms)
    refused = {name: values for name, values in found.items() if not is_allowed(name, allowed)}
    if refused:
        allow = " ".join(f"--allow {name}" for name in refused)
        raise GrowpruneError(
            f"the runs are not comparable: {'; '.join(_say(*item) for item in refused.items())}. Make them equal, or "
            f"add {shorten(allow, 200)}; the table will then note the difference"
        )
    return [_say(*item) for item in found.items()]


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """True if a field or its parent may differ."""
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def _differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """For each field that differs, the runs by value. A field that a run does not have is not compared."""
    found = {}
    names = dict.fromkeys(name for run in runs for name in run.fields)
    seeds: dict[Any, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.fields.get("task.data"), set()).add(run.seed)
    if seeds and set.intersection(*seeds.values()) and all(run.data for run in runs):
        names.pop("task.data", None)  # runs on all data paths share a seed, so their first batches are compared
    for name in names:
        values = _by_value([(run.name, run.fields[name]) for run in runs if name in run.fields])
        if len(values) > 1:
            found[name] = values
    return found | _data_differences(runs)


def _data_differences(runs: Sequence[Terms]) -> dict[str, dict[str, list[str]]]:
    """Differences of data: runs of one task need the same number of batches, and per seed the same first batch."""
    groups: dict[str, list[tuple[str, Any]]] = {}
    for run in runs:
        task = {name: value for name, value in run.fields.items() if name.startswith("task.") and name != "task.data"}
        if run.data:
            alike = repr((run.fields.get("accumulate"), task))
            groups.setdefault(f"{alike} {run.seed}", []).append((run.name, run.data))
            groups.setdefault(alike, []).append((run.name, {"num_batches": run.data.get("num_batches")}))
    for group in groups.values():
        if len(values := _by_value(group)) > 1:
            return {"data": values}
    return {}


def _by_value(values: Sequence[tuple[str, Any]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, value in values:
        grouped.setdefault(_text(value), []).append(name)
    return grouped


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return in_full(value) if isinstance(value, float) else str(value)


def _say(name: str, values: Mapping[str, Sequence[str]]) -> str:
    where = (f"{shorten(value, 60)} in {shorten(', '.join(runs), 90)}" for value, runs in values.items())
    return f"{name} differ{'' if name in ('epochs', 'data') else 's'}: {'; '.join(where)}"


# How runs on a page differ


def task_settings(run: Record) -> Json:
    """The settings of a task and its data, without the prefix `task.`."""
    return {name[5:]: value for name, value in settings(run).items() if name.startswith("task.")}


def varying(found: Sequence[Json]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs that have them, with their values."""
    names = dict.fromkeys(name for each in found for name in each)
    values = {name: {json.dumps(each[name]) for each in found if name in each} for name in names}
    return {name: sorted(map(json.loads, texts), key=str) for name, texts in values.items() if len(texts) > 1}


TOLERANCE = 0.0005
"""Difference from the target sparsity above which a row is off its target."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds. None where there are too few numbers; the mean is nan if any is."""

    mean: float | None
    deviation: float | None
    count: int


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

    def values(self, figure: str) -> dict[int, float]:
        """A number of each finished run by seed, if known: an attribute of Record, or a field of its result."""
        found = {run.seed: self.value(run, figure) for run in self.finished}
        return {seed: value for seed, value in found.items() if value is not None}

    def value(self, run: Record, figure: str) -> float | None:
        """A number of one of its runs."""
        if figure == "training_flops":
            return run.training_flops(self.dense_epochs)
        found: float | None = getattr(run, figure) if hasattr(run, figure) else run.figure(figure)
        return found

    def mean(self, figure: str) -> float | None:
        return mean(self.values(figure).values())

    def spread(self, figure: str) -> Spread:
        values = self.values(figure).values()
        return Spread(mean(values), deviation(values), len(values))

    def minus(self, other: RunRow) -> Gap | None:
        """The difference to another row on test data, paired by seed."""
        return paired(self.values("test"), other.values("test"))


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
    hidden = ("epochs", "iterations", "small") if PHASES.isdisjoint(options) else ()
    name = run.method if run.trains_dense else f"{run.recipe['method']}:{run.recipe.get('allocation')}"
    return " ".join([name, *(f"{key}={value}" for key, value in options.items() if key not in hidden)])


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
    if epochs is not None and PHASES.isdisjoint(options):
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
    name = next((row.metric.name for row in rows if row.finished), "")
    results = [run.result for row in rows for run in row.runs if run.result is not None]
    if not all(name in result.validation and name in result.test for result in results):
        raise GrowpruneError(f"not all results have the metric {name!r}. Compare runs of one task only")
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
    made = Counter(version_of(run.result.environment) for run in runs if run.result is not None)
    if len(made) < 2 and not any("unknown" in name for name in made):
        return notes
    counts = "; ".join(f"{name} ({count} run{'' if count == 1 else 's'})" for name, count in made.most_common())
    return [*notes, f"made by {'different versions of ' if len(made) > 1 else ''}growprune: {counts}"]


def version_of(environment: Json) -> str:
    """The version of growprune that made a result: its commit, else a digest of its source, else its number."""
    commit, source = str(environment.get("commit") or ""), str(environment.get("source") or "")
    if commit and not commit.endswith("-dirty"):
        return f"commit {commit}"
    if source:
        return f"source {source}"
    return f"commit {commit} with local changes that are unknown" if commit else "commit unknown"


HEAD = ("row", "chosen", "validation", "grid", "tuning runs", "failed")
FAILED = "failed"
"""Status of a point that cannot be chosen."""


def tunings_of(runs: Sequence[Record]) -> list[Json]:
    """The tuning of each row of some runs."""
    return [*{run.folder.parent.parent: run.tuning for run in runs if run.tuning}.values()]


def cells_of(tuning: Json) -> list[str]:
    """The cells of a tuned row, in the order of HEAD."""
    points = tuning["points"]
    score = next((point["validation"] for point in points if point["name"] == tuning["chosen"]), None)
    shown = "-" if score is None else f"{score:.{decimals(score)}f}"
    failed = sum(point["status"] == FAILED for point in points)
    left = sum(point["status"] not in ("finished", FAILED) for point in points)
    why = f"not yet: {left} of {len(points)} runs left" if left else f"none: all {len(points)} runs failed"
    return [name_of(tuning), tuning["chosen"] or why, shown, str(tuning["size"]), str(len(points)), str(failed)]


def name_of(tuning: Json) -> str:
    """The name of the row, and its sparsity if it has one."""
    sparsity = in_full(tuning["sparsity"])
    return tuning["row"] if sparsity == "0" else f"{tuning['row']} {sparsity}"


def errors_of(tuning: Json) -> list[str]:
    """One line for each failed point, and one for a row in which all points failed."""
    name, failed = name_of(tuning), [point for point in tuning["points"] if point["status"] == FAILED]
    said = [f"{name} {point['name']} seed {tuning['seed']} failed in tuning: {point['error']}" for point in failed]
    is_lost = len(failed) == len(tuning["points"])
    return [*said, *([f"{name} has no result: no point of its grid finished"] if is_lost else [])]


def notes_of(tunings: Sequence[Json]) -> list[str]:
    """Notes on the tuned settings, how they were chosen, and the number of runs."""
    by_grid: dict[str, list[Json]] = {}
    for each in tunings:
        by_grid.setdefault(say_grid(each["grid"]), []).append(each)
    notes = []
    for grid, alike in by_grid.items():
        first, runs = alike[0], sum(len(each["points"]) for each in alike)
        chosen = sum(each["chosen"] is not None for each in alike)
        notes.append(
            f"every row was tuned over the same grid of {first['size']} points ({grid}), chosen by validation "
            f"{first['metric']} with seed {first['seed']}: {runs} runs for {len(alike)} rows. The {chosen} chosen runs "
            f"are the results of that seed"
        )
    for each in [each for each in tunings if len(each["points"]) < each["size"]]:
        notes.append(f"{name_of(each)}: the {each['size']} points give {len(each['points'])} different runs")
    # the settings whose best value is the smallest or the largest of the grid: the best may lie beyond it
    edges: dict[tuple[str, str], list[str]] = {}
    for each in tunings:
        tried = [point.get("settings", {}) for point in each["points"]]
        best: Json = next((p.get("settings", {}) for p in each["points"] if p["name"] == each["chosen"]), {})
        for key, text in best.items():
            values = {value for settings in tried if (value := _number(settings.get(key))) is not None}
            if len(values) > 1 and (value := _number(text)) in (min(values), max(values)):
                edge = "smallest" if value == min(values) else "largest"
                edges.setdefault((key, edge), []).append(f"{name_of(each)} ({text})")
    for (key, edge), rows in edges.items():
        said = f"the best {key} is the {edge} of the grid for {', '.join(rows)}"
        notes.append(f"{said}: a wider grid may give better results")
    return notes


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
