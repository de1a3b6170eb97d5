"""The training program: build a run or resume it, train the phases of its plan, and write its result.

A run can be killed at any time, and resuming it is bit-exact: state.py has all that is resumed.

A process that writes to a folder holds its lock. Invalid input is refused before the folder is made. Checks of the
folder are repeated under the lock, because another process may have come first.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from growprune.engine.building import build, choose_device, environment, move, peak_bytes, shard
from growprune.engine.folder import RunFolder, check_same_plan, check_same_recipe, check_same_work, fields_of, portable
from growprune.engine.mesh import Mesh, ask_first, join, wait_for_all
from growprune.engine.observers import Accounting, Best, Event, Events, Exploration, Tally
from growprune.engine.recipe import Recipe, describe, require
from growprune.engine.state import Place, RunState, returned_by
from growprune.engine.trainer import Training, digest, fingerprint, work_before
from growprune.files import checkpoint
from growprune.files.weights_file import digest_of, weights_file
from growprune.files.writer import write_file
from growprune.masks.bits import Snapshot
from growprune.plan import By, ScheduledPhase
from growprune.plan.settings import check_counts
from growprune.runs.result import Metric, Result
from growprune.sparse.summary import summarise

SHOW_SECONDS = 0.2
"""Seconds between updates of the display."""


class Interrupted(Exception):
    """The run was interrupted. Its checkpoint is written, and it can be resumed."""


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train a recipe in a new folder, and return the content of `result.json`.

    Args:
        out: the run folder. It must be new or empty.
        origin: where the recipe comes from, for the records of the run.
        on_event: called with each event of the log, such as an epoch.
        should_stop: asked after each iteration. If it returns True, a checkpoint is saved and `Interrupted` raised.
    """
    folder = _enter_folder(recipe, out)
    if ask_first(folder.is_ours()):
        if folder.result.exists():
            said = f"{folder.path} was finished before this restart. Its result is kept"
            Events(folder, [on_event], 0).warn(said)
        return resume(recipe, out, origin=origin, on_event=on_event, should_stop=should_stop)
    folder.check_free(recipe)
    run = Run(recipe, folder, origin or {}, on_event, should_stop)  # one that cannot run leaves no folder
    run.mesh.barrier("starting")
    if run.mesh.is_first:
        folder.make()
    with folder.locked():
        if run.mesh.is_first:
            folder.check_free(recipe)
            folder.write_recipe(recipe, run.origin)
            folder.write_plan(run.plan)
            folder.store_files(run.files)
        run.check_processes_agree()
        return run.execute()


