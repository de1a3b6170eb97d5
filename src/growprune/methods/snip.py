"""SNIP: Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, method, prune


@method(allocation="global")
def snip(S: Parts, *, sparsity: float, iterations: int) -> Iterator[Phase]:
    """Prune once before training, keep the weights with the largest |gradient x weight|; then train.

    The paper ranks all layers together, which is allocation="global". With "uniform" or "erk" each layer keeps its own
    best, as in the RigL paper's comparison. A recipe scores its first batch. In your own loop, call
    `sparse.score(By.SNIP, losses)` first, or pass `score` to `Cursor`.

    Args:
        sparsity: the fraction of zeros, constant during training.
        iterations: the length of the whole training.

    Example: snip(S, sparsity=0.8, iterations=6)
    """
    yield Phase(prune(S.whole, to=sparsity, by=By.SNIP), iterations=iterations)
