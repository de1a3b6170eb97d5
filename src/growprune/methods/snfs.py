"""SNFS: Dettmers and Zettlemoyer, "Sparse Networks from Scratch: Faster Training without Losing Performance", 2019."""

from collections.abc import Iterator

from growprune.methods.rigl import swapping
from growprune.plan import By, InitialMask, Parts, Phase, Spread, first_by, grow, method, prune


@method(allocation="global")
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
    """Begin with a random mask; every so often, swap the smallest weights for those of the largest momentum.

    Sparse momentum: each layer drops a share of its own weights; what all have dropped grows again, each layer's number
    in proportion to the mean |momentum| of its live weights. Here those are the ones left after the drop, where the
    authors' code takes the mean before; and the momentum is a moving average of the dense gradients (0.9) since the
    edit before, where the authors use that of the optimizer. Layers get densities of their own: allocation="global" is
    what says so of the model. Momentum needs storage="masked".

    Args:
        sparsity: the fraction of zeros of the whole model, the same throughout.
        iterations: of the whole training.
        every: the iterations between two swaps; in the paper, those of an epoch.
        drop: the share of each layer's live weights that is dropped at first; it falls to 0 with a cosine.
        until: after which share of the training nothing is swapped any more.
        initial_mask: "random"; "magnitude", for trained weights; "as_is", for a model that is that sparse already.

    Example: snfs(S, sparsity=0.8, iterations=8, every=2)
    """
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    regrow = grow(S.whole, to=sparsity, by=By.MOMENTUM, spread=Spread.MOMENTUM)
    yield from swapping(S, first, regrow, iterations, every, drop, until)
