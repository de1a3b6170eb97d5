"""A study: one task on one data set. The rows of the paper's tables are recipes made from it.

dense        the reference
cyclic       C-GaP, K steps of T epochs and T' of fine-tuning
parallel     P-GaP, rounds in which each part is grown on a machine of its own; the epochs of all machines count
random       C-GaP that grows random layers instead of fixed parts
gradual      grow-and-prune with a sparsity that rises, as long as dense training: what we recommend
one_shot     train dense, prune, fine-tune: the paper's prune-from-dense, done the simplest way
stairs       train dense, then prune to one stair after another: the paper's prune-from-dense
rival        a method of somebody else

The rivals in the paper's tables are a table too: each line is two rows, one at 80 % and one at 90 %. Their names read
`method-sparsity-allocation[-times]`: `rigl-80-uniform-5x` is RigL, five times as long. In small and tiny studies all of
them train for the study's budget, and long forms for so many times that.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from growprune import methods
from growprune.engine.recipe import Recipe
from growprune.masks.partition import Partition
from growprune.masks.partition_kinds import balanced, contiguous, named, per_layer
from growprune.plan import Part, Plan, walk

Parts = tuple[tuple[str, ...], ...]


def cut_layers(stack: str, lengths: Sequence[int]) -> Parts:
    """Parts of a stack of so many layers each; its norm goes with the last.

    >>> cut_layers("encoder.", (1, 1))
    (('encoder.layers.0',), ('encoder.layers.1', 'encoder.norm'))
    """
    number = itertools.count()
    *parts, last = (tuple(f"{stack}layers.{next(number)}" for _ in range(length)) for length in lengths)
    return *parts, (*last, f"{stack}norm")


@dataclass(frozen=True)
class Study:
    """The lengths are the paper's letters where the paper has one."""

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
    """What a uniform sparsity leaves out."""
    budget: int | None = None
    """The epochs that a rival trains for; None for those of the paper."""
    every: int | None = None
    """The iterations between two edits of a rival; None for its own."""
    short: Mapping[str, Any] = field(default_factory=dict)
    """What rivals set in the dense recipe."""
    long: Mapping[str, Any] = field(default_factory=dict)
    """What their long forms set instead."""

    def cyclic(self, sparsity: float, **changes: Any) -> Recipe:
        options = {"steps": self.steps, "epochs": self.epochs, "finetune": self.finetune}
        return self._sparse(methods.cyclic_gap, sparsity, options, changes)

    def parallel(self, sparsity: float, **changes: Any) -> Recipe:
        options = {"steps": self.rounds, "epochs": self.epochs, "finetune": self.finetune}
        return self._sparse(methods.parallel_gap, sparsity, options, changes)

    def random(self, sparsity: float, **changes: Any) -> Recipe:
        options = {"steps": self.steps, "epochs": self.epochs, "finetune": self.finetune}
        options["kappa"] = len(self.parts)
        return self._sparse(methods.random_gap, sparsity, options, {"partition": per_layer(), **changes})

    def gradual(self, sparsity: float, **changes: Any) -> Recipe:
        options = {"epochs": self.dense.options["epochs"]}
        return self._sparse(methods.gradual_gap, sparsity, options, {"partition": balanced(4), **changes})

    def one_shot(self, sparsity: float, **changes: Any) -> Recipe:
        options = {"epochs": self.pretrain, "finetune": self.finetune}
        return self._sparse(methods.one_shot, sparsity, options, {"partition": contiguous(1), **changes})

    def stairs(self, method: Any, sparsity: float, phases: int, **changes: Any) -> Recipe:
        """In the paper, each phase is as long as dense training."""
        options = {"epochs": self.budget or self.pretrain * phases}
        changes = {"partition": contiguous(1), **changes}
        return self._sparse(method, sparsity, self._with_every(method, options), changes)

    def iterative_admm(self, sparsity: float, **changes: Any) -> Recipe:
        """With the paper's phases: three to 80 %, five to 90 %."""
        return self.stairs(methods.iterative_admm, sparsity, {0.8: 3, 0.9: 5}[sparsity], **changes)

    def rival(self, rival: Rival, sparsity: float) -> Recipe:
        """A rival, for its own epochs in the paper, or the budget, so many times over."""
        options = {**rival.options, "epochs": rival.epochs if self.budget is None else self.budget * rival.times}
        changes = {**(self.short if rival.times == 1 else self.long), "partition": contiguous(1)}
        changes["allocation"] = rival.allocation
        return self._sparse(rival.method, sparsity, self._with_every(rival.method, options), changes)

    def _with_every(self, method: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        has_every = self.every is not None and "every" in inspect.signature(method).parameters
        return {**options, "every": self.every} if has_every else dict(options)

    def _sparse(self, method: Any, sparsity: float, options: Mapping[str, Any], changes: Mapping[str, Any]) -> Recipe:
        # a ranking over the whole model leaves it to the weights which layers stay dense, and ERK to their shapes
        keep_dense = self.keep_dense if changes.get("allocation", "uniform") == "uniform" else ()
        settings = {"partition": named(self.parts), "keep_dense": keep_dense, **changes}
        return replace(self.dense, method=method, sparsity=sparsity, options=options, **settings)


Make = Callable[[Study], Recipe]
Row = str | tuple[str, Make]
"""What the paper says of a row of its tables, and how to make it from a study, unless its name says that too."""


VARIANTS: dict[str, Mapping[str, Any]] = {"": {}, "kappa1": {"partition": contiguous(1)}, "1x8": {"pattern": "1x8"}}
"""What rows of several tables change, by the end of their names."""


def make_by_name(row: str) -> Make:
    """`cyclic-80-global` is `Study.cyclic` at 80 % with the allocation "global"."""
    if row == "dense":
        return lambda study: study.dense
    method, percent, allocation, *variant = re.split(r"-(\d\d)-(\w+)-?", row)
    make = getattr(Study, method.replace("-", "_"))
    changes = {"allocation": allocation, **VARIANTS["".join(variant)]}
    return lambda study: make(study, int(percent) / 100, **changes)


OURS: dict[str, Row] = {
    "gradual-80-global": "gradual_gap 80 %, which the paper does not have",
    "gradual-90-global": "gradual_gap 90 %, which the paper does not have",
}
"""What every study has beside the rows of its table."""

ClaimFormat = Callable[[str, str], str]
"""Given a row's name and what the paper says of it, what to expect of the recipe."""


def in_the_paper(row: str, claim: str) -> str:
    return claim


def measured(data: str, figures: Mapping[str, str]) -> ClaimFormat:
    """What was measured, by row, on small data; a test compares it with experiments/."""
    return lambda row, claim: f"Like {claim.partition(':')[0]}, on {data}: {figures.get(row, 'not measured')}"


def to_see_that_it_runs(row: str, claim: str) -> str:
    return f"Like {claim.partition(':')[0]}, to see that it runs"


def recipes(
    name: str,
    study: Study,
    rows: Mapping[str, Row],
    say: ClaimFormat = in_the_paper,
    hardware: str = "machines of 8 V100",
) -> dict[str, Callable[[], Recipe]]:
    """Every row for a study, by its full name."""

    def bound(row: str, about: Row) -> Callable[[], Recipe]:
        claim, make = (about, make_by_name(row)) if isinstance(about, str) else about

        def build() -> Recipe:
            recipe = make(study)
            return replace(recipe, claim=f"{say(row, claim)}; {total_epochs(recipe)} epochs; {hardware}")

        return build

    return {f"{name}/{row}": bound(row, about) for row, about in (dict(rows) | OURS).items()}


def total_epochs(recipe: Recipe) -> int:
    """Of all steps, and of all machines, as the paper counts them; of any model, since a plan needs none."""
    parts = Partition(tuple(Part(f"S{i}", (f"{i}.weight",)) for i in range(recipe.partition.num_parts or 100)))
    return sum(scheduled.phase.num_iterations(1) for scheduled in walk(recipe.plan_over(parts, 1)))


SPARSITIES = (0.8, 0.9)


@dataclass(frozen=True)
class Rival:
    """What a table says of a method."""

    name: str
    method: Callable[..., Plan]
    allocation: str
    epochs: int
    """In all, in the paper."""
    found: tuple[str | None, str | None] = (None, None)
    """What was reached at 80 and 90 %; None where the paper has no such row."""
    times: int = 1
    """How many times as long as its short form."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, table: str, metric: str) -> Iterable[tuple[str, Row]]:
        for sparsity, found in zip(SPARSITIES, self.found, strict=True):
            percent, length = f"{sparsity:.0%}".rstrip("%"), "" if self.times == 1 else f"-{self.times}x"
            about = f"{self.name} {self.allocation} {percent} %" + (f", {self.times} times" if length else "")
            claim = (
                f"{about}, which the paper does not have" if found is None else f"{table}, {about}: {metric} {found}"
            )
            yield f"{self.name}-{percent}-{self.allocation}{length}", (claim, self._made_at(sparsity))

    def _made_at(self, sparsity: float) -> Make:
        return lambda study: study.rival(self, sparsity)


def rows_of(rivals: Iterable[Rival], *, table: str, metric: str) -> dict[str, Row]:
    """The rows of a table's rivals, by name."""
    return {name: row for rival in rivals for name, row in rival.rows(table, metric)}
