"""Does growth itself help? The same rising sparsity with and without it, at equal peak density, under SGD and AdamW.

python experiments/theory/growth.py
python experiments/theory/growth.py --task characters --data input.txt
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import clock, keep, parser, run
from deep_tasks import Characters, DeepDigits
from paired import ADAM, SGD, Figures, compare

import growprune as gp
from growprune.plan import Parts
from growprune.sparse.cursor import Cursor


@gp.method(seed="seed")
def rising(
    S: Parts,
    *,
    sparsity: float,
    start: float,
    iterations: int,
    every: int,
    grown: int = 0,
    swap: float = 0.0,
    seed: int = 0,
) -> Iterator[gp.Phase]:
    """From a random mask at `start`, prune a little more every so many iterations (cubic, as GMP), to three quarters.

    Args:
        grown: how many random layers are grown to dense after each pruning.
        swap: the share of the live weights of each layer that is swapped for random ones, falling to 0 with a cosine.
    """
    rng, last = random.Random(seed), round(0.75 * iterations)
    yield gp.Phase(gp.prune(S.whole, to=start, by=gp.By.RANDOM))
    for t in range(0, last, every):
        now = sparsity + (start - sparsity) * (1 - t / last) ** 3
        edits = [gp.prune(S.whole, to=now), *(gp.grow(S[i]) for i in sorted(rng.sample(range(len(S)), grown)))]
        if swap and t > 0:
            share = swap / 2 * (1 + math.cos(math.pi * t / last))
            edits += [gp.prune(S.whole, share=share), gp.grow(S.whole, to=now)]
        yield gp.Phase(*edits, iterations=min(every, last - t))
    yield gp.Phase(gp.prune(S.whole, to=sparsity), iterations=iterations - last)


def peak_density(plan: gp.Plan, model: torch.nn.Module, sparsity: float) -> float:
    """What a plan holds at most, found by doing its edits without training (exact: layers are pruned one by one)."""
    sparse = gp.SparseModel(model, sparsity=sparsity, allocation="uniform")
    held = [sparse.num_alive for phase in Cursor(sparse, plan) if phase.is_trained]
    return max(held) / sparse.num_prunable


def arms(
    task: gp.tasks.Task, iterations: int, every: int, target: float, start: float
) -> dict[str, Callable[..., gp.Plan]]:
    """By name, what is compared. The peak of the growing plan is what the others with its peak may hold, too."""
    torch.manual_seed(0)
    model = task.build_model()
    S = gp.Partition.per_layer(model)
    of = partial(rising, sparsity=target, iterations=iterations, every=every)
    one = max(1, round(len(S) / 8))
    peak = peak_density(of(S, start=start, grown=one), model, target)
    many = max(1, round((peak - 1 + target) / target * len(S)))
    return {
        "rising, never growing, equal peak": lambda S, n: of(S, start=1 - peak),
        "rising, growing random layers": lambda S, n: of(S, start=start, grown=one, seed=n),
        "constant sparsity, growing random layers": lambda S, n: of(S, start=target, grown=many, seed=n),
        "rising, never growing, equal start": lambda S, n: of(S, start=start),
        "rising, swapping 10 %, equal peak": lambda S, n: of(S, start=1 - peak, swap=0.1),
        "never growing, from dense (GMP)": lambda S, n: of(S, start=0.0),
        "static random": lambda S, n: of(S, start=target),
    }


def main() -> None:
    options = parser(__doc__ or "", "growth")
    options.set_defaults(seeds=5)
    options.add_argument("--task", choices=("digits", "characters"), default="digits")
    options.add_argument("--data", default="", help="of characters: a text file")
    options.add_argument("--iterations", type=int, default=950)
    options.add_argument("--every", type=int, default=19, help="iterations between edits")
    options.add_argument("--sparsity", type=float, default=0.95)
    options.add_argument("--start", type=float, default=0.7)
    arguments, seconds = options.parse_args(), clock()
    task = DeepDigits() if arguments.task == "digits" else Characters(arguments.data)
    rates = {"SGD": partial(SGD, lr=0.1), "AdamW": partial(ADAM, lr=3e-3 if arguments.task == "digits" else 4e-3)}
    settings = (arguments.iterations, arguments.every, arguments.sparsity, arguments.start)
    rows = compare(rates, arms(task, *settings), partial(once, task, sparsity=arguments.sparsity), arguments.seeds)
    keep(arguments.out, seconds(), task=arguments.task, settings=settings, rows=rows)


def once(task: gp.tasks.Task, plan: Callable[..., gp.Plan], make: Any, seed: int, *, sparsity: float) -> Figures:
    trace, metrics = run(task, lambda S: plan(S, seed), make, sparsity=sparsity, seed=seed)
    return {"peak": trace.peak, "average": trace.average, **metrics}


if __name__ == "__main__":
    main()
