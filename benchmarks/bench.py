"""Time a whole deployed model against torch, torch.compile, onnxruntime and OpenVINO.

    growprune deploy runs/mine --out fast
    python benchmarks/bench.py fast [--engines deployed,torch] [--threads 2] [--rounds 15] [--busy 2] [--json]

Each engine has a process of its own (bench_worker.py), and they take turns. Engines that are not installed, or cannot
run the model, are listed with the reason. With `--busy`, that many processes compute beside whichever is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from growprune.cli.app import AsJson, Trust, one_line_errors
from growprune.cli.deploying import ExampleShape, ModelSource, build, origin_of
from growprune.cli.screen import out, print_json
from growprune.deployment.api import load_deployed
from growprune.deployment.deployed import ABOUT, Deployed, read_folder
from growprune.errors import GrowpruneError
from growprune.files import sparse_file
from growprune.files.weights_file import weights_file

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
    busy: int = 0,
    python: str = sys.executable,
) -> list[Timing]:
    """Time a model on engines, about 60 ms each in turn, and that `rounds` times.

    Args:
        loader: `module:function` or `path.py:function`, which gives (model, example, what makes a Deployed or None).
        arguments: of that function; they must fit JSON.
        busy: how many other processes compute while engines are timed, but not while they get ready.
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
            return _in_turns(workers, question, rounds, busy)
        finally:
            for worker in workers:
                worker.close()


def _in_turns(workers: Sequence[Worker], question: Mapping[str, Any], rounds: int, busy: int) -> list[Timing]:
    ready = {worker: worker.ask(question) for worker in workers}
    blocks: dict[Worker, list[float]] = {worker: [] for worker in workers if not ready[worker].get("why")}
    with busy_processes(busy):
        for _ in range(rounds):
            for worker, times in blocks.items():
                times.append(worker.ask({"run": True})["ms"])
    return [_timing(worker.name, ready[worker], sorted(blocks.get(worker, ()))) for worker in workers]


BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(100_000))
"""
"""Computes until it is killed, or whoever started it is gone."""


def cpu_name() -> str:
    """The kind of CPU, with the numbers that tell its generations apart."""
    about = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M))
    return f"{about['model name']} (family {about['cpu family']}, model {about['model']})"


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compute and nothing else, until the end of the block, however that comes."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
        command = [python, "-P", str(script), name, str(threads)]
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


def open_model(
    path: str, model: str, example_shape: str, trust: bool = False
) -> tuple[Any, Any, Callable[[], Deployed] | None]:
    """The model in torch, an example, and, of a deployed folder, what loads it. Engines call it in their processes."""
    folder = Path(path)
    is_deployed = (folder / ABOUT).is_file()
    about = read_folder(folder)[0] if is_deployed else {}
    if is_deployed and about["device"] != "cpu":
        raise GrowpruneError(f"{folder} is deployed on cuda, but bench compares engines on the CPU: deploy it there")
    origin = dict(about["origin"]) if is_deployed else origin_of(folder, model, example_shape, trust=trust)
    if is_deployed and not origin and not model:
        raise GrowpruneError(f"{folder} was deployed from Python: say what builds its model with --model and its shape")
    origin = origin or origin_of(folder / "model.safetensors", model, example_shape)
    built, example = build(origin)
    sparse = sparse_file.load(weights_file(folder), built)
    return sparse.model.eval(), example, (lambda: load_deployed(folder, build(origin)[0])) if is_deployed else None


def show(timings: Sequence[Timing], busy: int = 0) -> None:
    """A row an engine, and how the deployed model compares with the fastest of the others."""
    table = Table()
    table.add_column("engine")
    for name in ("ms", "spread", "error"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("", overflow="fold")
    for one in timings:
        if one.ms is None:
            table.add_row(one.engine, "-", "-", "-", f"not measured: {one.why}")
        else:
            table.add_row(one.engine, f"{one.ms:.3f}", f"{one.spread or 0:.0%}", f"{one.error or 0:.1e}", "")
    out().print(table, highlight=False)
    out().print(conclusion(timings, busy), soft_wrap=True, highlight=False)


def conclusion(timings: Sequence[Timing], busy: int = 0) -> str:
    """Only of what was measured."""
    others = {t.engine: t.ms for t in timings if t.ms is not None}
    spreads = {t.engine: t.spread or 0 for t in timings}
    missing = [t.engine for t in timings if t.ms is None]
    left_out = f"; beside {busy} busy processes" if busy else ""
    left_out += f"; {', '.join(missing)} not measured" if missing else ""
    ours = others.pop("deployed", None)
    if ours is None or not others:
        return f"nothing to compare{left_out}"
    best = min(others, key=lambda engine: others[engine])
    noise = max(spreads["deployed"], spreads[best])
    return f"{others[best] / ours:.2f} times as fast as the best of the others, {best} (spread {noise:.0%}){left_out}"


@one_line_errors
def main(
    path: Annotated[Path, typer.Argument(metavar="DIR|RUN|FILE", help="What `growprune deploy` wrote, or takes.")],
    model: ModelSource = "",
    example_shape: ExampleShape = "",
    engines: Annotated[str, typer.Option(metavar="NAME,NAME,...", help="Which engines; all by default.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads of each engine; as torch has it by default.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How many turns each engine gets.")] = 15,
    busy: Annotated[int, typer.Option(min=0, help="How many other processes compute beside the engines.")] = 0,
    python: Annotated[str, typer.Option(metavar="FILE", help="Interpreter for onnxruntime and OpenVINO.")] = "",
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Time the whole model against torch, torch.compile, onnxruntime and OpenVINO, each in a process, in turns."""
    arguments = {"path": str(path.resolve()), "model": model, "example_shape": example_shape, "trust": trust}
    open_model(**arguments)  # what is wrong is said here, in one line
    options: dict[str, Any] = {"python": python} if python else {}
    chosen = tuple(engines.split(",")) if engines else ENGINES
    options |= {"engines": chosen, "threads": threads, "rounds": rounds, "busy": busy}
    found = bench(f"{__file__}:open_model", arguments, **options)
    if as_json:
        print_json({"busy": busy, "engines": [dataclasses.asdict(timing) for timing in found]})
    else:
        show(found, busy)


if __name__ == "__main__":
    typer.run(main)
