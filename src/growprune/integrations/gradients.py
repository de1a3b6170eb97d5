"""The gradients that edits look at, where a trainer has them in several processes, or not yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

from growprune.engine.rng import rng_state, set_rng_state
from growprune.errors import GrowpruneError
from growprune.plan import By
from growprune.sparse.internals import internals
from growprune.sparse.model import SparseModel


def share_gradients(sparse: SparseModel) -> None:
    """Let edits that look at gradients see those of all processes, so that all choose the same weights."""
    if _num_processes() > 1 and internals(sparse).ranks is None:  # of a sharded model, they are those of all already
        internals(sparse).gradients.add_up = _summed


@contextlib.contextmanager
def looking(by: By) -> Iterator[None]:
    """While it lasts, losses are looked at before the first step, for an edit by gradient.

    The training then draws the random numbers that it would have drawn anyway. GraSP differentiates twice, which the
    fast kernels of attention cannot.
    """
    if by is By.GRASP and _num_processes() > 1:
        raise GrowpruneError("by is grasp, which one process computes from its own batches: use one process, or snip")
    before = rng_state()
    with sdpa_kernel(SDPBackend.MATH) if by is By.GRASP else contextlib.nullcontext():
        yield
    set_rng_state(before)


def _num_processes() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _summed(tensor: Tensor) -> Tensor:
    total = tensor.to_dense().contiguous().clone() if tensor.is_sparse else tensor.contiguous().clone()
    distributed.all_reduce(total)
    return total
