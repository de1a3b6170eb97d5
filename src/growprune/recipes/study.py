"""A study: one task on one data set. The rows of the paper's tables are recipes made from it.

dense           the dense baseline
cyclic          C-GaP, K steps of T epochs and T' of fine-tuning
parallel        P-GaP, rounds in which each part is grown on a separate machine; the epochs of all machines count
random          C-GaP that grows random layers instead of fixed parts
gradual         grow-and-prune with rising sparsity, as long as dense training: what we recommend
one-shot        train dense, prune, fine-tune: the paper's prune-from-dense in its simplest form
iterative, iterative-admm    train dense, then prune in several steps: the paper's prune-from-dense

The baselines (class `Baseline`) of the paper's tables are a table too: each line is two rows, at 80 % and 90 %. Their
names are `method-sparsity-allocation[-times]`: `rigl-80-uniform-5x` is RigL, five times as long. In small studies all
of them train for the budget of the study, and long forms for a multiple of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from growprune import methods
from growprune.engine.recipe import Recipe
from growprune.masks.partition import Partition, balanced, contiguous, named, per_layer
from growprune.plan import Part, Plan, declaration_of, walk

Parts = tuple[tuple[str, ...], ...]


def cut_layers(stack: str, lengths: Sequence[int]) -> Parts:
    """Parts of a stack with the given numbers of layers. Its norm belongs to the last part.

    >>> cut_layers("encoder.", (1, 1))
    (('encoder.layers.0',), ('encoder.layers.1', 'encoder.norm'))
    """
    number = itertools.count()
    *parts, last = (tuple(f"{stack}layers.{next(number)}" for _ in range(length)) for length in lengths)
    return *parts, (*last, f"{stack}norm")


@dataclass(frozen=True)
class Study:
    """A task on one data set, from which recipes are made. Lengths are the letters of the paper, if it has one."""

    dense: Recipe
    parts: Parts
    """The kappa parts of C-GaP and P-GaP."""
    steps: int
    """K of C-GaP."""
    rounds: int
    """K of P-GaP."""
    epochs: int
    """T, of each step."""
    finetune: int
    """T', at the end."""
    pretrain: int
    """Epochs of dense training before prune-from-dense prunes."""
    keep_dense: tuple[str, ...] = ()
    """Layers that stay dense with uniform allocation."""
    budget: int | None = None
    """The epochs of a baseline. None: those of the paper."""
    six_parts: Parts = ()
    """The parts of rows with kappa = 6."""
    every: int | None = None
    """The iterations between two edits of a baseline. None: its default."""
    short: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the dense recipe that baselines change."""
    long: Mapping[str, Any] = field(default_factory=dict)
    """Fields that their long forms change instead."""

    def recipe(self, row: str) -> Recipe:
        """The recipe of a row: `cyclic-80-global-1x8` is C-GaP at 80 %, with allocation "global" and pattern 1x8."""
        if row == "dense":
            return self.dense
        kind, percent, allocation, variant = re.split(r"-(\d\d)-(\w+)-?", row)
        parts, rounds = self.parts, self.rounds
        if variant == "kappa6":
            parts, rounds = self.six_parts, (rounds + 1) // 2
        gap = {"steps": self.steps, "epochs": self.epochs, "finetune": self.finetune}
        # Pruning in several phases; in the paper, each is as long as dense training.
        num_phases = 6 if kind == "iterative" else {80: 3, 90: 5}[int(percent)]
        stairs = {"epochs": self.budget or self.pretrain * num_phases}
        once = contiguous(1)
        method, options, partition = {
            "cyclic": (methods.cyclic_gap, gap, named(parts)),
            "parallel": (methods.parallel_gap, gap | {"steps": rounds}, named(parts)),
            "random": (methods.random_gap, gap | {"kappa": len(parts)}, per_layer()),
            "gradual": (methods.gradual_gap, {"epochs": self.dense.options["epochs"]}, balanced(4)),
            "one-shot": (methods.one_shot, {"epochs": self.pretrain, "finetune": self.finetune}, once),
            "iterative": (methods.iterative, stairs, once),
            "iterative-admm": (methods.iterative_admm, self._with_every(methods.iterative_admm, stairs), once),
        }[kind]
        changes = {"parts": partition, "allocation": allocation, **VARIANTS.get(variant, {})}
        return self._sparse(method, int(percent) / 100, options, changes)

    def baseline(self, baseline: Baseline, sparsity: float) -> Recipe:
        """A baseline, for its epochs in the paper, or for a multiple of the budget."""
        epochs = baseline.epochs if self.budget is None else self.budget * baseline.times
        changes = {**(self.short if baseline.times == 1 else self.long), "parts": contiguous(1)}
        options = self._with_every(baseline.method, {**baseline.options, "epochs": epochs})
        return self._sparse(baseline.method, sparsity, options, {**changes, "allocation": baseline.allocation})

    def _with_every(self, method: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        has_every = self.every is not None and declaration_of(method).every is not None
        return {**options, "every": self.every} if has_every else dict(options)

    def _sparse(self, method: Any, sparsity: float, options: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
        # a global ranking or ERK decides by itself which layers stay dense
        keep_dense = self.keep_dense if changes["allocation"] == "uniform" else ()
        # the rows that are quoted were measured before "auto" scaled the rates of a rising sparsity
        scaling = {"lr_scaling": 0.0} if declaration_of(method).rises_from else {}
        settings = {"keep_dense": keep_dense, **scaling, **changes}
        return replace(self.dense, method=method, sparsity=sparsity, options=options, **settings)


Row = str | tuple[str, "Baseline"]
"""The claim of the paper for a row. The name of a row says how to make it, unless it is a baseline."""

VARIANTS: dict[str, Mapping[str, Any]] = {
    "kappa1": {"parts": contiguous(1)},
    "1x8": {"pattern": "1x8"},
    "sparse-fc": {"keep_dense": ("conv1",)},
}
"""Changes to the recipe by the suffix of a row's name."""

