"""Parallel grow-and-prune (P-GaP): Ma et al., "Effective Model Sparsification by Scheduled Grow-and-Prune
Methods", ICLR 2022, Algorithm 2."""

from collections.abc import Iterator

from growprune.plan import Branch, Fork, InitialMask, Parts, Phase, Stage, first_by, grow, method, prune
from growprune.plan.settings import check_counts


@method(length="steps * epochs + finetune", first_mask="initial_mask")
def parallel_gap(
    S: Parts,
    *,
    sparsity: float,
    steps: int,
    epochs: int,
    finetune: int,
    restart: bool = True,
    initial_mask: InitialMask = "random",
) -> Iterator[Stage]:
    """P-GaP: in each step, len(S) machines start from the same model and each grows one part; merge and prune.

    Args:
        sparsity: r, the fraction of zeros to reach.
        steps: K, how many times the models are merged; one step is one round.
        epochs: T, the epochs each machine trains in each step.
        finetune: T', the epochs trained at the end with all parts sparse.
        restart: give each step the full learning-rate schedule, as in the paper. Its optimizer is always fresh.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: parallel_gap(S, sparsity=0.8, steps=2, epochs=1, finetune=1)
    """
    check_counts(1, steps=steps)
    check_counts(0, epochs=epochs, finetune=finetune)
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)))
    for _ in range(steps):
        yield Fork(*(Branch(Phase(grow(P), epochs=epochs, restart=restart), returns=P) for P in S))
        yield Phase(prune(S.whole, to=sparsity))
    yield Phase(epochs=finetune, restart=restart)
