"""The schema of result.json, which the engine writes and every table and page reads; and comparing scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from growprune.errors import GrowpruneError
from growprune.files import disk
from growprune.files.disk import NUMBER

Json = dict[str, Any]

FORMAT = 2
"""Version of result.json. Version 1 has no `format`, and may hold NaN, which is not JSON."""
SCORE = (*NUMBER, type(None))
"""A metric or a loss. JSON has no NaN and no infinity: both are stored as null, and a metric is read back as nan."""

NAMES: disk.Names = {
    "format?": int,
    **{"recipe.task.name": str, "recipe.method": str, "recipe.sparsity": NUMBER, "recipe.options": dict},
    **{"recipe.seed": int, "recipe.accumulate?": int, "seed": int, "metric": str, "lower_is_better": bool},
    **{"environment": dict, "origin": dict, "origin.source?": str, "origin.settings?": dict},
    **{"origin.row?": str, "origin.files?": dict, "origin.files?.*": str},
    **{"data?": dict, "data?.num_batches": int, "weights?": dict, "signature?": str},
    **{"validation": dict, "validation.*": SCORE, "test": dict, "test.*": SCORE},
    **{"best?": dict, "best?.stage": int, "best?.test.*": SCORE},
    **{"history": list, "history.*.stage": int, "history.*.branch": (int, type(None)), "history.*.edits": str},
    **{"history.*.epoch": int, "history.*.iteration?": int, "history.*.alive": int, "history.*.loss?": SCORE},
    **{"history.*.explored?": NUMBER, "history.*.churn?": SCORE, "history.*.grown?": NUMBER},
    **{"history.*.validation?": dict, "history.*.validation?.*": SCORE},
    **{"history.*.candidate?": dict, "history.*.candidate?.*": SCORE},
    **{"sparsity.rows": list, "sparsity.rows.*.name": str, "sparsity.rows.*.size": int},
    **{"sparsity.rows.*.target?": NUMBER, "sparsity.rows.*.sparsity": NUMBER, "sparsity.totals.sparsity": NUMBER},
    **{"sparsity.totals.alive": int, "sparsity.totals.prunable": int},
    **{"sparsity.totals.flops_dense?": int, "sparsity.totals.flops_sparse?": int},
    **{"file_bytes": int, "peak_bytes": int, "seconds": NUMBER},
    **{"training_flops?": NUMBER, "training_iterations?": int, "training_examples?": int},
    **{"peak_alive?": int, "average_alive?": NUMBER},
}
"""What the fields of the file must be. Optional fields may be missing or null."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run has found out."""

    recipe: Json
    """All settings, as JSON values."""
    origin: Json
    """How to find the recipe again, without paths of the machine: source and settings as typed; `row`, the row of
    `growprune compare`; `files`, digests of the user's own files by name."""
    seed: int
    metric: str
    """Name of the number that measures the model, in `validation` and `test`."""
    lower_is_better: bool
    environment: Json
    """Versions and hardware. `commit` is that of growprune's source; empty if unknown, and it ends in "-dirty" if the
    source had local changes. `source` is then a digest of the source."""
    history: list[Json]
    """One row per epoch: epoch, iteration, stage, branch, edits, alive, loss, lr, explored, churn, grown (the share of
    live weights that were dead before), and, if evaluated, validation and candidate (pruned to the target then)."""
    validation: Mapping[str, float]
    """Metrics of the last model on validation data, which may select runs."""
    test: Mapping[str, float]
    """Metrics of the last model on test data, which selects nothing."""
    sparsity: Json
    """`totals`, and `rows`: one for each prunable weight."""
    file_bytes: int
    peak_bytes: int
    """Peak memory of the GPU, or of the process on a CPU."""
    seconds: float
    data: Json | None = None
    """Fingerprint of the data: num_batches, and a digest of the first batch."""
    weights: Json | None = None
    """The file of initial weights."""
    signature: str = ""
    """How the task computes its metric, such as the signature of sacrebleu."""
    training_flops: float | None = None
    training_iterations: int | None = None
    training_examples: int | None = None
    peak_alive: int | None = None
    average_alive: float | None = None
    """Live weights per iteration. The counts are None in old results."""
    best: Json | None = None
    """The best model at the target sparsity by validation data: stage, epoch, validation and test."""

    def to_dict(self) -> Json:
        """The content of result.json, except that numbers that are not finite stay."""
        return {"format": FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}

    def write(self, path: Path) -> None:
        disk.write_json(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read result.json. Raise GrowpruneError if it is damaged, or of a newer version."""
        content = disk.read_json(path, NAMES, "remove it and resume the run to write it again, or leave it out")
        if (content.get("format") or 1) > FORMAT:
            raise GrowpruneError(
                f"{path} was written by a newer growprune: it has format {content['format']}, this version reads "
                f"{FORMAT}. Upgrade growprune, or leave it out"
            )
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """The result of a valid content of result.json. Fields that this version does not know are left out."""
        known = {field.name: content[field.name] for field in fields(cls) if content.get(field.name) is not None}
        known |= {name: _scores(known[name]) for name in ("validation", "test")}
        known["history"] = [_with_scores(row, ("validation", "candidate")) for row in known["history"]]
        if "best" in known:
            known["best"] = _with_scores(known["best"], ("validation", "test"))
        return cls(**known)


def _with_scores(row: Json, names: tuple[str, ...]) -> Json:
    return row | {name: _scores(row[name]) for name in names if row.get(name)}


def _scores(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if score is None else score for name, score in metrics.items()}


Key = TypeVar("Key")


@dataclass(frozen=True)
class Metric:
    """Name and direction of the number that measures a model."""

    name: str
    lower_is_better: bool = False
    """False for an accuracy, True for a loss."""

    def is_as_good(self, score: float, than: float) -> bool:
        """True if a score is as good as another, or better. nan is worse than any number.

        >>> Metric("accuracy").is_as_good(2.0, than=1.0), Metric("loss", True).is_as_good(2.0, than=1.0)
        (True, False)
        """
        if math.isnan(score) or math.isnan(than):
            return not math.isnan(score)
        return score <= than if self.lower_is_better else score >= than

    def best(self, scores: Mapping[Key, float]) -> Key | None:
        """The name with the best score, the first among equals. nan is never the best.

        >>> Metric("accuracy").best({"a": 1.0, "b": 2.0}), Metric("loss", True).best({"a": 1.0, "b": 2.0})
        ('b', 'a')
        """
        choose = min if self.lower_is_better else max
        numbers = {key: score for key, score in scores.items() if not math.isnan(score)}
        return choose(numbers, key=lambda key: numbers[key], default=None)

    @property
    def direction(self) -> str:
        """A note if lower is better. Empty otherwise."""
        return " (lower is better)" if self.lower_is_better else ""


def mean(values: Collection[float]) -> float | None:
    """Mean of some numbers. nan if any is nan or infinite, so that a diverged run still counts.

    >>> mean([1.0, 2.0]), mean([1.0, math.inf]), mean([])
    (1.5, nan, None)
    """
    if not values:
        return None
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def deviation(values: Collection[float]) -> float | None:
    """Standard deviation over seeds. None for a single number, or if any is nan.

    >>> deviation([1.0, 3.0]), deviation([1.0, math.nan])
    (1.4142135623730951, None)
    """
    is_known = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if is_known else None


def decimals(score: float | None) -> int:
    """Number of decimals to show for scores of this size. Bits per byte need three.

    >>> decimals(39.3), decimals(1.47)
    (2, 3)
    """
    return 2 if score is None or abs(score) >= 10 else 3


def plus_minus(mean: float | None, spread: float | None, places: int, sign: str = "") -> str:
    """Format a mean and its deviation or error.

    >>> plus_minus(1.5, 0.25, 2, "+"), plus_minus(1.5, None, 1), plus_minus(None, None, 2)
    ('+1.50 ± 0.25', '1.5', '-')
    """
    if mean is None or math.isnan(mean):
        return "-" if mean is None else "nan"
    return f"{mean:{sign}.{places}f}" + ("" if spread is None else f" ± {spread:.{places}f}")


def scaled(count: float) -> str:
    """Format a count with three digits and a unit, such as 3.12 G.

    >>> scaled(3_120_000_000), scaled(12)
    ('3.12 G', '12')
    """
    if abs(count) < 1000:
        return f"{count:.3g}"
    power = next((p for p in range(1, 7) if abs(count) < 999.5 * 1000**p), 6)
    return f"{count / 1000**power:#.3g}".rstrip(".") + f" {'_kMGTPE'[power]}"
