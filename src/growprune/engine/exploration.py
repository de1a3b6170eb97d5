"""How much of a model a run has explored, and how much its masks change.

A weight is *explored* once it has been live in a phase that trains: the share of such weights is what the paper argues
with, since a mask that never moves can find nothing outside itself. *Churn* is how far a mask is from that of the phase
before: twice the weights that live in both, over the live ones of the two, taken from 1. Where as many are grown as
pruned, that is the share of the live weights that were replaced.

The branches of a fork start from the same model: each one's figures are of what went before the fork and of itself, and
what follows the fork has explored what any of them has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from growprune.engine.folder import RunFolder
from growprune.errors import GrowpruneError
from growprune.files.atomic import replacing
from growprune.plan import ScheduledPhase
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel
from growprune.storage import kernels


class Exploration:
    """Keeps count, in two bits a weight of the CPU's memory: did it ever live, and did it in the last phase?

    Args:
        folder: where branches leave what they explored until they are combined.
        is_on: if not, nothing is kept, and `figures` stays empty.
        is_writer: whether this process writes for the branch it trains.
    """

    def __init__(self, sparse: SparseModel, folder: RunFolder, *, is_on: bool, is_writer: bool) -> None:
        self._sparse, self._folder, self._is_on, self._is_writer = sparse, folder, is_on, is_writer
        self._ever: Tensor | None = None
        self._before: Tensor | None = None
        self.figures: dict[str, float | None] = {}
        """`explored` and `churn` as of the edits done last; the churn of the first phase is None."""

    def enter(self, scheduled: ScheduledPhase) -> None:
        """Look at the masks of a phase whose edits are done."""
        if not self._is_on:
            return
        live = pack_masks(self._sparse)
        ever = self._ever if self._ever is not None else torch.zeros_like(live)
        explored = ever | live if scheduled.phase.is_trained else ever
        churn = None if self._before is None else _distance(live, self._before)
        self.figures = {"explored": kernels.count_bits(explored) / max(1, self._sparse.num_prunable), "churn": churn}
        if scheduled.branch is None:
            self._ever, self._before = explored, live
        elif self._is_writer:
            _write(self._folder.explored(scheduled.stage, scheduled.branch), explored)

    def look_again(self) -> None:
        """Look at the masks within a phase, whose rule may have changed them; not those of branches."""
        if self._is_on and self._ever is not None:
            self._ever = self._ever | pack_masks(self._sparse)
            self.figures["explored"] = kernels.count_bits(self._ever) / max(1, self._sparse.num_prunable)

    def combine(self, stage: int, num_branches: int) -> None:
        """At the end of a fork: what any of its branches has explored."""
        for branch in range(num_branches) if self._is_on else ():
            explored = _read(self._folder.explored(stage, branch))
            self._ever = explored if self._ever is None else self._ever | explored

    def state_dict(self) -> dict[str, Any]:
        return {"ever": self._ever, "before": self._before, "figures": self.figures} if self._is_on else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting; where nothing was counted until now, the rest would tell nothing, so it is off from here."""
        self._is_on = self._is_on and bool(state)
        if self._is_on:
            self._ever, self._before, self.figures = state["ever"], state["before"], dict(state["figures"])


def pack_masks(sparse: SparseModel) -> Tensor:
    """The bits of all masks of a model, one after the other, on the CPU; a GPU is asked once."""
    names = dict.fromkeys(weight.parameter for weight in sparse.weights)
    packed = [kernels.pack(internals(sparse).stored[name].mask().reshape(-1)) for name in names]
    return torch.cat(packed).cpu() if packed else torch.zeros(0, dtype=torch.uint8)


def _distance(one: Tensor, other: Tensor) -> float:
    """0 for equal masks, 1 for masks without a common weight."""
    total = kernels.count_bits(one) + kernels.count_bits(other)
    return kernels.count_bits(one ^ other) / total if total else 0.0


def _write(path: Path, bits: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(safetensors.torch.save({"explored": bits}))


def _read(path: Path) -> Tensor:
    try:
        return safetensors.torch.load(path.read_bytes())["explored"]
    except (OSError, SafetensorError, KeyError) as error:
        raise GrowpruneError(
            f"{path}, what a branch has explored, cannot be read ({error}): resume the run, which writes it again"
        ) from error
