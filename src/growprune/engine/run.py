"""A run: a recipe carried out in a folder. Read this file second, after plan.py.

    recipe.json           where the recipe came from, and all it says
    plan.json             the steps it unrolls to
    log.jsonl             one object per event, appended
    checkpoints/          see checkpoint.py
    best.safetensors      the best sparse candidate by validation data
    model.safetensors     the final sparse model
    result.json           what came out; there once the run is finished

A run can be killed at any moment; it resumes to the bits it would have reached.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from growprune import file
from growprune.engine import checkpoint
from growprune.engine.compatibility import check_same_tensors, tensors_of
from growprune.engine.device import choose_device, environment, move, peak_bytes, reset_peak
from growprune.engine.folder import Event, OtherLogs, RunFolder
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe, describe
from growprune.engine.rng import rng_state, seed_all, set_rng_state
from growprune.engine.training import Training
from growprune.errors import GrowpruneError
from growprune.plan import ScheduledPhase, check_counts, walk
from growprune.snapshot import Snapshot, pack
from growprune.sparse import SparseModel
from growprune.summary import summarise


class Interrupted(Exception):
    """The run was asked to stop, has written a checkpoint, and can be resumed."""


class Run:
    """One recipe in one folder.

    Args:
        on_event: told of everything that goes to the log.
        should_stop: asked after each iteration; True ends the run with a checkpoint and `Interrupted`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.folder = recipe, folder
        self._on_event, self._should_stop = on_event, should_stop
        self.device = choose_device(recipe.device)
        self.task = recipe.task
        self.num_batches = self.task.num_batches()  # first, because it looks at the data, and data may be missing
        check_counts(1, num_batches=self.num_batches)
        seed_all(recipe.seed, "model")
        model = self.task.build_model().to(self.device)
        recipe.optimizer.build(model)  # on trial: if it cannot be built, better to hear of it before there is a folder
        self.plan = recipe.plan(model)
        self.sparse = recipe.sparse_model(model)
        self.mesh = Mesh(self.plan, recipe.replicas, recipe.timeout_seconds)
        self.training = Training(recipe, self.plan, self.sparse, self.device, self.mesh)
        walked = list(walk(self.plan))
        self.last = len(walked) - 1
        pairs = itertools.pairwise(walked)
        self._after_forks = {b.index for a, b in pairs if a.branch is not None and b.branch is None}
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self._best_model: Snapshot = {}
        self._seconds = 0.0
        self._since = time.monotonic()
        self._checkpoint_due = self._since + recipe.checkpoint_seconds
        self._validation: dict[str, float] = {}
        self._show_due = self._look_due = 0.0
        heads = range(self.mesh.replicas, self.mesh.world, self.mesh.replicas) if self.mesh.is_first else ()
        self._others = OtherLogs(folder, heads)
        self._number = max(checkpoint.numbers(folder.checkpoints), default=0)  # even if none of them can be loaded
        self._previous = 0
        self._resumed_after: int | None = None

    def files(self) -> dict[str, bytes]:
        """What the task made of its data, without which its models are of no use."""
        return self.task.files()

    def execute(self) -> dict[str, Any]:
        """Carry the plan out, from where the run stands to its end, and return the result."""
        reset_peak(self.device)
        for scheduled in self.sparse.schedule(self.plan, is_local=self.mesh.is_local, combine=self._combine):
            if scheduled.index == self._resumed_after or (
                scheduled.branch is not None and self._restore_branch(scheduled)
            ):
                continue
            branch = "" if scheduled.branch is None else f", branch {scheduled.branch}"
            self.mesh.phase = f"step {scheduled.stage}{branch} ({scheduled.phase})"
            if scheduled.branch is None:
                self._agree_on_masks(scheduled)
            alive = self.sparse.num_alive
            self.log_event_of(
                "phase", scheduled, edits=str(scheduled.phase), epochs=scheduled.phase.epochs, alive=alive
            )
            for _ in self.training.train(scheduled, self._after_epoch):
                self._after_iteration(scheduled)
            self._after_phase(scheduled)
        return self._finish()

    # Between iterations

    def _after_iteration(self, scheduled: ScheduledPhase) -> None:
        if self.mesh.any(self._should_stop()):
            self._save(scheduled)
            self.log_event_of("interrupted", scheduled)
            raise Interrupted
        now = time.monotonic()
        if now >= self._checkpoint_due:
            self._save(scheduled)
        if now >= self._show_due:  # shown, not logged
            self._show_due = now + 0.2
            cursor = self.training.cursor
            batches = {"batch": cursor.batch, "batches": self.num_batches}
            self._on_event(
                {"event": "iteration", "epoch": cursor.epoch + 1, "epochs": scheduled.phase.epochs, **batches}
            )
        if now >= self._look_due:
            self._look_due = now + 1.0
            self._show_others()

    def _show_others(self) -> None:
        """Show how far the other branches of a fork are; the first process speaks for all."""
        for event in self._others.news():
            if event.get("branch") is not None:
                self._on_event(event)

    def _after_epoch(self, scheduled: ScheduledPhase, loss: float, lr: float) -> None:
        epoch = self.training.cursor.epoch + 1
        if epoch % self.recipe.evaluate_every and epoch < scheduled.phase.epochs:
            self.log_event_of("epoch", scheduled, epoch=epoch, loss=loss, lr=lr)
            return
        self._validation = validation = self._evaluate(self.sparse, "validation")
        self.log_event_of("epoch", scheduled, epoch=epoch, loss=loss, lr=lr, validation=validation)
        if scheduled.index == self.last:
            self._consider(self.sparse, scheduled, validation, epoch)

    def _after_phase(self, scheduled: ScheduledPhase) -> None:
        row: dict[str, Any] = {"index": scheduled.index, "stage": scheduled.stage, "branch": scheduled.branch}
        row |= {"edits": str(scheduled.phase), "epochs": scheduled.phase.epochs, "alive": self.sparse.num_alive}
        if scheduled.phase.epochs:
            row["validation"] = self._validation
        if self._is_candidate(scheduled):
            candidate = self.sparse.clone()
            candidate.prune()
            row["candidate"] = self._evaluate(candidate, "validation")
            self._consider(candidate, scheduled, row["candidate"], None)
        self._add_row(scheduled, row)
        self.log_event_of(
            "phase_end", scheduled, **{k: v for k, v in row.items() if k in ("validation", "candidate", "alive")}
        )
        self.training.next_phase()
        if scheduled.phase.epochs or scheduled.index == self.last - 1 or scheduled.index in self._after_forks:
            self._save(scheduled, is_finished=True)

    def _add_row(self, scheduled: ScheduledPhase, row: dict[str, Any]) -> None:
        """Note what came of a phase; of a branch, where all processes find it when it is combined."""
        if scheduled.branch is None:
            self.history.append(row)
        elif self.mesh.leads_group:
            folder = self.folder.branch(scheduled.stage, scheduled.branch)
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.write_json(folder / "row.json", row)

    def _is_candidate(self, scheduled: ScheduledPhase) -> bool:
        """Whether the model, pruned now, is one that the plan could have ended with."""
        inside = 0 < scheduled.index < self.last and scheduled.branch is None
        return inside and self.recipe.candidates and self.recipe.sparsity > 0

    def _consider(
        self, sparse: SparseModel, scheduled: ScheduledPhase, metrics: dict[str, float], epoch: int | None
    ) -> None:
        """Keep the best sparse model by validation data."""
        score = metrics[self.task.metric]
        best = self.best["validation"][self.task.metric] if self.best else -math.inf
        if score >= best or math.isnan(best):  # of equals, the one trained longer
            self.best = {"validation": metrics, "stage": scheduled.stage, "epoch": epoch}
            self._best_model = sparse.snapshot(device="cpu")
            if self.mesh.is_first:
                file.save(sparse, self.folder.best)

    @torch.no_grad()
    def _evaluate(self, sparse: SparseModel, split: Any) -> dict[str, float]:
        sparse.model.eval()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            metrics = self.task.evaluate(sparse.model, split, device=self.device)
        if self.task.metric not in metrics:
            raise GrowpruneError(f"the task's metric is {self.task.metric!r}, but evaluate() gave {', '.join(metrics)}")
        return {name: float(value) for name, value in metrics.items()}  # tensors and numpy's numbers too

    # Checkpoints

    def _save(self, scheduled: ScheduledPhase, *, is_finished: bool = False) -> None:
        """Write a checkpoint: of the run by the first process, of a branch by the first of those that train it."""
        self.training.check_finite(scheduled)  # what diverged must not replace a good checkpoint
        self._clock()
        state = {
            "tensors": tensors_of(self.sparse),
            "model": self.sparse.snapshot(device="cpu"),
            "training": self.training.state_dict(),
            "rng": rng_state(),
            "seconds": self._seconds,
            "index": scheduled.index,
            "is_finished": is_finished,
        }
        if scheduled.branch is None and self.mesh.is_first:
            self._save_run(scheduled, state)
        elif scheduled.branch is not None and self.mesh.leads_group:
            self._save_branch(scheduled, state)
        self._checkpoint_due = time.monotonic() + self.recipe.checkpoint_seconds

    def _save_run(self, scheduled: ScheduledPhase, state: dict[str, Any]) -> None:
        state |= {"sparse": self.sparse.state_dict(), "history": self.history}
        state |= {"best": self.best, "best_model": self._best_model}
        self._number += 1
        checkpoint.save(self.folder.checkpoints, self._number, state)
        self.log_event_of("checkpoint", scheduled, number=self._number)
        self._note_search_end(state)
        checkpoint.remove_old(self.folder.checkpoints, [self._previous, self._number, *self.folder.kept()])
        self.folder.remove_branches(before=scheduled.stage)
        self._previous = self._number

    def _save_branch(self, scheduled: ScheduledPhase, state: dict[str, Any]) -> None:
        assert scheduled.branch is not None
        folder = self.folder.branch(scheduled.stage, scheduled.branch)
        number = max(checkpoint.numbers(folder), default=0) + 1
        checkpoint.save(folder, number, state)
        self.log_event_of("checkpoint", scheduled, number=number)
        checkpoint.remove_old(folder, [number - 1, number])

    def _restore_branch(self, scheduled: ScheduledPhase) -> bool:
        """Go on with a branch where its newest checkpoint stands, if there is one; tells whether it is finished."""
        assert scheduled.branch is not None
        found = checkpoint.load_newest(self.folder.branch(scheduled.stage, scheduled.branch), self.warn)
        if found is None:
            return False
        number, state = found
        check_same_tensors(self.sparse, state["tensors"])
        self.sparse.restore(state["model"])
        self.training.load_state_dict(state["training"])
        set_rng_state(state["rng"])
        self.log_event_of("resumed", scheduled, number=number)
        return bool(state["is_finished"])

    def _combine(self, returned: Snapshot, parts: list[tuple[str, ...]], like: Snapshot) -> Snapshot:
        """At the end of a fork, bring its parts together, and what was noted of its branches."""
        step = next(s.stage for s in walk(self.plan) if s.index == self.sparse.position)
        self.mesh.barrier(f"waiting for the branches of step {step}")
        self._show_others()
        before = self.mesh.bytes_received
        combined = self.mesh.combine(returned, parts, like)
        self.history += [self.folder.read_row(step, branch) for branch in range(len(parts))]
        self.log_event("combined", stage=step, bytes_received=self.mesh.bytes_received - before)
        return combined

    def restore(self, number: int, state: dict[str, Any]) -> None:
        """Go back to exactly where a checkpoint was written."""
        check_same_tensors(self.sparse, state["tensors"])
        self.sparse.restore(state["model"])
        self.sparse.load_state_dict(state["sparse"])
        self.training.load_state_dict(state["training"])
        self.history, self.best, self._best_model = state["history"], state["best"], state["best_model"]
        self._seconds = state["seconds"]
        self._resumed_after = state["index"] if state["is_finished"] else None
        self._number = number
        self._note_search_end(state)
        self._number, self._previous = max(checkpoint.numbers(self.folder.checkpoints)), number
        set_rng_state(state["rng"])
        self.log_event("resumed", number=number, stage=self.history[-1]["stage"] if self.history else 0)

    def _note_search_end(self, state: dict[str, Any]) -> None:
        """From the end of the phase before the last, the search can be extended: that checkpoint stays."""
        if state["is_finished"] and state["index"] == self.last - 1:
            checkpoint.write_json(self.folder.search_end, self._number)

    # The end

    def _finish(self) -> dict[str, Any]:
        self._clock()
        if not self.mesh.is_first:
            return self._wait_for_result()
        file.save(self.sparse, self.folder.model)
        result = {
            "recipe": describe(self.recipe),
            "seed": self.recipe.seed,
            "environment": environment(self.device),
            "phases": self.history,
            "signature": self.task.signature,
            "validation": self._evaluate(self.sparse, "validation"),
            "test": self._evaluate(self.sparse, "test"),
            "best": self._best_tested(),
            "sparsity": summarise(self.sparse, move(self.task.example(), self.device)).to_dict(),
            "file_bytes": self.folder.model.stat().st_size,
            "peak_bytes": peak_bytes(self.device),
            "seconds": self._seconds,
        }
        checkpoint.write_json(self.folder.result, result)
        self.log_event("finished", test=result["test"], seconds=self._seconds)
        return result

    def _wait_for_result(self) -> dict[str, Any]:
        """By looking, not in a barrier, which would time out: the first process may take long to evaluate."""
        while not self.folder.result.exists():
            if self._should_stop():
                raise Interrupted
            time.sleep(0.1)
        return self.folder.read_result()

    def _best_tested(self) -> dict[str, Any] | None:
        """The best candidate by validation data, with its test metrics, which select nothing."""
        if not self.best:
            return None
        best = self.sparse.clone()
        best.restore(self._best_model)
        file.save(best, self.folder.best)
        return {**self.best, "test": self._evaluate(best, "test")}

    # Telling

    def warn(self, message: str) -> None:
        self.log_event("warning", message=message)

    def _agree_on_masks(self, scheduled: ScheduledPhase) -> None:
        """Every process prunes by itself; that they prune alike is not left to hope."""
        if self.mesh.world > 1:
            packed = {name: pack(mask).cpu().numpy().tobytes() for name, mask in self.sparse.masks.items()}
            digests = {f"mask of {name}": hashlib.sha256(bits).hexdigest() for name, bits in packed.items()}
            self.mesh.agree(digests, f"step {scheduled.stage}")

    def log_event_of(self, event: str, scheduled: ScheduledPhase, **details: Any) -> None:
        place = {"index": scheduled.index, "last": self.last, "stage": scheduled.stage, "branch": scheduled.branch}
        self.log_event(event, **place, **details)

    def log_event(self, event: str, **details: Any) -> None:
        entry: Event = {"event": event, **details}
        self.folder.append(entry)
        self._on_event(entry)

    def _clock(self) -> None:
        now = time.monotonic()
        self._seconds, self._since = self._seconds + now - self._since, now
