"""What looks on while a run is trained, and changes nothing: counters, explored weights, the best model, the log.

docs/design.md, "Runs and comparisons", defines explored and churn, and says where live weights are counted. An
iteration costs three forward passes (one forward, two for the gradients) per example, at the densities the layers have
then. All branches of a fork count, wherever they are trained: each branch writes its counts to the run folder, and they
are added up at the end of the fork. The figures of a branch cover everything before the fork and the branch itself.
After the fork, a weight is explored if any branch explored it.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from growprune.engine.folder import RunFolder
from growprune.engine.mesh import PeerFailed
from growprune.engine.trainer import TrainingDiverged
from growprune.errors import GrowpruneError, shorten
from growprune.files.disk import plain_file, replacing
from growprune.files.writer import write_file
from growprune.masks.bits import Snapshot
from growprune.plan import ScheduledPhase
from growprune.runs.result import Metric
from growprune.sparse.flops import Flops, count_flops
from growprune.sparse.model import SparseModel
from growprune.storage import kernels


@dataclass
class Tally:
    """Sums over iterations; `+` adds those of a branch."""

    flops: int = 0
    iterations: int = 0
    examples: int = 0
    alive_sum: int = 0
    """The live weights of each iteration, added up."""
    peak_alive: int = 0

    def __add__(self, other: Tally) -> Tally:
        sums = {name: count + getattr(other, name) for name, count in vars(self).items()}
        return Tally(**sums | {"peak_alive": max(self.peak_alive, other.peak_alive)})


@dataclass
class Accounting:
    """Counts for one process of a run."""

    sparse: SparseModel
    example: Any
    """An input of the model, on its device, in a batch of one."""
    total: Tally = field(default_factory=Tally)
    """Counts outside branches, and of the forks that are over."""
    branch: Tally | None = None
    """Counts of the current branch."""

    def __post_init__(self) -> None:
        self._sizes = {weight.name: weight.numel for weight in self.sparse.weights}
        self._alive: dict[str, int] = {}
        self._forward = 0

    @cached_property
    def _flops(self) -> Flops:
        """Counted when a run starts or resumes, after the model was checked."""
        return count_flops(self.sparse.model, self.example)

    @property
    def _now(self) -> Tally:
        return self.total if self.branch is None else self.branch

    def enter(self, *, is_branch: bool) -> None:
        """Begin a phase, after its edits."""
        self.branch = Tally() if is_branch else None
        self.measure()

    @property
    def alive(self) -> int:
        """Number of live weights at the last measurement. Asking the model would make a GPU wait."""
        return sum(self._alive.values())

    @property
    def densities(self) -> dict[str, float]:
        """Density of each weight at the last measurement."""
        return {name: count / self._sizes[name] if self._sizes[name] else 1.0 for name, count in self._alive.items()}

    def measure(self, alive: Mapping[str, int] | None = None) -> int:
        """Count the live weights now, unless the counts are given, and return their number."""
        self._alive = dict(self.sparse.alive_by_weight() if alive is None else alive)
        self._forward = self._flops.at({name: count / self._sizes[name] for name, count in self._alive.items()})
        self._now.peak_alive = max(self._now.peak_alive, self.alive)
        return self.alive

    def count(self, num_examples: int) -> None:
        """Count one finished iteration."""
        now = self._now
        now.flops += 3 * self._forward * num_examples
        now.iterations += 1
        now.examples += num_examples
        now.alive_sum += self.alive

    def merge(self, combined: Snapshot) -> None:
        """Count the live weights of a combined fork in the peak, even if they are pruned at once."""
        alive = sum(values.numel() for values, mask in combined.values() if mask is not None)
        self.total.peak_alive = max(self.total.peak_alive, alive)

    def state_dict(self) -> dict[str, Any]:
        branch = None if self.branch is None else asdict(self.branch)
        return {"total": asdict(self.total), "branch": branch, "alive": self._alive}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a checkpoint."""
        self.total = Tally(**state["total"])
        self.branch = None if state["branch"] is None else Tally(**state["branch"])
        self.measure(state["alive"])

    def figures(self) -> dict[str, Any]:
        """The counts as `result.json` stores them."""
        total = self.total
        return {
            "training_flops": total.flops,
            "training_iterations": total.iterations,
            "training_examples": total.examples,
            "peak_alive": total.peak_alive,
            "average_alive": total.alive_sum / total.iterations if total.iterations else float(total.peak_alive),
        }


