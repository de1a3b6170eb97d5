"""GraSP: Wang et al., "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, method, prune


@method(allocation="global")
def grasp(S: Parts, *, sparsity: float, iterations: int) -> Iterator[Phase]:
    """Prune once before training, keep the weights that matter most for the gradient flow; then train.

    The score of a weight is weight x (Hessian x gradient); the largest stay. The paper ranks all layers together, which
    is allocation="global". The authors divide the logits by 200, re-initialize the last layer for scoring, and use 150
    batches of ImageNet. Here the score is computed with the training loss of the first batch. It needs a
    Hessian-vector product, so dense weights: storage="masked". In your own loop, call `sparse.score(By.GRASP, losses)`
    first, or pass `score` to `Cursor`.

    Args:
        sparsity: the fraction of zeros, constant during training.
        iterations: the length of the whole training.

    Example: grasp(S, sparsity=0.8, iterations=6)
    """
    yield Phase(prune(S.whole, to=sparsity, by=By.GRASP), iterations=iterations)
