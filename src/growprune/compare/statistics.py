"""Means, spreads and paired differences over seeds. Validation chooses the rival, test reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from growprune.metric import Metric, deviation, mean

BySeed = Mapping[int, float]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation; null where there are too few.

    >>> spread([1.0, 3.0])
    {'mean': 2.0, 'deviation': 1.4142135623730951, 'count': 2}
    """
    return {"mean": mean(values), "deviation": deviation(values), "count": len(values)}


def paired(ours: BySeed, theirs: BySeed) -> dict[str, Any] | None:
    """Ours minus theirs over the seeds that both have: the mean, and its standard error.

    >>> paired({0: 5.0, 1: 7.0, 2: 9.0}, {0: 4.0, 1: 4.0})
    {'mean': 2.0, 'standard_error': 1.0, 'count': 2}
    """
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not gaps:
        return None
    spread = deviation(gaps)
    error = None if spread is None else spread / math.sqrt(len(gaps))
    return {"mean": mean(gaps), "standard_error": error, "count": len(gaps)}


def best_rival(row: int, validation: Sequence[BySeed], rivals: Sequence[int], metric: Metric) -> int | None:
    """The rival with the best mean validation metric over the seeds it has in common with a row; of equals, the first.

    One of which any of these is no number is nobody's best.

    >>> best_rival(0, [{0: 9.0}, {0: 1.0, 1: 99.0}, {0: 2.0}], [1, 2], Metric("accuracy"))
    2
    """
    means = {}
    for other in rivals:
        common = [validation[other][seed] for seed in validation[row] if seed in validation[other]]
        if other != row and (score := mean(common)) is not None:
            means[other] = score
    return metric.best(means)
