"""What a run really cost: the weights that lived in each of its iterations, and the FLOPs of training them.

It is measured where a phase begins, where an epoch ends, so that a rule that changes masks inside a phase is seen once
an epoch, and where the branches of a fork are put together. An iteration costs three forward passes (one forward, two
for the gradients) of each of its examples, by the one FLOPs rule, at the densities the layers have then. All branches
of a fork count, wherever they are trained: what came of a branch is written to the run folder, and added up where the
fork ends, by one process as by many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from growprune.masks.bits import Snapshot
from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel


@dataclass
class Tally:
    """Sums over iterations; `+` adds those of a branch."""

    flops: int = 0
    iterations: int = 0
    examples: int = 0
    alive_sum: int = 0
    """The live weights of each iteration, added up."""
    peak_alive: int = 0
    is_whole: bool = True
    """False if it began in the middle, from a checkpoint of a growprune that did not count yet."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.flops + other.flops,
            self.iterations + other.iterations,
            self.examples + other.examples,
            self.alive_sum + other.alive_sum,
            max(self.peak_alive, other.peak_alive),
            self.is_whole and other.is_whole,
        )


@dataclass
class Accounting:
    """Counts for one process of a run.

    Args:
        example: an input of the model, on its device, in a batch of one.
    """

    sparse: SparseModel
    example: Any
    total: Tally = field(default_factory=Tally)
    """Of what is not in a branch, and of the forks that are over."""
    branch: Tally | None = None
    """Of the branch the run is in."""

    def __post_init__(self) -> None:
        self._sizes = {weight.name: weight.numel for weight in self.sparse.weights}
        self._alive: dict[str, int] = {}
        self._forward = 0

    @cached_property
    def _flops(self) -> Flops:
        """Counted where a run begins or goes on, once it is known that the model is the right one."""
        return count_flops(self.sparse.model, self.example)

    @property
    def _now(self) -> Tally:
        return self.total if self.branch is None else self.branch

    def enter(self, *, is_branch: bool) -> None:
        """A phase begins, and its edits are done."""
        self.branch = Tally() if is_branch else None
        self.measure()

    @property
    def alive(self) -> int:
        """How many weights lived when this was last measured: asking the model makes a GPU wait."""
        return sum(self._alive.values())

    @property
    def densities(self) -> dict[str, float]:
        """By weight, the share that lived when this was last measured."""
        return {name: count / self._sizes[name] if self._sizes[name] else 1.0 for name, count in self._alive.items()}

    def measure(self) -> int:
        """Look at how many weights live now, and return their number."""
        self._price(internals(self.sparse).alive_by_weight())
        return self.alive

    def _price(self, alive: Mapping[str, int]) -> None:
        self._alive = dict(alive)
        self._forward = self._flops.at({name: count / self._sizes[name] for name, count in alive.items()})
        self._now.peak_alive = max(self._now.peak_alive, self.alive)

    def count(self, num_examples: int) -> None:
        """An iteration is over."""
        now = self._now
        now.flops += 3 * self._forward * num_examples
        now.iterations += 1
        now.examples += num_examples
        now.alive_sum += self.alive

    def branch_dict(self) -> dict[str, Any]:
        """What came of the branch the run is in, for `add_branch` of whoever combines it."""
        return asdict(self.branch or Tally())

    def add_branch(self, stored: Mapping[str, Any] | None) -> None:
        self.total += _tally(stored)

    def merge(self, combined: Snapshot) -> None:
        """The branches of a fork are put together: what lives then counts in the peak, however soon it is pruned."""
        alive = sum(values.numel() for values, mask in combined.values() if mask is not None)
        self.total.peak_alive = max(self.total.peak_alive, alive)

    def state_dict(self) -> dict[str, Any]:
        branch = None if self.branch is None else asdict(self.branch)
        return {"total": asdict(self.total), "branch": branch, "alive": self._alive}

    def load_state_dict(self, state: Mapping[str, Any] | None, *, is_branch: bool = False) -> None:
        """Count on from a checkpoint. One that has no counts gives no figures at the end, rather than wrong ones."""
        if state is None:
            self._now.is_whole = False
            self.measure()
            return
        if is_branch:
            self.branch = _tally(state["branch"])
        else:
            self.total, self.branch = _tally(state["total"]), None
        self._price(state["alive"])

    def figures(self) -> dict[str, Any]:
        """For `result.json`; null where they are not known."""
        total = self.total
        known = {
            "training_flops": total.flops,
            "training_iterations": total.iterations,
            "training_examples": total.examples,
            "peak_alive": total.peak_alive,
            "average_alive": total.alive_sum / total.iterations if total.iterations else float(total.peak_alive),
        }
        return known if total.is_whole else dict.fromkeys(known)


def _tally(stored: Mapping[str, Any] | None) -> Tally:
    return Tally(is_whole=False) if stored is None else Tally(**stored)
