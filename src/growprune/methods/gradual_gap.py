"""Gradual grow-and-prune: the cyclic GaP of Ma et al. (ICLR 2022) with a sparsity that rises, as in GMP (Zhu and Gupta,
2017), and one learning-rate curve. The method we recommend; docs/results.md has what it was compared with."""

import math
from collections.abc import Iterator
from typing import Literal

from growprune.errors import GrowpruneError
from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_rise, check_share, check_sparsity, step_length

PEAK_DENSITY = 0.6
"""The largest share of the weights that live at a time, if nothing is said."""


@method(allocation="global", partition="balanced")
def gradual_gap(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int | None = None,
    start: float | None = None,
    peak_density: float | None = None,
    until: float = 0.75,
    power: int = 1,
    initial_mask: InitialMask = "random",
    control: Literal["start", "peak"] | None = None,
) -> Iterator[Phase]:
    """Begin with a mask of few zeros; each step prunes a little more, then grows the next part to dense.

    It is meant for parts of equal size from all over the model, `Partition.balanced(model, 4)`, and one ranking of all
    weights, allocation="global".

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: of the whole training.
        every: the iterations of each step; a sixtieth of the training if not given.
        start: the fraction of zeros to begin with.
        peak_density: instead of `start`: the largest share of the weights that may live at any time. If neither is
            given it is 0.6, or as near to it as the parts and the sparsity allow. Growth keeps to it (under
            "uniform", to the rounding of each layer): of a part that has fewer live weights than its share, not quite
            all may grow at once.
        until: when the steps end and fine-tuning begins, as a share of the training.
        power: how the sparsity rises: 1 evenly; 3 fast at first and slowly at the end, as in GMP. An even rise was as
            good or better on our four tasks, 3 far better in short trainings with AdamW (docs/theory.md, 7).
        initial_mask: "random"; "magnitude", for trained weights; "as_is", for a model that has the first sparsity.
        control: for a comparison, what shows what growth itself brings: the same plan without growth, from the same
            "start", or from as many live weights as the plan has at its "peak".

    Example: gradual_gap(S, sparsity=0.8, iterations=8, every=2)
    """
    every = step_length(iterations=iterations, every=every, steps=60)
    check_counts(1, power=power)
    check_share(until=until)
    first, within = first_and_peak(S, sparsity, start, peak_density)
    if control not in (None, "start", "peak"):
        raise GrowpruneError(f"control is {control!r}, but must be 'start', 'peak', or None for no control")
    first *= 1 - S.largest_share if control == "peak" else 1
    last = round(until * iterations)
    yield Phase(prune(S.whole, to=first, by=first_by(initial_mask)))
    for step, t in enumerate(range(0, last, every)):
        now = sparsity + (first - sparsity) * (1 - t / last) ** power
        growth = [] if control else [grow(S[step % len(S)], within=within)]
        yield Phase(prune(S.whole, to=now), *growth, iterations=min(every, last - t))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)


def first_and_peak(
    S: Parts, sparsity: float, start: float | None, peak_density: float | None
) -> tuple[float, float | None]:
    """The sparsity to begin with, and the share of the weights that growth keeps to; None for all that grow.

    The one is given as it is, or as what the other leaves room for: the largest part, dense.
    """
    check_sparsity(sparsity)
    if start is not None and peak_density is not None:
        raise GrowpruneError(f"start is {start} and peak_density is {peak_density}: give one of the two")
    if start is not None:
        check_rise(start=start, sparsity=sparsity)
        return start, None
    grown = S.largest_share
    least = 1 - sparsity * (1 - grown)
    if peak_density is not None:
        _check_peak(peak_density, least, grown, sparsity)
    peak = PEAK_DENSITY if peak_density is None else peak_density
    return 0.0 if grown == 1 else min(sparsity, (1 - peak) / (1 - grown)), max(peak, least)


def _check_peak(peak_density: float, least: float, grown: float, sparsity: float) -> None:
    check_share(peak_density=peak_density)
    if peak_density < least - 1e-9:  # it may have been computed in another order
        shown = math.ceil(round(least * 1e4, 6)) / 1e4  # up, so that it may be given
        raise GrowpruneError(
            f"peak_density is {peak_density}, but with a part of {grown:.3g} of the weights grown at a sparsity of "
            f"{sparsity}, up to {shown:g} of them live: give at least that, or cut the model into more parts, if "
            "the largest is not a single layer"
        )
