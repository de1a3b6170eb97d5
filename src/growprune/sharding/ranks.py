"""The processes that share the weights of one model, and what they send each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
"""Its name before torch 2.13 is the second."""


class Ranks:
    """Those along which weights are sharded, in order: each has the n-th chunk of every tensor.

    Args:
        group: the process group of a shard dimension.
        replicas: that of the dimension along which shards are the same (HSDP), if there is one.
        device: where tensors have to lie to be sent.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        device: torch.device,
        replicas: distributed.ProcessGroup | None = None,
    ) -> None:
        self.group, self.replicas, self.device = group, replicas, device
        self.size, self.rank = distributed.get_world_size(group), distributed.get_rank(group)

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all have together."""
        is_first_replica = self.replicas is None or distributed.get_rank(self.replicas) == 0
        return self.rank == 0 and is_first_replica

    def spans(self, length: int) -> list[tuple[int, int]]:
        """From where to where each rank has a tensor of some length, as `torch.chunk` cuts it."""
        step = -(-length // self.size)
        return [(min(length, step * rank), min(length, step * (rank + 1))) for rank in range(self.size)]

    def cut(self, flat: Tensor) -> Tensor:
        """What this rank keeps of a tensor: a view."""
        start, stop = self.spans(flat.shape[0])[self.rank]
        return flat[start:stop]

    def join(self, part: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """A flat tensor from the parts of all ranks, which go from where to where in it."""
        lengths = [stop - start for start, stop in spans]
        if self.size == 1:
            return part.clone()
        most = max(lengths)
        padded = torch.zeros(most, dtype=part.dtype, device=self.device)
        padded[: part.numel()] = part
        parts = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(parts, padded, group=self.group)
        return torch.cat([own[:length] for own, length in zip(parts, lengths, strict=True)]).to(part.device)

    def join_alike(self, part: Tensor) -> Tensor:
        """A flat tensor from the parts of all ranks, which are of one length: without a copy of any of them."""
        part = part.to(self.device)
        found = part.new_empty(part.numel() * self.size)
        _gather(found, part, group=self.group)
        return found

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, of which each has other weights."""
        total = tensor.to(self.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def any(self, flags: Tensor) -> Tensor:
        """Which flags any rank or replica has set."""
        return self._over_replicas_too(flags.to(torch.int64)) > 0

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks and replicas, of which each has seen other examples."""
        count = self.size * (1 if self.replicas is None else distributed.get_world_size(self.replicas))
        return self._over_replicas_too(tensor).div_(count).to(tensor.device)

    def _over_replicas_too(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        for group in filter(None, (self.group, self.replicas)):
            distributed.all_reduce(total, group=group)
        return total

    def each(self, numbers: Tensor) -> Tensor:
        """A row of numbers from each rank."""
        found = self.join(numbers, [(0, numbers.numel())] * self.size)
        return found.view(self.size, numbers.numel())
