"""RigL: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020."""

import math
from collections.abc import Iterator

from growprune.plan import By, Edit, InitialMask, Parts, Phase, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_share


@method(allocation="erk", every="every", first_mask="initial_mask")
def rigl(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    drop: float = 0.3,
    until: float = 0.75,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """Start with a random mask; regularly swap the smallest weights for those with the largest gradients.

    The authors' code skips the optimizer's step in the iteration of a swap, and keeps the value of a weight that is
    dropped and regrown at once. Here the step is taken, and regrown weights start from zero.

    Args:
        sparsity: S, the fraction of zeros, constant during training.
        iterations: the length of the whole training.
        every: dT, the iterations between two swaps.
        drop: alpha, the share of each layer's live weights in the first swap; it falls to 0 with a cosine.
        until: T_end, when the swaps end, as a share of the training.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: rigl(S, sparsity=0.8, iterations=8, every=2)
    """
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    regrow = grow(S.whole, to=sparsity, by=By.GRADIENT)
    yield from swapping(S, first, regrow, iterations, every, drop, until)


def swapping(
    S: Parts, first: Edit, regrow: Edit, iterations: int, every: int, drop: float, until: float
) -> Iterator[Phase]:
    """Yield the phases of RigL, SET and SNFS: the first edit, then swaps that drop a falling share and regrow it."""
    check_counts(1, every=every)
    check_counts(0, iterations=iterations)
    check_share(drop=drop, until=until)
    end = until * iterations
    yield Phase(first, iterations=min(every, iterations))
    for t in range(every, iterations, every):
        swap = (prune(S.whole, share=falling(drop, t, end)), regrow) if t < end else ()
        yield Phase(*swap, iterations=min(every, iterations - t))


def falling(drop: float, t: float, end: float) -> float:
    """Return the share at `t` on a cosine from `drop` at 0 to 0 at `end`, as in RigL, SNFS and GraNet."""
    return drop / 2 * (1 + math.cos(math.pi * t / end))
