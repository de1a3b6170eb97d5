"""GrowPrune in Lightning's Trainer."""

import copy
import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from lightning_cases import (  # noqa: E402
    QUIET,
    Loader,
    Module,
    assert_same,
    conv,
    every,
    examples,
    fit,
    mlp,
    shuffled,
    zeros,
)

from growprune import By, SparseModel  # noqa: E402
from growprune.errors import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402

pytestmark = QUIET


METHODS: dict[str, dict[str, Any]] = {
    "gradual_gap": {"every": 2},
    "cyclic_gap": {"steps": 2, "epochs": 1, "finetune": 1, "restart": False},
    "rigl": {"every": 3},
    "gmp": {"every": 2},
}


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize("method", METHODS)
def test_training_ends_with_exactly_as_many_weights_as_asked(method: str, storage: str, tmp_path: Path) -> None:
    callback = GrowPrune(method, sparsity=0.9, parts=2, storage=storage, **METHODS[method])
    module = fit(tmp_path, callback)
    assert callback.cursor.is_over
    assert callback.cursor.iteration == 18
    assert callback.sparse.num_alive == 192  # a tenth of 8 x 40 + 40 x 40; the last layer stays dense
    assert zeros(module, callback) == 1920 - 192
    assert "net.5.weight" not in callback.sparse.masks


@pytest.mark.parametrize(("method", "storage"), [("snip", "masked"), ("snip", "compact"), ("grasp", "masked")])
def test_methods_that_look_at_gradients_first_see_those_of_the_first_batch(
    method: str, storage: str, tmp_path: Path
) -> None:
    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return {"loss": loss}

    callback, (x, y) = GrowPrune(method, sparsity=0.9, storage=storage), examples(1)
    torch.manual_seed(0)
    module = Logging(nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)))
    by_hand = SparseModel(copy.deepcopy(module), sparsity=0.9, allocation="global", keep_dense=["net.4"])
    by_hand.score(By(method), [lambda: nn.functional.cross_entropy(by_hand.model.net(x), y)])
    by_hand.prune(by=By(method))
    fit(tmp_path, callback, module, callbacks=[every(tmp_path, 5)])
    assert callback.sparse.num_alive == 192
    assert all(torch.equal(mask, by_hand.masks[name]) for name, mask in callback.sparse.masks.items())
    again, other = GrowPrune(method, sparsity=0.9, storage=storage), Logging(copy.deepcopy(by_hand.model.net))
    assert_same(fit(tmp_path, again, other, ckpt=tmp_path / "step=5.ckpt"), module)


def test_looking_first_leaves_batches_and_random_numbers_as_they_are(tmp_path: Path) -> None:
    class Noting(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            drawn.append((float(batch[0].sum()), float(torch.rand(()))))
            return super().training_step(batch, batch_idx)

    seen = []
    for method in ("static_random", "snip"):
        drawn: list[tuple[float, float]] = []
        fit(tmp_path, GrowPrune(method, sparsity=0.9), Noting(), train=shuffled())
        seen.append(drawn)
    assert seen[1] == [seen[0][0], *seen[0]]  # the first batch is looked at, then trained


# Going on from Lightning's own checkpoints


@pytest.mark.parametrize("storage", ["masked", "compact"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("gradual_gap", {"every": 2}), ("rigl", {"every": 3}), ("cyclic_gap", METHODS["cyclic_gap"])],
)
def test_a_run_that_goes_on_within_an_epoch_ends_with_the_same_bits(
    method: str, options: dict[str, Any], storage: str, tmp_path: Path
) -> None:
    def make() -> GrowPrune:
        return GrowPrune(method, sparsity=0.9, parts=2, storage=storage, **options)

    whole = fit(tmp_path, make(), callbacks=[every(tmp_path, 1)])
    for step in (5, 9):  # the edits of RigL at 6 and 9 look at gradients of the step before
        callback = make()
        assert_same(fit(tmp_path, callback, ckpt=tmp_path / f"step={step}.ckpt"), whole)
        assert callback.cursor.is_over


def test_a_run_that_goes_on_after_an_epoch_draws_the_same_batches_from_a_shuffled_loader(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), train=shuffled(), callbacks=[saving])
    torch.manual_seed(77)
    assert_same(
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), train=shuffled(), ckpt=tmp_path / "epoch=0.ckpt"),
        whole,
    )


