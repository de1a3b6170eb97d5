"""ADMM pruning: Zhang et al., "A Systematic DNN Weight Pruning Framework using Alternating Direction Method of
Multipliers", ECCV 2018. The GaP paper calls it prune-from-dense."""

from collections.abc import Iterator
from dataclasses import dataclass

from growprune.errors import GrowpruneError
from growprune.plan import Parts, Phase, Rule, method, prune
from growprune.plan.settings import check_counts, check_span, check_sparsity, is_number


@dataclass(frozen=True)
class Admm(Rule):
    """Pull the weights W of a part towards the nearest sparse weights Z: train on loss + rho/2 |W - Z + U|^2."""

    to: float
    """The sparsity of Z."""
    rho: float = 1e-2
    every: int = 100
    """The iterations between two updates: Z becomes the projection of W + U, and U grows by W - Z."""

    def __post_init__(self) -> None:
        check_sparsity(self.to)
        check_counts(1, every=self.every)
        if not is_number(self.rho) or self.rho <= 0:
            raise GrowpruneError(f"rho must be a finite number > 0, got {self.rho!r}")


@method(every="every")
def admm(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 100,
    begin: float = 0.4,
    until: float = 0.75,
    rho: float = 1e-2,
) -> Iterator[Phase]:
    """Train dense, then pull the weights towards a sparse set, then prune and fine-tune.

    Args:
        sparsity: the fraction of zeros to reach.
        iterations: the length of the whole training.
        every: the iterations between two updates of Z and U.
        begin, until: when the pull begins and ends, as shares of the training.
        rho: the strength of the pull.

    Example: admm(S, sparsity=0.8, iterations=8, every=2)
    """
    check_counts(0, iterations=iterations)
    check_span(begin=begin, until=until)
    first, last = round(begin * iterations), round(until * iterations)
    yield Phase(iterations=first)
    yield Phase(iterations=last - first, rule=Admm(S.whole, to=sparsity, rho=rho, every=every))
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - last)
