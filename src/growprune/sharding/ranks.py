"""The processes that share the weights of one model, and their collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
"""The second is its name before torch 2.13."""


class Ranks:
    """The ranks over which weights are sharded, in order. The n-th rank has the n-th chunk of every tensor.

    Args:
        group: the process group of the shard dimension.
        replicas: the process group of the replica dimension (HSDP), if there is one.
        device: the device that tensors must be on to be sent.
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
        """True if this process writes what all processes share."""
        is_first_replica = self.replicas is None or distributed.get_rank(self.replicas) == 0
        return self.rank == 0 and is_first_replica

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the (start, end) of each rank in a tensor of this length, as `torch.chunk` splits it."""
        step = -(-length // self.size)
        return [(min(length, step * rank), min(length, step * (rank + 1))) for rank in range(self.size)]

    def cut(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a tensor, as a view."""
        start, stop = self.spans(flat.shape[0])[self.rank]
        return flat[start:stop]

    def join(self, part: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Gather a flat tensor from the parts of all ranks, given their (start, end) in it."""
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
        """Gather a flat tensor from equally long parts of all ranks, without copies."""
        part = part.to(self.device)
        found = part.new_empty(part.numel() * self.size)
        _gather(found, part, group=self.group)
        return found

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, each of which has different weights."""
        total = tensor.to(self.device, copy=True)
        distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def any(self, flags: Tensor) -> Tensor:
        """Return which flags any rank or replica has set."""
        return self._over_replicas_too(flags.to(torch.int64)) > 0

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks and replicas, each of which has seen different examples."""
        count = self.size * (1 if self.replicas is None else distributed.get_world_size(self.replicas))
        return self._over_replicas_too(tensor).div_(count).to(tensor.device)

    def _over_replicas_too(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device, copy=True)
        for group in filter(None, (self.group, self.replicas)):
            distributed.all_reduce(total, group=group)
        return total

    def each(self, numbers: Tensor) -> Tensor:
        """Gather a row of numbers from each rank."""
        found = self.join(numbers, [(0, numbers.numel())] * self.size)
        return found.view(self.size, numbers.numel())
