"""The processes that share the weights of one model, and their collectives."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


class Ranks:
    """The ranks over which weights are sharded, in order. The n-th rank has the n-th chunk of every tensor.

    Args:
        device: the device that tensors must be on to be sent.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)

    @property
    def is_first(self) -> bool:
        """True if this process writes what all processes share."""
        return self.rank == 0

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the (start, end) of each rank in a tensor of this length, as `torch.chunk` splits it."""
        step = -(-length // self.size)
        return [(min(length, step * rank), min(length, step * (rank + 1))) for rank in range(self.size)]

    def local_shard(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor, as a view."""
        start, stop = self.spans(tensor.shape[0])[self.rank]
        return tensor[start:stop]

    def all_gather(self, shard: Tensor, length: int) -> Tensor:
        """Gather a tensor with this many rows from the shards of all ranks: the inverse of `local_shard`."""
        if self.size == 1:
            return shard.clone()
        rows = [stop - start for start, stop in self.spans(length)]
        padded = torch.zeros(max(rows), *shard.shape[1:], dtype=shard.dtype, device=self.device)
        padded[: len(shard)] = shard
        shards = [torch.empty_like(padded) for _ in rows]
        distributed.all_gather(shards, padded, group=self.group)
        return torch.cat([own[:count] for own, count in zip(shards, rows, strict=True)]).to(shard.device)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        total = tensor.to(self.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)
