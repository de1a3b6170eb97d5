"""The number of cores for this process."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Number of cores this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
