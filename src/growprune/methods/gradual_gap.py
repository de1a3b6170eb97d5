"""Gradual grow-and-prune: the cyclic GaP of Ma et al. (ICLR 2022) with a rising sparsity, as in GMP (Zhu and Gupta,
2017), and one learning-rate curve. This is the method we recommend; docs/results.md compares it with the others.

These are the defaults of its second edition. `FIRST_EDITION` has the options that give the first.
"""

import math
from collections.abc import Iterator
from typing import Literal

from growprune.errors import GrowpruneError
from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_rise, check_share, check_span, check_sparsity, step_length

PEAK_DENSITY = 0.6
"""The default for the largest share of the weights that are live at a time."""
FIRST_EDITION = {"begin": 0.0, "power": 1, "capped": False, "grow_until": 1.0}
"""Options of `gradual_gap` as it was in most tables of docs/results/. There `every` was a sixtieth of the training, and
`lr_ramp` was 0."""


@method(
    allocation="global",
    partition="balanced",
    every="every",
    first_mask="initial_mask",
    rises_from="start",
    peak="peak_density",
    control="control",
)
def gradual_gap(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int | None = None,
    start: float | None = None,
    peak_density: float | None = None,
    begin: float = 0.1,
    until: float = 0.75,
    power: int = 3,
    capped: bool = True,
    grow_from: float = 0.0,
    grow_until: float = 0.3,
    initial_mask: InitialMask = "random",
    control: Literal["start", "peak"] | None = None,
) -> Iterator[Phase]:
    """Start at a low sparsity; each step prunes a little more, then grows the next part to dense.

    Use it with parts of equal size from all over the model, `Partition.balanced(model, 4)`, and with one ranking of all
    weights, allocation="global".

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: the length of the whole training.
        every: the iterations of each step; by default a sixtieth of the training, or if that is less than 50, then 50
            or a twentieth of the training, whichever is less.
        start: the initial fraction of zeros.
        peak_density: instead of `start`: the largest share of the weights that may be live at any time. If neither is
            given it is 0.6, or as close to it as the parts and the sparsity allow. Growth stays within it (up to the
            rounding of each layer under "uniform"), so a part with few live weights may not grow completely.
        begin: when the curve of the sparsity begins to rise, as a share of the training.
        until: when the steps end and fine-tuning begins, as a share of the training.
        power: how the sparsity rises: 3 fast at first and slowly at the end, as in GMP, or 1 evenly.
        capped: let the curve of the sparsity begin at 0, as in GMP, and stay at the first sparsity until the curve has
            passed it. Otherwise the curve begins at the first sparsity.
        grow_from, grow_until: when parts grow, as shares of the training. Growth brings most early on (docs/theory.md,
            9). If operations do not count, try `grow_until=0.75` under SGD.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model that has the first sparsity).
        control: run the same plan without growth, as a control in comparisons. "start" has the same initial sparsity,
            "peak" starts with as many live weights as the plan has at its peak.

    Example: gradual_gap(S, sparsity=0.8, iterations=8, every=2)
    """
    check_counts(0, iterations=iterations)
    steps = min(60, max(20, iterations // 50))  # in fewer than 50 iterations, weights that grow learn little
    every = step_length(iterations=iterations, every=every, steps=steps)
    check_counts(1, power=power)
    check_span(begin=begin, until=until)
    check_share(grow_from=grow_from, grow_until=grow_until)
    first, within = first_and_peak(S, sparsity, start, peak_density)
    if control not in (None, "start", "peak"):
        raise GrowpruneError(f"control must be 'start', 'peak' or None, got {control!r}")
    first *= 1 - S.largest_share if control == "peak" else 1
    hold, last = round(begin * iterations), round(until * iterations)
    yield Phase(prune(S.whole, to=first, by=first_by(initial_mask)))
    for step, t in enumerate(range(0, last, every)):
        left = 1 - max(0, t - hold) / max(1, last - hold)
        if capped:
            now = max(first, sparsity * (1 - left**power))
        else:
            now = first if left == 1 else sparsity + (first - sparsity) * left**power  # s + (f - s) may round below f
        grows = not control and grow_from * iterations <= t < grow_until * iterations
        growth = [grow(S[step % len(S)], within=within)] if grows else []
        yield Phase(prune(S.whole, to=now), *growth, iterations=min(every, last - t))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)


def first_and_peak(
    S: Parts, sparsity: float, start: float | None, peak_density: float | None
) -> tuple[float, float | None]:
    """Return the first sparsity and the largest share of weights that may be live (None for no limit).

    If only the peak is given, the first sparsity is the lowest at which the largest part can be dense within it.
    """
    check_sparsity(sparsity)
    if start is not None and peak_density is not None:
        raise GrowpruneError(f"pass start or peak_density, not both (got {start} and {peak_density})")
    if start is not None:
        check_rise(start=start, sparsity=sparsity)
        return start, None
    grown = S.largest_share
    least = 1 - sparsity * (1 - grown)
    if peak_density is not None:
        check_share(peak_density=peak_density)
        if peak_density < least - 1e-9:  # it may have been computed in another order
            shown = math.ceil(round(least * 1e4, 6)) / 1e4  # up, so that it may be given
            raise GrowpruneError(
                f"peak_density must be >= {shown:g} at sparsity {sparsity}, because the largest part has {grown:.3g} "
                f"of the weights, got {peak_density}. Raise it, or use more parts, unless the largest part is a single "
                f"layer"
            )
    peak = PEAK_DENSITY if peak_density is None else peak_density
    return 0.0 if grown == 1 else min(sparsity, (1 - peak) / (1 - grown)), max(peak, least)
