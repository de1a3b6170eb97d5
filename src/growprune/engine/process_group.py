"""How the processes that torchrun started find each other, and part again."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from growprune.errors import shorten


class PeerFailed(RuntimeError):
    """Another process did not come to where this one waits for it, or came with something else."""


def join(device: torch.device, timeout_seconds: float) -> int:
    """Join the processes that torchrun started, if it did, and return the rank of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        wait = timedelta(seconds=timeout_seconds)
        backend = _take_a_gpu(device) if device.type == "cuda" else "gloo"
        store, rank, world = _find_store(wait)
        fresh = PrefixStore(_meeting_name(store, rank, world, timeout_seconds), store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=wait)
    return dist.get_rank() if dist.is_initialized() else 0


def _take_a_gpu(device: torch.device) -> str:
    """Choose this process' GPU, unless the recipe does, and how to talk: NCCL, which lets no processes share a GPU."""
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    else:  # the recipe names one, for all processes of this machine
        gpus = 1
    return "nccl" if processes <= gpus else "gloo"


def _find_store(wait: timedelta) -> tuple[Any, int, int]:
    """The store that all processes share, the rank of this one, and how many there are."""
    try:
        store, rank, world = next(rendezvous("env://", timeout=wait))
    except (dist.DistError, dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerFailed(
            f"cannot meet at {where} ({reason_of(error)}): choose a free port of a machine that all others reach"
        ) from error
    return store, rank, world


def _meeting_name(store: Any, rank: int, world: int, timeout_seconds: float) -> str:
    """A name that the processes of this start agree on, and no earlier start had.

    torchrun keeps one store while it starts processes again, and what dead ones wrote there would be taken for the
    living: so every process asks under a name of its own, and the first answers until all have heard it.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank > 0:
        store.set(f"asks/{rank}", mine)
        name: str = store.get(f"answer/{mine}").decode()
        store.set(f"heard/{name}/{rank}", "yes")
        return name
    waiting = set(range(1, world))
    while waiting and time.monotonic() < deadline:
        for other in sorted(waiting):
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", mine)
            if store.check([f"heard/{mine}/{other}"]):
                waiting.remove(other)
        time.sleep(0.01)
    if waiting:
        raise PeerFailed(f"rank 0 gave up while starting: rank {min(waiting)} did not come in {timeout_seconds:g} s")
    return mine


def may_be_restarted() -> bool:
    """Whether torchrun started this process, which it does again after a fault: a run that is there is then ours."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def job() -> str:
    """A name for the job that torchrun is carrying out, the same after each restart; empty without torchrun.

    Its run id alone would not do, which is "none" unless a user gives one: the folder of its logs is a fresh one.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # <logs of the job>/attempt_0/<rank>/error.json
    return error_file.parent.parent.parent.name or os.environ.get("TORCHELASTIC_RUN_ID", "")


def is_restart_of(earlier_job: str) -> bool:
    """Whether torchrun has started this process again, after a fault, in a job."""
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return is_again and may_be_restarted() and job() == earlier_job


def ask_first(flag: bool) -> bool:
    """What the first process says, on all of them: they look at one folder, but not from one machine."""
    if not dist.is_initialized():
        return flag
    answer = torch.tensor(int(flag), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    with _starting():
        dist.broadcast(answer, 0)
    return bool(answer)


def wait_for_all() -> None:
    if dist.is_initialized():
        with _starting():
            dist.barrier()


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # as torch tells of a connection that is gone
        raise PeerFailed(f"rank {dist.get_rank()} gave up while starting: {reason_of(error)}") from error


def leave() -> None:
    """Part from the other processes, at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reason_of(error: Exception) -> str:
    """What an error says, in one line of bearable length."""
    return shorten(" ".join(str(error).split()), 300)
