"""The same arguments in one's own loop, in transformers, in Lightning and in a recipe give the same bits."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import growprune as gp
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.integrations.lightning import GrowPrune
from growprune.integrations.transformers import GrowPruneCallback
from growprune.methods import METHODS
from growprune.tasks import Task

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]

ONE_LOOP = [name for name in METHODS if not name.startswith("parallel")]
STEPS, BATCH = 12, 4
RATE = 0.05


class Layers(nn.Module):
    """Built with the same weights wherever it is built."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.more = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.more(self.body(x)))
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}


def example() -> tuple[Tensor, Tensor]:
    """All examples are this one, so that their order does not matter."""
    return torch.linspace(-1, 1, 8), torch.tensor(1)


def batch() -> tuple[Tensor, Tensor]:
    x, y = example()
    return x.expand(BATCH, -1).contiguous(), y.expand(BATCH).contiguous()


def arguments_of(name: str) -> dict[str, Any]:
    """What every door is given. Methods that count in epochs get epochs of one iteration."""
    taken = inspect.signature(METHODS[name]).parameters
    given: dict[str, Any] = {"sparsity": 0.75, "parts": 4, "seed": 5, "keep_dense": ["head"], "lr_scaling": 0.5}
    if "iterations" in taken:
        given |= {"iterations": STEPS}
    elif "steps" in taken:
        given |= {"steps": 3, "epochs": 2, "finetune": STEPS - 6, "iterations_per_epoch": 1}
    elif "finetune" in taken:
        given |= {"epochs": 5, "finetune": STEPS - 5, "iterations_per_epoch": 1}
    else:
        given |= {"epochs": STEPS, "iterations_per_epoch": 1}
    return given | ({"every": 2} if "every" in taken else {})


Result = tuple[dict[str, Tensor], dict[str, Tensor]]


def result_of(sparse: gp.SparseModel) -> Result:
    return {name: p.detach() for name, p in sparse.model.named_parameters()}, dict(sparse.masks)


def own_loop(name: str) -> Result:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    x, y = batch()
    losses = [lambda: model(x, y)["loss"]] if name in ("snip", "grasp") else None
    sparsifier = gp.sparsify(model, optimizer, name, losses=losses, **arguments_of(name))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x, y)["loss"].backward()
        optimizer.step()
    assert sparsifier.is_finished
    return result_of(sparsifier.sparse)


def transformers(name: str, folder: Path) -> Result:
    x, y = example()
    data = [{"x": x, "labels": y}] * (STEPS * BATCH)
    model = Layers()
    callback = GrowPruneCallback(name, **arguments_of(name))
    sgd = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    restarts = {"learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": STEPS}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "save_strategy": "no"}
    args = TrainingArguments(str(folder), per_device_train_batch_size=BATCH, **restarts, **quiet)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback], optimizers=(sgd, None))  # type: ignore[arg-type, list-item]
    trainer.train()
    assert callback.cursor.is_over
    return result_of(callback.sparse)


class Module(LightningModule):
    """Layers, with the parameters' names as they are there."""

    def __init__(self) -> None:
        super().__init__()
        layers = Layers()
        self.body, self.more, self.head = layers.body, layers.more, layers.head

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.more(self.body(x))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)


def lightning(name: str, folder: Path) -> Result:
    callback = GrowPrune(name, **arguments_of(name))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = LightningTrainer(
        max_steps=STEPS, accelerator="cpu", callbacks=[callback], default_root_dir=folder, **quiet
    )
    loader = torch.utils.data.DataLoader([example()] * (STEPS * BATCH), BATCH)
    trainer.fit(Module(), loader)
    assert callback.cursor.is_over
    return result_of(callback.sparse)


@dataclass(frozen=True)
class OneBatch(Task):
    """An epoch is one batch."""

    metric = "accuracy"

    def build_model(self) -> nn.Module:
        return Layers()

    def example(self) -> Tensor:
        return batch()[0]

    def num_batches(self) -> int:
        return 1

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[Any]:
        if start == 0:
            yield batch()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(*batch)["loss"]
        return loss

    def evaluate(self, model: nn.Module, split: str, *, device: torch.device) -> dict[str, float]:
        return {"accuracy": 0.0}


def recipe(name: str, folder: Path) -> Result:
    given = arguments_of(name)
    given.pop("iterations_per_epoch", None)
    fields = {field: given.pop(field) for field in ("sparsity", "parts", "seed", "keep_dense", "lr_scaling")}
    optimizer, schedule = OptimizerConfig("sgd", lr=RATE, momentum=0.9), LRSchedule("constant")
    made = Recipe(OneBatch(), METHODS[name], given, optimizer=optimizer, lr_schedule=schedule, device="cpu", **fields)
    gp.train(replace(made, candidates=False), folder / "run")
    sparse = gp.load(folder / "run" / "model.safetensors", Layers())
    return result_of(sparse)


@pytest.mark.parametrize("name", ONE_LOOP)
def test_four_doors_give_the_same_bits(name: str, tmp_path: Path) -> None:
    weights, masks = own_loop(name)
    for door in (transformers, lightning, recipe):
        its_weights, its_masks = door(name, tmp_path / door.__name__)
        assert masks.keys() == its_masks.keys(), door.__name__
        assert [key for key in masks if not torch.equal(masks[key], its_masks[key])] == [], door.__name__
        assert [key for key in weights if not torch.equal(weights[key], its_weights[key])] == [], door.__name__
