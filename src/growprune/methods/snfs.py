"""SNFS: Dettmers and Zettlemoyer, "Sparse Networks from Scratch: Faster Training without Losing Performance", 2019."""

from collections.abc import Iterator

from growprune.methods.rigl import swapping
from growprune.plan import By, InitialMask, Parts, Phase, Spread, first_by, grow, method, prune


@method(allocation="global", every="every", first_mask="initial_mask")
def snfs(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    drop: float = 0.5,
    until: float = 1.0,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """Start with a random mask; regularly swap the smallest weights for those with the largest momentum.

    Each layer drops a share of its own weights. The same total grows again, divided among layers in proportion to the
    mean |momentum| of their live weights. Here that is the mean after the drop; the authors' code takes it before. The
    momentum is a moving average (0.9) of the dense gradients since the last edit; the authors use the optimizer's. The
    densities of layers change, so use allocation="global". Momentum needs storage="masked".

    Args:
        sparsity: the fraction of zeros of the whole model, constant during training.
        iterations: the length of the whole training.
        every: the iterations between two swaps; one epoch in the paper.
        drop: the share of each layer's live weights in the first drop; it falls to 0 with a cosine.
        until: when the swaps end, as a share of the training.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: snfs(S, sparsity=0.8, iterations=8, every=2)
    """
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    regrow = grow(S.whole, to=sparsity, by=By.MOMENTUM, spread=Spread.MOMENTUM)
    yield from swapping(S, first, regrow, iterations, every, drop, until)
