"""Gradual magnitude pruning (GMP): Zhu and Gupta, "To prune, or not to prune", 2017."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, method, prune
from growprune.plan.settings import check_counts, check_rise, check_span


@method(allocation="global", every="every")
def gmp(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    start: float = 0.0,
    begin: float = 0.1,
    until: float = 0.75,
) -> Iterator[Phase]:
    """Start dense and prune gradually: the sparsity rises on a cubic curve between `begin` and `until`.

    At t the sparsity is s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3. With s_i > 0 the model is never dense, and
    weights outside the first mask are never tried.

    Args:
        sparsity: s_f, the fraction of zeros to reach.
        iterations: the length of the whole training.
        every: dt, the iterations between two edits.
        start: s_i, the initial fraction of zeros, in a random mask. 0, as in the paper, starts dense.
        begin, until: t_0 and t_0 + n dt, as shares of the training.

    Example: gmp(S, sparsity=0.8, iterations=8, every=2)
    """
    check_counts(1, every=every)
    check_counts(0, iterations=iterations)
    check_span(begin=begin, until=until)
    check_rise(start=start, sparsity=sparsity)
    first, last = round(begin * iterations), round(until * iterations)
    yield Phase(*([prune(S.whole, to=start, by=By.RANDOM)] if start else []), iterations=first)
    for t in range(first, last, every):
        left = 1 - (t - first) / (last - first)
        yield Phase(prune(S.whole, to=start + (sparsity - start) * (1 - left**3)), iterations=min(every, last - t))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)
