"""How should the sparsity rise: evenly, or fast at first and slowly at the end? With growth and without it.

python experiments/theory/rise.py
python experiments/theory/rise.py --task characters --data input.txt --iterations 3000 --seeds 2
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from common import clock, keep, parser, run
from deep_tasks import Characters, DeepDigits
from paired import ADAM, SGD, Figures, compare

import growprune as gp

PEAK = 0.6
POWERS = (1, 3)
Arm = Callable[[gp.Partition], gp.Plan]


def arms(iterations: int, sparsity: float) -> dict[str, Arm]:
    """By name, what is compared. All but GMP have the same share of the weights alive at most."""
    of = partial(gp.methods.gradual_gap, sparsity=sparsity, iterations=iterations, peak_density=PEAK)
    gmp = partial(gp.methods.gmp, sparsity=sparsity, iterations=iterations, every=max(1, iterations // 60))
    growing = {f"growing, power {power}": partial(of, power=power) for power in POWERS}
    never = {f"never growing, power {power}": partial(of, power=power, control="peak") for power in POWERS}
    return growing | never | {"GMP, from dense": gmp}


def once(task: gp.tasks.Task, arm: Arm, make: Any, seed: int, *, sparsity: float) -> Figures:
    quarters = partial(gp.Partition.balanced, kappa=4)
    trace, metrics = run(task, arm, make, sparsity=sparsity, seed=seed, allocation="global", cut=quarters)
    return {"peak": trace.peak, "average": trace.average, **metrics}


def main() -> None:
    options = parser(__doc__ or "", "rise")
    options.set_defaults(seeds=5)
    options.add_argument("--task", choices=("digits", "characters"), default="digits")
    options.add_argument("--data", default="", help="of characters: a text file")
    options.add_argument("--iterations", type=int, default=950)
    options.add_argument("--sparsity", type=float, default=0.9)
    given, seconds = options.parse_args(), clock()
    task = DeepDigits() if given.task == "digits" else Characters(given.data, width=96, depth=3, batch_size=32)
    rates = {"AdamW": partial(ADAM, lr=3e-3 if given.task == "digits" else 4e-3)}
    rates |= {"SGD": partial(SGD, lr=0.05)} if given.task == "digits" else {}
    rows = compare(
        rates, arms(given.iterations, given.sparsity), partial(once, task, sparsity=given.sparsity), given.seeds
    )
    keep(given.out, seconds(), task=given.task, iterations=given.iterations, sparsity=given.sparsity, rows=rows)


if __name__ == "__main__":
    main()