def test_a_checkpoint_is_plain_values_and_tensors_with_plain_names(tmp_path: Path) -> None:
    fit(tmp_path, GrowPrune("rigl", sparsity=0.9, parts=1, storage="compact", every=3), callbacks=[every(tmp_path, 5)])
    checkpoint = torch.load(tmp_path / "step=5.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == Module().state_dict().keys()
    assert checkpoint["callbacks"]["GrowPrune"]["sparsifier"]["cursor"]["iteration"] == 5
    Module().load_state_dict(checkpoint["state_dict"])


def test_a_checkpoint_of_other_settings_or_lengths_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), callbacks=[every(tmp_path, 5)])
    with pytest.raises(GrowpruneError, match="storage='masked', but this training has storage='compact'"):
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, storage="compact", every=2), ckpt=tmp_path / "step=5.ckpt")
    with pytest.raises(GrowpruneError, match=r"sparsity=0.9, but this Sparsifier has sparsity=0.8: resume"):
        fit(tmp_path, GrowPrune(parts=2, sparsity=0.8, every=2), ckpt=tmp_path / "step=5.ckpt")
    with pytest.raises(GrowpruneError, match=r"has 18 optimizer steps, but the Trainer makes 24: set .*max_epochs=3\)"):
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), ckpt=tmp_path / "step=5.ckpt", max_epochs=4)
    with pytest.raises(GrowpruneError, match="of another plan: resume with"):
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=3), ckpt=tmp_path / "step=5.ckpt")


