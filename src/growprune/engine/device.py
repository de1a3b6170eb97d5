"""The device a run trains on, and what is measured of it."""

from __future__ import annotations

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


def check_device(name: str) -> None:
    try:
        torch.device("cpu" if name == "auto" else name)
    except (RuntimeError, TypeError) as error:
        raise GrowpruneError(f"device is {name!r}, but must be auto, cpu, cuda, or one such as cuda:1") from error


def choose_device(name: str) -> torch.device:
    """The device a recipe names, set up to give the same bits each time."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise GrowpruneError(f"device is {name!r}, but torch sees no CUDA device: set device=cpu or device=auto")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda":
        if device.index is not None:
            _make_current(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    return device


def _make_current(device: torch.device) -> None:
    """Streams, events and graphs are of the current device, and must be of the one that trains."""
    if device.index >= (count := torch.cuda.device_count()):
        raise GrowpruneError(f"device is '{device}', but torch sees only cuda:0 to cuda:{count - 1}: name one of those")
    torch.cuda.set_device(device)


def move(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple, list or dict of them, on another device."""
    return map_tensors(lambda tensor: tensor.to(device), value)


def environment(device: torch.device) -> dict[str, Any]:
    """What a result depends on beside its recipe."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "growprune": growprune.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """Of the checkout growprune runs from, marked if it has been changed since; nothing if it was installed."""
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


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory used at a time: of the GPU's if the run used one, of the whole process if not."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
