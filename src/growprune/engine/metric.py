"""Which of two scores is the better one: decided here, for the best model of a run, for comparisons and for reports."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Metric:
    """The number that says how good a model is."""

    name: str
    lower_is_better: bool = False
    """Of an accuracy a better model has more, of a loss less."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Metric:
        """As a result or an event of a log says it; without a name if it does not."""
        return cls(str(result.get("metric") or ""), bool(result.get("lower_is_better", False)))

    def is_as_good(self, score: float, than: float) -> bool:
        """Whether a score is as good as another, or better; any is better than what is no number, which is never.

        >>> Metric("accuracy").is_as_good(2.0, than=1.0), Metric("loss", True).is_as_good(2.0, than=1.0)
        (True, False)
        """
        if math.isnan(score) or math.isnan(than):
            return not math.isnan(score)
        return score <= than if self.lower_is_better else score >= than

    def best(self, scores: Mapping[Key, float]) -> Key | None:
        """Whose score is the best; of equals, the first. What is no number is nobody's best.

        >>> Metric("accuracy").best({"a": 1.0, "b": 2.0}), Metric("loss", True).best({"a": 1.0, "b": 2.0})
        ('b', 'a')
        """
        choose = min if self.lower_is_better else max
        numbers = {key: score for key, score in scores.items() if not math.isnan(score)}
        return choose(numbers, key=lambda key: numbers[key], default=None)

    @property
    def direction(self) -> str:
        """In words, where a reader would not expect it."""
        return " (lower is better)" if self.lower_is_better else ""


def mean(values: Collection[float]) -> float | None:
    """Of some figures; nan if any of them is no number, or endless: a diverged run is not left out of its row.

    >>> mean([1.0, 2.0]), mean([1.0, math.inf]), mean([])
    (1.5, nan, None)
    """
    if not values:
        return None
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def deviation(values: Collection[float]) -> float | None:
    """The standard deviation over seeds; none if there is one only, or if any figure is no number.

    >>> deviation([1.0, 3.0]), deviation([1.0, math.nan])
    (1.4142135623730951, None)
    """
    is_known = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if is_known else None


def in_full(number: float) -> str:
    """A number with all its digits, and no more than it needs: sparsities that differ are never written alike.

    >>> in_full(0.9), in_full(0.0), in_full(0.9000001)
    ('0.9', '0', '0.9000001')
    """
    return repr(float(number)).removesuffix(".0")


def decimals(score: float | None) -> int:
    """How many decimals of scores of this size to show: bits per byte are told apart by the third.

    >>> decimals(39.3), decimals(1.47)
    (2, 3)
    """
    return 2 if score is None or abs(score) >= 10 else 3


def scaled(count: float) -> str:
    """A count in three digits, such as 3.12 G.

    >>> scaled(3_120_000_000), scaled(12)
    ('3.12 G', '12')
    """
    if abs(count) < 1000:
        return f"{count:.3g}"
    power = next((p for p in range(1, 7) if abs(count) < 999.5 * 1000**p), 6)
    return f"{count / 1000**power:#.3g}".rstrip(".") + f" {'_kMGTPE'[power]}"
