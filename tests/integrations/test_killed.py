"""Trainings killed at random moments, and resumed as their trainer resumes, end with the bits of one left alone.

GROWPRUNE_KILLS is how often each is killed. As it also draws the moments, 2 and 3 together kill each training 5 times:

    for kills in 2 3; do GROWPRUNE_KILLS=$kills pytest -rP tests/integrations/test_killed.py; done
"""

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

from killed_cases import TRAINERS, run_with_kills

NUM_KILLS = int(os.environ.get("GROWPRUNE_KILLS", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "case"),
    [
        ("own loop", ("gradual_gap", "compact")),
        ("transformers", ("bert", "gradual_gap", "masked")),
        ("transformers", ("mixtral", "rigl", "compact")),
        ("lightning", ("cyclic_gap", "masked")),
        ("lightning", ("rigl", "compact")),
        ("accelerate", ("rigl",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_training_killed_at_random_moments_ends_with_the_bits_of_one_left_alone(
    trainer: str, case: tuple[str, ...], tmp_path: Path, server: ProcessPoolExecutor
) -> None:
    assert server.submit(run_with_kills, trainer, tmp_path / "alone", case, 0).result() == 0
    kills = server.submit(run_with_kills, trainer, tmp_path / "killed", case, NUM_KILLS).result()
    assert kills > 0
    _, left = TRAINERS[trainer]
    alone, killed = left(tmp_path / "alone"), left(tmp_path / "killed")
    assert [path for path in {**alone, **killed} if alone.get(path) != killed.get(path)] == []
    print(f"{trainer}: killed {kills} times, same bits")
