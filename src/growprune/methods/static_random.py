"""A random sparse network, trained as it is: the control that every sparse training method must beat."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, check_counts, method, prune


@method(allocation="erk")
def static_random(S: Parts, *, sparsity: float, iterations: int) -> Iterator[Phase]:
    """Train a random mask, the same from beginning to end, for `iterations` iterations.

    Example: static_random(S, sparsity=0.8, iterations=6)
    """
    check_counts(0, iterations=iterations)
    yield Phase(prune(S.whole, to=sparsity, by=By.RANDOM), iterations=iterations)
