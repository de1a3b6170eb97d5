"""Trainings killed at random moments, and resumed as their trainer resumes, end with the bits of one left alone."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from killed_cases import TRAINERS

NUM_KILLS = 4
LOADED = [
    *("torch._dynamo", "growprune.integrations.transformers", "growprune.integrations.lightning"),
    *("transformers.models.bert.modeling_bert", "transformers.models.mixtral.modeling_mixtral"),
]
"""What the server has loaded that processes are forked from, so that they train at once."""


def wait_for_steps(file: Path, count: int, process: Any) -> None:
    """Until so many more steps are done, or the process has ended."""
    before = len(file.read_bytes()) if file.exists() else 0
    while process.is_alive() and (len(file.read_bytes()) if file.exists() else 0) < before + 2 * count:
        time.sleep(0.001)


def run_with_kills(train: Any, folder: Path, case: tuple[str, ...], kills: int, chance: random.Random) -> int:
    """Train in one process after another, the first of which are killed; gives how many were."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    killed = 0
    while not (folder / "done").exists():
        process = context.Process(target=train, args=(folder, *case))
        process.start()
        if killed < kills:
            wait_for_steps(folder / "steps", chance.randrange(0, 5), process)
            time.sleep(chance.random() * 0.05)
            process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL)
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "case"),
    [
        ("transformers", ("bert", "gradual_gap", "masked")),
        ("transformers", ("mixtral", "rigl", "compact")),
        ("lightning", ("mlp", "cyclic_gap", "masked")),
        ("lightning", ("mlp", "rigl", "compact")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_training_killed_at_random_moments_ends_with_the_bits_of_one_left_alone(
    trainer: str, case: tuple[str, ...], tmp_path: Path
) -> None:
    train, left = TRAINERS[trainer]
    assert run_with_kills(train, tmp_path / "alone", case, 0, random.Random()) == 0
    chance = random.Random(f"{trainer}{case}")
    assert run_with_kills(train, tmp_path / "killed", case, NUM_KILLS, chance) > 0
    alone, killed = left(tmp_path / "alone"), left(tmp_path / "killed")
    assert [path for path in {**alone, **killed} if alone.get(path) != killed.get(path)] == []
