"""Checks of this machine for `growprune doctor`: versions, devices, kernels and threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rich.table import Table
from rich.text import Text

import growprune
from growprune.cli.screen import out, say
from growprune.deployment.cpu.library import BuildError, find_compiler
from growprune.errors import how_to_install
from growprune.storage import kernels
from growprune.tasks.task import num_cores

State = Literal["ok", "absent", "slow", "broken"]
COLOURS = {"ok": "green", "absent": "dim", "slow": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    """"absent": optional and not installed. "slow": works, but could be faster. "broken": does not work."""
    text: str
    do: str = ""
    """What the user can do about it."""


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
    say(f"{', '.join(wrong)}: see above" if wrong else "All checks passed: nothing is broken or slow")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> Iterator[Finding]:
    """Run all checks. Loads torch, and runs the kernels on tiny tensors."""
    # 1) the versions of Python, growprune and its dependencies, by extra
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    yield Finding("growprune", "ok", growprune.__version__)
    extras: dict[str, list[str]] = {"": []}
    for line in (importlib.metadata.requires("growprune") or []) if _version("growprune") else []:
        needed_by = re.search(r"extra == .(\w+)", line)
        extras.setdefault(needed_by[1] if needed_by else "", []).append(re.split(r"[^\w.-]", line)[0])
    for extra, names in extras.items():
        if extra in ("dev", "dist", "docs", "tasks"):  # for developers, or made of others
            continue
        missing = [name for name in names if _version(name) is None]
        name = f"extra {extra}" if extra else "required"
        if missing:
            install = how_to_install(extra) if extra else "run pip install . in a copy of its repository"
            yield Finding(name, "absent" if extra else "broken", f"{', '.join(missing)} not installed", install)
        else:
            yield Finding(name, "ok", ", ".join(f"{name} {_version(name)}" for name in names))
    # 2) CPU and GPUs, and whether the mask kernels work there: a wrong kernel would train a wrong model
    memory, triton = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _version("triton")
    yield Finding("cpu", "ok", f"{num_cores()} cores, {memory / 2**30:.1f} GiB of memory, {platform.machine()}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_properties(index).name
            text, is_free = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free", free > total / 2
            do = "" if is_free else "another process uses most of the memory: see nvidia-smi"
            yield Finding(f"cuda:{index}", "ok" if is_free else "slow", text, do)
    elif torch.version.cuda is not None:
        built = f"torch is built for CUDA {torch.version.cuda}, but finds no GPU"
        yield Finding("cuda", "absent", built, "see nvidia-smi")
    elif shutil.which("nvidia-smi"):
        yield Finding("cuda", "slow", "NVIDIA driver found, but this torch is CPU-only", "install torch with CUDA")
    else:
        yield Finding("cuda", "absent", "no GPU, and torch is CPU-only")
    yield _try_kernels("kernels", torch.device("cpu"))
    if torch.cuda.is_available() and triton:
        yield _try_kernels(f"triton {triton}", torch.device("cuda"))
    elif torch.cuda.is_available():
        text = "not installed: masks on CUDA use torch operations, which are several times slower"
        yield Finding("triton", "slow", text, "pip install triton")
    try:
        yield Finding("C++ compiler", "ok", find_compiler().command[0])
    except BuildError as error:
        text = f"{error}: gp.deploy and torch.compile on a CPU need one"
        yield Finding("C++ compiler", "absent", text, "install g++ or clang, or set CXX")
    # 3) threads
    threads, cores = torch.get_num_threads(), num_cores()
    text = f"torch uses {threads} threads of {cores} cores"
    if threads > cores:
        yield Finding("threads", "slow", f"{text}: too many", f"set OMP_NUM_THREADS={cores}")
    else:
        yield Finding("threads", "ok", text, "set OMP_NUM_THREADS to change it, such as for several processes")


def _try_kernels(name: str, device: torch.device) -> Finding:
    """Pack a mask of 3,000 weights, expand its values and compress them, and compare with what torch does."""
    mask = torch.arange(3000, device=device) % 7 == 3
    values = torch.arange(1.0, 1 + int(mask.sum()), device=device)
    try:
        bits = kernels.pack(mask)
        offsets, alive = kernels.block_offsets(bits)
        dense = kernels.expand(values, bits, offsets, mask.numel(), dtype=torch.float32)
        back = kernels.compress(dense, bits, offsets, alive, dtype=torch.float32)
        is_same_mask = torch.equal(kernels.unpack(bits, mask.numel()), mask)
        expected = torch.zeros(mask.numel(), device=device).masked_scatter_(mask, values)
        is_right = is_same_mask and torch.equal(dense, expected) and torch.equal(back, values)
    except Exception as error:  # report whatever a compiler or a driver raises
        text = f"the kernels do not run: {' '.join(str(error).split())[:200]}"
        return Finding(name, "broken", text, "install a C compiler, or a Triton that matches torch and the driver")
    if not is_right:
        return Finding(name, "broken", f"the kernels give wrong results on {device}", "please report it as a bug")
    return Finding(name, "ok", f"mask kernels give correct results on {device}")
