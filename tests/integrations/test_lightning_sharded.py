"""GrowPrune with ModelParallelStrategy (FSDP2) on two processes: masks are those of one process, and resumes exact."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import on_two_ranks, sharded_code_of

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

import growprune as gp  # noqa: E402
from growprune.errors import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]

METHODS = {"gradual_gap": {"every": 4}, "rigl": {"every": 2}}


class Module(pl.LightningModule):
    """As anyone would write it for FSDP2; double precision leaves no near ties."""

    def __init__(self, dropout: float = 0.0, *, is_sharded: bool = True) -> None:
        super().__init__()
        self.is_sharded = is_sharded
        blocks = [nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 8)) for _ in range(2)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 4)).double()

    def configure_model(self) -> None:
        if self.is_sharded and not isinstance(self.net[2].weight, DTensor):
            for part in (*self.net, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def data(world: int = 1) -> DataLoader[Any]:
    """The examples of this process, so that all together have the batches that one has."""
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x[int(os.environ.get("RANK", 0)) :: world]
    return DataLoader(TensorDataset(x, (x[:, :4] + x[:, 4:]).argmax(1)), 8 // world)


def trainer_of(callbacks: list[Any], world: int, **settings: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = "auto" if world == 1 else ModelParallelStrategy(world, 1, settings.pop("is_in_parts", True))
    checkpointing = {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    usual = {"accelerator": "cpu", "devices": world, "max_epochs": 3, "gradient_clip_val": 0.5}
    usual["use_distributed_sampler"] = False
    return pl.Trainer(strategy=strategy, callbacks=callbacks, **usual, **quiet, **checkpointing, **settings)


def fit(
    method: str, world: int, folder: Path, *, dropout: float = 0.0, ckpt: Any = None, **settings: Any
) -> tuple[GrowPrune, Any]:
    """18 steps, a checkpoint after each epoch."""
    torch.manual_seed(0)
    module = Module(dropout, is_sharded=world > 1)
    callback = GrowPrune(method, sparsity=0.8, parts=2, storage="compact", **METHODS[method])
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = trainer_of([callback, saving], world, **settings)
    trainer.fit(module, data(world), data(), ckpt_path=ckpt)
    assert callback.cursor.iteration == 18 and callback.sparse.is_at_target
    return callback, trainer


def weights_of(callback: GrowPrune) -> dict[str, Any]:
    whole = {name: values.numpy() for name, (values, _) in callback.sparse.snapshot().items()}
    return whole | {f"{name} (mask)": mask.numpy() for name, mask in callback.sparse.masks.items()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rigl": ("rigl", {"is_in_parts": False}),
    "gradual_gap": ("gradual_gap", {}),
    "with dropout": ("gradual_gap", {"dropout": 0.2}),  # so that random numbers count too
}
RESUMED = ("rigl", "with dropout")


def trained(folder: Path) -> dict[str, Any]:
    """Trainings as a whole, and from their second checkpoint."""
    found: dict[str, Any] = {}
    for case, (method, settings) in CASES.items():
        callback, trainer = fit(method, 2, folder / case, **settings)
        assert isinstance(callback.sparse.model.net[0][0].weight, DTensor)
        found[case] = weights_of(callback)
        gp.save(callback.sparse, folder / f"{case}.safetensors")
        if case in RESUMED:
            trainer.validate(callback.sparse.model, data(), ckpt_path=folder / case / "step=6.ckpt", verbose=False)
            found[f"{case}, at the sixth step"] = callback.sparse.num_alive
            fresh = GrowPrune(method, sparsity=0.8, parts=2, storage="compact", **METHODS[method])
            place = {"ckpt_path": folder / case / "step=12.ckpt", "verbose": False}
            trainer_of([fresh], 2).validate(Module(), data(), **place)
            found[f"{case}, at the twelfth step"] = fresh.sparse.num_alive
            again, _ = fit(method, 2, folder / "again", ckpt=folder / case / "step=12.ckpt", **settings)
            found[f"{case}, resumed"] = weights_of(again)
    return found


def documented(folder: Path) -> int:
    """What docs/lightning.md shows, on two devices."""
    code = sharded_code_of("lightning.md").replace("size=8", "size=2").replace("devices=8", "devices=2")
    names: dict[str, Any] = {"pl": pl, "GrowPrune": GrowPrune, "Module": Module}
    with contextlib.chdir(folder):
        exec(code, names)
        names["trainer"].fit(names["Sharded"](is_sharded=False), data(2), data())
    assert isinstance(names["sparsify"].sparse.model.net[2].weight, DTensor)
    return int(names["sparsify"].sparse.num_alive)


def refused(folder: Path) -> list[str]:
    told = []
    for module, callback in (
        (Module(), GrowPrune("rigl", sparsity=0.8, storage="masked")),
        (Module(is_sharded=False), GrowPrune("rigl", sparsity=0.8, storage="compact")),
    ):
        with pytest.raises(GrowpruneError) as caught:
            trainer_of([callback], 2).fit(module, data(2))
        told.append(str(caught.value))
    return told


Told = tuple[list[list[Any]], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of two processes has found, and where they wrote."""
    folder = tmp_path_factory.mktemp("sharded")
    return on_two_ranks((trained, refused, documented), folder, ["growprune.integrations.lightning"]), folder


def test_masks_and_weights_are_those_of_one_process(told: Told, tmp_path: Path) -> None:
    for method in METHODS:
        alone, _ = fit(method, 1, tmp_path / method)
        for found, *_ in told[0]:
            for name, array in weights_of(alone).items():
                assert found[method][name].shape == array.shape
                assert abs(found[method][name] * 1.0 - array * 1.0).max() < 1e-9, name
        loaded = gp.load(told[1] / f"{method}.safetensors", Module(is_sharded=False))
        assert all(torch.equal(mask, alone.sparse.masks[name]) for name, mask in loaded.masks.items())


def test_a_checkpoint_of_the_trainer_resumes_to_the_same_bits(told: Told) -> None:
    for found, *_ in told[0]:
        for case in RESUMED:
            whole, again = found[case], found[f"{case}, resumed"]
            assert [name for name in whole if whole[name].tobytes() != again[name].tobytes()] == []
        # masks of a checkpoint are taken for a validation too
        assert found["with dropout, at the sixth step"] > found["rigl, at the sixth step"]  # a part of it is grown
        assert found["rigl, at the twelfth step"] == found["rigl, at the sixth step"]


def test_the_code_of_the_page_trains_to_the_sparsity_it_asks_for(told: Told) -> None:
    assert [alive for _, _, alive in told[0]] == [77, 77]  # a tenth of 4 x 192, and the last layer is dense


def test_what_cannot_be_sharded_is_told_in_one_line(told: Told) -> None:
    for _, (masked, plain), _ in told[0]:
        assert masked.startswith("GrowPrune with ModelParallelStrategy needs storage='compact', got 'masked': give")
        assert plain.startswith("configure_model has not sharded the module: call fully_shard")
