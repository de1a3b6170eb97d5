"""The laptop suite: methods for sparse training on small models, each training one to four minutes on one core.

    python experiments/suite.py --list                                    # what is there, and what is missing
    python experiments/suite.py --data DIR --cell shakespeare-90          # train what is missing of a cell
    python experiments/suite.py --data DIR --cell digits-90 --row gmp --seed 2
    python experiments/suite.py --print --cell shakespeare-90             # commands of what is missing, to run by hand
    python experiments/suite.py --keep                                    # add new results to suite/*.jsonl
    python experiments/suite.py --data DIR --cell shapenet-90 --tune 0.032,0.064 --device cuda --processes 12
                                                                          # extend the grid of learning rates

Results go to runs/suite/results.jsonl as they come, and those of --tune to runs/suite/defaults.jsonl. --keep adds them
to the files of these names in experiments/suite, which are in the repository, so that a fresh clone continues where
another machine stopped. A run that was stopped is resumed.

DIR holds cifar10.npz, tinyshakespeare/input.txt, multi30k/ and shapenet_part_subset.zip. experiments/README.md says
where to get them, and how the rows were tuned.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growprune.compare import Job, Request
from growprune.compare.jobs import last_words
from growprune.errors import GrowpruneError
from growprune.runs import read_run
from growprune.runs.record import Record

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "suite" / "results.jsonl"
TUNING = HERE / "suite" / "defaults.jsonl"
"""Its lines named 'tune ...' are how rows were tuned, on a GPU."""
RUNS = ROOT / "runs" / "suite"
SEEDS = (0, 1, 2, 3)
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Row:
    """A line of the table of a cell."""

    name: str
    """In tables, and for --row."""
    method: str
    """As in `growprune compare --methods`."""
    tuned: str = ""
    """The row whose tuned settings it has. Empty: none, it is not tuned."""
    times: int = 1
    """How often it trains the epochs of the cell."""
    sparsity: float | None = None
    """For a small dense model: of the sparse model that it equals, if that is not the cell's."""


NEVER = "gradual_gap control=peak"
ROWS = (
    Row("gradual_gap", "gradual_gap", "gradual_gap-global"),
    Row("gmp", "gmp", "gmp-global"),
    Row("never growing", NEVER, "gradual_gap-global-control=peak"),
    Row("dense", "dense", "dense"),
    Row("rigl", "rigl", "rigl-erk"),
    Row("static random", "static_random", "static_random-erk"),
    Row("dpf", "dpf", "dpf-global"),
    Row("small dense, equal non-zeros", "small_dense", "small_dense"),
    Row("small dense, equal operations", "small_dense:flops", "small_dense-flops"),
)
"""The rows of every cell, in the order in which they are trained."""


