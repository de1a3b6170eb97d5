"""What a run has explored, and how much its masks change, by hand and through interruptions and processes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import cyclic, parallel, stopped

from growprune import SparseModel, engine, methods
from growprune.engine.folder import RunFolder
from growprune.engine.observers import Exploration
from growprune.errors import GrowpruneError
from growprune.plan import Branch, Fork, Parts, Phase, Stage, grow, method, prune, walk

FIGURES = ("stage", "branch", "epoch", "explored", "churn")


@method
def known(S: Parts, *, sparsity: float) -> Iterator[Stage]:
    """Live weights whose numbers are known: 400 in all, of which S0 has 96, S1 256 and S2 48."""
    yield Phase(prune(S.whole, to=0.5))  # never trained, so not explored
    yield Phase(prune(S[0], to=0.75), epochs=1)
    yield Fork(*(Branch(Phase(grow(P), epochs=1), returns=P) for P in S))
    yield Phase(prune(S.whole, to=sparsity), epochs=1)


def figures(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in FIGURES} for row in result["history"]]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_what_a_rule_explores_within_a_phase_is_seen_each_epoch(tmp_path: Path) -> None:
    options = {"epochs": 4, "until": 1.0, "temperature": 1e-2}
    result = engine.train(replace(cyclic(), method=methods.deepr, options=options, sparsity=0.9), tmp_path / "run")
    explored = [row["explored"] for row in figures(result)]
    assert explored == sorted(explored)
    assert explored[0] > 0.1
    assert explored[-1] > explored[0]


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_explored_and_churn_are_those_counted_by_hand(storage: str, tmp_path: Path) -> None:
    result = engine.train(replace(cyclic(), method=known, options={}, storage=storage), tmp_path / "run")
    before = 24 + 128 + 24  # live after the second phase: a quarter of S0, and half of S1 and of S2
    expected = [
        # of 200 live weights 24 are gone
        {"stage": 1, "branch": None, "epoch": 1, "explored": before / 400, "churn": 24 / (200 + before)},
        # each branch adds what its part did not have, to what went before the fork
        {"stage": 2, "branch": 0, "epoch": 2, "explored": (before + 72) / 400, "churn": 72 / (2 * before + 72)},
        {"stage": 2, "branch": 1, "epoch": 2, "explored": (before + 128) / 400, "churn": 128 / (2 * before + 128)},
        {"stage": 2, "branch": 2, "epoch": 2, "explored": (before + 24) / 400, "churn": 24 / (2 * before + 24)},
    ]
    assert figures(result)[:4] == expected
    assert figures(result)[4]["explored"] == 1.0  # by the branches together
    phases = [event for event in events(tmp_path / "run") if event["event"] == "phase"]
    assert (phases[0]["explored"], phases[0]["churn"]) == (0.0, None)
    assert [phase["explored"] for phase in phases[1:]] == [row["explored"] for row in figures(result)]


def test_masks_that_move_have_that_churn_and_growth(tmp_path: Path) -> None:
    sparse = SparseModel(torch.nn.Linear(10, 10, bias=False), sparsity=0.5)
    exploration = Exploration(sparse, RunFolder(tmp_path), is_on=True, is_writer=True)
    masks = torch.zeros(4, 100, dtype=torch.bool)
    masks[0, :10] = masks[1, :50] = masks[2, 10:60] = masks[3, 5:60] = True
    seen = []
    for scheduled, mask in zip(walk([Phase(epochs=0), *[Phase(epochs=1)] * 3]), masks, strict=True):
        sparse.stored["weight"].set_mask(mask.view(10, 10))
        exploration.enter(scheduled)
        seen.append([exploration.figures[name] for name in ("explored", "churn", "grown")])
    assert [row[0] for row in seen] == [0, 0.5, 0.6, 0.6]
    assert [row[1] for row in seen][2:] == [20 / 100, 5 / 105]
    assert [row[2] for row in seen] == [0.0, 0.0, 10 / 50, 15 / 55]  # what no iteration saw dead has not grown
    assert exploration.state_dict()["figures"]["grown"] == seen[-1][2]


def test_it_can_be_switched_off_and_then_nothing_is_kept_of_it(tmp_path: Path) -> None:
    result = engine.train(replace(parallel(), exploration=False), tmp_path / "run")
    assert not any("explored" in row or "churn" in row for row in result["history"])
    assert not any("explored" in event for event in events(tmp_path / "run"))
    assert not list((tmp_path / "run").rglob("explored.safetensors"))


def test_a_run_that_did_not_count_at_first_does_not_count_from_the_middle(tmp_path: Path) -> None:
    stopped(replace(cyclic(), exploration=False), tmp_path / "run", 9)
    result = engine.resume(cyclic(), tmp_path / "run")
    assert not any("explored" in row for row in result["history"])


def test_a_branch_whose_file_is_damaged_is_named(tmp_path: Path) -> None:
    sparse = SparseModel(torch.nn.Linear(10, 10), sparsity=0.5)
    exploration = Exploration(sparse, RunFolder(tmp_path), is_on=True, is_writer=True)
    path = RunFolder(tmp_path).explored(1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing of ours")
    with pytest.raises(GrowpruneError, match=r"1-0/explored.safetensors.*Resume the run"):
        exploration.combine(1, 1)
