"""Damaged and forged files by the thousand, into deploy and convert: python benchmarks/fuzz_files.py [--cases 10000]

Small real sources (sparse files of all kinds of masks, dense ones, checkpoints of torch, a folder of transformers, a
deployed one) are changed at random: bytes flipped, cut out or cut off, numbers, shapes, names and metadata of headers
and JSON changed, with digests that fit again. Each is deployed or converted in a worker process whose memory is bounded
and which is ended if it takes too long. Counted is what came of it:

    refused     a GrowpruneError of one line
    equal       what the source was before, to the bit
    different   another valid file: only if it has no digests, or was forged with digests that fit
    WRONG       another result from a file of ours that was damaged, so that a digest must have told
    CRASH, HANG, MEMORY, or the name of another exception: a fault

Exits with 1 if there was a fault; `--only N` runs one case again and shows where it came from.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from mutations import BYTES, FORGED, JSON, PLAIN, Mutate
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import growprune as gp
from growprune.files.convert import convert
from growprune.files.importers import read

SECONDS, MEBIBYTES = 30, 192
"""How long a case may take, and how much memory beside twice its file: mostly what torch.export takes once."""
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files are made: each is synced when it is written, which takes most of the time on a disk."""
FINE = ("refused", "equal", "different")


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16, bias=False))


def example() -> Tensor:
    return torch.linspace(-1, 1, 128).view(2, 64)


# Sources: a folder each, with what of it may be changed


def sparse_net(sparsity: float, pattern: str) -> gp.SparseModel:
    torch.manual_seed(0)
    sparse = gp.SparseModel(Net().eval(), sparsity=sparsity, pattern=pattern)
    sparse.prune()
    return sparse


def make_sources(folder: Path) -> None:
    for name, sparsity, pattern in (
        ("bits", 0.6, "unstructured"),
        ("gaps", 0.97, "unstructured"),
        ("1x8", 0.75, "1x8"),
    ):
        (folder / name).mkdir()
        gp.save(sparse_net(sparsity, pattern), folder / name / "file.safetensors")
    sparse = sparse_net(0.8, "unstructured")
    state = sparse.to_dense_().state_dict()
    for name in ("dense", "torch", "hf"):
        (folder / name).mkdir()
    save_file(state, folder / "dense" / "file.safetensors", {"format": "pt"})
    torch.save(state, folder / "torch" / "file.pt")
    (folder / "hf" / "config.json").write_text(
        json.dumps({"model_type": "net", "sizes": [64, 48], "quantization_config": 1})
    )
    convert(folder / "dense" / "file.safetensors", folder / "hf" / "model", to="hf")
    shutil.copyfile(folder / "hf" / "config.json", folder / "hf" / "model" / "config.json")
    gp.deploy(sparse_net(0.8, "8x1"), example(), seconds=0).save(folder / "deployed" / "model")


SOURCES: dict[str, dict[str, list[Mutate]]] = {
    "bits": {"file.safetensors": [*PLAIN, *FORGED]},
    "gaps": {"file.safetensors": [*PLAIN, *FORGED]},
    "1x8": {"file.safetensors": [*PLAIN, *FORGED]},
    "dense": {"file.safetensors": PLAIN},
    "torch": {"file.pt": BYTES},
    "hf": {
        "model/model.safetensors": PLAIN,
        "model/growprune.safetensors": [*PLAIN, *FORGED],
        "model/growprune.json": JSON,
        "model/config.json": JSON,
    },
    "deployed": {"model/model.safetensors": [*PLAIN, *FORGED], "model/deployed.json": JSON},
}


# What is done with them, and what comes of it: tensors to compare


def deployed_file(path: Path, out: Path) -> Any:
    del out
    return gp.deploy(path, example(), into=Net(), seconds=0, whole=False)(example())


def deployed_whole(path: Path, out: Path) -> Any:
    del out
    return gp.deploy(path, example(), into=Net(), seconds=0)(example())


def loaded_deployed(path: Path, out: Path) -> Any:
    del out
    found = gp.load_deployed(path, Net(), seconds=0)
    assert str(found.table)
    return found(example())


def to_dense(path: Path, out: Path) -> Any:
    return load_file(convert(path, out / "out.safetensors", to="dense").dest)


def to_sparse(path: Path, out: Path) -> Any:
    return gp.read(convert(path, out / "out.safetensors", to="sparse").dest)


def to_hf(path: Path, out: Path) -> Any:
    return read(convert(path, out / "out", to="hf").dest).tensors


def with_model(path: Path, out: Path) -> Any:
    return gp.read(convert(path, out / "out.safetensors", to="sparse", model=Net()).dest)


Action = Callable[[Path, Path], Any]
OF_OURS: list[Action] = [deployed_file, deployed_file, deployed_file, deployed_whole, to_dense, to_hf, with_model]
OF_OTHERS: list[Action] = [to_sparse, to_dense, to_hf, with_model, deployed_file]
ACTIONS: dict[str, list[Action]] = {
    **dict.fromkeys(("bits", "gaps", "1x8"), OF_OURS),
    **dict.fromkeys(("dense", "torch", "hf"), OF_OTHERS),
    "deployed": [loaded_deployed],
}


