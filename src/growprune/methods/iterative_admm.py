"""Iterative ADMM pruning: Ren et al., "ADMM-NN: An Algorithm-Hardware Co-Design Framework of DNNs Using Alternating
Direction Methods of Multipliers", ASPLOS 2019; as the GaP paper prunes ResNet-50 from dense."""

from collections.abc import Iterator

from growprune.methods.admm import Admm
from growprune.methods.iterative import equal_lengths, stairs_to
from growprune.plan import Parts, Phase, method, prune
from growprune.plan.settings import check_counts


@method(every="every")
def iterative_admm(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    stages: tuple[float, ...] = (0.8,),
    every: int = 100,
    rho: float = 1e-2,
    restart: bool = True,
) -> Iterator[Phase]:
    """ADMM in stages of rising sparsity: train dense; then for each stage pull, prune and fine-tune.

    In the paper, 80 % takes 250 epochs each of dense training, ADMM and fine-tuning. 90 % continues from there with 250
    of ADMM and 250 of fine-tuning. Here too, all phases have an equal share of the training. The authors' code uses a
    rho of 0.001, and updates Z and U every 30 epochs.

    Args:
        sparsity: the last stage. Of `stages`, those below it are used.
        iterations: the length of the whole training.
        stages: the sparsities of the stages, rising.
        every: the iterations between two updates of Z and U.
        rho: the strength of the pull.
        restart: give each phase a fresh optimizer and its own learning-rate schedule.

    Example: iterative_admm(S, sparsity=0.8, iterations=10, stages=(0.5,), every=2)
    """
    check_counts(0, iterations=iterations)
    stairs = stairs_to(sparsity, stages)
    lengths = iter(equal_lengths(iterations, 1 + 2 * len(stairs)))
    yield Phase(iterations=next(lengths))
    for stair in stairs:
        pull = Admm(S.whole, to=stair, rho=rho, every=every)
        yield Phase(iterations=next(lengths), restart=restart, rule=pull)
        yield Phase(prune(S.whole, to=stair), iterations=next(lengths), restart=restart)