OURS: dict[str, Row] = {
    "gradual-80-global": "gradual_gap 80 %, not in the paper",
    "gradual-90-global": "gradual_gap 90 %, not in the paper",
}
"""Rows that every study has in addition to its table."""


def recipes(
    name: str, study: Study, rows: Mapping[str, Row], *, like: str = "", measured: Mapping[str, str] | None = None
) -> dict[str, Callable[[], Recipe]]:
    """All recipes of a study, by full name.

    Args:
        like: what the recipe of a study of our own claims, which fits on one GPU; `{}` is the row of the paper, without
            its figure.
        measured: our own results by full name. Each claim says its result, or that it was not measured.
    """

    hardware = "one GPU" if like else "machines of 8 V100"

    def build(row: str, about: Row) -> Recipe:
        full, (claim, baseline) = f"{name}/{row}", (about, None) if isinstance(about, str) else about
        recipe = study.recipe(row) if baseline is None else study.baseline(baseline, int(row.split("-")[1]) / 100)
        said = like.format(claim.partition(":")[0]) if like else claim
        result = f"measured here: {measured[full]}" if measured and full in measured else "not measured here"
        return replace(recipe, claim=f"{said}; {result}; {total_epochs(recipe)} epochs; {hardware}")

    return {f"{name}/{row}": partial(build, row, about) for row, about in (dict(rows) | OURS).items()}


def total_epochs(recipe: Recipe) -> int:
    """Epochs of all steps and all machines, as the paper counts them. They do not depend on the model."""
    parts = Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(recipe.chosen()["parts"].num_parts or 100)))
    return sum(scheduled.phase.num_iterations(1) for scheduled in walk(recipe.plan_over(parts, 1)))


@dataclass(frozen=True)
class Baseline:
    """A baseline in a table of the paper."""

    name: str
    method: Callable[..., Plan]
    allocation: str
    epochs: int
    """Total epochs in the paper."""
    found: tuple[str | None, str | None] = (None, None)
    """The results at 80 and 90 %. None if the paper has no such row."""
    times: int = 1
    """Length as a multiple of the short form."""
    options: Mapping[str, Any] = field(default_factory=dict)


def rows_of(baselines: Iterable[Baseline], *, table: str, metric: str) -> dict[str, Row]:
    """The rows of the baselines of a table, by name."""
    rows: dict[str, Row] = {}
    for baseline in baselines:
        for percent, found in zip((80, 90), baseline.found, strict=True):
            length, times = ("", "") if baseline.times == 1 else (f"-{baseline.times}x", f", {baseline.times} times")
            about = f"{baseline.name} {baseline.allocation} {percent} %{times}"
            claim = f"{about}, not in the paper" if found is None else f"{table}, {about}: {metric} {found}"
            rows[f"{baseline.name}-{percent}-{baseline.allocation}{length}"] = claim, baseline
    return rows
