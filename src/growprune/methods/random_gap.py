"""Cyclic grow-and-prune over a random partition: Ma et al., ICLR 2022, appendix A.2."""

import random
from collections.abc import Iterator

from growprune.errors import GrowpruneError
from growprune.plan import InitialMask, Parts, Phase, first_by, grow, method, prune
from growprune.plan.settings import check_counts


@method(
    partition="per_layer", length="steps * epochs + finetune", first_mask="initial_mask", parts="kappa", seed="seed"
)
def random_gap(
    S: Parts,
    *,
    sparsity: float,
    steps: int,
    epochs: int,
    finetune: int,
    kappa: int,
    seed: int = 0,
    restart: bool = True,
    initial_mask: InitialMask = "random",
) -> Iterator[Phase]:
    """C-GaP that grows a random set of layers in each step, none of them grown in the step before.

    Args:
        S: a fine partition, usually `Partition.per_layer(model)`. Each step draws len(S) // kappa of its parts.
        kappa: 1 / kappa is the share of the layers that are grown in a step.
        seed: the seed of the draws.
        sparsity, steps, epochs, finetune, restart: as in `cyclic_gap`.
        initial_mask: "random", "magnitude" (for trained weights), or "as_is" (for a model already at this sparsity).

    Example: random_gap(S, sparsity=0.8, steps=3, epochs=1, finetune=1, kappa=2)
    """
    check_counts(1, steps=steps)
    check_counts(0, epochs=epochs, finetune=finetune)
    check_counts(2, kappa=kappa)
    if kappa > len(S):
        raise GrowpruneError(f"kappa must be <= the number of parts of the partition, {len(S)}, got {kappa}")
    rng = random.Random(seed)
    grown: list[int] = []
    yield Phase(prune(S.whole, to=sparsity, by=first_by(initial_mask)))
    for _ in range(steps):
        previous = grown
        grown = sorted(rng.sample([i for i in range(len(S)) if i not in previous], len(S) // kappa))
        edits = [*(prune(S[j], to=sparsity) for j in previous), *(grow(S[i]) for i in grown)]
        yield Phase(*edits, epochs=epochs, restart=restart)
    yield Phase(*(prune(S[i], to=sparsity) for i in grown), epochs=finetune, restart=restart)
