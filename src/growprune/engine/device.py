"""The device of a run, its peak memory, and the software environment."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import growprune
from growprune.errors import GrowpruneError
from growprune.tasks.task import map_tensors

SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh")


def check_device(name: str) -> None:
    try:
        torch.device("cpu" if name == "auto" else name)
    except (RuntimeError, TypeError) as error:
        raise GrowpruneError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error


def choose_device(name: str) -> torch.device:
    """The device of a recipe, set up for deterministic results."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise GrowpruneError(f"device is {name!r}, but torch finds no CUDA device. Use device=cpu or device=auto")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        if device.index is not None:
            _make_current(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return device


def _make_current(device: torch.device) -> None:
    """Make the training device the current one, because streams, events and graphs use the current device."""
    if device.index >= (count := torch.cuda.device_count()):
        raise GrowpruneError(f"device must be one of cuda:0 to cuda:{count - 1} on this machine, got '{device}'")
    torch.cuda.set_device(device)


def move(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple, list or dict of tensors, to another device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and hardware that a result depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    of_source = commit()
    is_known = of_source and not of_source.endswith("-dirty")
    return {
        "growprune": growprune.__version__,
        "commit": of_source,
        **({} if is_known else {"source": source_digest()}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The git commit of growprune's source, marked if there are local changes. Empty for an installed package."""
    package = Path(__file__).parents[1]
    root = package.parents[1]
    if not (root / ".git").exists() or package != root / "src" / "growprune":
        return ""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10, env=plain).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # without git, or not ours to look at
        return ""


def source_digest() -> str:
    """A digest of growprune's own source, for a tree that no commit tells."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for path in package.rglob("*") if path.is_file() and path.suffix in SOURCES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the GPU if the run used one, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
