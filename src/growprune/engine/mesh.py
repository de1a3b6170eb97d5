"""Several processes: how those that torchrun started find each other, and what each of them does.

They lie on two axes: mask groups, which take the branches of a fork, and data replicas inside each group. Ranks count
through the replicas first: with 2 groups of 3 replicas, ranks 0-2 are group 0. One process is a mesh of one group with
one replica, and runs the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from growprune.errors import GrowpruneError, shorten
from growprune.masks.bits import Snapshot, pack
from growprune.plan import Fork, Plan
from growprune.sparse.model import SparseModel


class PeerFailed(RuntimeError):
    """Another process did not come to where this one waits for it, or came with something else."""


def join(device: torch.device, timeout_seconds: float) -> int:
    """Join the processes that torchrun started, if it did, and return the rank of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        wait = timedelta(seconds=timeout_seconds)
        backend = take_a_gpu(device) if device.type == "cuda" else "gloo"
        store, rank, world = _find_store(wait)
        fresh = PrefixStore(_meeting_name(store, rank, world, timeout_seconds), store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=wait)
    return dist.get_rank() if dist.is_initialized() else 0


def take_a_gpu(device: torch.device) -> str:
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
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and job() == earlier_job


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


ASK_EVERY = 16
"""How many iterations to wait, on GPUs, before the replicas are asked again whether to stop."""


