"""One-shot magnitude pruning, the prune-from-dense baseline: train, prune once, fine-tune."""

from collections.abc import Iterator

from growprune.plan import Parts, Phase, check_counts, method, prune


@method
def one_shot(S: Parts, *, sparsity: float, epochs: int, finetune: int) -> Iterator[Phase]:
    """Train dense for `epochs`, prune the smallest magnitudes once, fine-tune for `finetune` epochs."""
    check_counts(0, epochs=epochs, finetune=finetune)
    yield Phase(epochs=epochs)
    yield Phase(prune(S.whole, to=sparsity), epochs=finetune)
