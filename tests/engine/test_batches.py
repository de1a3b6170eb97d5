"""Batches that are made before they are asked for are the ones that would have come."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from growprune.engine.trainer import Batches
from growprune.recipes import find

PLACES = [(None, 0), (None, 1), (None, 2), (0, 2), (0, 3), (1, 2), (None, 3), (None, 4), (None, 7), (None, 8)]
"""On in an epoch, into the next, off to a branch and back, and a leap: an epoch has four iterations."""


class Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


class Numbered:
    """Batches that say which they are, and count how many were made."""

    num_made = 0

    def num_batches(self) -> int:
        return 8

    def batches(self, *, seed: int, start: int, device: torch.device) -> Any:
        for number in range(start, 8):
            self.num_made += 1
            yield torch.tensor([seed % 10**9, number])


def batches(task: Numbered, device: str = "cpu", accumulate: int = 2) -> Batches:
    recipe = replace(find("digits/tiny"), accumulate=accumulate)
    return Batches(recipe, task, torch.device(device), 8 // accumulate)


def taken(source: Batches, place: tuple[int | None, int]) -> list[list[int]]:
    return [batch.tolist() for batch in source.of(*place)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_made_ahead_is_the_one_that_was_to_come(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    task = Numbered()
    plain, ahead = batches(Numbered(), "cpu", accumulate), batches(task, "cuda", accumulate)
    for branch, iteration in PLACES:
        assert taken(ahead, (branch, iteration)) == taken(plain, (branch, iteration))
        num_made = task.num_made
        ahead.prepare(branch, iteration + 1)
        assert task.num_made == num_made + 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_made_ahead_on_a_gpu_is_not_overwritten() -> None:
    class Large(Numbered):
        def batches(self, *, seed: int, start: int, device: torch.device) -> Any:
            return (torch.full((1 << 20,), number, device=device, dtype=torch.float32) for number in range(start, 8))

    recipe = replace(find("digits/tiny"), accumulate=1)
    source = Batches(recipe, Large(), torch.device("cuda"), 8)
    sums: list[Tensor] = []
    for iteration in range(8):
        batch = next(source.of(None, iteration))
        source.prepare(None, iteration + 1)
        sums.append(batch.mean())
    assert [float(mean) for mean in sums] == list(range(8))