class Mesh:
    """Where this process stands among the others.

    Args:
        replicas: how many processes train each branch together; 0 for as many as the plan can use that way.
        timeout_seconds: how long to wait for another process.
    """

    def __init__(self, plan: Plan, replicas: int, timeout_seconds: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        branches = max((len(stage.branches) for stage in plan if isinstance(stage, Fork)), default=1)
        self.replicas = replicas or (self.world if branches == 1 else 1)
        check_shape(self.world, self.replicas, branches)
        self.groups = self.world // self.replicas
        self.group, self.replica = divmod(self.rank, self.replicas)
        self.bytes_received = 0
        self.phase = "starting"
        """What the run is at, for whoever has to be told that it hangs there."""
        ranks = [range(g * self.replicas, (g + 1) * self.replicas) for g in range(self.groups)]
        self.data_group = self._axis(ranks)
        """The process group of this branch's replicas; None if there is one only."""
        self._mask_group = self._axis(list(zip(*ranks, strict=True)))

    def _axis(self, lines: Sequence[Sequence[int]]) -> Any:
        """The process group of the line this rank is on; every rank has to make them all."""
        made = [dist.new_group(list(line), timeout=self._timeout) if len(line) > 1 else None for line in lines]
        return next(group for group, line in zip(made, lines, strict=True) if self.rank in line)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all share."""
        return self.rank == 0

    @property
    def leads_group(self) -> bool:
        """Whether this process writes what its group alone knows."""
        return self.replica == 0

    def is_local(self, branch: int) -> bool:
        """Whether this process' group trains a branch; with fewer groups than branches, they go in waves."""
        return branch % self.groups == self.group

    def barrier(self, where: str) -> None:
        """Wait until every process is here; one that does not come is named."""
        if self.world > 1:
            with self.waiting(where):
                if dist.get_backend() == "gloo":
                    dist.monitored_barrier(timeout=self._timeout, wait_all_ranks=True)
                else:
                    dist.barrier()

    def agree(self, what: dict[str, str], where: str) -> None:
        """Raise on every process if they differ in any of these texts, naming the process and what differs."""
        if self.world == 1:
            return
        mine = torch.tensor([_number(text) for text in what.values()], dtype=torch.int64, device=self.device())
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        with self.waiting("comparing with the others"):
            dist.all_gather(all_of_them, mine)
        for rank, theirs in enumerate(all_of_them):
            for name, here, there in zip(what, all_of_them[0].tolist(), theirs.tolist(), strict=True):
                if here != there:
                    raise PeerFailed(f"{where}: rank {rank} has another {name} than rank 0: all must have the same")

    def agree_on_masks(self, sparse: SparseModel, where: str) -> None:
        """Every process prunes by itself; that they prune alike is not left to hope."""
        if self.world > 1:
            packed = {name: pack(mask).cpu().numpy().tobytes() for name, mask in sparse.masks.items()}
            digests = {f"mask of {name}": hashlib.sha256(bits).hexdigest() for name, bits in packed.items()}
            self.agree(digests, where)

    def any(self, flag: bool, iteration: int) -> bool:
        """Whether the flag is up on any replica of this group. Asked seldom where the answer makes a GPU wait."""
        if self.data_group is None:
            return flag
        if self.device().type == "cuda" and iteration % ASK_EVERY:
            return False
        return bool(self.sum_over_replicas(torch.tensor(float(flag), device=self.device())))

    def sum_over_replicas(self, value: Tensor) -> Tensor:
        if self.data_group is not None:
            value = value.clone()
            with self.waiting("adding up over replicas"):
                dist.all_reduce(value, group=self.data_group)
        return value

    def combine(self, returned: Snapshot, parts: Sequence[Sequence[str]], like: Snapshot) -> Snapshot:
        """Every part of a fork, each from the group that trained its branch.

        Args:
            returned: the tensors of the parts that the branches trained by this process' group return.
            parts: by branch, the names of the tensors it returns.
            like: any copy of all of them, for shapes and dtypes.
        """
        if self.groups == 1:
            return returned
        combined = dict(returned)
        for branch, names in enumerate(parts):
            source = branch % self.groups * self.replicas + self.replica
            with self.waiting(f"combining branch {branch}"):
                combined |= self._broadcast(combined, names, like, source)
        return combined

    def _broadcast(self, have: Snapshot, names: Sequence[str], like: Snapshot, source: int) -> Snapshot:
        is_mine = source == self.rank
        device = self.device()
        counts = torch.tensor([have[n][0].numel() if is_mine else 0 for n in names], device=device)
        dist.broadcast(counts, source, group=self._mask_group)
        received: Snapshot = {}
        for name, count in zip(names, counts.tolist(), strict=True):
            values, mask = have[name] if is_mine else _empty_like(like[name], count)
            for tensor in (values, mask):
                if tensor is not None:
                    moved = tensor.to(device)
                    dist.broadcast(moved, source, group=self._mask_group)
                    tensor.copy_(moved)
                    self.bytes_received += 0 if is_mine else tensor.numel() * tensor.element_size()
            received[name] = values, mask
        return received

    @contextlib.contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Around what waits for other processes: if they do not come, says who waited, and where."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PeerFailed) or not _is_about_peers(error):
                raise
            who = f"rank {self.rank} of {self.world} gave up in {self.phase}"
            raise PeerFailed(f"{who}, while {where}: {reason_of(error)}") from error

    def device(self) -> torch.device:
        is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _is_about_peers(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it because a peer is late, or gone; gloo has no kind of error of its own."""
    words = ("gloo", "NCCL", "ProcessGroup", "monitoredBarrier")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _empty_like(like: tuple[Tensor, Tensor | None], count: int) -> tuple[Tensor, Tensor | None]:
    values, mask = like
    if mask is None:
        return torch.empty_like(values), None
    return torch.empty(count, dtype=values.dtype, device=values.device), torch.empty_like(mask)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def check_shape(world: int, replicas: int, branches: int) -> None:
    if world % replicas:
        raise GrowpruneError(
            f"{world} processes cannot be groups of {replicas} replicas: start a multiple of {replicas}"
        )
    if world // replicas > branches:
        raise GrowpruneError(
            f"{world} processes with {replicas} replicas each are {world // replicas} groups, but the plan has only "
            f"{branches} branches: start at most {branches * replicas}, or set replicas={-(-world // branches)}"
        )
