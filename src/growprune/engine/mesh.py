"""Several processes: how those that torchrun started find each other, and the task of each.

They form two axes: mask groups, which take the branches of a fork, and data replicas inside each group. Replicas of a
group have consecutive ranks: with 2 groups of 3 replicas, ranks 0-2 are group 0. A single process is a mesh of one
group with one replica, and runs the same code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from growprune.errors import GrowpruneError, shorten
from growprune.masks.bits import Snapshot
from growprune.plan import Fork, Plan
from growprune.sparse.model import SparseModel
from growprune.sparse.stepper import first_to_differ


class PeerFailed(RuntimeError):
    """Another process failed, did not arrive in time, or has other data than this one."""


def join(device: torch.device, timeout_seconds: float) -> int:
    """Join the processes of torchrun, if there are any, and return the rank of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        wait = timedelta(seconds=timeout_seconds)
        backend = take_a_gpu(device) if device.type == "cuda" else "gloo"
        try:
            store, rank, world = next(rendezvous("env://", timeout=wait))
        except (dist.DistError, dist.DistNetworkError, dist.DistStoreError) as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            why = f"({reason_of(error)}). Use a free port on a machine that all others can reach"
            raise PeerFailed(f"cannot connect to {where} {why}") from error
        fresh = PrefixStore(_meeting_name(store, rank, world, timeout_seconds), store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=wait)
        atexit.register(leave)
    return dist.get_rank() if dist.is_initialized() else 0


def take_a_gpu(device: torch.device) -> str:
    """Choose the GPU of this process, unless the recipe names one, and the backend. NCCL needs a GPU per process."""
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.index is None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    else:  # the recipe names one, for all processes of this machine
        gpus = 1
    return "nccl" if processes <= gpus else "gloo"