@pytest.mark.parametrize("is_weights_only", [False, True])
def test_a_checkpoint_without_our_state_is_refused(is_weights_only: bool, tmp_path: Path) -> None:
    trainer = pl.Trainer(max_steps=1, logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    trainer.fit(Module(), Loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt", weights_only=is_weights_only)
    with pytest.raises(GrowpruneError, match=r"plain.ckpt has no state of GrowPrune"):
        fit(tmp_path, GrowPrune(sparsity=0.9), ckpt=tmp_path / "plain.ckpt")


# The best checkpoint


def test_the_best_checkpoint_is_at_the_target_sparsity(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "best", monitor="val_loss", save_top_k=1)
    latest = ModelCheckpoint(tmp_path, "latest")
    callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2, until=0.8, grow_until=1.0)

    class Rising(Module):
        """Its first, half-dense models are the best."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

    fit(tmp_path, callback, Rising(), max_epochs=5, callbacks=[best, latest])
    state = torch.load(best.best_model_path, weights_only=True)
    assert state["epoch"] == 3  # with whose last step the target is reached
    assert sum(int((state["state_dict"][name] != 0).sum()) for name in callback.sparse.masks) == 192
    assert "check_monitor_top_k" not in vars(best)


def test_a_checkpoint_by_steps_is_not_judged_by_a_validation_from_before_an_edit(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, "{step}", monitor="val_loss", save_top_k=-1, every_n_train_steps=1)
    fit(tmp_path, GrowPrune("rigl", sparsity=0.9, parts=2, every=4, until=1.0), callbacks=[best])
    # always at the target. Edits after steps 4, 8, 12 and 16; validated after 6, 12 and 18, when 6, 12 and 18 are over
    assert {p.name for p in tmp_path.glob("step=*")} == {f"step={step}.ckpt" for step in (7, 13, 14, 15)}


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_testing_the_best_checkpoint_brings_its_masks_along(storage: str, tmp_path: Path) -> None:
    callback = GrowPrune("rigl", sparsity=0.9, parts=2, storage=storage, every=3)
    module = fit(tmp_path, callback, callbacks=[every(tmp_path, 4)])
    last = callback.sparse.masks
    module.trainer.validate(module, Loader(), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    assert any(not torch.equal(mask, last[name]) for name, mask in callback.sparse.masks.items())
    weights = module.state_dict()  # of which some are zero alive: RigL has just let them grow
    assert all(not weights[name][~mask].any() for name, mask in callback.sparse.masks.items())
    fresh = Module()
    trainer = pl.Trainer(
        callbacks=[GrowPrune("rigl", sparsity=0.9, parts=2)], logger=False, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.validate(fresh, Loader(), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    assert_same(fresh, module)


# Copies of the model


@pytest.mark.parametrize("is_first", [False, True])
def test_an_average_of_weights_has_the_masks_of_the_model(is_first: bool, tmp_path: Path) -> None:
    average, saving = EMAWeightAveraging(decay=0.5), ModelCheckpoint(tmp_path, "last")
    callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2)
    extra = [average] if is_first else []
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=3,
        callbacks=[*extra, callback, *([] if is_first else [average]), saving],
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    module = Module()
    trainer.fit(module, Loader(), Loader(2))
    assert zeros(module, callback) == 1728
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert sum(int((saved["state_dict"][name] == 0).sum()) for name in callback.sparse.masks) == 1728


def test_a_run_with_an_average_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def make() -> list[Any]:
        return [EMAWeightAveraging(decay=0.5), every(tmp_path, 5)]

    whole = fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), callbacks=make())
    assert_same(
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, every=2), ckpt=tmp_path / "step=5.ckpt", callbacks=make()), whole
    )


@pytest.mark.parametrize("net", [mlp, conv])
def test_stochastic_weight_averaging_ends_at_the_target_with_and_without_batch_norm(net: Any, tmp_path: Path) -> None:
    callback = GrowPrune("cyclic_gap", sparsity=0.9, parts=2, steps=4, epochs=1, finetune=2, restart=False)
    module = fit(tmp_path, callback, Module(net()), max_epochs=6, callbacks=[StochasticWeightAveraging(0.01, 2)])
    assert callback.cursor.is_over
    assert zeros(module, callback) == callback.sparse.num_prunable - callback.sparse.num_alive
    assert callback.sparse.num_alive == round(0.1 * callback.sparse.num_prunable)


def test_an_average_that_is_kept_elsewhere_is_named(tmp_path: Path) -> None:
    module, callback = Module(), GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    callback.add_copy(average)

    class Updating(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            average.update_parameters(pl_module)

    fit(tmp_path, callback, module, callbacks=[Updating()])
    assert zeros(average.module, callback) == 1728


def test_averaging_compact_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"a callback averages the weights.*use storage='masked'"):
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, storage="compact"), callbacks=[EMAWeightAveraging()])


# Steps and learning rates


def test_an_iteration_is_an_optimizer_step_whatever_is_accumulated(tmp_path: Path) -> None:
    callback = GrowPrune("rigl", sparsity=0.9, parts=2, storage="compact", every=3)
    fit(tmp_path, callback, accumulate_grad_batches=4, gradient_clip_val=0.1)
    assert callback.cursor.iteration == 6  # 6 batches are two steps, of 4 and of 2
    assert callback.sparse.num_alive == 192


def test_a_step_that_a_gradient_scaler_skips_does_not_move_the_plan(tmp_path: Path) -> None:
    class Overflowing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 5:
                assert callback.cursor.iteration == 5
            if self.global_step == 7:
                assert callback.cursor.iteration == 6
            return super().training_step(batch, batch_idx) * (float("inf") if self.global_step == 5 else 1)

    callback = GrowPrune("gmp", sparsity=0.9, parts=2, every=1, until=1.0)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    module = fit(tmp_path, callback, Overflowing(), plugins=[scaled])
    assert callback.cursor.is_over  # the edit that a skipped step left out is done at the end
    assert zeros(module, callback) == 1728


def test_bf16_trains_to_exact_counts(tmp_path: Path) -> None:
    callback = GrowPrune(sparsity=0.9, parts=2, every=2)
    assert zeros(fit(tmp_path, callback, precision="bf16-mixed"), callback) == 1728


def cosine(optimizer: Any) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4), "interval": "step"}


def test_each_phase_has_a_schedule_of_its_own_or_one_goes_on(tmp_path: Path) -> None:
    def rates(restart: bool) -> list[float]:
        callback = GrowPrune("cyclic_gap", sparsity=0.9, parts=2, steps=2, epochs=1, finetune=1, restart=restart)
        module = fit(tmp_path, callback, Module(schedule=cosine, lr=0.4), train=Loader(4))
        return [round(rate, 6) for rate in module.rates]

    assert rates(True) == [0.4, 0.3, 0.2, 0.1] * 3
    assert rates(False) == [0.4, 0.3, 0.2, 0.1] + [0.0] * 8


def test_a_schedule_that_restarts_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def make() -> tuple[GrowPrune, Module]:
        return GrowPrune("cyclic_gap", sparsity=0.9, parts=2, steps=2, epochs=1, finetune=1), Module(schedule=cosine)

    whole = fit(tmp_path, *make(), callbacks=[every(tmp_path, 5)])
    assert_same(fit(tmp_path, *make(), ckpt=tmp_path / "step=5.ckpt"), whole)


def test_a_schedule_that_looks_at_epochs_before_cannot_restart(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> Any:
        return {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"}

    with pytest.raises(GrowpruneError, match=r"ReduceLROnPlateau.*restart=False"):
        fit(tmp_path, GrowPrune("cyclic_gap", sparsity=0.9, parts=2), Module(schedule=plateau))


class Adversaries(Module):
    """Two optimizers that the module steps by itself, one of them twice a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in (*self.optimizers(), self.optimizers()[1]):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]) + self.other(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.other.parameters(), 0.1), torch.optim.Adam(self.net.parameters(), 0.01)


