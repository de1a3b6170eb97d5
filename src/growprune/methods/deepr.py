"""DeepR: Bellec et al., "Deep Rewiring: Training very sparse deep networks", ICLR 2018."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from growprune.errors import GrowpruneError
from growprune.plan import InitialMask, Parts, Phase, Rule, first_by, method, prune
from growprune.plan.settings import check_counts, check_share, is_number

COOLING = 1e-10
"""By how much the temperature falls over a rule."""


@dataclass(frozen=True)
class Deepr(Rule):
    """Pull live weights to zero and shake them; one that changes its sign dies, and a random dead one lives instead."""

    iterations: int
    """In how many it cools down."""
    l1: float = 1e-5
    """The pull: each step is that of loss + l1 |w|."""
    temperature: float = 1e-5
    """T of the noise at first, whose standard deviation is sqrt(2 learning-rate T)."""

    def __post_init__(self) -> None:
        check_counts(0, iterations=self.iterations)
        for name, value in (("l1", self.l1), ("temperature", self.temperature)):
            if not is_number(value) or value < 0:
                raise GrowpruneError(f"{name} is {value!r}, but must be a number of at least 0")

    def temperature_at(self, iteration: int) -> float:
        """T when so many iterations are done: it falls geometrically."""
        return self.temperature * math.pow(COOLING, iteration / max(1, self.iterations))


@method(allocation="erk")
def deepr(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    until: float = 0.75,
    l1: float = 1e-5,
    temperature: float = 1e-5,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """Begin with a random mask; in every iteration, swap the weights that change their sign for random dead ones.

    In the paper each connection has a fixed random sign, and a new one begins at 1e-12 with it. Here a new weight is
    zero, and the step that first moves it decides its sign, as in the version of the authors of DSR, whose figures the
    GaP paper quotes: with a fixed sign, the first gradient would end half of the new weights at once. Each layer has as
    many live weights after every iteration as before.

    Args:
        sparsity: the fraction of zeros, the same throughout.
        iterations: of the whole training.
        until: after which share of the training nothing is swapped any more.
        l1: how strong the pull to zero is.
        temperature: T of the noise at first; it falls to a 10^10th.
        initial_mask: "random"; "magnitude", for trained weights; "as_is", for a model that is that sparse already.

    Example: deepr(S, sparsity=0.8, iterations=8)
    """
    check_counts(0, iterations=iterations)
    check_share(until=until)
    last = round(until * iterations)
    rule = Deepr(S.whole, iterations=last, l1=l1, temperature=temperature)
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)), iterations=last, rule=rule)
    yield Phase(iterations=iterations - last)
