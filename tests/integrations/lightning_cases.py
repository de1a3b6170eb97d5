"""A small module of Lightning as anyone would write it, its data, and trainers for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from growprune.integrations.lightning import GrowPrune

QUIET = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
"""What Lightning says of small tests."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


class Module(pl.LightningModule):
    """A module as anyone would write it."""

    def __init__(self, net: nn.Module | None = None, schedule: Any = None, lr: float = 0.1) -> None:
        super().__init__()
        self.net = mlp() if net is None else net
        self.schedule, self.lr = schedule, lr
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class Loader(DataLoader[Any]):
    """Batches in an order of their own; it can be gone on with in the middle, as torchdata's StatefulDataLoader."""

    def __init__(self, num_batches: int = 6) -> None:
        super().__init__(range(num_batches))  # type: ignore[arg-type]
        self.num_batches, self.epoch, self.done = num_batches, 0, 0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())  # as a DataLoader draws a seed for its workers
        return self.batches()

    def batches(self) -> Iterator[Any]:
        if self.done == self.num_batches:  # Lightning counts batches, and never asks for the end
            self.epoch, self.done = self.epoch + 1, 0
        while self.done < self.num_batches:
            self.done += 1
            yield examples(100 * self.epoch + self.done)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


def examples(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, (x[:, :4] + x[:, 4:]).argmax(1)


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*examples(0, 48)), 8, shuffle=True)


def fit(
    folder: Path, callback: GrowPrune, module: Any = None, *, train: Any = None, ckpt: Any = None, **settings: Any
) -> Any:
    """Train 3 epochs of 6 batches, if nothing else is said."""
    torch.manual_seed(0)
    module = Module() if module is None else module
    others = settings.pop("callbacks", [])
    usual = {"max_epochs": 3, "logger": False, "enable_checkpointing": bool(others), "accelerator": "cpu"}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = pl.Trainer(callbacks=[callback, *others], **{**usual, **quiet, **settings})
    torch.manual_seed(1)
    trainer.fit(
        module, Loader() if train is None else train, DataLoader(TensorDataset(*examples(9)), 8), ckpt_path=ckpt
    )
    return module


def zeros(module: nn.Module, callback: GrowPrune) -> int:
    """How many prunable weights are exactly zero, by the tensors themselves."""
    state = module.state_dict()
    return sum(int((state[name] == 0).sum()) for name in callback.sparse.masks)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name


def every(folder: Path, steps: int, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=steps, save_top_k=-1, **settings)
