"""GrowPrune on two processes with DistributedDataParallel: they stay equal to the last bit."""

import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo  # which the first step of an optimizer would import
from replicas import on_two_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from growprune.errors import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402

pytestmark = pytest.mark.slow


class Module(pl.LightningModule):
    def __init__(self, drifts: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))
        self.drifts = drifts
        self.wrapped: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.wrapped.add(isinstance(self.trainer.strategy.model, DistributedDataParallel))
        if self.drifts and self.trainer.global_step == 4:
            with torch.no_grad():
                self.net[2].weight.mul_(1 + torch.rand(40, 40) * self.global_rank)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def replica(method: str, storage: str, drifts: bool) -> Any:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(int(os.environ["RANK"]))  # the first weights differ, as do the data
    options = {} if method == "snip" else {"every": 2}
    module, callback = Module(drifts), GrowPrune(method, sparsity=0.9, parts=2, storage=storage, **options)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[callback], **quiet)
    try:
        trainer.fit(module, DataLoader(TensorDataset(x, (x[:, :4] + x[:, 4:]).argmax(1)), 6, shuffle=True))
    except GrowpruneError as error:
        return str(error)
    assert module.wrapped == {True}
    assert callback.cursor.iteration == 12  # 48 examples in batches of 6 on two processes, three times
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("method", ["rigl", "snip"])
def test_two_processes_end_with_the_same_bits_and_exact_counts(method: str, server: ProcessPoolExecutor) -> None:
    one, other = server.submit(on_two_processes, replica, method, "masked", False).result()
    for name in one:
        assert (one[name] == other[name]).all(), name
    assert sum(int((one[f"net.{layer}.weight"] != 0).sum()) for layer in (0, 2)) == 192


@pytest.mark.parametrize(
    ("storage", "drifts", "expected"),
    [("masked", True, "the 2 processes have different masks"), ("compact", False, "'compact' does not work with DDP")],
)
def test_processes_that_drift_apart_and_compact_storage_are_refused_in_both(
    storage: str, drifts: bool, expected: str, server: ProcessPoolExecutor
) -> None:
    for told in server.submit(on_two_processes, replica, "gmp", storage, drifts).result():
        assert expected in told
