"""Checks of this machine for `growprune doctor`: versions, devices, kernels, and causes of slow training."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

import growprune
from growprune.cli.screen import out
from growprune.storage import kernels
from growprune.tasks.cores import num_cores

State = Literal["ok", "absent", "slow", "broken"]

REQUIRED = ("torch", "numpy", "safetensors", "typer", "rich")
EXTRAS = {
    "digits": ("scikit-learn",),
    "classification": ("pillow",),
    "detection": ("pillow", "pycocotools"),
    "translation": ("sentencepiece", "sacrebleu"),
    "report": ("plotly",),
    "tensorboard": ("tensorboard",),
}
"""Distributions by extra, as pyproject.toml has them."""

COLOURS = {"ok": "green", "absent": "dim", "slow": "yellow", "broken": "red"}
MANY_PROCESSES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
"""Variables by which launchers say how many processes they start."""


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    """"absent": optional and not installed. "slow": works, but could be faster. "broken": does not work."""
    text: str
    do: str = ""
    """What the user can do about it."""


def examine() -> list[Finding]:
    """Run all checks. Loads torch, and runs the kernels on tiny tensors."""
    return [*_versions(), *_extras(), *_devices(), *_kernels(), *_compiler(), *_threads(), *_settings()]


def show_findings(findings: Sequence[Finding]) -> None:
    """Print one line per finding with what to do about it, then a summary."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text).append(f"\n-> {finding.do}" if finding.do else "", style="bold")
        table.add_row(Text(finding.state, style=COLOURS[finding.state]), finding.name, text)
    out().print(table, highlight=False)
    counts = Counter(finding.state for finding in findings)
    wrong = [f"{counts[state]} {state}" for state in ("broken", "slow") if counts[state]]
    out().print(f"{', '.join(wrong)}: see above" if wrong else "All checks passed: nothing is broken or slow")


def _versions() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield Finding("growprune", "ok", growprune.__version__)
    for name in REQUIRED:
        if (found := _version(name)) is None:
            yield Finding(name, "broken", "not installed", "pip install growprune")
        else:
            yield Finding(name, "ok", found)


def _extras() -> Iterator[Finding]:
    for extra, names in EXTRAS.items():
        missing = [name for name in names if _version(name) is None]
        if missing:
            text = f"{', '.join(missing)} not installed"
            yield Finding(f"extra {extra}", "absent", text, f"pip install 'growprune[{extra}]'")
        else:
            yield Finding(f"extra {extra}", "ok", ", ".join(f"{name} {_version(name)}" for name in names))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("cpu", "ok", f"{num_cores()} cores, {memory / 2**30:.1f} GiB of memory, {platform.machine()}")
    if not torch.cuda.is_available():
        yield from _no_cuda()
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        text = f"{about.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        state: State = "ok" if free > total / 2 else "slow"
        do = "" if state == "ok" else "another process uses most of the memory: see nvidia-smi"
        yield Finding(f"cuda:{index}", state, text, do)


def _no_cuda() -> Iterator[Finding]:
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        yield Finding("cuda", "slow", "NVIDIA driver found, but this torch is CPU-only", "install torch with CUDA")
    elif torch.version.cuda is not None:
        yield Finding(
            "cuda", "absent", f"torch is built for CUDA {torch.version.cuda}, but finds no GPU", "see nvidia-smi"
        )
    else:
        yield Finding("cuda", "absent", "no GPU, and torch is CPU-only")


# Kernels


def _kernels() -> Iterator[Finding]:
    """Test the mask kernels on each device. A wrong kernel would train a wrong model."""
    yield _try_kernels(torch.device("cpu"))
    version = _version("triton")
    if not torch.cuda.is_available():
        yield Finding("triton", "absent", f"{version}, but no GPU to use it" if version else "not installed; no GPU")
    elif version is None:
        text = "not installed: masks on CUDA use torch operations, which are several times slower"
        yield Finding("triton", "slow", text, "pip install triton")
    else:
        yield _try_kernels(torch.device("cuda"))


