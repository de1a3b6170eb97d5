"""A whole model against other engines: each in a process of its own, in turns, with the spread of its times.

Engines that are not installed, or cannot run the model, are listed with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from growprune.errors import GrowpruneError

WORKER = Path(__file__).with_name("bench_worker.py")
ENGINES = ("deployed", "torch", "compile", "onnxruntime", "openvino")
OTHERS = ("onnxruntime", "openvino")
"""Those that may live in another environment, and need no torch."""


@dataclass(frozen=True)
class Timing:
    """What was measured of an engine."""

    engine: str
    ms: float | None
    """The 30th percentile of its blocks: above it is other load on the machine. None if it was not measured."""
    spread: float | None = None
    """How far its 80th percentile lies above that: 0 on a quiet machine."""
    error: float | None = None
    """The largest difference to torch's output, as a share of its largest number."""
    why: str = ""
    """Why it was not measured."""


def bench(
    loader: str,
    arguments: Mapping[str, Any],
    *,
    engines: Sequence[str] = ENGINES,
    threads: int | None = None,
    rounds: int = 15,
    python: str = sys.executable,
) -> list[Timing]:
    """Time a model on engines, about 60 ms each in turn, and that `rounds` times.

    Args:
        loader: `module:function` or `path.py:function`, which gives (model, example, what makes a Deployed or None).
        arguments: of that function; they must fit JSON.
        python: the interpreter for onnxruntime and OpenVINO, if they live in an environment of their own.
    """
    if unknown := [name for name in engines if name not in ENGINES]:
        raise GrowpruneError(f"there is no engine {unknown[0]!r}; known are {', '.join(ENGINES)}")
    threads = threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        question = {"loader": loader, "arguments": dict(arguments), "folder": folder}
        preparing = Worker(WORKER, "prepare", threads)
        prepared = preparing.ask({**question, "onnx": any(name in OTHERS for name in engines)})
        preparing.close()
        if why := prepared.get("why"):
            raise GrowpruneError(f"the model cannot be run in torch: {why}")
        workers = [Worker(WORKER, name, threads, python if name in OTHERS else sys.executable) for name in engines]
        try:
            return _in_turns(workers, question, rounds)
        finally:
            for worker in workers:
                worker.close()


def _in_turns(workers: Sequence[Worker], question: Mapping[str, Any], rounds: int) -> list[Timing]:
    ready = {worker: worker.ask(question) for worker in workers}
    blocks: dict[Worker, list[float]] = {worker: [] for worker in workers if not ready[worker].get("why")}
    for _ in range(rounds):
        for worker, times in blocks.items():
            times.append(worker.ask({"run": True})["ms"])
    return [_timing(worker.name, ready[worker], sorted(blocks.get(worker, ()))) for worker in workers]


def _timing(name: str, ready: Mapping[str, Any], blocks: Sequence[float]) -> Timing:
    if not blocks:
        return Timing(name, None, why=ready.get("why", "it was given no round"))
    typical, late = (blocks[int(share * (len(blocks) - 1))] for share in (0.3, 0.8))
    return Timing(name, typical, late / typical - 1, ready["error"])


class Worker:
    """A process of a script that answers each line of JSON with one."""

    def __init__(self, script: Path, name: str, threads: int, python: str = sys.executable) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        command = [python, "-P", str(script), name, str(threads)]  # -P: beside the worker lies a folder called cuda
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            return {"why": f"its process ended with {self._process.wait()}: {self._last_words()}"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()
