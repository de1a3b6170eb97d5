"""Train a small network 90 % sparse with Lightning, keep the best sparse model, and save it in the sparse format.

    pip install '.[lightning]'
    python examples/lightning_fit.py

Takes seconds on a CPU. The data are made up: which of four noisy waves is it?
"""

import argparse
import math
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp
from growprune.integrations.lightning import GrowPrune


def waves(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (count,), generator=generator)
    phase = torch.rand(count, 1, generator=generator)
    t = torch.linspace(0, 2 * math.pi, 64)
    noise = torch.randn(count, 64, generator=generator)
    return TensorDataset(torch.sin((y[:, None] + 1) * t + 6 * phase) + noise, y)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"))
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()

    pl.seed_everything(0)
    module = Classifier()
    sparsify = GrowPrune("gradual_gap", sparsity=0.9, parts=2)
    best = ModelCheckpoint(arguments.out, "best", monitor="accuracy", mode="max")  # at the target sparsity, always
    trainer = pl.Trainer(
        max_epochs=arguments.epochs, callbacks=[sparsify, best], accelerator="cpu", logger=False, log_every_n_steps=10
    )
    train = DataLoader(waves(2048, seed=1), 64, shuffle=True)
    validation = DataLoader(waves(512, seed=2), 512)
    trainer.fit(module, train, validation)

    (result,) = trainer.validate(module, validation, ckpt_path="best", verbose=False)
    path = arguments.out / "model.safetensors"
    gp.save(sparsify.sparse, path)
    print(sparsify.sparse.summary())
    print(f"{100 * result['accuracy']:.1f} % right, {path.stat().st_size:,} bytes in {path}")


if __name__ == "__main__":
    main()
