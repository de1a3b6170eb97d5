"""A loop of one's own with accelerate on two processes: the same masks, exact resume, and no compact weights."""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which the first step of an optimizer would import
from accelerate import Accelerator
from replicas import on_two_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp
from growprune.integrations.accelerate import keep_in_checkpoints

pytestmark = pytest.mark.slow


def make() -> tuple[nn.Module, Any, DataLoader[Any]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=draw)
    torch.manual_seed(int(os.environ["RANK"]))  # the first weights differ, until accelerate wraps them
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    data = TensorDataset(x, (x[:, :4] + x[:, 4:]).argmax(1))
    return model, torch.optim.AdamW(model.parameters(), 1e-2), DataLoader(data, 4)


def replica(method: str, options: dict[str, Any], folder: Path, resume: bool) -> dict[str, Any]:
    """Eight steps; saves after the fifth, or resumes from there."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*make())
    assert accelerator.num_processes == 2 and isinstance(model, DistributedDataParallel)
    sparsifier = gp.sparsify(model, optimizer, method, sparsity=0.9, iterations=len(loader), **options)
    keep_in_checkpoints(accelerator, sparsifier)
    if resume:
        accelerator.load_state(str(folder))
    for x, y in accelerator.skip_first_batches(loader, sparsifier.cursor.iteration):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        if sparsifier.cursor.iteration == 5 and not resume:
            accelerator.save_state(str(folder))
    assert sparsifier.is_finished and sparsifier.cursor.iteration == 8
    weights = {name: tensor.numpy() for name, tensor in sparsifier.model.state_dict().items()}
    return {**weights, **{f"mask of {name}": mask.numpy() for name, mask in sparsifier.sparse.masks.items()}}


@pytest.mark.parametrize(("method", "options"), [("gradual_gap", {}), ("rigl", {"every": 2})])
def test_two_processes_have_the_same_masks_and_resume_to_the_same_bits(
    method: str, options: dict[str, Any], server: ProcessPoolExecutor, tmp_path: Path
) -> None:
    runs = []
    for resume in (False, True):
        runs += server.submit(on_two_processes, replica, method, options, tmp_path, resume).result()
    for other in runs[1:]:
        assert runs[0].keys() == other.keys()
        assert [name for name, array in runs[0].items() if not (array == other[name]).all()] == []
    assert sum(int(mask.sum()) for name, mask in runs[0].items() if name.startswith("mask")) == 128  # of 1,280


def refused(is_prepared: bool) -> str:
    accelerator, (model, optimizer, loader) = Accelerator(cpu=True), make()
    if is_prepared:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    try:
        sparsifier = gp.sparsify(model, optimizer, sparsity=0.9, iterations=8, storage="compact")
        keep_in_checkpoints(accelerator, sparsifier)
    except gp.GrowpruneError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("is_prepared", [True, False])
def test_compact_storage_is_refused_in_one_line_on_both(is_prepared: bool, server: ProcessPoolExecutor) -> None:
    for told in server.submit(on_two_processes, refused, is_prepared).result():
        assert told.startswith("storage='compact' ") and "use storage='masked'" in told and "\n" not in told