@dataclass(frozen=True)
class Cell:
    """A model and a sparsity: a table of the suite."""

    name: str
    title: str
    recipe: str
    data: str
    """In DIR. Empty: none is needed."""
    sparsity: float
    epochs: int
    settings: Mapping[str, str]
    """What makes the model small, for all rows."""
    metric: str
    failed_by: float
    """A seed failed if its validation score is that much worse than the best seed of its row."""
    tuned: str = ""
    """The model whose tuning it uses: a cell of defaults.jsonl. Empty: rows are not tuned."""
    tuned_at: str = "0.9"
    tuning_epochs: int | None = None
    """If the rows were tuned with other epochs than those of the cell."""
    operations: float | None = None
    """The sparsity of a uniformly sparse model with the operations of `gradual_gap`, if that is not the cell's."""
    more: tuple[Row, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        small = Row(
            *("small dense, equal operations", "small_dense:flops", "small_dense-flops"), sparsity=self.operations
        )
        return (*(small if row.name == small.name else row for row in ROWS), *self.more)


PAPER = (Row("C-GaP, as long", "cyclic_gap", "dense"), Row("C-GaP, 4x as long", "cyclic_gap", "dense", times=4))
"""The paper's method with the settings of dense. It is not tuned."""
SHORT_PAPER = tuple(Row(row.name, f"{row.method} parts=contiguous(2)", row.tuned, row.times) for row in PAPER)
"""In trainings of three epochs there is room for two parts."""


def with_power(**powers: Sequence[float]) -> tuple[Row, ...]:
    """Rows that cost about as many operations as others, by their names. Their other settings are those of the row."""
    rows = {row.name.replace(" ", "_"): row for row in ROWS}
    return tuple(
        Row(f"{rows[name].name}, cost_power={power:g}", f"{rows[name].method} cost_power={power:g}", rows[name].tuned)
        for name, each in powers.items()
        for power in each
    )


CPU = {"device": "cpu", "precision": "fp32", "candidates": "false"}
SHAKESPEARE: dict[str, Any] = {
    "recipe": "language-shakespeare/dense",
    "data": "tinyshakespeare/input.txt",
    "epochs": 3,
    "settings": CPU
    | {"task.heads": "4", "task.d_model": "64", "task.ffn": "256", "task.layers": "3", "task.context": "64"}
    | {"task.batch_size": "32", "task.dropout": "0"},
    "metric": "bits_per_byte",
    "failed_by": 0.08,
    "tuned": "shakespeare",
}
CIFAR10: dict[str, Any] = {
    "recipe": "classification-cifar10/dense",
    "data": "cifar10.npz",
    "epochs": 5,
    "settings": CPU | {"task.width": "16", "task.stem": "imagenet", "task.batch_size": "128", "evaluate_every": "5"},
    "metric": "top1",
    "failed_by": 4.0,
    "tuned": "cifar10",
    "tuning_epochs": 8,
}
MULTI30K: dict[str, Any] = {
    "recipe": "translation-multi30k/dense",
    "data": "multi30k",
    "epochs": 3,
    "settings": CPU
    | {"task.vocab_size": "2000", "task.d_model": "64", "task.ffn": "256", "task.max_tokens": "2048"}
    | {"task.encoder_layers": "2", "task.decoder_layers": "2", "task.dropout": "0.1"},
    "metric": "loss",
    "failed_by": 0.15,
    "tuned": "multi30k",
}
SHAPENET: dict[str, Any] = {
    "recipe": "segmentation-subset/dense",
    "data": "shapenet_part_subset.zip",
    "epochs": 20,
    "settings": CPU | {"task.width": "0.25", "task.detail": "0.25", "task.num_points": "512", "evaluate_every": "20"},
    "metric": "instance_miou",
    "failed_by": 4.0,
    "tuned": "shapenet",
}
CELLS = (
    Cell("shakespeare-90", "Shakespeare, GPT", sparsity=0.9, more=SHORT_PAPER, **SHAKESPEARE),
    Cell(
        *("cifar10-90", "CIFAR-10, ResNet-18"),
        sparsity=0.9,
        operations=0.61,
        more=(
            *with_power(gradual_gap=(0.25,), gmp=(-0.15, 0.1), never_growing=(-0.4,)),
            *PAPER,
        ),
        **CIFAR10,
    ),
    Cell("shakespeare-80", "Shakespeare, GPT", sparsity=0.8, tuned_at="0.8", **SHAKESPEARE),
    Cell("multi30k-90", "Multi30k, Transformer", sparsity=0.9, **MULTI30K),
    Cell("shapenet-90", "ShapeNet, PointNet++", sparsity=0.9, operations=0.69, **SHAPENET),
    Cell("multi30k-80", "Multi30k, Transformer", sparsity=0.8, tuned_at="0.8", **MULTI30K),
    Cell("cifar10-95", "CIFAR-10, ResNet-18", sparsity=0.95, operations=0.72, tuned_at="0.95", **CIFAR10),
    Cell(
        *("digits-90", "digits, CNN", "digits/dense", ""),
        sparsity=0.9,
        epochs=4,
        settings={"device": "cpu", "candidates": "false"},
        metric="accuracy",
        failed_by=10.0,
    ),
)
"""In the order in which they are trained. `digits-90` only tries the suite itself."""


# How rows are tuned


@dataclass(frozen=True)
class Tuned:
    """Settings chosen by validation from a grid, on a GPU."""

    settings: dict[str, str]
    grid: dict[str, list[str]]

    @property
    def at_edge(self) -> list[str]:
        """The settings whose best value is the smallest or largest of several that were tried."""
        ends = {key: sorted(values, key=float) for key, values in self.grid.items() if key == "optimizer.lr"}
        return [key for key, values in ends.items() if self.settings[key] in (values[0], values[-1])]


TUNABLE = ("optimizer.lr", "lr_scaling", "lr_schedule.warmup_iterations", "lr_schedule.warmup_epochs")


def tuned(cell: Cell, row: Row) -> Tuned | None:
    """The settings of a row with the best validation score. None if it was not tuned."""
    if not cell.tuned or not row.tuned:
        return None
    sparsities = (*(() if row.sparsity is None else (f"{row.sparsity:g}",)), cell.tuned_at, "0.9")
    names = [f"tune {sparsity} {row.tuned}" for sparsity in sparsities]
    found = next(_trials()[cell.tuned, name] for name in names if (cell.tuned, name) in _trials())
    sign = 1 if cell.metric in ("loss", "bits_per_byte") else -1
    best = min(found, key=lambda run: (sign * run["validation"][cell.metric], run["settings"].get("lr_scaling", "")))
    kept = [{key: run["settings"][key] for key in TUNABLE if key in run["settings"]} for run in found]
    grid = {key: sorted({settings[key] for settings in kept}, key=float) for key in kept[0]}
    return Tuned({key: best["settings"][key] for key in grid}, grid)


@functools.cache
def _trials() -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in TUNING.read_text().splitlines()[1:]:
        run = json.loads(line)
        if run["name"].startswith("tune "):
            found.setdefault((run["cell"], run["name"]), []).append(run)
    return found


def try_rates(
    cells: Sequence[str], rows: Sequence[str], rates: Sequence[str], data: Path, runs: Path, device: str, processes: int
) -> None:
    """Train the rows that are tuned with more learning rates, each with the values of `lr_scaling` tried before."""
    tried: dict[tuple[str, ...], tuple[Run, dict[str, Any]]] = {}
    for run in all_runs(cells, rows, seeds=[0]):
        cell, row, found = run.cell, run.row, tuned(run.cell, run.row)
        if found is None or row in cell.more:
            continue
        sparsity = cell.tuned_at if row.sparsity is None else f"{row.sparsity:g}"
        for rate in rates:
            for scaling in found.grid.get("lr_scaling", [""]):
                chosen = {**found.settings, "optimizer.lr": rate, **({"lr_scaling": scaling} if scaling else {})}
                method = " ".join([row.method, *(f"{key}={value}" for key, value in chosen.items())])
                settings = {**cell.settings, "device": device}
                epochs = cell.tuning_epochs or cell.epochs
                asked = {**run.asked, "method": method, "epochs": epochs, "settings": settings}
                name = f"tune {sparsity} {row.tuned}"
                line: dict[str, Any] = {"cell": cell.tuned, "name": name, "seed": 0, "settings": chosen, "tried": {}}
                tried[cell.tuned, name, rate, scaling] = (replace(run, asked=asked), line)

    def train_one(trial: tuple[Run, dict[str, Any]]) -> dict[str, Any]:
        run, line = trial
        job = run.job(
            data, runs / "tuning" / re.sub(r"\W+", "-", f"{line['name']} {' '.join(line['settings'].values())}")
        )
        words = shlex.split(command(job, str(data / run.cell.data)))
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("wb") as log:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            status = subprocess.call(
                [sys.executable, "-m", *words, "--out", job.folder], stdout=log, stderr=log, env=environment
            )
        record = read_run(job.folder)
        if record.result is None:
            raise GrowpruneError(f"{line['name']} {line['settings']}: {record.why or last_words(job.log, status)}")
        result = record.result
        keys = ("commit", "source", "torch", "device")
        return {
            **line,
            **{"validation": dict(result.validation), "test": dict(result.test)},
            **{"operations": record.inference_flops, "peak": record.peak_alive, "average": record.average_alive},
            "seconds": round(result.seconds, 1),
            **{key: result.environment[key] for key in keys if key in result.environment},
        }

    with ThreadPoolExecutor(processes) as pool, (runs / TUNING.name).open("a") as file:
        for line in pool.map(train_one, tried.values()):
            file.write(json.dumps(line) + "\n")
            print(line["name"], *line["settings"].values(), line["validation"], flush=True)


# The runs


@dataclass(frozen=True)
class Run:
    """A row of a cell with a seed."""

    cell: Cell
    row: Row
    seed: int
    asked: Mapping[str, Any] = field(hash=False)
    """What decides its result, beside the seed: arguments of `growprune compare`."""

    @classmethod
    def of(cls, cell: Cell, row: Row, seed: int) -> Run:
        found = tuned(cell, row)
        words = [row.method, *(f"{key}={value}" for key, value in (found.settings if found else {}).items())]
        sparsity = cell.sparsity if row.sparsity is None else row.sparsity
        asked = {"recipe": cell.recipe, "method": " ".join(words), "sparsity": sparsity if row.name != "dense" else 0.0}
        return cls(cell, row, seed, {**asked, "epochs": row.times * cell.epochs, "settings": dict(cell.settings)})

    @property
    def name(self) -> str:
        return f"{self.cell.name}, {self.row.name}, seed {self.seed}"

    def job(self, data: Path, runs: Path) -> Job:
        """The run as `growprune compare` makes it."""
        place = "" if not self.cell.data else str(data / self.cell.data)
        row = re.sub(r"\W+", "-", self.row.name)
        settings = [f"{key}={value}" for key, value in self.asked["settings"].items()]
        request = Request.parse(
            *([self.asked["recipe"]], self.asked["method"], str(self.asked["sparsity"]), str(self.seed)),
            *(self.asked["epochs"], runs / self.cell.name / row, settings, place),
        )
        return request.every_job[0]


def all_runs(cells: Sequence[str] = (), rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
    """The runs of the suite in their order: cell by cell, all rows of the first seed first."""
    found = [cell for cell in CELLS if (cell.name in cells if cells else cell.name != "digits-90")]
    runs = [Run.of(cell, row, seed) for cell in found for seed in seeds or SEEDS for row in cell.rows]
    return [run for run in runs if not rows or run.row.name in rows]


def missing(runs: Sequence[Run], lines: Sequence[Mapping[str, Any]]) -> list[Run]:
    """The runs without a result. Cells of one model have their dense runs in common."""
    done, left = [(line["asked"], line["seed"]) for line in lines], []
    for run in runs:
        if (run.asked, run.seed) not in done:
            done.append((run.asked, run.seed))
            left.append(run)
    return left


def read_lines(*files: Path) -> list[dict[str, Any]]:
    """The results in some files, each once."""
    texts = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [json.loads(text) for text in dict.fromkeys(texts)]


# Training


def command(job: Job, data: str) -> str:
    """The command that makes the same numbers again."""
    settings = {key: value for key, value in job.settings.items() if key != "task.data"}
    words = ["growprune", "train", job.source, *(["--data", data] if data else [])]
    return shlex.join([*words, *(word for item in settings.items() for word in ("--set", "=".join(item)))])


def train(run: Run, data: Path, runs: Path, results: Path) -> bool:
    """Train or resume a run, and add its result. False if it was stopped."""
    job = run.job(data, runs)
    place = str(data / run.cell.data) if run.cell.data else ""
    started = (job.folder / "recipe.json").exists()
    words = ["growprune", "resume"] if started else shlex.split(command(job, place))
    words += [str(job.folder)] if started else ["--out", str(job.folder)]
    job.log.parent.mkdir(parents=True, exist_ok=True)
    spent = job.log.with_suffix(".cpu")  # seconds, also of processes that were stopped
    before = _cpu_seconds() - (float(spent.read_text()) if spent.exists() else 0.0)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # which saves
            process.wait()
            raise
        finally:
            spent.write_text(f"{_cpu_seconds() - before:.1f}")
    if status in STOPPED:
        return False
    record = read_run(job.folder)
    if record.status not in ("finished", "failed"):
        raise GrowpruneError(f"{run.name}: {last_words(job.log, status)}")
    line = line_of(run, job, record, _cpu_seconds() - before)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    said = line["test"].get(run.cell.metric) if line["status"] == "finished" else line["why"]
    print(f"{run.name}: {line['status']}, {said}, {line['cpu_seconds']:.0f} s of CPU", flush=True)
    return True


def _cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def line_of(run: Run, job: Job, record: Record, cpu_seconds: float) -> dict[str, Any]:
    """What is kept of a run, failed or not."""
    place = f"DIR/{run.cell.data}" if run.cell.data else ""
    about = {"cell": run.cell.name, "row": run.row.name, "seed": run.seed, "asked": run.asked}
    about |= {"command": command(job, place), "machine": machine(), "cpu_seconds": round(cpu_seconds, 1)}
    result = record.result
    if result is None:
        return {**about, "status": "failed", "why": record.why}
    keys = ("commit", "source", "torch", "python", "threads")
    return {
        **about,
        "status": "finished",
        **{key: result.environment[key] for key in keys if key in result.environment},
        "seconds": round(result.seconds, 1),
        "data": result.data,
        **{"validation": dict(result.validation), "test": dict(result.test)},
        **{"operations": record.inference_flops, "reached": record.reached},
        **{"peak": record.peak_alive, "average": record.average_alive},
        "grown": next((row.get("grown") for row in reversed(result.history)), None),
    }


@functools.cache
def machine() -> str:
    """The kind of CPU, without the name of the host."""
    try:
        models = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def check_data(runs: Sequence[Run], data: Path | None) -> Path:
    """Raise if data is missing that the runs need."""
    needed = list(dict.fromkeys(run.cell.data for run in runs if run.cell.data))
    lacking = [name for name in needed if data is None or not (data / name).exists()]
    if lacking:
        where = "--data is missing" if data is None else f"{data} has no {', '.join(lacking)}"
        raise GrowpruneError(
            f"{where}. Give a folder with {', '.join(needed)}; docs/paper.md, Data, says what they hold, and "
            f"experiments/README.md where to get them"
        )
    return Path() if data is None else data.resolve()


def listing(runs: Sequence[Run], lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each row of each cell: seeds that are there and missing, and how it was tuned."""
    left = missing(runs, lines)
    done = [(line["asked"], line["seed"]) for line in lines]
    for cell, row in dict.fromkeys((run.cell.name, run.row.name) for run in runs):
        own = [run for run in runs if (run.cell.name, run.row.name) == (cell, row)]
        there = [str(run.seed) for run in own if (run.asked, run.seed) in done]
        lacking = [str(run.seed) for run in own if (run.asked, run.seed) not in done]
        found = tuned(own[0].cell, own[0].row)
        how = "not tuned" if found is None else " ".join(f"{key}={value}" for key, value in found.settings.items())
        edge = f"; {', '.join(found.at_edge)} at the edge of its grid" if found and found.at_edge else ""
        seeds = f"seeds {','.join(there) or 'none'}" + (f", missing {','.join(lacking)}" if lacking else "")
        yield f"{cell:15} {row:40} {seeds:35} {how}{edge}"
    yield f"{len(left)} of {len(runs)} runs are missing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR")
    parser.add_argument("--cell", action="append", default=[], choices=[cell.name for cell in CELLS])
    parser.add_argument("--row", action="append", default=[], choices={r.name: 0 for c in CELLS for r in c.rows})
    parser.add_argument("--seed", action="append", default=[], type=int)
    parser.add_argument("--runs", type=Path, default=RUNS, help="where run folders and new results go")
    parser.add_argument("--until", metavar="HH:MM", help="begin no run after this time (UTC)")
    parser.add_argument("--tune", metavar="RATES", help="try more learning rates, such as 0.032,0.064, instead")
    parser.add_argument("--device", default="cpu", help="of --tune")
    parser.add_argument("--processes", type=int, default=1, help="of --tune")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    new = args.runs / "results.jsonl"
    lines = read_lines(RESULTS, new)
    if args.keep:
        RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
        TUNING.write_text("".join(json.dumps(line) + "\n" for line in read_lines(TUNING, args.runs / TUNING.name)))
        return
    runs = all_runs(args.cell, args.row, args.seed)
    if args.list:
        print("\n".join(listing(runs, lines)))
        return
    left = missing(runs, lines)
    try:
        data = check_data(runs if args.tune else left, args.data)
        if args.tune:
            args.runs.mkdir(parents=True, exist_ok=True)
            try_rates(args.cell, args.row, args.tune.split(","), data, args.runs, args.device, args.processes)
            return
        for run in left:
            if args.print:
                print(command(run.job(data, args.runs), str(data / run.cell.data) if run.cell.data else ""))
            elif (args.until and time.strftime("%H:%M", time.gmtime()) >= args.until) or not train(
                run, data, args.runs, new
            ):
                break
    except GrowpruneError as error:
        sys.exit(f"suite: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
