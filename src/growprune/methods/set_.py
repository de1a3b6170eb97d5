"""SET: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired by
network science", 2018; as the RigL paper compares with it."""

from collections.abc import Iterator

from growprune.methods.rigl import swapping
from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune


@method(allocation="erk")
def set_(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    drop: float = 0.3,
    until: float = 0.75,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """RigL that grows at random: every so many iterations, swap the smallest weights for random ones.

    SET itself swaps once an epoch, and the same share each time; the falling share is RigL's.

    Args:
        sparsity: the fraction of zeros, the same throughout.
        iterations: of the whole training.
        every: the iterations between two swaps.
        drop: zeta, the share of each layer's live weights that is swapped at first; it falls to 0 with a cosine.
        until: after which share of the training nothing is swapped any more.
        initial_mask: "random"; "magnitude", for trained weights; "as_is", for a model that is that sparse already.

    Example: set_(S, sparsity=0.8, iterations=8, every=2)
    """
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    yield from swapping(S, first, grow(S.whole, to=sparsity), iterations, every, drop, until)
