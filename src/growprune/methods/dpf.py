"""DPF: Lin et al., "Dynamic Model Pruning with Feedback", ICLR 2020."""

from collections.abc import Iterator
from dataclasses import dataclass

from growprune.plan import Parts, Phase, Rule, method, prune
from growprune.plan.settings import check_counts, check_share, check_span, check_sparsity


@dataclass(frozen=True)
class Dpf(Rule):
    """The model is m * w, with w dense and m a mask of its largest; what it learns is done to all of w.

    The gradient is that at m * w (straight-through), so an error of the mask can be seen in w, and undone.
    """

    to: float
    """The sparsity of m in the end."""
    rise: int = 0
    """In how many iterations it rises there from 0, as GMP's does."""
    every: int = 16
    """The iterations from one mask to the next."""

    def __post_init__(self) -> None:
        check_sparsity(self.to)
        check_counts(0, rise=self.rise)
        check_counts(1, every=self.every)

    def target(self, iteration: int) -> float:
        """The sparsity of a mask made when so many iterations are done."""
        left = max(0.0, 1 - iteration / self.rise) if self.rise else 0.0
        return self.to * (1 - left**3)


@method(allocation="global")
def dpf(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 16,
    begin: float = 0.0,
    until: float = 0.75,
    masks_until: float = 1.0,
) -> Iterator[Phase]:
    """Train a dense model by the gradients of its pruned self, with a new mask every so many iterations.

    All weights live until the hard prune: it trains the memory of a dense model. In the paper the sparsity is reached
    where the learning rate falls for the second time, masks go on changing to the end, and training on with the last
    mask is an extra; so `masks_until` is 1 here.

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: of the whole training.
        every: the iterations from one mask to the next.
        begin, until: when masks begin, and when they have the sparsity, rising as GMP's, as shares of the training.
        masks_until: when masks end to change and the model is pruned, as a share of the training; not before `until`.

    Example: dpf(S, sparsity=0.8, iterations=8, every=2)
    """
    check_counts(0, iterations=iterations)
    check_span(begin=begin, until=until)
    check_share(masks_until=masks_until)
    first, last = round(begin * iterations), round(until * iterations)
    end = max(last, round(masks_until * iterations))
    yield Phase(iterations=first)
    yield Phase(iterations=end - first, rule=Dpf(S.whole, to=sparsity, rise=last - first, every=every))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - end)
