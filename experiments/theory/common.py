"""What the experiments of this folder share: a plain training loop, means with their errors, tables, files."""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import growprune as gp
from growprune.plan import ScheduledPhase

HERE = Path(__file__).parent
CPU = torch.device("cpu")
Hook = Callable[[ScheduledPhase], None]


@dataclass
class Trace:
    """What is seen of a training: at each edit of the masks, and on average over its iterations."""

    num_prunable: int
    coverage: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, share of the weights that have ever lived), after each phase's edits."""
    live: list[tuple[int, float]] = field(default_factory=list)
    """(iteration, share of the weights that live), after each phase's edits."""
    iterations: int = 0

    @property
    def peak(self) -> float:
        """The largest share of weights that lived in any iteration."""
        ends = [start for start, _ in self.live[1:]] + [self.iterations]
        return max(share for (start, share), end in zip(self.live, ends, strict=True) if end > start)

    @property
    def average(self) -> float:
        """The share of weights that lived, on average over iterations."""
        ends = [start for start, _ in self.live[1:]] + [self.iterations]
        return sum(share * (end - start) for (start, share), end in zip(self.live, ends, strict=True)) / self.iterations

    def coverage_at(self, iteration: int) -> float:
        """The share that had lived by then."""
        return next(share for start, share in reversed(self.coverage) if start <= iteration)


class Ever:
    """Which weights of a model have ever lived."""

    def __init__(self, sparse: gp.SparseModel) -> None:
        self._sparse = sparse
        self._seen = {name: torch.zeros_like(mask) for name, mask in sparse.masks.items()}

    def look(self) -> float:
        """Take note of what lives now; the share of weights that have ever lived."""
        for name, mask in self._sparse.masks.items():
            self._seen[name] |= mask
        return sum(int(seen.sum()) for seen in self._seen.values()) / self._sparse.num_prunable


def train(
    sparse: gp.SparseModel,
    plan: gp.Plan,
    batches: Callable[[int], Iterable[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    per_epoch: int,
    warmup: int = 0,
    before_edits: Hook = lambda scheduled: None,
    after_edits: Hook = lambda scheduled: None,
) -> Trace:
    """Train a model through a plan; the learning rate is a cosine from each restart of the plan to the next.

    Args:
        batches: given the number of an epoch, its batches.
        per_epoch: how many batches an epoch has.
        warmup: iterations, after each restart, in which the learning rate rises.
        before_edits, after_edits: told of each phase as it ends, and of each once its edits are done.
    """
    trace, ever = Trace(sparse.num_prunable), Ever(sparse)

    def enter(scheduled: ScheduledPhase) -> None:
        trace.coverage.append((cursor.start, ever.look()))
        trace.live.append((cursor.start, sparse.num_alive / sparse.num_prunable))
        after_edits(scheduled)

    cursor = gp.Cursor(sparse, plan, iterations_per_epoch=per_epoch, on_enter=enter, on_leave=before_edits)
    optimizer = cursor.attach(make_optimizer(sparse.model.parameters()))
    peak_lr = optimizer.param_groups[0]["lr"]
    curve = lr_curve(cursor, warmup)
    sparse.model.train()
    for batch in _endless(batches):
        if cursor.is_over:
            break
        optimizer.param_groups[0]["lr"] = peak_lr * curve[cursor.iteration]
        optimizer.zero_grad()
        loss(sparse.model, batch).backward()
        optimizer.step()  # which also does the edits that are due, since the cursor is attached
        trace.iterations += 1
    return trace


def run(
    task: gp.tasks.Task,
    make_plan: Callable[[gp.Partition], gp.Plan],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    sparsity: float,
    seed: int,
    allocation: str = "uniform",
    cut: Callable[[nn.Module], gp.Partition] = gp.Partition.per_layer,
    watch: Callable[[gp.SparseModel], tuple[Hook, Hook]] | None = None,
) -> tuple[Trace, dict[str, float]]:
    """Train a task by a plan over its layers; what was seen, and the metrics of the last model on the test split.

    With the same seed, every plan begins with the same weights, and sees the same batches in the same order. With
    `cut`, the plan is over other parts than single layers.
    """
    torch.manual_seed(seed)
    model = task.build_model()
    sparse = gp.SparseModel(model, sparsity=sparsity, allocation=allocation, seed=seed)
    hooks = {} if watch is None else dict(zip(("before_edits", "after_edits"), watch(sparse), strict=True))
    plan, per_epoch = make_plan(cut(model)), task.num_batches()

    def batches(epoch: int) -> Iterator[Any]:
        return task.batches(seed=random.Random(f"{seed} {epoch}").getrandbits(32), start=0, device=CPU)

    trace = train(sparse, plan, batches, task.loss, make_optimizer, per_epoch=per_epoch, warmup=per_epoch, **hooks)
    with torch.no_grad():
        return trace, task.evaluate(model.eval(), "test", device=CPU)


def lr_curve(cursor: gp.Cursor, warmup: int) -> list[float]:
    """For each iteration of a plan, the share of the peak learning rate."""
    spans = [0]
    for scheduled in cursor.schedule:
        if scheduled.phase.restart:
            spans.append(0)
        spans[-1] += cursor.length_of(scheduled.phase)
    return [_cosine(t, span, min(warmup, span // 2)) for span in spans for t in range(span)]


def _cosine(t: int, length: int, warmup: int) -> float:
    if t < warmup:
        return (t + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (t - warmup) / (length - warmup))) / 2


def _endless(batches: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
    epoch = 0
    while True:
        yield from batches(epoch)
        epoch += 1


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def told(values: Sequence[float], digits: int = 2, *, sign: bool = False) -> str:
    """Mean ± standard error."""
    mean, error = mean_and_error(values)
    plus = "+" if sign else ""
    return f"{mean:{plus}.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def parser(doc: str, name: str) -> argparse.ArgumentParser:
    """Options that every experiment has."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--out", type=Path, default=HERE / f"{name}.json", help="where the figures are kept")
    return options


def keep(path: Path, seconds: float, **figures: Any) -> None:
    """Write what was found, and on what, so that documents can be checked against it."""
    made_with = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    times = {"seconds": round(seconds, 1), "cpu_seconds": round(time.process_time(), 1)}
    path.write_text(json.dumps({**times, **made_with, **figures}, indent=1) + "\n")


def clock() -> Callable[[], float]:
    """Asked later: the seconds since now."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
