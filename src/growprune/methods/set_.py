"""SET: Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired by
network science", 2018; in the form that the RigL paper compares with."""

from collections.abc import Iterator

from growprune.methods.rigl import swapping
from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune


@method(allocation="erk", every="every", first_mask="initial_mask")
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
    """Start with a random mask; regularly swap the smallest weights for random ones.

    The original SET swaps the same share once an epoch. The falling share is RigL's.

    Args:
        sparsity: the fraction of zeros, constant during training.
        iterations: the length of the whole training.
        every: the iterations between two swaps.
        drop: zeta, the share of each layer's live weights in the first swap; it falls to 0 with a cosine.
        until: when the swaps end, as a share of the training.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: set_(S, sparsity=0.8, iterations=8, every=2)
    """
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    yield from swapping(S, first, grow(S.whole, to=sparsity), iterations, every, drop, until)