def test_where_a_module_steps_several_optimizers_itself_the_last_with_prunable_weights_counts(tmp_path: Path) -> None:
    callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2, iterations=36, keep_dense=["net.5", "other"])
    module = fit(tmp_path, callback, Adversaries())
    assert callback.cursor.iteration == 36
    assert zeros(module, callback) == 1728


def test_a_compiled_module_trains_to_the_same_masks(tmp_path: Path) -> None:
    def train(is_compiled: bool) -> Any:
        torch.manual_seed(0)
        module = Module(nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4)))
        callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2)
        fit(tmp_path, callback, torch.compile(module, backend="eager") if is_compiled else module)
        assert zeros(module, callback) == 1728
        return module

    one, other = train(False), train(True)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name])


# What is logged


def test_loggers_have_sparsity_live_weights_phase_and_churn(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, GrowPrune("rigl", sparsity=0.9, parts=2, every=4, drop=0.5), logger=logger, log_every_n_steps=1)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        table = [row for row in csv.DictReader(file) if row["sparsity"]]
    rows = [{name: float(row[name]) for name in ("sparsity", "live_weights", "phase", "churn")} for row in table]
    assert [row["phase"] for row in rows] == [0.0] * 3 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 3
    assert {row["live_weights"] for row in rows} == {192}
    assert {round(row["sparsity"], 6) for row in rows} == {0.9}
    assert 0 < rows[4]["churn"] <= 0.5


