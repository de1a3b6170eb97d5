"""Checkpoints: how they are written and read, what they hold, and when a run writes one.

A checkpoint is the folder `checkpoints/<number>/` with

    tensors.safetensors   every tensor, under a running number
    state.json            the nest, with {"tensor": "<number>"} where a tensor was
    COMPLETE              JSON with the digests of the two files; written last

It is written under a temporary name, each file is fsynced, and the folder is renamed at the end. What lacks a valid
COMPLETE is never loaded. Nothing in it runs code when read.

The checkpoints of a run and of the branches of a fork hold the model as it is trained. The place in the plan, the
history and the best model are in those of the run only: a branch is resumed when the run, taken back to before the
fork, enters it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from growprune.engine import json_file
from growprune.engine.compatibility import check_same_tensors, tensors_of
from growprune.engine.device import rng_state, set_rng_state
from growprune.engine.events import Events, Timer
from growprune.engine.folder import RunFolder
from growprune.errors import GrowpruneError
from growprune.plan import ScheduledPhase
from growprune.sparse.internals import internals

if TYPE_CHECKING:
    from growprune.engine.run import Run

State = dict[str, Any]


FILES = ("tensors.safetensors", "state.json")
_NAME = re.compile("[0-9]{8,12}")


def save(folder: Path, number: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint; on any failure nothing is left behind and the earlier ones are untouched."""
    final = folder / f"{number:08d}"
    temporary = folder / f".writing-{number:08d}"
    tensors: dict[str, Tensor] = {}
    nest = encode(state, tensors)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / FILES[0])
        (temporary / FILES[1]).write_text(json.dumps(nest))
        _sync(temporary / FILES[0], temporary / FILES[1])
        (temporary / "COMPLETE").write_text(json.dumps({name: _digest(temporary / name) for name in FILES}))
        _sync(temporary / "COMPLETE", temporary)
        temporary.rename(final)
        _sync(folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise OSError(f"cannot write checkpoint {final}: {error}; earlier checkpoints are intact") from error
        raise
    return final


def load(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint whose COMPLETE matches; raises ValueError if it does not."""
    try:
        digests = json.loads((checkpoint / "COMPLETE").read_text())
        wrong = [name for name in FILES if _digest(checkpoint / name) != digests[name]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GrowpruneError(f"checkpoint {checkpoint} is incomplete ({error})") from error
    if wrong:
        raise GrowpruneError(f"checkpoint {checkpoint} is damaged: {', '.join(wrong)} is not what was written")
    tensors = load_file(checkpoint / FILES[0])
    state = decode(json.loads((checkpoint / FILES[1]).read_text()), tensors)
    assert isinstance(state, dict)
    return state


def load_newest(folder: Path, warn: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its number; `warn` is told of each newer one that is not."""
    found = numbers(folder)
    for number in reversed(found):
        try:
            return number, load(folder / f"{number:08d}")
        except ValueError as error:
            remedy = "going back to the one before" if number > found[0] else "it was the last one, so starting over"
            warn(f"{error}; {remedy}")
    return None


def numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder, whole or not, in order."""
    return sorted(int(path.name) for path in folder.glob("*") if _NAME.fullmatch(path.name))


def remove_old(folder: Path, keep: Sequence[int]) -> None:
    """Remove all checkpoints but some, and what interrupted writes left."""
    for path in folder.glob("*"):
        is_old = _NAME.fullmatch(path.name) and int(path.name) not in keep
        if path.is_dir() and (is_old or path.name.startswith(".writing-")):  # a file of such a name is not ours
            with contextlib.suppress(FileNotFoundError):  # without its marker it is no checkpoint, however far we get
                (path / "COMPLETE").unlink()
            shutil.rmtree(path, ignore_errors=True)


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().contiguous().cpu().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        return {"items": [[encode(k, tensors), encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    return {decode(k, tensors): decode(v, tensors) for k, v in content}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _sync(*paths: Path) -> None:
    """Have the system write files, or the entries of a folder, to the disk now."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Checkpoints:
    """The checkpoints of a run, and of the branches of the fork it is in.

    Args:
        seconds: the time from one to the next.
    """

    def __init__(self, folder: RunFolder, events: Events, seconds: float) -> None:
        self._folder, self._events = folder, events
        self.timer = Timer(seconds)
        """Of when the next one is due."""
        self.timer.put_off()
        self._number = max(numbers(folder.checkpoints), default=0)  # even if none of them can be loaded
        self._previous = 0

    def save(self, scheduled: ScheduledPhase, state: State, *, is_search_end: bool) -> None:
        """Write one of the run; the two newest stay, and the one from which a search can be extended."""
        folder = self._folder
        self._number += 1
        save(folder.checkpoints, self._number, state)
        self._events.log_event("checkpoint", scheduled, number=self._number)
        if is_search_end:
            json_file.write(folder.search_end, self._number)
        remove_old(folder.checkpoints, [self._previous, self._number, *folder.kept()])
        folder.remove_branches(before=scheduled.stage)
        self._previous = self._number

    def save_branch(self, scheduled: ScheduledPhase, state: State) -> None:
        assert scheduled.branch is not None
        folder = self._folder.branch(scheduled.stage, scheduled.branch)
        number = max(numbers(folder), default=0) + 1
        save(folder, number, state)
        self._events.log_event("checkpoint", scheduled, number=number)
        remove_old(folder, [number - 1, number])

    def load_branch(self, scheduled: ScheduledPhase) -> tuple[int, State] | None:
        """The number of a branch's newest whole checkpoint and what it holds, if there is one."""
        assert scheduled.branch is not None
        return load_newest(self._folder.branch(scheduled.stage, scheduled.branch), self._events.warn)

    def go_back_to(self, number: int, *, is_search_end: bool) -> None:
        """Count on from a checkpoint that was loaded."""
        if is_search_end:
            json_file.write(self._folder.search_end, number)
        self._number, self._previous = max(numbers(self._folder.checkpoints)), number


def run_state(run: Run) -> State:
    """All that a run needs to go on between two iterations, or where a phase is over."""
    return {
        **_trained_state(run),
        "sparse": run.sparse.state_dict(),
        "cursor": run.cursor.state_dict(),
        "history": run.history,
        "best": run.best.state_dict(),
        "exploration": run.exploration.state_dict(),
    }


def branch_state(run: Run) -> State:
    """All that the branch needs to go on that a run is in."""
    rule = {} if run.cursor.rule is None else run.cursor.rule.state_dict()
    return {**_trained_state(run), "branch_rows": run.branch_rows, "rule": rule}


def _trained_state(run: Run) -> State:
    device = "cpu" if run.mesh.leads_group else "meta"  # who only takes part keeps nothing of it
    return {
        "tensors": tensors_of(run.sparse),
        "model": internals(run.sparse).snapshot(device=device),
        "training": run.training.state_dict(device if run.is_sharded else None),
        "accounting": run.accounting.state_dict(),
        "rng": rng_state(),
        "seconds": run.seconds,
        "done": run.done,
    }


def load_run_state(run: Run, state: State) -> None:
    """Take back what `run_state` gave."""
    check_same_tensors(run.sparse, state["tensors"])
    internals(run.sparse).restore(state["model"])
    run.sparse.load_state_dict(state["sparse"])
    run.cursor.load_state_dict(state["cursor"])
    run.training.load_state_dict(state["training"])
    run.accounting.load_state_dict(state["accounting"])
    run.best.load_state_dict(state["best"])
    run.exploration.load_state_dict(state["exploration"])
    run.history, run.seconds = state["history"], state["seconds"]
    set_rng_state(state["rng"])


def load_branch_state(run: Run, state: State) -> None:
    """Take back what `branch_state` gave, in a run that has just entered the branch."""
    check_same_tensors(run.sparse, state["tensors"])
    internals(run.sparse).restore(state["model"])
    run.training.load_state_dict(state["training"])
    if run.cursor.rule is not None:
        run.cursor.rule.load_state_dict(state["rule"])
    run.accounting.load_state_dict(state["accounting"], is_branch=True)
    run.branch_rows = state["branch_rows"]
    run.cursor.skip_to(state["done"])
    set_rng_state(state["rng"])
