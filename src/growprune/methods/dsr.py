"""DSR: Mostafa and Wang, "Parameter Efficient Training of Deep Convolutional Neural Networks by Dynamic Sparse
Reparameterization", ICML 2019."""

from collections.abc import Iterator

from growprune.plan import InitialMask, Parts, Phase, Spread, first_by, grow, method, prune
from growprune.plan.settings import check_counts, check_share


@method(allocation="global", every="every", first_mask="initial_mask")
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
    """Start with a random mask; regularly drop the smallest weights of the model and grow in layers that kept most.

    Weights of all layers are ranked together for the drop. As many grow at random, divided among layers in proportion
    to their remaining live weights. The paper drops weights below a threshold and adapts it to drop about a fixed
    number. Here exactly that number is dropped, so there is no threshold. The paper does not regrow weights that it has
    just dropped; here it may. As in the paper, the time between two edits doubles with each quarter of the training.
    The densities of layers change, so use allocation="global".

    Args:
        sparsity: the fraction of zeros of the whole model, constant during training.
        iterations: the length of the whole training.
        every: the iterations between two edits in the first quarter.
        drop: the share of all live weights that moves each time; 0.08 in the paper, for ResNet-50 at 80 %.
        until: when the edits end, as a share of the training.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

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
