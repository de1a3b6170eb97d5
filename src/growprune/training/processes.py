"""Make several processes that train replicas of one model choose the same weights."""

from __future__ import annotations

from torch import Tensor, distributed

from growprune.sparse.model import SparseModel


def share_gradients(sparse: SparseModel) -> None:
    """Sum the gradients that edits use over all processes, so that all choose the same weights."""
    if num_processes() > 1 and sparse.ranks is None:  # those of a sharded model are summed already
        sparse.add_up_gradients(_summed)


def num_processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.to_dense().contiguous().clone() if tensor.is_sparse else tensor.contiguous().clone()
    distributed.all_reduce(total)
    return total
