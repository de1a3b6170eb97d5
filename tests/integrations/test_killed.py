"""Trainings killed at random moments, and resumed as their trainer resumes, end with the bits of one left alone."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

from killed_cases import TRAINERS, run_with_kills

NUM_KILLS = 2


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
    trainer: str, case: tuple[str, ...], tmp_path: Path, server: ProcessPoolExecutor
) -> None:
    train, left = TRAINERS[trainer]
    assert server.submit(run_with_kills, train, tmp_path / "alone", case, 0).result() == 0
    assert server.submit(run_with_kills, train, tmp_path / "killed", case, NUM_KILLS).result() > 0
    alone, killed = left(tmp_path / "alone"), left(tmp_path / "killed")
    assert [path for path in {**alone, **killed} if alone.get(path) != killed.get(path)] == []
