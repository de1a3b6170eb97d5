"""What does it cost that machines meet? A round of P-GaP, measured on 1 and 2 processes, and modelled for more.

    python benchmarks/parallel.py [--processes 1,2] [--rounds 5] [--epochs 6] [--width 16] [--json FILE]
                                  [--assume NAME=STEPS,SECONDS]

Measured: `digits/parallel-90` (kappa = 4) under torchrun on this machine's CPU, one thread a process, from the logs of
all ranks. A round is from its first branch to the edit after the fork; the first round, in which torch loads itself, is
left out. Meeting is from when the last process has trained its branches until the parts are together on the slowest:
the barrier and the broadcasts. Waiting for a slower process is not meeting, but is part of the round.

Modelled, for n machines on links of B bytes a second in each direction, W prunable weights of 4 bytes, kappa = n:

    a part, as the branch that grew it returns it   W / n * (4 * density + 1/8) bytes: live values, and a packed mask
    P-GaP, received by each machine in a round      (n - 1) / n * W * (4 * density + 1/8) bytes
    per-step data parallelism, in each step         2 * (n - 1) / n * 4 * G bytes, by a ring all-reduce
    G, gradients that are there                     W if masked; W * (1 / n + (1 - 1 / n) * density) if compact
    share of a round that is communication          c / (c + t): c = bytes / B, t = seconds of training

with t of STEPS * SECONDS for P-GaP and of SECONDS for data parallelism. The links are all that is counted: no latency,
no overlap of all-reduce and backward pass, and broadcasts that keep every link busy. A broadcast along a binary tree
takes up to ceil(log2(n)) times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DENSITY = 0.1
MACHINES = (4, 16, 64)
GIGABITS = (10, 100)


@dataclass(frozen=True)
class Model:
    name: str
    weights: float
    steps: int
    """In a round, on each machine."""
    seconds: float
    """Of training in a step."""
    is_compact: bool = False


MODELS = (
    Model("ResNet-50", 25.6e6, steps=30 * 1_281_167 // 256, seconds=0.055),  # 30 epochs of ImageNet at batch 256
    Model("Transformer-big", 210e6, steps=10_000, seconds=0.25),
    Model("40 B, compact", 40e9, steps=10_000, seconds=0.67, is_compact=True),
)


def measure(processes: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the rounds of a run."""
    settings = {"device": "cpu", "task.width": args.width, "candidates": "false", "options.finetune": 0}
    settings |= {"options.steps": args.rounds, "options.epochs": args.epochs}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "growprune", "train", "digits/parallel-90", "--out", str(folder)]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr, timeout=900)
    logs = [read(folder / (f"log-{rank}.jsonl" if rank else "log.jsonl")) for rank in range(processes)]
    rounds = [time_round(logs, stage) for stage in combined_stages(logs[0])[1:]]
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {"processes": processes, "rounds": len(rounds), **medians, "share": medians["meeting"] / medians["round"]}


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def combined_stages(log: Sequence[dict[str, Any]]) -> list[int]:
    return [event["stage"] for event in log if event["event"] == "combined"]


def time_round(logs: Sequence[Sequence[dict[str, Any]]], stage: int) -> dict[str, float]:
    """Seconds of a round and of its meeting, and the most bytes that a process received."""
    inside = [[event for event in log if event.get("stage") == stage] for log in logs]
    began = min(events[0]["time"] for events in inside)
    trained = max(event["time"] for events in inside for event in events if event["event"] == "checkpoint")
    meetings = [event for events in inside for event in events if event["event"] == "combined"]
    ended = max(next(e["time"] for e in log if e["event"] == "phase" and e["stage"] == stage + 1) for log in logs)
    return {
        "round": ended - began,
        "meeting": max(event["time"] for event in meetings) - trained,
        "bytes": max(event["bytes_received"] for event in meetings),
    }


def predict(model: Model, machines: int, gigabits: float) -> dict[str, Any]:
    """The formulas of this file's docstring."""
    others, speed = (machines - 1) / machines, gigabits * 1e9 / 8
    meeting_bytes = others * model.weights * (4 * DENSITY + 1 / 8)
    alive = 1 / machines + others * DENSITY if model.is_compact else 1.0
    step_bytes = 2 * others * 4 * model.weights * alive
    meeting, training = meeting_bytes / speed, model.steps * model.seconds
    return {
        **asdict(model),
        "machines": machines,
        "gigabits": gigabits,
        "meeting_bytes": meeting_bytes,
        "meeting_seconds": meeting,
        "meeting_share": meeting / (meeting + training),
        "step_bytes": step_bytes,
        "reduce_seconds": step_bytes / speed,
        "reduce_share": step_bytes / speed / (step_bytes / speed + model.seconds),
        "bytes_ratio": step_bytes * model.steps / meeting_bytes,
    }


def show_measured(rows: Sequence[dict[str, Any]]) -> None:
    print("| processes | a round, s | meeting, ms | share of the round | bytes received per process |")
    print("|---:|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {row['processes']} | {row['round']:.2f} | {1e3 * row['meeting']:.0f} ", end="")
        print(f"| {row['share']:.2%} | {row['bytes']:,.0f} |")


def show_predicted(rows: Sequence[dict[str, Any]]) -> None:
    """One line for each model and number of machines, with all speeds in it."""
    speeds = " / ".join(map(str, GIGABITS))
    print(f"Gbit/s: {speeds}\n")
    print("| model | steps a round x s | machines | P-GaP: GB a round | s a round | % of time ", end="")
    print("| per step: GB a round | s a step | % of time |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for start in range(0, len(rows), len(GIGABITS)):
        same = rows[start : start + len(GIGABITS)]
        row = same[0]
        print(f"| {row['name']} | {row['steps']:,} x {row['seconds']} | {row['machines']} ", end="")
        print(f"| {row['meeting_bytes'] / 1e9:.3g} | {each(same, 'meeting_seconds')} ", end="")
        print(f"| {each(same, 'meeting_share', 100)} | {row['step_bytes'] * row['steps'] / 1e9:,.0f} ", end="")
        print(f"| {each(same, 'reduce_seconds')} | {each(same, 'reduce_share', 100)} |")


def each(rows: Sequence[dict[str, Any]], name: str, factor: float = 1.0) -> str:
    values = [factor * row[name] for row in rows]
    return " / ".join("< 0.001" if v < 0.001 else f"{v:.2g}" if v < 10 else f"{v:.0f}" for v in values)


def assumed(texts: Sequence[str]) -> list[Model]:
    """The models, with the steps and seconds given for some of them."""
    models = {model.name: model for model in MODELS}
    for text in texts:
        name, _, numbers = text.partition("=")
        if name not in models or numbers.count(",") != 1:
            raise ValueError(f"--assume {text!r} is not NAME=STEPS,SECONDS with a name of {', '.join(models)}")
        steps, seconds = numbers.split(",")
        models[name] = replace(models[name], steps=int(steps), seconds=float(seconds))
    return list(models.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2", help="empty: only the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=STEPS,SECONDS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first is left out")
    models = assumed(args.assume)
    counts = [int(count) for count in args.processes.split(",") if count]
    with tempfile.TemporaryDirectory() as folder:
        measured = [measure(count, args, Path(folder) / str(count)) for count in counts]
    predicted = [predict(model, n, speed) for model in models for n in MACHINES for speed in GIGABITS]
    if measured:
        show_measured(measured)
        print()
    show_predicted(predicted)
    if args.json:
        args.json.write_text(json.dumps({"measured": measured, "predicted": predicted}, indent=2) + "\n")


if __name__ == "__main__":
    main()
