"""The paper's example of 10 weights, one trained at a time: how many steps until each was trained once?

python experiments/theory/ten_weights.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from math import comb

from common import Ever, clock, keep, parser, table, told
from torch import nn

import growprune as gp
from growprune.plan import Parts
from growprune.sparse.cursor import Cursor

NUM_WEIGHTS = 10


@gp.method
def random_exploration(S: Parts, *, sparsity: float, steps: int) -> Iterator[gp.Phase]:
    """In each step, drop what lives and let as many random weights live: SET that swaps all of them."""
    yield gp.Phase(gp.prune(S.whole, to=sparsity, by=gp.By.RANDOM))
    for _ in range(steps - 1):
        yield gp.Phase(gp.prune(S.whole, share=1.0), gp.grow(S.whole, to=sparsity))


def expected_random(n: int = NUM_WEIGHTS) -> float:
    """The coupon collector: if j of n weights are seen, the next draw is new with probability (n - j) / n."""
    return sum(n / (n - j) for j in range(n))


def expected_random_but_the_last(n: int = NUM_WEIGHTS) -> float:
    """random_gap never draws what it has just drawn, so each draw but the first is one of n - 1."""
    return 1 + sum((n - 1) / (n - j) for j in range(1, n))


def probability_all_seen(steps: int, n: int = NUM_WEIGHTS) -> float:
    """Of all n weights after so many random steps: by inclusion and exclusion of those that were missed."""
    return sum((-1) ** missed * comb(n, missed) * (1 - missed / n) ** steps for missed in range(n + 1))


def steps_until_all_seen(sparse: gp.SparseModel, plan: gp.Plan) -> int:
    """Follow a real plan with a real model; count the phases that leave something alive to train."""
    ever, steps = Ever(sparse), 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layer.* pruned to zero weights")  # that is what the example is about
        for _ in Cursor(sparse, plan):
            steps += sparse.num_alive > 0
            if ever.look() == 1:
                return steps
    raise RuntimeError(f"the plan ended after {steps} steps, before all weights were seen: make it longer")


def one_layer_each() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(NUM_WEIGHTS)))


def cyclic(seed: int) -> int:
    """C-GaP over ten parts of one weight: 90 % of one weight is none, so that only the part in turn lives."""
    model = one_layer_each()
    plan = gp.methods.cyclic_gap(gp.Partition.per_layer(model), sparsity=0.9, steps=30, epochs=1, finetune=0)
    return steps_until_all_seen(gp.SparseModel(model, sparsity=0.9, allocation="uniform", seed=seed), plan)


def random_parts(seed: int) -> int:
    model = one_layer_each()
    options = {"sparsity": 0.9, "steps": 200, "epochs": 1, "finetune": 0, "kappa": NUM_WEIGHTS, "seed": seed}
    plan = gp.methods.random_gap(gp.Partition.per_layer(model), **options)
    return steps_until_all_seen(gp.SparseModel(model, sparsity=0.9, allocation="uniform", seed=seed), plan)


def random_weights(seed: int) -> int:
    model = nn.Linear(NUM_WEIGHTS, 1, bias=False)
    plan = random_exploration(gp.Partition.contiguous(model, 1), sparsity=0.9, steps=200)
    return steps_until_all_seen(gp.SparseModel(model, sparsity=0.9, allocation="uniform", seed=seed), plan)


def main() -> None:
    options = parser(__doc__ or "", "ten_weights")
    options.set_defaults(seeds=500)
    arguments, seconds = options.parse_args(), clock()
    ways: list[tuple[str, float, Callable[[int], int]]] = [
        ("cyclic_gap, 10 parts", float(NUM_WEIGHTS), cyclic),
        ("random_gap, 10 parts", expected_random_but_the_last(), random_parts),
        ("random exploration", expected_random(), random_weights),
    ]
    found = {name: [run(seed) for seed in range(arguments.seeds)] for name, _, run in ways}
    rows = [(name, f"{exact:.2f}", told(found[name]), max(found[name])) for name, exact, _ in ways]
    print(table(["", "steps expected", f"measured, {arguments.seeds} runs", "longest"], rows))
    chances = {steps: probability_all_seen(steps) for steps in (10, 20, 29, 30, 40, 51, 70)}
    print("\nAll seen after so many random steps: " + ", ".join(f"{s}: {p:.1%}" for s, p in chances.items()))
    figures = [
        {"method": name, "expected": exact, "mean": sum(found[name]) / len(found[name]), "longest": max(found[name])}
        for name, exact, _ in ways
    ]
    keep(arguments.out, seconds(), runs=arguments.seeds, rows=figures, probability_all_seen=chances)


if __name__ == "__main__":
    main()
