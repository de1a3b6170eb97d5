"""Dense training: the baseline for every sparse result."""

from collections.abc import Iterator

from growprune.plan import Parts, Phase, method


@method(length="epochs")
def dense(S: Parts, *, epochs: int, small: object = None) -> Iterator[Phase]:
    """Train the dense model, without pruning.

    Args:
        epochs: the length of the training.
        small: the note of a comparison about a small dense model. It has no effect.

    Example: dense(S, epochs=2)
    """
    del small
    yield Phase(epochs=epochs)
