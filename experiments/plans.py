"""Plans that were tried on the way to `gradual_gap`, all of them one generator with many options.

    growprune train experiments/plans.py:cifar10 --data cifar10.npz --set options.kappa=8 --out runs/kappa8

The sparsity rises from `start` to its target; what else happens at each edit is what the options say.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import growprune as gp
from growprune.methods.dpf import Dpf
from growprune.plan import By, Edit, Parts, Phase, grow, method, prune
from growprune.recipes.classification import cifar10 as cifar10_study


@method(seed="seed")
def rising(
    S: Parts,
    *,
    sparsity: float,
    iterations: int,
    every: int = 96,
    start: float = 0.5,
    until: float = 0.75,
    power: int = 3,
    order: str = "cyclic",
    share: int = 4,
    depth: float = 1.0,
    shrink: bool = False,
    swap: float = 0.0,
    swap_by: str = "random",
    feedback: int = 0,
    rotate: bool = False,
    seed: int = 0,
) -> Iterator[Phase]:
    """From a random mask at `start`, prune to a sparsity that rises by a power, and at each edit grow something.

    Args:
        order: which parts grow: "none", "cyclic" (one after the other), "random" (1/share of them, none of the last).
        depth: how far they grow: 1 to dense, 0 not at all.
        shrink: whether the depth falls to 0 with a cosine.
        swap: the share of each layer's live weights that is dropped and grown elsewhere; falls to 0 with a cosine.
        feedback: if not 0, a part that grows is dense for the optimizer only: the model has it pruned, anew after so
            many iterations, as in DPF. Then pruning it at last changes nothing.
        rotate: whether parts go on growing after the sparsity is reached, to the end.
    """
    rng, grown, last = random.Random(seed), [], round(until * iterations)
    end = iterations if rotate else last
    yield Phase(prune(S.whole, to=start, by=By.RANDOM))
    for step, t in enumerate(range(0, end, every)):
        falling = (1 + math.cos(math.pi * t / end)) / 2
        s = sparsity + (start - sparsity) * max(0, 1 - t / last) ** power
        edits: list[Edit] = [prune(S.whole, to=s)]
        if swap:
            edits += [prune(S.whole, share=swap * falling), grow(S.whole, to=s, by=By(swap_by))]
        if order == "cyclic":
            grown = [step % len(S)]
        elif order == "random":
            grown = sorted(rng.sample([i for i in range(len(S)) if i not in grown], len(S) // share))
        d = depth * (falling if shrink else 1)
        edits += [grow(S[i], to=s * (1 - d)) for i in grown if d > 0]
        rule = Dpf(S[grown[0]], to=s, every=feedback) if feedback and order == "cyclic" else None
        yield Phase(*edits, iterations=min(every, end - t), rule=rule)
    yield Phase(prune(S.whole, to=sparsity), iterations=iterations - end)


def cifar10() -> gp.Recipe:
    dense = cifar10_study().dense
    task = replace(dense.task, width=32)  # type: ignore[type-var]
    recipe = replace(dense, task=task, method=rising, options={"epochs": 60}, sparsity=0.9, allocation="global")
    return replace(recipe, parts=gp.balanced(4), compile=True, evaluate_every=10, candidates=False)
