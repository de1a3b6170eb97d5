"""GrowPrune beside callbacks of Lightning that try a module out, or change its learning rates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning, StochasticWeightAveraging  # noqa: E402
from lightning_cases import QUIET, Module, examples, fit, zeros  # noqa: E402

from growprune.errors import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402

pytestmark = QUIET


class Tunable(Module):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*examples(0, 48)), self.batch_size)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Rate(LearningRateFinder):
    """Finds one that is known, after it has tried some."""

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        super().lr_find(trainer, pl_module)
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.03


def train(folder: Path, *callbacks: Any) -> Tunable:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=3, callbacks=list(callbacks), accelerator="cpu", default_root_dir=folder, **quiet)
    torch.manual_seed(0)
    module = Tunable()
    trainer.fit(module)
    return module


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    "make", [lambda: Rate(num_training_steps=4), lambda: BatchSizeFinder(max_trials=1, steps_per_trial=1)]
)
def test_what_finders_restore_before_the_first_step_is_no_training_without_us(
    make: Any, storage: str, tmp_path: Path
) -> None:
    callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, storage=storage)
    module = train(tmp_path, callback, make())
    assert callback.cursor.is_over and callback.cursor.iteration == module.trainer.global_step
    assert zeros(module, callback) == 1728


def test_phases_that_restart_have_the_rate_that_was_found(tmp_path: Path) -> None:
    module = train(tmp_path, GrowPrune("cyclic_gap", sparsity=0.9, parts=2), Rate(num_training_steps=4))
    assert set(module.rates[4:]) == {0.03}  # the finder has trained 4


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(examples, range(6))


def test_data_without_a_length_are_named_where_epochs_tell_no_number_of_steps(tmp_path: Path) -> None:
    data = DataLoader(Endless(), batch_size=None)
    with pytest.raises(GrowpruneError, match=r"the data have no length.* max_epochs=3 .*max_steps="):
        fit(tmp_path, GrowPrune(sparsity=0.9), train=data)


def test_a_plan_that_one_batch_is_too_short_for_says_so(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"has 2 optimizer steps .* has 1: set Trainer\(fast_dev_run=False\)"):
        fit(tmp_path, GrowPrune("cyclic_gap", sparsity=0.9), fast_dev_run=True)


@pytest.mark.parametrize("schedule", [None, lambda optimizer: CosineAnnealingLR(optimizer, 4)])
def test_a_phase_that_restarts_leaves_the_rates_of_stochastic_weight_averaging_alone(
    schedule: Any, tmp_path: Path
) -> None:
    rates = {}
    for restart in (False, True):
        module = Module(schedule=schedule)
        callback = GrowPrune("one_shot", sparsity=0.9, epochs=2, finetune=2, restart=restart)
        fit(tmp_path, callback, module, max_epochs=4, callbacks=[StochasticWeightAveraging(0.01, 1)])
        assert zeros(module, callback) == 1728
        rates[restart] = module.rates
    assert rates[True] == rates[False]


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_callback_that_prunes_too_is_refused(storage: str, tmp_path: Path) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(GrowpruneError, match="ModelPruning prunes the same weights as GrowPrune"):
        fit(tmp_path, GrowPrune(sparsity=0.9, storage=storage), callbacks=[pruning])


def test_weights_that_are_frozen_when_training_begins_are_named(tmp_path: Path) -> None:
    class OnlyTheHead(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[5].parameters(), 0.1)  # type: ignore[index]

    with pytest.raises(GrowpruneError, match=r"trains none of the weights to prune \(net.0.weight"):
        fit(tmp_path, GrowPrune(sparsity=0.9), OnlyTheHead())