def _meeting_name(store: Any, rank: int, world: int, timeout_seconds: float) -> str:
    """A name that all processes of this start agree on, and that no earlier start had.

    torchrun keeps one store over restarts, so entries of dead processes are still there. Therefore every process asks
    under a unique name, and rank 0 answers until all have received the answer.
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
        raise PeerFailed(f"rank 0 gave up while starting: rank {min(waiting)} did not join in {timeout_seconds:g} s")
    return mine


def ask_first(flag: bool) -> bool:
    """The answer of rank 0, on all ranks. Other machines may see an older state of the folder."""
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
    except RuntimeError as error:  # torch raises it for a lost connection
        raise PeerFailed(f"rank {dist.get_rank()} gave up while starting: {reason_of(error)}") from error


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reason_of(error: BaseException) -> str:
    """The message of an error in one short line."""
    return shorten(" ".join(str(error).split()), 300)


ASK_EVERY = 16
"""On GPUs, iterations between checks whether any replica wants to stop."""


class Mesh:
    """The groups and replicas of a run, and the place of this process among them.

    With replicas=0, as many processes train each branch together as the plan can use.
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
        self.is_first = self.rank == 0
        """True if this process writes the shared files."""
        self.leads_group = self.replica == 0
        """True if this process writes the files of its group."""
        self.bytes_received = 0
        self.phase: object = "starting"
        """The current phase of the run, for error messages."""
        ranks = [range(g * self.replicas, (g + 1) * self.replicas) for g in range(self.groups)]
        with _starting():
            self.data_group = self._axis(ranks)
            """The process group of this branch's replicas; None if there is one only."""
            self._mask_group = self._axis(list(zip(*ranks, strict=True)))
            wait_for_all()  # so that none that is refused next leaves while another still connects to it

    def _axis(self, lines: Sequence[Sequence[int]]) -> Any:
        """The process group of this rank along an axis. Every rank has to create all groups."""
        made = [dist.new_group(list(line), timeout=self._timeout) if len(line) > 1 else None for line in lines]
        return next(group for group, line in zip(made, lines, strict=True) if self.rank in line)

    def is_local(self, branch: int) -> bool:
        """True if this process' group trains a branch. With fewer groups than branches, each group trains several."""
        return branch % self.groups == self.group

    def barrier(self, where: str) -> None:
        """Wait until every process arrives. The error names a process that does not."""
        if self.world > 1:
            with self.waiting(where):
                if dist.get_backend() == "gloo":
                    dist.monitored_barrier(timeout=self._timeout, wait_all_ranks=True)
                else:
                    dist.barrier()

    def agree(self, what: dict[str, bytes], where: str) -> None:
        """Raise on every process if they differ in anything. The error names the rank and what differs."""
        with self.waiting("comparing with the others"):
            differing = first_to_differ(what.values(), self.device())
        if differing is not None:
            rank, index = differing
            raise PeerFailed(f"{where}: {list(what)[index]} on rank {rank} differs from rank 0. All must be equal")

    def agree_on_masks(self, sparse: SparseModel, where: str) -> None:
        """Check that all processes have the same masks, because every process prunes by itself."""
        if self.world > 1:
            bits = {f"mask of {name}": mask.cpu().numpy().tobytes() for name, mask in sparse.packed_masks().items()}
            self.agree(bits, where)

    def any(self, flag: bool, iteration: int) -> bool:
        """True if the flag is set on any replica of this group. On GPUs, checked only every ASK_EVERY iterations."""
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
        """Collect every part of a fork from the group that trained its branch.

        Args:
            returned: the tensors that the branches of this process' group return.
            parts: the names of the tensors that each branch returns.
            like: tensors with the same names, for shapes and dtypes.
        """
        if self.groups == 1:
            return returned
        combined, device = dict(returned), self.device()
        for branch, names in enumerate(parts):
            source = branch % self.groups * self.replicas + self.replica
            is_mine = source == self.rank
            with self.waiting(f"combining branch {branch}"):
                counts = torch.tensor([returned[n][0].numel() if is_mine else 0 for n in names], device=device)
                dist.broadcast(counts, source, group=self._mask_group)
                for name, count in zip(names, counts.tolist(), strict=True):
                    if not is_mine:
                        values, mask = like[name]
                        is_pruned = mask is not None  # then there are live values only
                        values = values.new_empty(count) if is_pruned else torch.empty_like(values)
                        combined[name] = values, torch.empty_like(mask) if mask is not None else None
                    for tensor in combined[name]:
                        if tensor is not None:
                            moved = tensor.to(device)
                            dist.broadcast(moved, source, group=self._mask_group)
                            tensor.copy_(moved)
                            self.bytes_received += 0 if is_mine else tensor.numel() * tensor.element_size()
        return combined

    @contextlib.contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Context for waiting on other processes. If they do not arrive, the error says who waited and where."""
        try:
            yield
        except RuntimeError as error:
            # gloo has no error class of its own
            is_about_peers = any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup", "monitoredBarrier"))
            if isinstance(error, PeerFailed) or not (is_about_peers or isinstance(error, dist.DistError)):
                raise
            who = f"rank {self.rank} of {self.world} gave up in {self.phase}"
            raise PeerFailed(f"{who}, while {where}: {reason_of(error)}") from error

    def tell_failure(self, error: BaseException) -> None:
        """Tell the processes that wait for the result of rank 0 that there will be none."""
        if self.world > 1 and self.is_first:
            with contextlib.suppress(RuntimeError):
                _get_default_store().set("failed", reason_of(error))

    def check_first(self) -> None:
        """Raise if rank 0 has failed, or is gone."""
        where = f"rank {self.rank} gave up while waiting for the result of rank 0"
        try:
            if _get_default_store().check(["failed"]):
                raise PeerFailed(f"{where}: {_get_default_store().get('failed').decode()}")
        except dist.DistError as error:
            raise PeerFailed(f"{where}: {reason_of(error)}") from error

    def device(self) -> torch.device:
        is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def check_shape(world: int, replicas: int, branches: int) -> None:
    if world % replicas:
        raise GrowpruneError(f"the number of processes must be a multiple of replicas={replicas}, got {world}")
    if world // replicas > branches:
        raise GrowpruneError(
            f"{world} processes with replicas={replicas} make {world // replicas} groups, but the plan has only "
            f"{branches} branches. Start at most {branches * replicas} processes, or set "
            f"replicas={-(-world // branches)}"
        )