def resume(
    recipe: Recipe,
    out: str | Path,
    *,
    origin: dict[str, Any] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Resume a run from its newest complete checkpoint.

    The recipe must be the one the run was started with, except for fields that do not change results (`MAY_CHANGE`).

    Args:
        out: the run folder.
        origin, on_event, should_stop: as in `train`.
    """
    folder = _enter_folder(recipe, out)
    check_same_recipe(folder, recipe)
    with folder.locked():
        wait_for_all()
        check_same_recipe(folder, recipe)
        if ask_first(folder.result.exists()):
            result = folder.read_result()
            num_batches = (result["data"] or {}).get("num_batches")  # so no data is read to count them
            if num_batches or not recipe.counts_iterations:
                check_same_work(folder, recipe, math.ceil((num_batches or 1) / recipe.accumulate))
            folder.check_model(result)
            return result
        run = Run(recipe, folder, folder.read_origin() if origin is None else origin, on_event, should_stop)
        check_same_plan(folder, run.plan)
        folder.store_files(run.files)
        run.mesh.barrier("resuming")
        if run.mesh.is_first:
            folder.write_recipe(recipe, run.origin)
            folder.write_plan(run.plan)
        run.check_processes_agree()
        found = checkpoint.load_newest(folder.checkpoints, run.events.warn)
        if found is not None:
            number, state = found
            run.state.load_state_dict(state)
            run.previous = number
            current = run.schedule[run.place.position]
            run.events.log_event("resumed", current, number=number, iteration=run.iteration_of(current))
        elif run.mesh.is_first and not any(folder.checkpoints.glob("*")):  # damaged ones were named already
            run.events.warn(f"{folder.path} has no checkpoint yet, so it starts over. See checkpoint_seconds")
        return run.execute()


def _enter_folder(recipe: Recipe, out: str | Path) -> RunFolder:
    how = "a growprune.Recipe (for a named one, use growprune.recipes.find(name))"
    require(isinstance(recipe, Recipe), "recipe", recipe, how)
    return RunFolder(Path(out), join(choose_device(recipe.device), recipe.timeout_seconds))


class Run:
    """One recipe in one folder: what it is built of, and the loop."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        origin: dict[str, Any],
        on_event: Callable[[Event], None] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.folder, self.task = recipe, folder, recipe.task
        self.origin, self.should_stop = origin, should_stop
        # 1) the model and its plan
        self.device = choose_device(recipe.device)
        self.weights: dict[str, str] | None = None
        """Name and digest of the file of initial weights."""
        if recipe.weights:
            file = weights_file(recipe.weights)
            self.weights = {"file": file.name, "sha256": digest_of(file)}
        self.num_batches = self.task.num_batches()  # first, because it looks at the data, and data may be missing
        check_counts(1, num_batches=self.num_batches)
        self.per_epoch = math.ceil(self.num_batches / recipe.accumulate)
        self.sparse, self.plan, is_begun = build(recipe, self.device, self.per_epoch)
        accounting = Accounting(self.sparse, move(self.task.example(), self.device))
        # 2) the processes that share the work
        self.mesh = Mesh(self.plan, recipe.replicas, recipe.timeout_seconds)
        shard(self.sparse, recipe, self.mesh, self.device)
        self.is_sharded = self.sparse.ranks is not None
        if self.mesh.data_group is not None and not self.is_sharded:
            self.sparse.add_up_gradients(self.mesh.sum_over_replicas)
        # 3) what is resumed
        self.place = Place(
            self.sparse, self.plan, iterations_per_epoch=self.per_epoch, is_begun=is_begun, score=self._score
        )
        self.schedule = self.place.schedule
        self.training = Training(recipe, self.schedule, self.sparse, self.device, self.mesh, self.per_epoch)
        exploration = Exploration(self.sparse, folder, is_on=recipe.exploration, is_writer=self.mesh.leads_group)
        metric = Metric(self.task.metric, self.task.lower_is_better)
        best = Best(folder.best, metric, is_writer=self.mesh.is_first or (self.is_sharded and self.mesh.group == 0))
        self.state = RunState(self.sparse, self.place, self.training, accounting, exploration, best)
        # 4) what looks on
        listeners = [on_event]
        if recipe.log and self.mesh.is_first:
            from growprune.logs import Logs

            listeners.append(Logs(recipe.log, folder.path))
        self.events = Events(folder, listeners, len(self.schedule) - 1)
        self.previous = 0
        """Number of the checkpoint of the run that was written or loaded last."""
        self.save_at, self.show_at = time.monotonic() + recipe.checkpoint_seconds, 0.0
        """When the next checkpoint and the next update of the display are due."""
        # 5) where the plan ends
        trained = [scheduled for scheduled in self.schedule if scheduled.phase.is_trained]
        ends_in_fork = not trained or trained[-1].branch is not None
        self.last_trained = len(self.schedule) - 1 if ends_in_fork else trained[-1].index
        self.work = work_before(self.schedule, self.training.spans, self.mesh.is_local)
        self.num_trained = 0
        """Iterations that this process has trained."""
        self.since = time.monotonic()

    @property
    def files(self) -> dict[str, bytes]:
        """Files stored in the folder to check that data and initial weights are the same on resume."""
        about = {} if self.weights is None else {"weights.json": json.dumps(self.weights).encode()}
        return {**self.task.files(), **about}

    def check_processes_agree(self) -> None:
        """Raise if the processes of the run have different recipes, initial weights or data."""
        if self.mesh.world == 1:
            return
        self.mesh.barrier("starting")
        sees = self.folder.recipe.read_text() if self.folder.recipe.is_file() else "nothing"
        batch = next(iter(self.task.batches(seed=0, start=0, device=torch.device("cpu"))), None)
        fields = fields_of(self.recipe) | {"task.data": None, "weights": None}  # which may lie elsewhere
        version = environment(self.device) | {"commit": None, "source": None}  # which take git to know
        texts = {
            "recipe": json.dumps(fields),
            "version": json.dumps(version),
            "data": digest(batch),
            "weights": json.dumps(self.weights),
            "view of the run folder, which all must share,": sees,
        }
        self.mesh.agree({name: text.encode() for name, text in texts.items()}, "starting")

    def iteration_of(self, scheduled: ScheduledPhase) -> int:
        """The current iteration of the run. Branches of a fork count in parallel."""
        return self.training.spans[scheduled.index].start + self.place.done

    # The loop

    def execute(self) -> dict[str, Any]:
        """Train from the current place in the plan to its end, and return the result."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            if self.is_sharded:
                shares = [parameter.to_local().numel() for parameter in self.sparse.model.parameters()]  # type: ignore[attr-defined]
                self.events.log_event("sharded", ranks=self.mesh.replicas, own_values=sum(shares))
            for _, stage in groupby(self.schedule[max(0, self.place.position) :], key=lambda s: s.stage):
                first, *others = stage
                if first.branch is None:
                    self._train(first)
                else:
                    self._fork([first, *others])
            self.place.end()
            if self.num_trained and self.mesh.any(self.should_stop(), self.place.iteration):
                self._interrupt(self.schedule[-1])  # it was saved as it left its last phase
            return self._finish()
        except BaseException as error:
            if not isinstance(error, Interrupted):
                self.events.log_failure(error)
                self.mesh.tell_failure(error)
            raise

    def _train(self, scheduled: ScheduledPhase) -> None:
        """Train a phase, or what is left of it."""
        if self.place.position < scheduled.index:
            self._enter(scheduled)
        start, length = self.training.spans[scheduled.index].start, self.place.length
        for done in range(self.place.done, length):
            if self.num_trained:  # a process that is stopped again and again gets on nevertheless
                self._between_iterations(scheduled, done)
            self.training.iterate(scheduled, done)
            self.num_trained += 1
            self.state.accounting.count(self.training.num_examples)
            epoch, rest = divmod(start + done + 1, self.per_epoch)
            is_last = scheduled.index == self.last_trained and done + 1 == length
            if rest == 0 or is_last:
                self._end_epoch(scheduled, epoch + (rest > 0), is_last)
            self.place.count()
        before = self.schedule[scheduled.index - 1] if scheduled.index else None
        is_merge = before is not None and before.branch is not None
        if scheduled.branch is None and (is_merge or scheduled.index == len(self.schedule) - 1):
            self._save(scheduled)

    def _enter(self, scheduled: ScheduledPhase) -> None:
        """Begin a phase: edit the masks, or resume the branch that it is."""
        state = self.state
        self.mesh.phase = scheduled
        self.place.enter(scheduled)
        state.accounting.enter(is_branch=scheduled.branch is not None)
        self.training.enter(scheduled)
        state.branch_rows = []
        if scheduled.branch is not None:
            folder = self.folder.branch(scheduled.stage, scheduled.branch)
            if (found := checkpoint.load_newest(folder, self.events.warn)) is not None:
                state.load_state_dict(found[1])
                at = self.iteration_of(scheduled)
                self.events.log_event("resumed", scheduled, number=found[0], iteration=at)
        elif scheduled.phase.edits:
            self.mesh.agree_on_masks(self.sparse, f"stage {scheduled.stage}")
        state.exploration.enter(scheduled)
        if self.place.left > 0 or not scheduled.phase.is_trained:
            alive = state.accounting.alive
            phase: dict[str, Any] = {"edits": str(scheduled.phase), "epochs": scheduled.phase.epochs}
            phase |= {"iterations": self.place.length, "iteration": self.iteration_of(scheduled), "alive": alive}
            phase |= {"density": self._density(alive), **self._progress(scheduled), **state.exploration.figures}
            self.events.log_event("phase", scheduled, **phase)

    def _between_iterations(self, scheduled: ScheduledPhase, done: int) -> None:
        """Stop, save a checkpoint, and show progress, where each is due."""
        if self.mesh.any(self.should_stop(), self.place.iteration):
            self._save(scheduled)
            self._interrupt(scheduled)
        # due by the clock of this process, but all that share a model save together
        is_due = time.monotonic() >= self.save_at
        if self.mesh.any(is_due, self.place.iteration) if self.is_sharded else is_due:
            self._save(scheduled)
        if time.monotonic() >= self.show_at:
            self.show_at = time.monotonic() + SHOW_SECONDS
            at = {"iteration": done, "iterations": self.place.length, **self._progress(scheduled)}
            self.events.show("iteration", scheduled, **at, lr=self.training.lr, loss=self.training.shown_loss())

    def _end_epoch(self, scheduled: ScheduledPhase, epoch: int, is_last: bool) -> None:
        """Evaluate the model, keep it if it is the best, and write a row of the history."""
        state, rule = self.state, self.place.rule
        self.training.check_finite(scheduled, self.place.done)
        row: dict[str, Any] = {"epoch": epoch, "iteration": self.iteration_of(scheduled) + 1, "stage": scheduled.stage}
        row |= {"branch": scheduled.branch, "edits": str(scheduled.phase), "alive": state.accounting.measure()}
        if rule is not None and scheduled.branch is None:
            state.exploration.look_again()
        row |= {"loss": self.training.end_epoch(), "lr": self.training.lr, **state.exploration.figures}
        if rule is not None and (figures := rule.figures()):
            row["rule"] = figures
        if epoch % self.recipe.evaluate_every == 0 or is_last:
            self._validate(row)
        (state.history if scheduled.branch is None else state.branch_rows).append(row)
        logged = {name: value for name, value in row.items() if name not in ("stage", "branch")}
        logged |= {"density": self._density(row["alive"]), "layers": state.accounting.densities}
        logged |= {"metric": self.task.metric, "lower_is_better": self.task.lower_is_better}
        self.events.log_event("epoch", scheduled, done=self.place.done + 1, **logged)

    def _validate(self, row: dict[str, Any]) -> None:
        """Add the validation metrics to the row of an epoch, and keep the model if it is the best at its target."""
        row["validation"] = self.training.evaluate("validation")
        target = self.recipe.sparsity
        if row["branch"] is not None or target == 0:
            return
        # of weights that all live, a rule may have made as many zeros as are asked for
        is_sparse_by_rule = row.get("rule", {}).get("sparsity", 0.0) >= target
        is_candidate_due = self.recipe.candidates and (self.place.left == 1 or is_sparse_by_rule)
        where = {name: row[name] for name in ("stage", "epoch")}
        if self.sparse.is_at_target:
            self.state.best.consider(self.sparse, row["validation"], **where)
        elif is_candidate_due and self.sparse.can_be_pruned:  # then as it would be if pruned to it now
            with self.sparse.pruned():
                row["candidate"] = self.training.evaluate("validation")
                self.state.best.consider(self.sparse, row["candidate"], **where)

    def _fork(self, branches: list[ScheduledPhase]) -> None:
        """Train the branches that are this process's, and merge all: each tensor is that of the branch that returns it.

        What no branch returns stays as it was before the fork. A branch writes its history and its cost to the folder,
        for all processes to read.
        """
        state, stage = self.state, branches[0].stage
        base = self.sparse.snapshot()
        returned: Snapshot = {}
        is_trained = False
        for scheduled in branches:
            assert scheduled.branch is not None and scheduled.returns is not None
            if not self.mesh.is_local(scheduled.branch):
                self.place.skip(scheduled)
                continue
            if is_trained:
                self.sparse.restore(base)
            self._train(scheduled)
            is_trained = True
            if self.mesh.leads_group:
                tally = state.accounting.branch or Tally()
                self.folder.write_rows(stage, scheduled.branch, state.branch_rows, asdict(tally))
            self._save(scheduled)
            returned |= returned_by(scheduled, self.schedule, self.sparse)
        self.mesh.barrier(f"waiting for the branches of stage {stage}")
        before = self.mesh.bytes_received
        parts = [scheduled.returns.tensors for scheduled in branches if scheduled.returns is not None]
        merged = base | self.mesh.combine(returned, parts, base)
        state.accounting.merge(merged)
        for branch in range(len(branches)):
            rows, cost = self.folder.read_rows(stage, branch)
            state.history += rows
            state.accounting.total += Tally(**cost)
        state.exploration.combine(stage, len(branches))
        self.events.log_event("combined", stage=stage, bytes_received=self.mesh.bytes_received - before)
        self.sparse.restore(merged)

    def _save(self, scheduled: ScheduledPhase) -> None:
        """Write a checkpoint: rank 0 for the run, or the first process of a group for a branch.

        All processes that have a share of a sharded model take part.
        """
        self.training.check_finite(scheduled, self.place.done)  # what diverged must not replace a good checkpoint
        self._clock()
        in_branch = scheduled.branch is not None
        is_writer = self.mesh.leads_group if in_branch else self.mesh.is_first
        if is_writer or (self.is_sharded and (in_branch or self.mesh.group == 0)):
            device = ("cpu" if is_writer else "meta") if self.is_sharded else None
            state = self.state.state_dict(device)
            if is_writer:
                number = self.folder.save(state, scheduled, self.previous)
                self.previous = self.previous if in_branch else number
                self.events.log_event("checkpoint", scheduled, number=number)
        self.save_at = time.monotonic() + self.recipe.checkpoint_seconds

    def _interrupt(self, scheduled: ScheduledPhase) -> None:
        self.events.log_event("interrupted", scheduled)
        raise Interrupted

    def _finish(self) -> dict[str, Any]:
        """Write the trained model and the result."""
        self._clock()
        self.training.unwrap()
        if self.mesh.is_first or (self.is_sharded and self.mesh.group == 0):
            write_file(self.sparse, self.folder.model)
            best = self.state.best
            result = Result(
                recipe=describe(self.recipe),
                origin=portable(self.origin),
                seed=self.recipe.seed,
                metric=self.task.metric,
                lower_is_better=self.task.lower_is_better,
                data=fingerprint(self.recipe, self.num_batches),
                weights=self.weights,
                environment=environment(self.device),
                history=self.state.history,
                signature=self.task.signature,
                validation=self.training.evaluate("validation"),
                test=self.training.evaluate("test"),
                sparsity=summarise(self.sparse, move(self.task.example(), self.device)).to_dict(),
                file_bytes=self.folder.model.stat().st_size,
                peak_bytes=peak_bytes(self.device),
                seconds=self.state.seconds,
                **self.state.accounting.figures(),
                best=None,
            )
            if best.found:  # last, because the model becomes the best one
                best.put_into(self.sparse)
                result = replace(result, best={**best.found, "test": self.training.evaluate("test")})
        if self.mesh.is_first:
            result.write(self.folder.result)
            self.events.log_event("finished", test=result.test, seconds=result.seconds)
            return result.to_dict()
        while not self.folder.result.exists():  # no barrier: it would time out, as evaluating may take long
            if self.should_stop():
                raise Interrupted
            self.mesh.check_first()
            time.sleep(0.1)
        return self.folder.read_result()

    # Its parts

    def _score(self, by: By) -> None:
        """Compute gradients of the first batches, for an edit by gradient before any training."""
        self.state.accounting.measure()  # what lives now is seen by no phase, but all of it takes part
        self.training.unwrap()  # each replica looks by itself
        self.sparse.model.train()
        self.sparse.score(by, self.training.first_losses())

    def _progress(self, scheduled: ScheduledPhase) -> dict[str, int]:
        """Finished and total iterations of this process."""
        return {"run_done": self.work[scheduled.index] + self.place.done, "run_iterations": self.work[-1]}

    def _density(self, alive: int) -> float:
        return alive / max(1, self.sparse.num_prunable)

    def _clock(self) -> None:
        now = time.monotonic()
        self.state.seconds, self.since = self.state.seconds + now - self.since, now
