"""Iterative magnitude pruning: Han et al., "Learning both Weights and Connections for Efficient Neural Networks",
NeurIPS 2015; with the stages of the GaP paper's prune-from-dense of SSD."""

import itertools
from collections.abc import Iterator, Sequence

from growprune.errors import GrowpruneError
from growprune.plan import Parts, Phase, method, prune
from growprune.plan.settings import check_counts, check_sparsity

STAGES = (0.5, 0.7, 0.8, 0.875, 0.9)


@method(allocation="global")
def iterative(
    S: Parts, *, sparsity: float, iterations: int, stages: tuple[float, ...] = STAGES, restart: bool = True
) -> Iterator[Phase]:
    """Train dense, then prune in stages of rising sparsity, with equal training after each.

    Args:
        sparsity: the last stage. Of `stages`, those below it are used: for 0.8 these are 0.5 and 0.7.
        iterations: the length of the whole training.
        stages: the sparsities of the stages, rising.
        restart: give each stage a fresh optimizer and its own learning-rate schedule, as in the paper.

    Example: iterative(S, sparsity=0.8, iterations=8)
    """
    check_counts(0, iterations=iterations)
    stairs = stairs_to(sparsity, stages)
    lengths = equal_lengths(iterations, 1 + len(stairs))
    yield Phase(iterations=lengths[0])
    for stair, length in zip(stairs, lengths[1:], strict=True):
        yield Phase(prune(S.whole, to=stair), iterations=length, restart=restart)


def stairs_to(sparsity: float, stages: Sequence[float]) -> list[float]:
    """Return the stages below a sparsity, then the sparsity itself.

    >>> stairs_to(0.8, (0.5, 0.7, 0.8, 0.9))
    [0.5, 0.7, 0.8]
    """
    if not isinstance(stages, Sequence):
        raise GrowpruneError(f"stages must be a sequence of sparsities, such as (0.5, 0.7), got {stages!r}")
    for stage in (sparsity, *stages):
        check_sparsity(stage)
    if any(a >= b for a, b in itertools.pairwise(stages)):
        raise GrowpruneError(f"stages must rise from each to the next, got {tuple(stages)}")
    return [*(stage for stage in stages if stage < sparsity), sparsity]


def equal_lengths(iterations: int, count: int) -> list[int]:
    """Divide iterations among phases as equally as possible.

    >>> equal_lengths(11, 3)
    [4, 3, 4]
    """
    ends = [round(iterations * i / count) for i in range(count + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]