class Exploration:
    """Tracks which weights ever lived, ever were dead, and lived in the last phase. Needs three bits of CPU memory per
    weight.

    Branches write what they explored to the folder until they are combined. If it is not on, `figures` stays empty.
    """

    def __init__(self, sparse: SparseModel, folder: RunFolder, *, is_on: bool, is_writer: bool) -> None:
        self._sparse, self._folder, self._is_on, self._is_writer = sparse, folder, is_on, is_writer
        self._ever = self._dead = torch.zeros(1, dtype=torch.uint8)  # of no weight, for any number of weights
        """Weights that lived, and weights that were dead, at some time in training."""
        self._before: Tensor | None = None
        self.figures: dict[str, float | None] = {}
        """`explored`, `churn` and `grown` after the last edits. The churn of the first phase is None."""

    def enter(self, scheduled: ScheduledPhase) -> None:
        """Record the masks of a phase after its edits."""
        if not self._is_on:
            return
        live = pack_masks(self._sparse)
        explored = self._ever | live if scheduled.phase.is_trained else self._ever
        churn = None
        if self._before is not None:  # 0 if no mask changed, 1 if no live weight lived before
            total = kernels.count_bits(live) + kernels.count_bits(self._before)
            churn = kernels.count_bits(live ^ self._before) / max(1, total)
        self.figures = {**self._shares(explored, self._dead, live), "churn": churn}
        if scheduled.branch is None:
            self._ever, self._before = explored, live
            if scheduled.phase.is_trained:
                self._dead = self._dead | ~live
        elif self._is_writer:
            path = self._folder.explored(scheduled.stage, scheduled.branch)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(safetensors.torch.save({"explored": explored}))

    def look_again(self) -> None:
        """Record the masks within a phase, because its rule may have changed them. Branches are skipped."""
        if self._is_on:
            live = pack_masks(self._sparse)
            self._ever = self._ever | live
            self.figures |= self._shares(self._ever, self._dead, live)
            self._dead = self._dead | ~live

    def _shares(self, explored: Tensor, dead: Tensor, live: Tensor) -> dict[str, float]:
        """The share of weights that were explored, and of live weights that were dead at some time in training."""
        grown = kernels.count_bits(live & dead) / max(1, kernels.count_bits(live))
        return {"explored": kernels.count_bits(explored) / max(1, self._sparse.num_prunable), "grown": grown}

    def combine(self, stage: int, num_branches: int) -> None:
        """At the end of a fork, add what its branches explored."""
        for branch in range(num_branches) if self._is_on else ():
            path = self._folder.explored(stage, branch)
            try:
                self._ever = self._ever | safetensors.torch.load(plain_file(path).read_bytes())["explored"]
            except (OSError, SafetensorError, KeyError) as error:
                raise GrowpruneError(
                    f"cannot read {path}, the explored weights of a branch ({error}). Resume the run to write it again"
                ) from error

    def state_dict(self) -> dict[str, Any]:
        if not self._is_on:
            return {}
        return {"ever": self._ever, "dead": self._dead, "before": self._before, "figures": self.figures}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint. Tracking turns off if the checkpoint has none, because it would be incomplete."""
        self._is_on = self._is_on and bool(state)
        if self._is_on:
            self._ever, self._before, self.figures = state["ever"], state["before"], dict(state["figures"])
            self._dead = state["dead"]


def pack_masks(sparse: SparseModel) -> Tensor:
    """Pack all masks of a model into one tensor of bits on the CPU, with one copy from the GPU."""
    names = dict.fromkeys(weight.parameter for weight in sparse.weights)
    packed = [kernels.pack(sparse.stored[name].mask().clone().reshape(-1)) for name in names]
    return torch.cat(packed).cpu() if packed else torch.zeros(0, dtype=torch.uint8)


class Best:
    """The best model so far. Only a writer keeps it, in a file; other processes know its score."""

    def __init__(self, path: Path, metric: Metric, *, is_writer: bool) -> None:
        self._path, self._metric, self._is_writer = path, metric, is_writer
        self.found: dict[str, Any] = {}
        self._model: Snapshot = {}

    def consider(self, sparse: SparseModel, metrics: dict[str, float], **where: Any) -> None:
        """Keep a model if it is as good as the best so far. Among equals, the later one wins."""
        name = self._metric.name
        best = self.found["validation"][name] if self.found else math.nan
        if self._metric.is_as_good(metrics[name], than=best):
            self.found = {"validation": metrics, **where}
            if self._is_writer:
                self._model = sparse.snapshot(device="cpu")
                write_file(sparse, self._path)

    def put_into(self, sparse: SparseModel) -> None:
        """Load the best weights into a model, and write its file again: after a kill it may be newer than the state."""
        sparse.restore(self._model)
        write_file(sparse, self._path)

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found, "model": self._model}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found, self._model = state["found"], state["model"]


Event: TypeAlias = dict[str, Any]
Listener: TypeAlias = Callable[[Event], None]


class Events:
    """Sends events to listeners. Events are either *logged* in the run folder too, or only *shown*."""

    def __init__(self, folder: RunFolder, listeners: Sequence[Listener], last: int) -> None:
        self._folder, self._listeners, self._last = folder, listeners, last

    def log_event(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> None:
        self._folder.append(self.show(event, scheduled, **details))

    def show(self, event: str, scheduled: ScheduledPhase | None = None, **details: Any) -> Event:
        """Send an event to listeners without logging it."""
        entry: Event = {"event": event}
        if scheduled is not None:
            entry |= {"index": scheduled.index, "last": self._last}
            entry |= {"stage": scheduled.stage, "branch": scheduled.branch}
        entry |= details
        for listener in self._listeners:
            listener(entry)
        return entry

    def warn(self, message: str) -> None:
        self.log_event("warning", message=message)

    def log_failure(self, error: BaseException) -> None:
        """Log why the run ends, for readers of the folder: as interrupted by Ctrl-C, or as failed."""
        entry: Event = {"event": "interrupted"}
        if not isinstance(error, KeyboardInterrupt):
            says_all = isinstance(error, GrowpruneError | TrainingDiverged | PeerFailed)
            text = str(error) if says_all else traceback.format_exception_only(error)[-1]  # the last line
            entry = {"event": "failed", "message": shorten(" ".join(text.split()), 1000)}
        for tell in (self._folder.append, *self._listeners):
            with contextlib.suppress(Exception):  # the disk may be full, or a listener may be what failed
                tell(entry)
