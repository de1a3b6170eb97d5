"""GraSP: Wang et al., "Picking Winning Tickets Before Training by Preserving Gradient Flow", ICLR 2020."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, method, prune
from growprune.plan.settings import check_counts


@method(allocation="global")
def grasp(S: Parts, *, sparsity: float, iterations: int) -> Iterator[Phase]:
    """Before any training, keep the weights whose loss would hurt the gradient flow most; then train what is left.

    A weight's score is weight x (Hessian x gradient), and the largest stay. The paper ranks all layers together, which
    is allocation="global". The authors divide the logits by 200 first, re-initialise the last layer for scoring, and
    look at 150 batches of ImageNet; here the loss is that of training, of its first batch. It needs the Hessian times a
    vector, so dense weights: storage="masked". In a loop of one's own, call `sparse.score(By.GRASP, losses)` first, or
    give `Cursor` a `score`.

    Args:
        sparsity: the fraction of zeros, the same throughout.
        iterations: of the whole training.

    Example: grasp(S, sparsity=0.8, iterations=6)
    """
    check_counts(0, iterations=iterations)
    yield Phase(prune(S.whole, to=sparsity, by=By.GRASP), iterations=iterations)
