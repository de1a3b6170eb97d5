"""GraNet: Liu et al., "Sparse Training via Boosting Pruning Plasticity with Neuroregeneration", NeurIPS 2021."""

import itertools
from collections.abc import Iterator

from growprune.methods.rigl import falling
from growprune.plan import By, InitialMask, Parts, Phase, Spread, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_rise, check_share, check_span


@method(allocation="global", every="every", first_mask="initial_mask", rises_from="start")
def granet(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    start: float = 0.5,
    drop: float = 0.5,
    begin: float = 0.0,
    until: float = 0.3,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """Start half sparse; regularly prune a little more and swap the smallest weights for those with large gradients.

    At t the sparsity is s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3, as in GMP. Each prune is followed by a swap: a
    share of each layer's live weights, the smallest, is swapped for those with the largest gradients. Swaps continue
    after the sparsity has stopped rising. The share falls to 0 with a cosine over the whole training, as in the
    authors' code. allocation="global" is the authors' method: the first random mask has the shares of ERK, one ranking
    prunes all weights, and each layer regrows as many as it has just dropped. (They round the drop up, end the cosine
    at 0.005, and keep the value of a weight that is dropped and regrown at once; here it starts from zero.) With "erk"
    or "uniform" each layer has the counts of that allocation throughout.

    Args:
        sparsity: s_f, the fraction of zeros to reach.
        iterations: the length of the whole training.
        every: dt, the iterations between two edits.
        start: s_i, the fraction of zeros in the first mask.
        drop: the share of live weights in the first swap.
        begin, until: when the sparsity begins and stops to rise, as shares of the training.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model that has the first sparsity).

    Example: granet(S, sparsity=0.8, iterations=10, every=2, until=0.6)
    """
    check_counts(1, every=every)
    check_counts(0, iterations=iterations)
    check_span(begin=begin, until=until)
    check_share(drop=drop)
    check_rise(start=start, sparsity=sparsity)
    first, last = round(begin * iterations), max(1, round(until * iterations))
    times = [0, *sorted({t for t in range(every, iterations, every) if t >= first} | {last})] if iterations else []
    spread = Spread.ERK if initial_mask == "random" else None
    begin_with = prune(S.whole, to=start if times else sparsity, by=first_by(initial_mask), spread=spread)
    yield Phase(begin_with, iterations=min(times[1:2], default=0))
    for t, after in itertools.pairwise([*times[1:], iterations]):
        left = min(1.0, max(0.0, (last - t) / max(1, last - first)))
        to = start if left == 1 else sparsity + (start - sparsity) * left**3  # s + (f - s) may round to below f
        drop_some = prune(S.whole, share=falling(drop, t, iterations))
        regrow = grow(S.whole, to=to, by=By.GRADIENT, spread=Spread.LOST)
        yield Phase(prune(S.whole, to=to), drop_some, regrow, iterations=after - t)
