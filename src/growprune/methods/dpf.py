"""DPF: Lin et al., "Dynamic Model Pruning with Feedback", ICLR 2020."""

from collections.abc import Iterator
from dataclasses import dataclass

from growprune.plan import Parts, Phase, Rule, method, prune
from growprune.plan.settings import check_counts, check_share, check_span, check_sparsity


@dataclass(frozen=True)
class Dpf(Rule):
    """Run the model as m * w, where m masks the largest of the dense weights w; update all of w.

    The gradient is taken at m * w (straight-through), so that mistakes of the mask show in w and can be undone.
    """

    to: float
    """The final sparsity of m."""
    rise: int = 0
    """The iterations in which the sparsity rises from 0, on the same curve as GMP."""
    every: int = 16
    """The iterations between two masks."""

    def __post_init__(self) -> None:
        check_sparsity(self.to)
        check_counts(0, rise=self.rise)
        check_counts(1, every=self.every)

    def target(self, iteration: int) -> float:
        """Return the sparsity of a mask that is made after `iteration` iterations."""
        left = max(0.0, 1 - iteration / self.rise) if self.rise else 0.0
        return self.to * (1 - left**3)


@method(allocation="global", every="every")
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
    """Train dense weights with the gradients of their pruned version, and update the mask regularly.

    All weights stay live until the final prune, so training needs the memory of a dense model. In the paper the
    sparsity is reached at the second drop of the learning rate and masks change to the end. Further training with the
    last mask is optional, so `masks_until` is 1 by default.

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: the length of the whole training.
        every: the iterations between two masks.
        begin, until: when the sparsity begins to rise and when it is reached, as shares of the training.
        masks_until: when the masks stop changing and the model is pruned, as a share of the training, at least `until`.

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
