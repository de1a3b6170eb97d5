"""One-shot magnitude pruning, the prune-from-dense baseline: train, prune once, fine-tune."""

from collections.abc import Iterator

from growprune.plan import Parts, Phase, method, prune
from growprune.plan.settings import check_counts


@method(allocation="global", length="epochs + finetune")
def one_shot(S: Parts, *, sparsity: float, epochs: int, finetune: int, restart: bool = True) -> Iterator[Phase]:
    """Train dense for `epochs`, prune the smallest magnitudes once, then fine-tune for `finetune` epochs.

    Args:
        restart: give fine-tuning a fresh optimizer and its own learning-rate schedule.

    Example: one_shot(S, sparsity=0.8, epochs=1, finetune=1)
    """
    check_counts(0, epochs=epochs, finetune=finetune)
    yield Phase(epochs=epochs)
    yield Phase(prune(S.whole, to=sparsity), epochs=finetune, restart=restart)
