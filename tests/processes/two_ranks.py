"""Two processes as torchrun would start them, for the tests of trainers."""

from __future__ import annotations

import multiprocessing
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import torch
from paths import ROOT
from replicas import become_rank

Bodies = Sequence[Callable[[Path], Any]]


def on_two_ranks(bodies: Bodies, folder: Path, preload: Sequence[str]) -> list[list[Any]]:
    """By rank, what each of some functions of a folder gives there.

    Args:
        preload: modules that take long to import; none of them may use torch when it is imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, "growprune.sharding", "torch._dynamo"])
    results = context.Queue()
    port = forked.free_port()
    processes = [context.Process(target=_work, args=(rank, port, bodies, folder, results)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = sorted((results.get(timeout=forked.HANG_SECONDS) for _ in processes), key=lambda result: result[0])
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    assert all(is_well for _, is_well, _ in found), "\n".join(str(what) for _, is_well, what in found if not is_well)
    return [what for _, _, what in found]


def sharded_code_of(page: str) -> str:
    """The code on a page of docs/ that needs several processes."""
    text = (ROOT / "docs" / page).read_text()
    (code,) = re.findall(r"## Sharded\n[^#]*?```python\n(.*?)```", text, re.S)
    return str(code)


def _work(rank: int, port: int, bodies: Bodies, folder: Path, results: Any) -> None:
    warnings.simplefilter("ignore")
    become_rank(rank, port)
    try:
        results.put((rank, True, [body(folder) for body in bodies]))
    except Exception:
        results.put((rank, False, traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
