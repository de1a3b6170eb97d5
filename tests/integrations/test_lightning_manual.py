"""GrowPrune where a module steps several optimizers itself, as the two of a GAN."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from lightning_cases import QUIET, fit, zeros  # noqa: E402

from growprune.errors import GrowpruneError  # noqa: E402
from growprune.integrations.lightning import GrowPrune  # noqa: E402

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")]


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, outputs))


class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Its discriminator steps last, and is the last of the optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = layers(4, 8), layers(8, 1)

    def judge(self, x: Tensor, sign: int) -> Tensor:
        return nn.functional.softplus(sign * self.discriminator(x)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        noise = torch.randn(8, 4)
        with self.toggled_optimizer(generating):
            self.step(generating, self.judge(self.generator(noise), -1))
        with self.toggled_optimizer(judging):
            self.step(judging, self.judge(batch[0], -1) + self.judge(self.generator(noise), 1))

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), 0.01) for net in (self.generator, self.discriminator)]


class JudgingFirst(Gan):
    """As in Lightning's documentation: what was generated before the first step is used after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generating, judging = self.optimizers()
        fake = self.generator(torch.randn(8, 4))
        self.step(judging, self.judge(batch[0], -1) + self.judge(fake.detach(), 1))
        self.step(generating, self.judge(fake, -1))


def sparsify(method: str = "rigl", **settings: Any) -> GrowPrune:
    return GrowPrune(method, sparsity=0.8, keep_dense=["generator.4", "discriminator.4"], every=2, **settings)


def test_two_optimizers_that_are_toggled_train_to_exact_counts(tmp_path: Path) -> None:
    callback = sparsify()
    module = fit(tmp_path, callback, Gan())
    assert callback.cursor.is_over and callback.sparse.is_at_target
    assert zeros(module, callback) >= 832  # of 1,040; some that live may be zero


def test_compact_storage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"'compact' does not work with manual optimization.*use storage='masked'"):
        fit(tmp_path, sparsify(storage="compact"), Gan())


def test_an_edit_between_a_forward_pass_and_its_backward_pass_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        fit(tmp_path, sparsify(), JudgingFirst())
    assert "return last the optimizer that steps last" in raised.value.__notes__[0]


def test_the_optimizer_that_steps_last_is_returned_last(tmp_path: Path) -> None:
    class Turned(JudgingFirst):
        def optimizers(self) -> Any:
            return super().optimizers()[::-1]

        def configure_optimizers(self) -> Any:
            return super().configure_optimizers()[::-1]

    callback = sparsify()
    fit(tmp_path, callback, Turned())
    assert callback.sparse.is_at_target and callback.cursor.is_over
