"""DSR: Mostafa and Wang, "Parameter Efficient Training of Deep Convolutional Neural Networks by Dynamic Sparse
Reparameterization", ICML 2019."""

from collections.abc import Iterator

from growprune.plan import InitialMask, Parts, Phase, Spread, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_share


@method(allocation="global")
def dsr(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    drop: float = 0.1,
    until: float = 0.95,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """Begin with a random mask; every so often, drop the smallest weights of the model, and grow where most are left.

    What is dropped is ranked over all layers. As many grow at random, each layer's number in proportion to the live
    weights that it has left. The paper drops what is below a threshold, and adapts it so that about a fixed number is
    dropped each time; here just that number is, so there is no threshold to adapt. The paper does not grow again what
    it has just dropped; here it may. The time between two edits doubles with each quarter of the training, as in the
    paper. Layers get densities of their own: allocation="global" is what says so of the model.

    Args:
        sparsity: the fraction of zeros of the whole model, the same throughout.
        iterations: of the whole training.
        every: the iterations between two edits in the first quarter.
        drop: the share of all live weights that moves each time; the paper moves 0.08 of ResNet-50's at 80 %.
        until: after which share of the training nothing moves any more.
        initial_mask: "random"; "magnitude", for trained weights; "as_is", for a model that is that sparse already.

    Example: dsr(S, sparsity=0.8, iterations=16, every=2, drop=0.3)
    """
    check_counts(1, every=every)
    check_counts(0, iterations=iterations)
    check_share(drop=drop, until=until)
    first = prune(S.whole, to=sparsity, by=first_by(initial_mask))
    move = prune(S.whole, share=drop, spread=Spread.RANKING), grow(S.whole, to=sparsity, spread=Spread.LIVE)
    t = 0
    while t < max(1, iterations):
        edits = (first,) if t == 0 else move if t < until * iterations else ()
        length = min(every * 2 ** (4 * t // max(1, iterations)), iterations - t)
        yield Phase(*edits, iterations=length)
        t += max(1, length)
