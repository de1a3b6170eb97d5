"""DeepR: Bellec et al., "Deep Rewiring: Training very sparse deep networks", ICLR 2018."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from growprune.errors import GrowpruneError
from growprune.plan import InitialMask, Parts, Phase, Rule, first_by, method, prune
from growprune.plan.settings import check_counts, check_share, is_number

COOLING = 1e-10
"""The factor by which the temperature falls until the rule ends."""


@dataclass(frozen=True)
class Deepr(Rule):
    """Add noise and an L1 penalty to live weights; replace each weight that changes sign with a random dead weight."""

    iterations: int
    """The iterations in which the temperature falls."""
    l1: float = 1e-5
    """The strength of the L1 penalty: train on loss + l1 |w|."""
    temperature: float = 1e-5
    """The initial temperature T of the noise, whose standard deviation is sqrt(2 learning-rate T)."""

    def __post_init__(self) -> None:
        check_counts(0, iterations=self.iterations)
        for name, value in (("l1", self.l1), ("temperature", self.temperature)):
            if not is_number(value) or value < 0:
                raise GrowpruneError(f"{name} must be a finite number >= 0, got {value!r}")

    def temperature_at(self, iteration: int) -> float:
        """Return the temperature after `iteration` iterations. It falls geometrically."""
        return self.temperature * math.pow(COOLING, iteration / max(1, self.iterations))


@method(allocation="erk", first_mask="initial_mask")
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
    """Start with a random mask; in every iteration, swap weights that change sign for random dead weights.

    In the paper each connection has a fixed random sign, and a new one starts with it at 1e-12. Here a new weight is
    zero, and its first step decides its sign. The authors of DSR, whose numbers the GaP paper quotes, do so too: with a
    fixed sign, the first gradient would remove half of the new weights at once. The number of live weights of each
    layer stays constant.

    Args:
        sparsity: the fraction of zeros, constant during training.
        iterations: the length of the whole training.
        until: when the swaps end, as a share of the training.
        l1: the strength of the pull to zero.
        temperature: the initial T of the noise; it falls by a factor of 10^10.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: deepr(S, sparsity=0.8, iterations=8)
    """
    check_counts(0, iterations=iterations)
    check_share(until=until)
    last = round(until * iterations)
    rule = Deepr(S.whole, iterations=last, l1=l1, temperature=temperature)
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)), iterations=last, rule=rule)
    yield Phase(iterations=iterations - last)
