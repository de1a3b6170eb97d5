"""Small Transformers, and processes that stay, for the tests of sharding."""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import forked
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import growprune as gp

WORDS = 11


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


class Transformer(nn.Module):
    """Smooth: no ReLU on whose kink the last bit could decide."""

    def __init__(self, width: int = 16, depth: int = 2, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def batches(count: int, *, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (8, 6), generator=generator) for _ in range(count)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def mine(tokens: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The examples of this rank; all of them, without a mesh."""
    return tokens if mesh is None else tokens[dist.get_rank() :: dist.get_world_size()]


def make(*, is_checkpointed: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> gp.SparseModel:
    torch.manual_seed(0)
    model = Transformer(is_checkpointed=is_checkpointed).to(dtype)
    return gp.SparseModel(model, **{"sparsity": 0.8, "storage": "compact", "seed": 3, **settings})


Arrays = dict[str, np.ndarray[Any, Any]]


def sent(tensors: dict[str, Tensor]) -> Arrays:
    """Tensors as what goes from one process to another."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def received(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def weights_of(sparse: gp.SparseModel) -> dict[str, Tensor]:
    """By name: live values and masks, whole."""
    return {name: values for name, (values, _) in sparse.snapshot().items()} | {
        f"{name} (mask)": mask for name, mask in sparse.masks.items()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


# Processes


def _work(rank: int, world: int, meeting: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # torch says so of any that ends with a Linear
    wait = timedelta(seconds=forked.HANG_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=wait)
    mesh = init_device_mesh("cpu", (world,))
    while (task := pipe.recv()) is not None:
        body, arguments = task
        try:
            pipe.send((True, body(mesh, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


Run = Callable[..., list[Any]]


@contextmanager
def ranks(world: int) -> Iterator[Run]:
    """Some processes with a mesh of all; gives what runs a function on each, and returns what it returned."""
    context = forked.context()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world)]
        processes = [
            context.Process(target=_work, args=(rank, world, f"{folder}/meeting", pipes[rank][1]), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()

        def run(body: Callable[..., Any], *arguments: Any) -> list[Any]:
            for pipe, _ in pipes:
                pipe.send((body, arguments))
            found = [pipe.recv() for pipe, _ in pipes]
            assert all(is_well for is_well, _ in found), "\n".join(str(what) for is_well, what in found if not is_well)
            return [what for _, what in found]

        try:
            yield run
        finally:
            for pipe, _ in pipes:
                pipe.send(None)
            for process in processes:
                process.join(20)
                process.kill()
