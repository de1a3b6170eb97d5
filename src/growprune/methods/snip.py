"""SNIP: Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, method, prune
from growprune.plan.settings import check_counts


@method(allocation="global")
def snip(S: Parts, *, sparsity: float, iterations: int) -> Iterator[Phase]:
    """Before any training, keep the weights with the largest |gradient x weight|; then train what is left.

    The paper ranks all layers together: that is allocation="global". With "uniform" or "erk" each layer keeps its own
    best, as the RigL paper compares with it. Where a recipe is trained, the first batch is looked at; in a loop of
    one's own, call `sparse.score(By.SNIP, losses)` first, or give `Cursor` a `score`.

    Args:
        sparsity: the fraction of zeros, the same throughout.
        iterations: of the whole training.

    Example: snip(S, sparsity=0.8, iterations=6)
    """
    check_counts(0, iterations=iterations)
    yield Phase(prune(S.whole, to=sparsity, by=By.SNIP), iterations=iterations)