def _try_kernels(device: torch.device) -> Finding:
    name = "kernels" if device.type == "cpu" else f"triton {_version('triton')}"
    try:
        is_right = kernels_work(device)
    except Exception as error:  # report whatever a compiler or a driver raises
        text = f"the kernels do not run: {' '.join(str(error).split())[:200]}"
        return Finding(name, "broken", text, "install a C compiler, or a Triton that matches torch and the driver")
    if not is_right:
        return Finding(name, "broken", f"the kernels give wrong results on {device}", "please report it as a bug")
    kind = "Triton kernels" if device.type == "cuda" else "mask kernels"
    return Finding(name, "ok", f"{kind} give correct results on {device}")


def kernels_work(device: torch.device) -> bool:
    """True if packing a mask of 3,000 weights, expanding its values and compressing them give correct results."""
    mask = torch.arange(3000, device=device) % 7 == 3
    values = torch.arange(1.0, 1 + int(mask.sum()), device=device)
    bits = kernels.pack(mask)
    offsets, alive = kernels.block_offsets(bits)
    dense = kernels.expand(values, bits, offsets, mask.numel(), dtype=torch.float32)
    back = kernels.compress(dense, bits, offsets, alive, dtype=torch.float32)
    expected = torch.zeros(mask.numel(), device=device).masked_scatter_(mask, values)
    is_same_mask = torch.equal(kernels.unpack(bits, mask.numel()), mask)
    return is_same_mask and torch.equal(dense, expected) and torch.equal(back, values)


def _compiler() -> Iterator[Finding]:
    """Look for the C++ compiler that torch.compile needs on a CPU."""
    names = (*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")
    if found := next(filter(None, map(shutil.which, names)), None):
        yield Finding("C++ compiler", "ok", found)
    else:
        yield Finding(
            "C++ compiler", "absent", "none found: torch.compile on a CPU needs one", "install g++ or clang, or set CXX"
        )


# What is slow


def _threads() -> Iterator[Finding]:
    threads, cores = torch.get_num_threads(), num_cores()
    text = f"torch uses {threads} threads of {cores} cores"
    launched = next((int(os.environ[name]) for name in MANY_PROCESSES if os.environ.get(name, "").isdigit()), 1)
    if threads > cores:
        yield Finding("threads", "slow", f"{text}: too many", f"set OMP_NUM_THREADS={cores}")
    elif launched > 1 and launched * threads > cores:
        best = max(1, cores // launched)
        yield Finding("threads", "slow", f"{text}, in each of {launched} processes", f"set OMP_NUM_THREADS={best}")
    elif "OMP_NUM_THREADS" in os.environ and threads < cores:
        do = "unset OMP_NUM_THREADS if a single process trains here"
        yield Finding("threads", "ok", f"{text}, set by OMP_NUM_THREADS", do)
    else:
        yield Finding("threads", "ok", text, "set OMP_NUM_THREADS if you train with several processes")
    yield from _load(threads, cores)


def _load(threads: int, cores: int) -> Iterator[Finding]:
    """Warn if other processes use the cores: each parallel step waits for its slowest thread."""
    busy = os.getloadavg()[0]
    if threads > 1 and busy + threads > cores + 1:
        free = max(1, round(cores - busy))
        text = f"other processes use {busy:.1f} of {cores} cores: torch's threads wait for each other"
        yield Finding("load", "slow", text, f"wait for them, or set OMP_NUM_THREADS={free}")


def _settings() -> Iterator[Finding]:
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding("CUDA_LAUNCH_BLOCKING", "slow", "torch waits for every kernel", "unset CUDA_LAUNCH_BLOCKING")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield Finding("TRITON_INTERPRET", "slow", "Triton kernels run in Python", "unset TRITON_INTERPRET")
