"""A loop of one's own with accelerate: what it wraps is unwrapped, and its checkpoints resume to the same bits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp
from growprune.integrations.accelerate import keep_in_checkpoints
from growprune.sparse.stepper import unwrapped


def run(folder: Path, storage: str, *, resume: bool = False, is_kept: bool = True) -> gp.Sparsifier:
    """Eight steps of RigL; saves after the third, or resumes from there."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))
    loader: Any = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(2, (32,))), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2), loader)
    sparsifier = gp.sparsify(model, optimizer, "rigl", sparsity=0.75, iterations=8, every=2, storage=storage)
    if is_kept:
        keep_in_checkpoints(accelerator, sparsifier)
    if resume:
        accelerator.load_state(str(folder))
    for x, y in accelerator.skip_first_batches(loader, sparsifier.cursor.iteration):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if sparsifier.cursor.iteration == 3 and not resume:
            accelerator.save_state(str(folder))
    return sparsifier


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_loop_resumes_from_a_checkpoint_of_accelerate_to_the_same_bits(storage: str, tmp_path: Path) -> None:
    whole = run(tmp_path, storage)
    again = run(tmp_path, storage, resume=True)
    assert whole.is_finished and again.is_finished
    assert whole.sparse.num_alive * 4 == whole.sparse.num_prunable
    weights = again.sparse.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.sparse.model.state_dict().items())


def test_a_checkpoint_of_accelerate_with_another_storage_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "masked")
    with pytest.raises(gp.GrowpruneError, match=r"storage='masked', .* resume with storage='masked'"):
        run(tmp_path, "compact", resume=True)


def test_a_checkpoint_of_accelerate_without_our_state_is_named(tmp_path: Path) -> None:
    run(tmp_path, "masked", is_kept=False)
    with pytest.raises(gp.GrowpruneError, match="has no complete folder 'growprune': it was saved without"):
        run(tmp_path, "masked", resume=True)


def test_attach_unwraps_what_accelerate_has_prepared() -> None:
    model = nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = Accelerator(cpu=True).prepare(inner)
    assert wrapped is not inner and unwrapped(wrapped) is inner
    sparse = gp.SparseModel(model, sparsity=0.5)
    assert sparse.attach(wrapped) is wrapped
    sparse.prune()
    model(torch.ones(1, 8)).sum().backward()
    wrapped.step()
    assert int(torch.count_nonzero(model.weight)) == 32


def refuse(match: str, storage: str = "masked", **accelerator: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.5, iterations=8, storage=storage)
    with pytest.raises(gp.GrowpruneError, match=match):
        keep_in_checkpoints(SimpleNamespace(**accelerator), sparsifier)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharding_by_accelerate_is_refused(kind: str) -> None:
    refuse(f"{kind}: .*growprune.save_sharded_checkpoint", distributed_type=f"DistributedType.{kind}")


def test_compact_weights_in_several_processes_are_refused_before_training() -> None:
    about = {"distributed_type": "DistributedType.MULTI_CPU", "num_processes": 2}
    refuse("storage='compact' does not work with DDP.*use storage='masked'", "compact", **about)


def test_keep_in_checkpoints_takes_only_a_sparsifier() -> None:
    with pytest.raises(gp.GrowpruneError, match="takes a Sparsifier, got str"):
        keep_in_checkpoints(SimpleNamespace(), "cursor")  # type: ignore[arg-type]
