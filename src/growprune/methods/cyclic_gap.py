"""Cyclic grow-and-prune (C-GaP): Ma et al., "Effective Model Sparsification by Scheduled Grow-and-Prune
Methods", ICLR 2022, Algorithm 1."""

from collections.abc import Iterator

from growprune.plan import By, Parts, Phase, check_counts, grow, method, prune


@method
def cyclic_gap(S: Parts, *, sparsity: float, steps: int, epochs: int, finetune: int) -> Iterator[Phase]:
    """C-GaP: each step grows one part to dense and prunes the one grown before; at the end, fine-tune.

    Args:
        sparsity: r, the fraction of zeros to reach.
        steps: K, how many parts are grown in all; len(S) of them are one round.
        epochs: T, the epochs trained in each step.
        finetune: T', the epochs trained at the end with all parts sparse.
    """
    check_counts(1, steps=steps)
    check_counts(0, epochs=epochs, finetune=finetune)
    yield Phase(prune(S.whole, to=sparsity, by=By.RANDOM))
    for step in range(steps):
        i, j = step % len(S), (step - 1) % len(S)
        yield Phase(prune(S[j], to=sparsity), grow(S[i]), epochs=epochs)
    yield Phase(prune(S[i], to=sparsity), epochs=finetune)
