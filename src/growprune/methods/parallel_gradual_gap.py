"""Gradual grow-and-prune on several machines: P-GaP of Ma et al. (ICLR 2022) with a rising sparsity."""

from collections.abc import Iterator

from growprune.methods.gradual_gap import first_and_peak
from growprune.plan import Branch, Fork, InitialMask, Parts, Phase, Stage, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_share, step_length


@method(
    allocation="global",
    partition="balanced",
    every="every",
    first_mask="initial_mask",
    rises_from="start",
    peak="peak_density",
)
def parallel_gradual_gap(
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
) -> Iterator[Stage]:
    """Gradual GaP on several machines: each step prunes a little more, then len(S) machines each grow one part.

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: the length of the whole training on each machine.
        every: the iterations of each step; by default a tenth of the training, because each step starts with a fresh
            optimizer on every machine.
        start: the initial fraction of zeros.
        peak_density: instead of `start`: the largest share of the weights that any machine may train at a time. If
            neither is given it is 0.6, or as close to it as the parts and the sparsity allow. While the parts are
            merged, more weights may be live for a moment: with allocation="global" all of them, because one ranking
            prunes them together. With "uniform" and "erk" each part is pruned before the merge.
        until: when the steps end and fine-tuning begins, as a share of the training.
        power: how the sparsity rises: 1 evenly, 3 fast at first and slowly at the end, as in GMP. An even rise was as
            good or better on our four tasks; 3 was far better in short trainings with AdamW (docs/theory.md, 7).
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model that has the first sparsity).

    Example: parallel_gradual_gap(S, sparsity=0.8, iterations=8, every=3)
    """
    every = step_length(iterations=iterations, every=every, steps=10)
    check_counts(1, power=power)
    check_share(until=until)
    first, within = first_and_peak(S, sparsity, start, peak_density)
    last = round(until * iterations)
    yield Phase(prune(S.whole, to=first, by=first_by(initial_mask)))
    for t in range(0, last, every):
        length = min(every, last - t)
        # s + (f - s) may round to below f
        now = sparsity + (first - sparsity) * (1 - t / last) ** power if t else first
        yield Phase(prune(S.whole, to=now))
        yield Fork(*(Branch(Phase(grow(P, within=within), iterations=length), returns=P) for P in S))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)
