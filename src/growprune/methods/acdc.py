"""AC/DC: Peste et al., "AC/DC: Alternating Compressed/DeCompressed Training of Deep Neural Networks", NeurIPS 2021."""

from collections.abc import Iterator

from growprune.plan import Parts, Phase, grow, method, prune
from growprune.plan.settings import check_share, check_span, step_length


@method(allocation="global", every="every")
def acdc(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int | None = None,
    begin: float = 0.1,
    until: float = 0.75,
    dense_until: float = 0.85,
) -> Iterator[Phase]:
    """Train dense, then alternate sparse and dense phases; after a last, longer dense phase, end sparse.

    The paper's 100 epochs: 10 dense, then alternately 5 sparse and 5 dense up to 75, dense up to 85, then sparse.
    The authors reset all momentum at each growth. Here only the momentum of grown weights is zero.

    Args:
        sparsity: the fraction of zeros in a sparse phase.
        iterations: the length of the whole training.
        every: the iterations between two edits; by default a twentieth of the training.
        begin, until: when the alternation begins and ends, as shares of the training.
        dense_until: when the last dense phase ends, as a share of the training, at least `until`.

    Example: acdc(S, sparsity=0.8, iterations=20)
    """
    every = step_length(iterations=iterations, every=every, steps=20)
    check_span(begin=begin, until=until)
    check_share(dense_until=dense_until)
    first, last = round(begin * iterations), round(until * iterations)
    end = max(last, round(dense_until * iterations))
    yield Phase(iterations=first)
    for turn, t in enumerate(range(first, last, every)):
        edit = prune(S.whole, to=sparsity) if turn % 2 == 0 else grow(S.whole)
        yield Phase(edit, iterations=min(every, last - t))
    yield Phase(grow(S.whole), iterations=end - last)
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - end)
