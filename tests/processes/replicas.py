"""Two processes that train replicas, forked from one that has only loaded what they need."""

import multiprocessing
import os
import queue
import warnings
from collections.abc import Callable
from typing import Any

import forked
import torch


def on_two_processes(train: Callable[..., Any], *args: Any) -> list[Any]:
    """By rank, what a function returns on two processes with the environment that torchrun gives them."""
    context = multiprocessing.get_context("fork")
    results, port = context.Queue(), forked.free_port()
    processes = [context.Process(target=_replica, args=(rank, port, results, train, args)) for rank in range(2)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < len(processes):
            try:
                rank, result = results.get(timeout=1)
                found[rank] = result
            except queue.Empty:
                assert not any(process.exitcode for process in processes), "a process has failed: see its stderr"
    finally:
        for process in processes:
            if len(found) < len(processes):
                process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]


def _replica(rank: int, port: int, results: Any, train: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    become_rank(rank, port)
    results.put((rank, train(*args)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def become_rank(rank: int, port: int) -> None:
    """Give this process the environment that torchrun gives one of two."""
    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    names = {**where, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in names.items()})
