"""A fixed random mask: the baseline that every sparse training method must beat."""

from collections.abc import Iterator

from growprune.plan import InitialMask, Parts, Phase, first_by, method, prune


@method(allocation="erk", first_mask="initial_mask")
def static_random(
    S: Parts, *, sparsity: float, iterations: int, initial_mask: InitialMask = "random"
) -> Iterator[Phase]:
    """Train with a random mask that never changes.

    Args:
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).
            With the last two, this is fine-tuning with a fixed mask.

    Example: static_random(S, sparsity=0.8, iterations=6)
    """
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)), iterations=iterations)
