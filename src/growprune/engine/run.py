"""A run: trains a recipe in a folder. docs/design.md lists the files of the folder.

A run can be killed at any time, and resuming it is bit-exact. This file has the order of events. The steps are in
building.py, trainer.py, evaluation.py, run_checkpoints.py, accounting.py and events.py.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from growprune.engine.accounting import Accounting, Exploration
from growprune.engine.building import about_weights, build, shard
from growprune.engine.device import choose_device, move, reset_peak
from growprune.engine.evaluation import Best, Evaluation, result_of
from growprune.engine.events import Events, Listener, OtherLogs
from growprune.engine.folder import RunFolder
from growprune.engine.forks import ForkCursor
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import Recipe
from growprune.engine.run_checkpoints import Checkpoints, branch_state, load_branch_state, load_run_state, run_state
from growprune.engine.trainer import Training, TrainingDiverged, last_trained, work_before
from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.logs import Logs
from growprune.masks.bits import Snapshot
from growprune.plan import By, ScheduledPhase
from growprune.plan.settings import check_counts
from growprune.runs.metric import Metric
from growprune.runs.result import Result


class Interrupted(Exception):
    """The run was interrupted. Its checkpoint is written, and it can be resumed."""


class Run:
    """One recipe in one folder.

    Args:
        listeners: called with every event.
        should_stop: called after each iteration; True ends the run with a checkpoint and `Interrupted`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        *,
        listeners: Sequence[Listener] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.folder, self.task = recipe, folder, recipe.task
        self._should_stop = should_stop
        self.device = choose_device(recipe.device)
        self.weights = about_weights(recipe)
        """The file of initial weights."""
        self.num_batches = self.task.num_batches()  # first, because it looks at the data, and data may be missing
        check_counts(1, num_batches=self.num_batches)
        per_epoch = math.ceil(self.num_batches / recipe.accumulate)
        self.sparse, self.plan, is_begun = build(recipe, self.device, per_epoch)
        self.accounting = Accounting(self.sparse, move(self.task.example(), self.device))
        self.mesh = Mesh(self.plan, recipe.replicas, recipe.timeout_seconds)
        shard(self.sparse, recipe, self.mesh, self.device)
        self.cursor = self._make_cursor(per_epoch, is_begun=is_begun)
        self.last = len(self.cursor.schedule) - 1
        self._last_trained = last_trained(self.cursor.schedule)
        self.training = Training(recipe, self.cursor.schedule, self.sparse, self.device, self.mesh, per_epoch)
        self._work = work_before(self.cursor.schedule, self.training.spans, self.mesh.is_local)
        logs = Logs(recipe.log if self.mesh.is_first else (), folder.path)
        self.events = Events(folder.append, [*listeners, logs], self.last)
        self.checkpoints = Checkpoints(folder, self.events, recipe.checkpoint_seconds)
        metric = Metric(self.task.metric, self.task.lower_is_better)
        self.best = Best(folder.best, metric, is_writer=self._takes_part())
        self.evaluation = Evaluation(recipe, self.sparse, self.device, self.best)
        self.exploration = Exploration(self.sparse, folder, is_on=recipe.exploration, is_writer=self.mesh.leads_group)
        self.history: list[dict[str, Any]] = []
        """One row per epoch. Rows of a branch are in `branch_rows` until the fork is combined."""
        self.branch_rows: list[dict[str, Any]] = []
        self.seconds, self._since = 0.0, time.monotonic()
        heads = range(self.mesh.replicas, self.mesh.world, self.mesh.replicas) if self.mesh.is_first else ()
        self._others = OtherLogs({rank: RunFolder(folder.path, rank).log for rank in heads})
        if self.mesh.data_group is not None and not self.is_sharded:
            self.sparse.add_up_gradients(self.mesh.sum_over_replicas)

    def _make_cursor(self, per_epoch: int, *, is_begun: bool) -> ForkCursor:
        return ForkCursor(
            self.sparse,
            self.plan,
            iterations_per_epoch=per_epoch,
            is_begun=is_begun,
            is_local=self.mesh.is_local,
            combine=self._combine,
            score=self._score,
            on_enter=self._enter,
            on_leave=self._leave,
        )

    @property
    def is_sharded(self) -> bool:
        """True if each replica holds a shard of the model instead of all of it."""
        return self.sparse.ranks is not None

    def _takes_part(self, *, is_branch: bool = False) -> bool:
        """True if this process takes part in writing shared files, or the files of its branch.

        One does; of a sharded model all that have a share of it.
        """
        if is_branch:
            return self.is_sharded or self.mesh.leads_group
        return self.mesh.is_first or (self.is_sharded and self.mesh.group == 0)

    def execute(self) -> dict[str, Any]:
        """Train from the current place in the plan to its end, and return the result."""
        reset_peak(self.device)
        if self.is_sharded:
            shares = [parameter.to_local().numel() for parameter in self.sparse.model.parameters()]  # type: ignore[attr-defined]
            self.events.log_event("sharded", ranks=self.mesh.replicas, own_values=sum(shares))
        try:
            with self.training.backward.own_stream():
                self.cursor.advance(self.cursor.iteration)
                while (scheduled := self.cursor.current) is not None:
                    self.training.iterate(scheduled, self.done)
                    self._after_iteration(scheduled)
                return self._finish()
        except (GrowpruneError, TrainingDiverged) as error:
            self.events.log_event("failed", message=str(error))  # so that who looks at the folder knows why
            raise

    @property
    def done(self) -> int:
        """Number of finished iterations of the current phase."""
        return self.cursor.iteration - self.cursor.start

    def _iteration(self, scheduled: ScheduledPhase) -> int:
        """The current iteration of the run. Branches of a fork count in parallel."""
        return self.training.spans[scheduled.index].start + self.done

    def _progress(self, scheduled: ScheduledPhase) -> dict[str, int]:
        """Finished and total iterations of this process."""
        return {"run_done": self._work[scheduled.index] + self.done, "run_iterations": self._work[-1]}

    def _density(self, alive: int) -> float:
        return alive / max(1, self.sparse.num_prunable)

    # Phases

    def _enter(self, scheduled: ScheduledPhase) -> None:
        """Begin a phase, after its edits."""
        self.mesh.phase = str(scheduled)
        self.accounting.enter(is_branch=scheduled.branch is not None)
        self.training.enter(scheduled)
        self.branch_rows = []
        if scheduled.branch is not None:
            self._restore_branch(scheduled)
        elif scheduled.phase.edits:
            self.mesh.agree_on_masks(self.sparse, f"stage {scheduled.stage}")
        self.exploration.enter(scheduled)
        if self.cursor.left > 0 or not scheduled.phase.is_trained:
            phase: dict[str, Any] = {"edits": str(scheduled.phase), "epochs": scheduled.phase.epochs}
            alive = self.accounting.alive
            phase |= {"iterations": self.cursor.length, "iteration": self._iteration(scheduled), "alive": alive}
            phase |= {"density": self._density(alive), **self._progress(scheduled), **self.exploration.figures}
            self.events.log_event("phase", scheduled, **phase)

    def _leave(self, scheduled: ScheduledPhase) -> None:
        """End a phase, before the edits of the next one."""
        if scheduled.branch is not None:
            self._end_branch(scheduled)
        elif self._is_after_fork(scheduled) or scheduled.index == self.last:
            self._save(scheduled)

    def _is_after_fork(self, scheduled: ScheduledPhase) -> bool:
        before = self.cursor.schedule[scheduled.index - 1] if scheduled.index else None
        return before is not None and before.branch is not None

    def _score(self, by: By) -> None:
        """Compute gradients of the first batches, for an edit by gradient before any training."""
        self.accounting.measure()  # what lives now is seen by no phase, but all of it takes part
        self.training.backward.unwrap()  # each replica looks by itself
        self.sparse.model.train()
        self.sparse.score(by, self.training.first_losses())

    # Iterations

    def _after_iteration(self, scheduled: ScheduledPhase) -> None:
        self.accounting.count(self.training.num_examples)
        epoch, rest = divmod(self._iteration(scheduled) + 1, self.training.per_epoch)
        if rest == 0 or (scheduled.index == self._last_trained and self.cursor.left == 1):
            self._after_epoch(scheduled, epoch + (rest > 0))
        self.cursor.advance(self.cursor.iteration + 1)
        if self.cursor.current is not None:
            self._between_iterations(self.cursor.current)
        elif self.mesh.any(self._should_stop(), self.cursor.iteration):  # it was saved as it left its last phase
            self.events.log_event("interrupted", scheduled)
            raise Interrupted

    def _between_iterations(self, scheduled: ScheduledPhase) -> None:
        if self.mesh.any(self._should_stop(), self.cursor.iteration):
            self._save(scheduled)
            self.events.log_event("interrupted", scheduled)
            raise Interrupted
        if self._is_checkpoint_due():
            self._save(scheduled)
        if self.events.show_timer.is_due:
            self.events.show_timer.put_off()
            done = {"iteration": self.done, "iterations": self.cursor.length, **self._progress(scheduled)}
            self.events.show("iteration", scheduled, **done, lr=self.training.lr, loss=self.training.shown_loss())
        if self.events.look_timer.is_due:
            self.events.look_timer.put_off()
            self._show_others()

    def _is_checkpoint_due(self) -> bool:
        is_due = self.checkpoints.timer.is_due  # by the clock of this process, and all that share a model save together
        return self.mesh.any(is_due, self.cursor.iteration) if self.is_sharded else is_due

    def _after_epoch(self, scheduled: ScheduledPhase, epoch: int) -> None:
        self.training.check_finite(scheduled, self.done)
        row: dict[str, Any] = {"epoch": epoch, "iteration": self._iteration(scheduled) + 1, "stage": scheduled.stage}
        row |= {"branch": scheduled.branch, "edits": str(scheduled.phase), "alive": self.accounting.measure()}
        if self.cursor.rule is not None and scheduled.branch is None:
            self.exploration.look_again()
        row |= {"loss": self.training.end_epoch(), "lr": self.training.lr, **self.exploration.figures}
        if self.cursor.rule is not None and (figures := self.cursor.rule.figures()):
            row["rule"] = figures
        is_last = scheduled.index == self._last_trained and self.cursor.left == 1
        if epoch % self.recipe.evaluate_every == 0 or is_last:
            self.evaluation.validate(row, is_phase_end=self.cursor.left == 1)
        (self.history if scheduled.branch is None else self.branch_rows).append(row)
        logged = {name: value for name, value in row.items() if name not in ("stage", "branch")}
        logged |= {"density": self._density(row["alive"]), "layers": self.accounting.densities}
        logged |= {"metric": self.task.metric, "lower_is_better": self.task.lower_is_better}
        self.events.log_event("epoch", scheduled, done=self.done + 1, **logged)

    # Forks

    def _end_branch(self, scheduled: ScheduledPhase) -> None:
        """Write the history and cost of a branch to the folder, for all processes to read at the end of the fork."""
        assert scheduled.branch is not None
        if self.mesh.leads_group:
            tally = self.accounting.branch_dict()
            self.folder.write_rows(scheduled.stage, scheduled.branch, self.branch_rows, tally)
        self._save(scheduled)

    def _restore_branch(self, scheduled: ScheduledPhase) -> None:
        """Resume a branch from its newest checkpoint, if there is one."""
        found = self.checkpoints.load_branch(scheduled)
        if found is not None:
            number, state = found
            load_branch_state(self, state)
            self.events.log_event("resumed", scheduled, number=number, iteration=self._iteration(scheduled))

    def _combine(self, returned: Snapshot, parts: list[tuple[str, ...]], like: Snapshot) -> Snapshot:
        """At the end of a fork, collect the parts, history and cost of its branches."""
        stage = self.cursor.schedule[self.cursor.position].stage
        self.mesh.barrier(f"waiting for the branches of stage {stage}")
        self._show_others()
        before = self.mesh.bytes_received
        combined = self.mesh.combine(returned, parts, like)
        self.accounting.merge({**like, **combined})
        for branch in range(len(parts)):
            rows, tally = self.folder.read_rows(stage, branch)
            self.history += rows
            self.accounting.add_branch(tally)
        self.exploration.combine(stage, len(parts))
        self.events.log_event("combined", stage=stage, bytes_received=self.mesh.bytes_received - before)
        return combined

    def _show_others(self) -> None:
        """Show the progress of the other branches of a fork. Only rank 0 prints."""
        for event in self._others.news():
            if event.get("branch") is not None:
                self.events.show(**event)

    # Checkpoints

    def _save(self, scheduled: ScheduledPhase) -> None:
        """Write a checkpoint: rank 0 for the run, or the first process of a group for a branch."""
        self.training.check_finite(scheduled, self.done)  # what diverged must not replace a good checkpoint
        self._clock()
        if scheduled.branch is None and self._takes_part():
            state = run_state(self)
            if self.mesh.is_first:
                self.checkpoints.save(scheduled, state)
        elif scheduled.branch is not None and self._takes_part(is_branch=True):
            state = branch_state(self)
            if self.mesh.leads_group:
                self.checkpoints.save_branch(scheduled, state)
        self.checkpoints.timer.put_off()

    def restore(self, number: int, state: dict[str, Any]) -> None:
        """Restore the exact state of a checkpoint."""
        load_run_state(self, state)
        self.checkpoints.go_back_to(number)
        at = self._iteration(self.cursor.schedule[max(0, self.cursor.position)])
        self.events.log_event("resumed", self.cursor.current, number=number, iteration=at)

    # The end

    def _finish(self) -> dict[str, Any]:
        self._clock()
        self.training.backward.unwrap()
        if not self._takes_part():
            return self._wait_for_result()
        file.write_file(self.sparse, self.folder.model)
        result = result_of(self)
        if not self.mesh.is_first:
            return self._wait_for_result()
        made = Result(**result)
        made.write(self.folder.result)
        self.events.log_event("finished", test=made.test, seconds=self.seconds)
        return made.to_dict()

    def _wait_for_result(self) -> dict[str, Any]:
        """Poll for the result. A barrier would time out, because rank 0 may take long to evaluate."""
        while not self.folder.result.exists():
            if self._should_stop():
                raise Interrupted
            time.sleep(0.1)
        return self.folder.read_result()

    def _clock(self) -> None:
        now = time.monotonic()
        self.seconds, self._since = self.seconds + now - self._since, now

    @property
    def files(self) -> dict[str, bytes]:
        """Files stored in the folder to check that data and initial weights are the same on resume."""
        about = {} if self.weights is None else {"weights.json": json.dumps(self.weights).encode()}
        return {**self.task.files(), **about}
