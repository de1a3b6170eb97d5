"""Metrics: which of two scores is better, for runs, comparisons and reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Metric:
    """Name and direction of the number that measures a model."""

    name: str
    lower_is_better: bool = False
    """False for an accuracy, True for a loss."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Metric:
        """The metric of a result or a logged event. The name is empty if there is none."""
        return cls(str(result.get("metric") or ""), bool(result.get("lower_is_better", False)))

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


def in_full(number: float) -> str:
    """Format a number with all its digits, so that different sparsities never look the same.

    >>> in_full(0.9), in_full(0.0), in_full(0.9000001)
    ('0.9', '0', '0.9000001')
    """
    return repr(float(number)).removesuffix(".0")


def decimals(score: float | None) -> int:
    """Number of decimals to show for scores of this size. Bits per byte need three.

    >>> decimals(39.3), decimals(1.47)
    (2, 3)
    """
    return 2 if score is None or abs(score) >= 10 else 3


def scaled(count: float) -> str:
    """Format a count with three digits and a unit, such as 3.12 G.

    >>> scaled(3_120_000_000), scaled(12)
    ('3.12 G', '12')
    """
    if abs(count) < 1000:
        return f"{count:.3g}"
    power = next((p for p in range(1, 7) if abs(count) < 999.5 * 1000**p), 6)
    return f"{count / 1000**power:#.3g}".rstrip(".") + f" {'_kMGTPE'[power]}"
