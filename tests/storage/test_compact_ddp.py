"""Data parallelism moves what lives, and nothing else."""

import os
import tempfile
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from growprune.errors import GrowpruneError
from growprune.masks.partition import Partition
from growprune.plan import By
from growprune.sparse.model import SparseModel


def make(storage: str) -> tuple[SparseModel, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 64), nn.Linear(64, 8))
    sparse = SparseModel(model, sparsity=0.9, storage=storage, seed=1)
    sparse.prune(by=By.RANDOM)
    sparse.grow(Partition.contiguous(model, 3)[2])
    return sparse, model


def train(sparse: SparseModel, forward: nn.Module, x: torch.Tensor) -> None:
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()


def counting(moved, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and not as text
    moved.append(bucket.buffer().numel() * bucket.buffer().element_size())
    averaged = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(averaged)
    # not `.then(...)`: gloo's thread may want to free that while this one, at its end, waits for gloo's thread
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(averaged)
    return done


def replica(rank: int, meeting: str, storage: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    sparse, model = make(storage)
    ddp = DistributedDataParallel(model)
    moved: list[int] = []
    ddp.register_comm_hook(moved, counting)
    train(sparse, ddp, batch()[rank::2])
    answer((rank, sum(moved) / 3, {name: tensor.numpy() for name, tensor in model.state_dict().items()}), results)


def answer(result: Any, results: Any) -> None:
    """Hand a result over, and end the process at once: torch's own teardown of replicas sometimes hangs or crashes."""
    results.put(result)
    results.close()
    results.join_thread()
    dist.barrier()  # the other still sends and receives
    os._exit(0)


def batch() -> torch.Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(2))


def on_two_processes(option: Any, target: Any = replica) -> list[Any]:
    context = forked.context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/meeting", option, results)
        processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        found = sorted((results.get(timeout=forked.HANG_SECONDS) for _ in processes), key=lambda result: result[0])
        for process in processes:
            process.join()
    return found


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_step_moves_what_is_stored_and_ends_where_one_process_ends(storage: str) -> None:
    sparse, model = make(storage)
    stored = sum(parameter.numel() for parameter in model.parameters())
    assert storage == "masked" or stored < 0.6 * (sparse.num_prunable + 16 + 64 + 8)
    train(sparse, model, batch())
    for _, moved, state in on_two_processes(storage):
        assert moved == 4 * stored  # compact: no bits, no offsets, no zeros
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(torch.from_numpy(state[name]), tensor, rtol=1e-5, atol=1e-6)
        for name, mask in sparse.masks.items():
            assert (torch.from_numpy(state[name])[~mask] == 0).all()


def stale(rank: int, meeting: str, wraps_again: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    sparse, model = make("compact")
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = sparse.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    told = ""
    for is_edited in (False, True):
        if is_edited:
            sparse.grow(Partition.contiguous(model, 3)[0])
            ddp = DistributedDataParallel(model, find_unused_parameters=True) if wraps_again else ddp
        ddp(batch()[rank::2]).square().mean().backward()
        try:
            optimizer.step()
        except GrowpruneError as error:
            told = str(error)
    answer((rank, told), results)


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_replicas_whose_wrapper_is_older_than_an_edit_are_refused() -> None:
    for _, told in on_two_processes(False, stale):
        assert told == "an edit replaced weights that DistributedDataParallel holds: wrap the model again"
    assert on_two_processes(True, stale) == [(0, ""), (1, "")]
