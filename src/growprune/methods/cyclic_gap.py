"""Cyclic grow-and-prune (C-GaP): Ma et al., "Effective Model Sparsification by Scheduled Grow-and-Prune
Methods", ICLR 2022, Algorithm 1."""

from collections.abc import Iterator

from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune
from growprune.plan.settings import check_counts


@method(length="steps * epochs + finetune", first_mask="initial_mask")
def cyclic_gap(
    S: Parts,
    *,
    sparsity: float,
    steps: int,
    epochs: int,
    finetune: int,
    restart: bool = True,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """C-GaP: each step grows one part to dense and prunes the part grown before; then fine-tune.

    Args:
        sparsity: r, the fraction of zeros to reach.
        steps: K, how many parts are grown in total; a round is len(S) steps.
        epochs: T, the epochs trained in each step.
        finetune: T', the epochs trained at the end with all parts sparse.
        restart: give each step a fresh optimizer and the full learning-rate schedule, as in the paper.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: cyclic_gap(S, sparsity=0.8, steps=3, epochs=1, finetune=1)
    """
    check_counts(1, steps=steps)
    check_counts(0, epochs=epochs, finetune=finetune)
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)))
    for step in range(steps):
        i, j = step % len(S), (step - 1) % len(S)
        yield Phase(prune(S[j], to=sparsity), grow(S[i]), epochs=epochs, restart=restart)
    yield Phase(prune(S[i], to=sparsity), epochs=finetune, restart=restart)
