"""The dense reference every sparse result is compared with."""

from collections.abc import Iterator

from growprune.plan import Parts, Phase, method


@method
def dense(S: Parts, *, epochs: int) -> Iterator[Phase]:
    """Train with every weight alive for `epochs` epochs.

    Example: dense(S, epochs=2)
    """
    yield Phase(epochs=epochs)