class Noting(pl.Callback):
    """Notes what other callbacks get to see."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_the_density_of_layers_is_logged_before_other_callbacks_look(tmp_path: Path) -> None:
    noting, callback, logger = (
        Noting(),
        GrowPrune("cyclic_gap", sparsity=0.9, parts=2, log_layers=True, **METHODS["cyclic_gap"]),
        CSVLogger(tmp_path),
    )
    trainer = pl.Trainer(
        max_epochs=3,
        callbacks=[noting, callback],
        logger=logger,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), Loader())
    layers = ("density/net.0.weight", "density/net.3.weight")
    first, second, last = (tuple(noting.seen[step][name] for name in layers) for step in (0, 6, 17))
    assert (first, second, last) == ((1.0, pytest.approx(0.1)), (pytest.approx(0.1), 1.0), pytest.approx((0.1, 0.1)))
    assert [seen["phase"] for seen in noting.seen] == [1.0] * 5 + [2.0] * 6 + [3.0] * 7
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert [float(row[layers[0]]) for row in csv.DictReader(file)] == [seen[layers[0]] for seen in noting.seen]


# A second fit, and what is refused


def test_the_methods_of_the_module_and_of_callbacks_are_their_own_again_after_the_training(tmp_path: Path) -> None:
    class Noting(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            assert "on_load_checkpoint" not in vars(pl_module)  # so that the module can be pickled

    saving = ModelCheckpoint(tmp_path, monitor="val_loss")
    module = fit(tmp_path, GrowPrune(sparsity=0.9, parts=2), callbacks=[saving, Noting()])
    assert "on_load_checkpoint" not in vars(module) and "check_monitor_top_k" not in vars(saving)
    module.trainer.validate(module, Loader(), verbose=False)
    assert "on_load_checkpoint" not in vars(module)


def test_a_second_fit_goes_on_at_the_target(tmp_path: Path) -> None:
    for storage in ("masked", "compact"):
        callback = GrowPrune("gradual_gap", sparsity=0.9, parts=2, storage=storage, every=2)
        module = fit(tmp_path, callback)
        masks, before = callback.sparse.masks, {k: v.clone() for k, v in module.state_dict().items()}
        fit(tmp_path, callback, module, max_epochs=1)
        assert zeros(module, callback) == 1728
        assert all(torch.equal(mask, masks[name]) for name, mask in callback.sparse.masks.items())
        assert not torch.equal(before["net.0.weight"], module.state_dict()["net.0.weight"])


@pytest.mark.filterwarnings("ignore:the training ended at step")
def test_a_fit_that_stopped_goes_on_in_the_same_trainer_and_is_refused_in_another(tmp_path: Path) -> None:
    class Stopping(Module):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = self.current_epoch == 0

    callback, module = GrowPrune("gradual_gap", sparsity=0.9, parts=2, every=2), Stopping()
    fit(tmp_path, callback, module)
    trainer = module.trainer
    assert callback.cursor.iteration == 6
    with pytest.raises(GrowpruneError, match="is at step 6 of 18, but the Trainer is at step 0: resume"):
        fit(tmp_path, callback, module)
    trainer.should_stop = False
    trainer.fit(module, Loader(), Loader(1))
    assert callback.cursor.is_over
    assert zeros(module, callback) == 1728


def test_a_training_that_ends_before_its_plan_is_told(tmp_path: Path) -> None:
    class Stopping(Module):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = True

    with pytest.warns(UserWarning, match="the training ended at step 6 of 18 of the plan, at sparsity 0.15 "):
        fit(tmp_path, GrowPrune(sparsity=0.9, parts=2, grow_until=1.0), Stopping())


def test_steps_that_do_not_match_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"has 30 optimizer steps .* has 18: set Trainer\(max_epochs=5\)"):
        fit(tmp_path, GrowPrune("cyclic_gap", sparsity=0.9, parts=2, steps=4, epochs=1, finetune=1))
    with pytest.raises(GrowpruneError, match=r"has 20 optimizer steps .* has 18: set Trainer\(max_steps=20\)"):
        fit(tmp_path, GrowPrune("gmp", sparsity=0.9, parts=1, iterations=20))
    with pytest.raises(GrowpruneError, match="has no limit, but a plan needs one: give it max_epochs or max_steps"):
        fit(tmp_path, GrowPrune(sparsity=0.9), max_epochs=-1)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_another_module_is_validated_by_the_same_trainer(storage: str, tmp_path: Path) -> None:
    callback = GrowPrune("rigl", sparsity=0.9, parts=2, every=3, storage=storage)
    module = fit(tmp_path, callback, callbacks=[every(tmp_path, 4)], limit_val_batches=0)
    trainer, first, data = module.trainer, str(tmp_path / "step=4.ckpt"), Loader()
    masks, weights = callback.sparse.masks, {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.trainer.limit_val_batches = 1
    other = Module.load_from_checkpoint(first)
    trainer.validate(other, data, verbose=False)
    trainer.validate(Module(), data, ckpt_path=first, verbose=False)  # whose masks are not those of the trained module
    assert callback.state_dict()["num_edits_validated"] == -1 and callback.cursor.is_over
    assert all(torch.equal(mask, callback.sparse.masks[name]) for name, mask in masks.items())
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    with pytest.raises(GrowpruneError, match="already belongs to another module"):
        trainer.fit(other, data)


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match="no method 'cyclic'; similar: cyclic_gap"):
        GrowPrune("cyclic", sparsity=0.9)
    with pytest.raises(GrowpruneError, match="gradual_gap takes no option 'evry': did you mean every"):
        GrowPrune(sparsity=0.9, evry=3)
    with pytest.raises(GrowpruneError, match=r"^GrowPrune has no model yet: it gets one when the trainer starts to"):
        _ = GrowPrune(sparsity=0.9).sparse
    with pytest.raises(TypeError, match="positional"):
        GrowPrune("rigl", 0.9, sparsity=0.9)  # type: ignore[misc]
    with pytest.raises(GrowpruneError, match="snip needs the loss of the first batch"):
        fit(tmp_path, GrowPrune("snip", sparsity=0.9, iterations=36), Adversaries())
    trainer = pl.Trainer(logger=False, accelerator="cpu")
    trainer.strategy.__class__ = type("FSDPStrategy", (FSDPStrategy,), {"__init__": None})
    with pytest.raises(GrowpruneError, match=r"with FSDPStrategy: use strategy='ddp'"):
        GrowPrune(sparsity=0.9).setup(trainer, Module(), "fit")


def test_without_lightning_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "growprune.integrations.lightning")
    with pytest.raises(GrowpruneError, match=r"\[lightning\]"):
        importlib.import_module("growprune.integrations.lightning")


def test_masked_and_compact_give_the_same_bits(tmp_path: Path) -> None:
    one = fit(tmp_path, GrowPrune("rigl", sparsity=0.9, parts=2, storage="masked", every=3))
    other = fit(tmp_path, GrowPrune("rigl", sparsity=0.9, parts=2, storage="compact", every=3))
    assert_same(one, other)


def test_resuming_keeps_the_sparsity_where_lightnings_own_pruning_loses_it(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(tmp_path, GrowPrune("one_shot", sparsity=0.8, parts=1, epochs=2, finetune=1), callbacks=[saving])
    callback = GrowPrune("one_shot", sparsity=0.8, parts=1, epochs=2, finetune=1)
    module = fit(tmp_path, callback, ckpt=tmp_path / "epoch=2.ckpt", max_epochs=4)  # one more, when the plan is over
    assert module.trainer.global_step == 24
    assert zeros(module, callback) == 1536  # 80 % of 1,920


def test_a_callback_is_for_one_module(tmp_path: Path) -> None:
    callback = GrowPrune(sparsity=0.9, parts=2)
    fit(tmp_path, callback)
    with pytest.raises(GrowpruneError, match="already belongs to another module: make a new GrowPrune for each"):
        fit(tmp_path, callback)
