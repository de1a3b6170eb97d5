"""The loss of a translation: a mean over tokens, however they are batched."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from toy import stopped
from translation_cases import CPU, model_of, naive_losses, tiny, tokens

import growprune as gp
from growprune import engine, methods
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.engine.trainer import split
from growprune.sparse.rng import seed_all
from growprune.tasks.translation import text as corpus
from growprune.tasks.translation import token_losses
from growprune.tasks.translation.text import Pieces
from growprune.tasks.translation.transformer import PAD, Transformer


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_those_of_a_loop_over_tokens(smoothing: float) -> None:
    logits, labels = torch.randn(3, 4, 11), tokens(3, 4)
    labels[1, 2:] = PAD
    torch.testing.assert_close(
        token_losses(logits, labels, label_smoothing=smoothing), naive_losses(logits, labels, smoothing)
    )


def test_the_loss_is_a_mean_over_tokens(data: Path) -> None:
    task = tiny(data)
    model = model_of(task)
    for source, target, scale in itertools.islice(task.batches(seed=0, start=0, device=CPU), 3):
        losses = naive_losses(model(source, target[:, :-1]).detach(), target[:, 1:], 0.1)
        expected = losses.sum() / (target[:, 1:] != PAD).sum()
        torch.testing.assert_close(task.loss(model, (source, target, scale)), expected)


def test_accumulated_batches_count_by_their_tokens(data: Path, tmp_path: Path) -> None:
    task = tiny(data)
    batches = list(task.batches(seed=0, start=0, device=CPU))
    numbers = [int((target[:, 1:] != PAD).sum()) for _, target, _ in batches]
    assert len(set(numbers)) > 2
    recipe = Recipe(
        task=task, method=methods.dense, options={"epochs": 1}, lr_schedule=LRSchedule("constant"), device="cpu"
    )
    recipe = replace(recipe, optimizer=OptimizerConfig("sgd", lr=1.0))
    engine.train(replace(recipe, accumulate=len(batches)), tmp_path / "run")  # one step
    seed_all(recipe.seed, "model")
    model = cast(Transformer, task.build_model())
    losses = [naive_losses(model(s, t[:, :-1]), t[:, 1:], 0.1).sum() for s, t, _ in batches]
    (sum(losses) / sum(numbers)).backward()
    found = gp.read(tmp_path / "run/model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], (parameter - parameter.grad).detach(), rtol=1e-4, atol=1e-6)


def test_pieces_are_kept_with_a_run_and_must_be_the_same_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    recipe = Recipe(task=tiny(data), method=methods.dense, options={"epochs": 2}, device="cpu")
    stopped(recipe, tmp_path / "run", 2)
    kept = (tmp_path / "run/pieces.model").read_bytes()
    assert Pieces(kept).decode([Pieces(kept).encode(["one two."], is_target=False)[0].tolist()]) == ["one two."]
    before = (data / "train.en").read_bytes()
    (data / "train.en").write_bytes(before.upper())
    forget()
    with pytest.raises(ValueError, match=r"pieces.model differs from what the data gives now.*start a new run"):
        engine.resume(recipe, tmp_path / "run")
    (data / "train.en").write_bytes(before)
    forget()
    assert engine.resume(recipe, tmp_path / "run")["test"]


def forget() -> None:
    """Read the data again, as another process would."""
    for function in (corpus.load_pieces, corpus.load_training, corpus.read, corpus.load_split):
        function.cache_clear()


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_losses_of_shares_add_up_to_that_of_the_batch(data: Path, replicas: int) -> None:
    task = tiny(data)
    model = model_of(task)
    batch = max(task.batches(seed=0, start=0, device=CPU), key=lambda batch: len(batch[0]))
    shares = [split(batch, index, replicas) for index in range(replicas)]
    total = sum(task.loss(model, mine) * share for mine, share in shares)
    torch.testing.assert_close(total, task.loss(model, batch))
