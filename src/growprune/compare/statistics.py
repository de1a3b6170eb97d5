"""Means, spreads and paired differences over seeds. Validation data selects the baseline, test data is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from growprune.engine.metric import Metric, deviation, mean

BySeed = Mapping[int, float]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation. None where there are too few numbers.

    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'deviation': 1.4142135623730951, 'count': 2}
    """
    return {"mean": mean(values), "deviation": deviation(values), "count": len(values)}


def paired(ours: BySeed, theirs: BySeed) -> dict[str, Any] | None:
    """Mean difference (ours minus theirs) over common seeds, and its standard error.

    >>> paired({0: 5.0, 1: 7.0, 2: 9.0}, {0: 4.0, 1: 4.0})
    {'mean': 2.0, 'standard_error': 1.0, 'count': 2}
    """
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not gaps:
        return None
    spread = deviation(gaps)
    error = None if spread is None else spread / math.sqrt(len(gaps))
    return {"mean": mean(gaps), "standard_error": error, "count": len(gaps)}


def best_baseline(row: int, validation: Sequence[BySeed], baselines: Sequence[int], metric: Metric) -> int | None:
    """The best baseline of a row by mean validation metric, among those with the most seeds in common with it.

    A baseline with missing seeds could win by luck. Means are of differences to the row, so that different seeds
    compare. Among equals, the first wins. A baseline with a mean of nan is never chosen.

    >>> best_baseline(0, [{0: 9.0}, {0: 1.0, 1: 99.0}, {0: 2.0}], [1, 2], Metric("accuracy"))
    2
    """
    ours = {seed: score if math.isfinite(score) else 0.0 for seed, score in validation[row].items()}
    gaps = {other: gap for other in baselines if other != row and (gap := paired(validation[other], ours))}
    most = max((gap["count"] for gap in gaps.values()), default=0)
    return metric.best({other: gap["mean"] for other, gap in gaps.items() if gap["count"] == most})
