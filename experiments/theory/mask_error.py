"""The mask-incurred error of C-GaP: how much of the weights does each pruning throw away? The digits CNN.

delta^2 = ||W - m W||^2 / ||W||^2, W the weights just before a part is pruned, m the mask just after.

python experiments/theory/mask_error.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product

import digits
import torch
from common import Hook, clock, keep, mean_and_error, parser, run, table, told
from torch import Tensor

import growprune as gp
from growprune.plan import Action, ScheduledPhase


def mask_error(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], names: Iterable[str] | None = None) -> float:
    """delta^2 of the paper's Assumption 3, over all weights or over some of them."""
    names = list(weights if names is None else names)
    lost = sum(float(weights[name][~masks[name]].double().square().sum()) for name in names)
    return lost / sum(float(weights[name].double().square().sum()) for name in names)


class MaskErrors:
    """Notes delta^2 each time a part is pruned: of the whole model, as the paper has it, and of the part alone."""

    def __init__(self, sparse: gp.SparseModel) -> None:
        self._sparse, self._weights = sparse, {}
        self._masks = sparse.masks
        self.whole: list[float] = []
        self.part: list[float] = []
        self.new: list[float] = []
        """Of the weights that the pruning keeps, the share that was dead before the part grew."""

    def before_edits(self, scheduled: ScheduledPhase) -> None:
        parameters = dict(self._sparse.model.named_parameters())
        self._weights = {name: parameters[name].detach().clone() for name in self._sparse.masks}

    def after_edits(self, scheduled: ScheduledPhase) -> None:
        masks = self._sparse.masks
        pruned = [edit.part for edit in scheduled.phase.edits if edit.action is Action.PRUNE]
        names = [name for name in pruned[0].tensors if name in masks] if pruned else []
        if scheduled.stage >= 2 and names:  # in the first step the part to prune is sparse already
            self.whole.append(mask_error(self._weights, masks))
            self.part.append(mask_error(self._weights, masks, names))
            new = sum(int((masks[name] & ~self._masks[name]).sum()) for name in names)
            self.new.append(new / max(1, sum(int(masks[name].sum()) for name in names)))
        self._masks |= {name: masks[name] for name in (names if scheduled.stage else masks)}


def measure(sparsity: float, allocation: str, restart: bool, seed: int, rounds: int, epochs: int, width: int) -> dict:
    """One run of C-GaP, and its errors by round."""
    found: list[MaskErrors] = []

    def watch(sparse: gp.SparseModel) -> tuple[Hook, Hook]:
        found.append(MaskErrors(sparse))
        return found[0].before_edits, found[0].after_edits

    def plan(S: gp.Partition) -> gp.Plan:
        steps = {"steps": rounds * len(S), "epochs": epochs, "finetune": 4 * epochs}
        return gp.methods.cyclic_gap(S, sparsity=sparsity, restart=restart, **steps)

    settings = {"sparsity": sparsity, "seed": seed, "allocation": allocation}
    _, metrics = run(gp.tasks.Digits(width=width), plan, digits.SGD, watch=watch, **settings)
    by_round = partial(_by_round, rounds)
    errors = {"whole": by_round(found[0].whole), "part": by_round(found[0].part), "new": by_round(found[0].new)}
    return {**errors, "accuracy": metrics["accuracy"]}


def _by_round(rounds: int, errors: list[float]) -> list[float]:
    """The mean over the prunings of each round."""
    return torch.tensor(errors, dtype=torch.float64).view(rounds, -1).mean(1).tolist()


def main() -> None:
    options = parser(__doc__ or "", "mask_error")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--epochs", type=int, default=2, help="of each step")
    options.add_argument("--width", type=int, default=8)
    arguments, seconds = options.parse_args(), clock()
    rows, figures = [], []
    for sparsity, allocation, restart in product((0.8, 0.9), ("uniform", "global"), (True, False)):
        size = (arguments.rounds, arguments.epochs, arguments.width)
        runs = [measure(sparsity, allocation, restart, seed, *size) for seed in range(arguments.seeds)]
        by_round = [mean_and_error(column) for column in zip(*(one["part"] for one in runs), strict=True)]
        whole, new = ([one[what][-1] for one in runs] for what in ("whole", "new"))
        schedule = "restarts" if restart else "one curve"
        label = f"{sparsity:.0%}, {allocation}, {schedule}"
        accuracies = [one["accuracy"] for one in runs]
        rows.append([label, *(f"{mean:.3f}" for mean, _ in by_round), told(whole, 4)])
        rows[-1] += [told([one["new"][0] for one in runs], 3), told(new, 3), told(accuracies)]
        setting = {"sparsity": sparsity, "allocation": allocation, "restart": restart}
        figures.append({**setting, "runs": runs})
    heads = ["delta² of the pruned part, round", *map(str, range(1, arguments.rounds + 1))]
    print(table([*heads, "of the whole model, last", "new, first", "new, last", "test accuracy"], rows))
    keep(arguments.out, seconds(), epochs=arguments.epochs, width=arguments.width, rows=figures)


if __name__ == "__main__":
    main()