class Case:
    """A number is a case, always the same."""

    def __init__(self, number: int, seed: int) -> None:
        self.draw = random.Random(f"{seed} {number}")
        self.source = self.draw.choice(list(SOURCES))
        self.file = self.draw.choice(list(SOURCES[self.source]))
        self.mutate = self.draw.choice(SOURCES[self.source][self.file])
        self.action = self.draw.choice(ACTIONS[self.source])

    def __str__(self) -> str:
        return f"{self.source}/{self.file}, {self.mutate.__name__}, {self.action.__name__}"

    @property
    def has_digests(self) -> bool:
        """Whether a digest tells of this damage: of our files, unless it was forged."""
        return self.file.endswith("file.safetensors") and self.source in ("bits", "gaps", "1x8") and self._is_damage

    @property
    def _is_damage(self) -> bool:
        return self.mutate not in FORGED

    def path(self, sources: Path) -> Path:
        return self._in(sources / self.source)

    @contextlib.contextmanager
    def changed(self, sources: Path, folder: Path) -> Iterator[Path]:
        """The source with the change, in a folder that is gone after."""
        shutil.copytree(sources / self.source, folder / "in")
        (folder / "out").mkdir()
        file = folder / "in" / self.file
        file.write_bytes(self.mutate(self.draw, file.read_bytes()))
        try:
            yield self._in(folder / "in")
        finally:
            shutil.rmtree(folder)

    def _in(self, folder: Path) -> Path:
        return folder / (self.file if "/" not in self.file else "model")


def flat(found: Any) -> list[tuple[str, Tensor]]:
    return sorted(found.items()) if isinstance(found, dict) else [("", found)]


def same(a: Any, b: Any) -> bool:
    (first, second) = (flat(x) for x in (a, b))
    return [n for n, _ in first] == [n for n, _ in second] and all(
        x.dtype == y.dtype and torch.equal(x, y) for (_, x), (_, y) in zip(first, second, strict=True)
    )


def outcome(case: Case, sources: Path, folder: Path, expected: dict[Any, Any]) -> tuple[str, str]:
    key = (case.source, case.action)
    if key not in expected:
        (folder / "expected").mkdir(parents=True)
        with contextlib.suppress(gp.GrowpruneError, FileNotFoundError):
            expected[key] = case.action(case.path(sources), folder / "expected")
        expected.setdefault(key, None)
        shutil.rmtree(folder)
    with case.changed(sources, folder) as path:
        before = memory("VmRSS")
        reset_peak()
        size = sum(file.stat().st_size for file in (folder / "in").rglob("*") if file.is_file())
        try:
            found = case.action(path, folder / "out")
        except gp.GrowpruneError as error:
            result = ("refused", str(error)) if "\n" not in str(error) else ("LINES", str(error))
        except FileNotFoundError as error:
            result = ("refused", str(error)) if str(path.parent) in str(error) else ("FileNotFoundError", str(error))
        except Exception as error:
            return type(error).__name__, traceback.format_exc()
        else:
            kind = "equal" if same(found, expected[key]) else "different"
            result = ("WRONG" if kind == "different" and case.has_digests else kind, "")
        if (taken := memory("VmHWM") - before) > 2 * size + (MEBIBYTES << 20):
            return "MEMORY", f"{taken >> 20} MiB for {size} bytes"
        return result


def memory(field: str) -> int:
    with contextlib.suppress(OSError, StopIteration), Path("/proc/self/status").open() as status:
        return 1024 * int(next(line for line in status if line.startswith(field)).split()[1])
    return 0


def reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def work(sources: Path, seed: int) -> None:
    """A worker: numbers of cases in, what came of them out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bound = memory("VmSize") + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    expected: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for line in sys.stdin:
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                found = outcome(Case(int(line), seed), sources, Path(folder) / "case", expected)
            print(json.dumps(found), flush=True)


class Worker:
    def __init__(self, sources: Path, seed: int) -> None:
        self._command = [sys.executable, __file__, "--work", str(sources), "--seed", str(seed)]
        self._start()

    def _start(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, text=True, **pipes)

    def ask(self, number: int) -> tuple[str, str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], SECONDS)[0]:
            self.close()
            self._start()
            return "HANG", f"over {SECONDS} s"
        if not (line := process.stdout.readline()):
            code, words = process.wait(), process.stderr.read() if process.stderr else ""
            self._start()
            return "CRASH", f"exit {code}: {words[-2000:]}"
        kind, why = json.loads(line)
        return kind, why

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run(arguments: argparse.Namespace) -> bool:
    """Whether nothing went wrong."""
    torch.set_num_threads(1)  # as in workers: a deployed folder is for a number of threads
    counts: dict[tuple[str, str], int] = collections.Counter()
    faults: list[tuple[int, str, str]] = []
    numbers = range(arguments.cases) if arguments.only is None else [arguments.only]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_sources(Path(folder))
        worker, start = Worker(Path(folder), arguments.seed), time.perf_counter()
        for number in numbers:
            kind, why = worker.ask(number)
            counts[Case(number, arguments.seed).source, kind] += 1
            if kind not in FINE:
                faults.append((number, kind, why))
            if arguments.only is not None:
                print(Case(number, arguments.seed), kind, why, sep="\n")
        worker.close()
    show(counts, faults, arguments.seed, time.perf_counter() - start)
    return not faults


def show(counts: dict[tuple[str, str], int], faults: list[tuple[int, str, str]], seed: int, seconds: float) -> None:
    kinds = list(dict.fromkeys([*FINE, *(kind for _, kind in counts)]))
    print(f"| source | {' | '.join(kinds)} |\n|---|{'---:|' * len(kinds)}")
    for source in [*SOURCES, None]:
        cells = [sum(n for (s, k), n in counts.items() if source in (s, None) and k == kind) for kind in kinds]
        print(f"| {source or 'all'} | {' | '.join(map(str, cells))} |")
    print(f"{sum(counts.values())} files in {seconds:.0f} s, {len(faults)} faults")
    for number, kind, why in faults[:20]:
        last = why.strip().splitlines()[-1:] or [""]
        print(f"  --only {number} --seed {seed}: {Case(number, seed)}: {kind}: {last[0][:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.seed)
    elif not run(arguments):
        sys.exit(1)


if __name__ == "__main__":
    main()
