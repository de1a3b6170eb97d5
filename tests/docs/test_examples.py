"""Examples that need nothing but growprune: a loop of one's own, and torchrun. The others are tested elsewhere."""

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from paths import ROOT
from torch import nn

import growprune as gp

EXAMPLES = ROOT / "examples"


def own_loop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the example prints last."""
    monkeypatch.setattr(sys, "argv", ["own_loop.py", *arguments])
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    return (capsys.readouterr().out.splitlines() or [""])[-1]


def test_the_loop_of_ones_own_goes_on_to_the_same_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    told = own_loop(monkeypatch, capsys, "--out", str(whole))
    accuracy, path = re.fullmatch(r"([\d.]+) % right; (.*) has [\d,]+ bytes", told).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 85
    assert path == str(whole / "model.safetensors")
    assert gp.manifest(path)["totals"]["prunable_nnz"] == 422  # a tenth of 2 * 64 + 64 * 64

    assert "iteration 57 of 300" in own_loop(monkeypatch, capsys, "--out", str(parted), "--stop-after", "57")
    assert not (parted / "model.safetensors").exists()
    own_loop(monkeypatch, capsys, "--out", str(parted), "--resume")
    assert (parted / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


TORCHRUN = str(EXAMPLES / "torchrun.py")


@pytest.mark.slow
def test_two_processes_of_torchrun_end_with_the_bits_of_one(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    two = forked.python(*launcher, TORCHRUN, "--out", str(tmp_path / "two"), environment=environment)
    assert re.fullmatch(r"[\d.]+ % right, 845 of 4224 weights live\n", two)  # said once; a fifth
    assert (tmp_path / "two" / "log-1.jsonl").exists()  # the other process trained too
    assert forked.python(TORCHRUN, "--out", str(tmp_path / "one"), environment=environment) == two
    assert (tmp_path / "two/model.safetensors").read_bytes() == (tmp_path / "one/model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_replicas_of_torchrun_share_each_batch(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:  # what torchrun would start, as the test above sees
        where = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(forked.free_port()),
        }
        ranks = [{**where, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        words = (TORCHRUN, "--out", str(tmp_path / "run"), "--cyclic")
        both = [stack.enter_context(forked.started(*words, environment=rank)) for rank in ranks]
        done = [command.wait() for command in both]
    assert [rank.returncode for rank in done] == [0, 0], done
    told = "".join(rank.stdout for rank in done)
    accuracy, alive = re.fullmatch(r"([\d.]+) % right, (\d+) of 4224 weights live\n", told).groups()  # type: ignore[union-attr]
    assert (float(accuracy) > 85, alive) == (True, "845")
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    gp.load(tmp_path / "run" / "model.safetensors", model)
    assert [int(torch.count_nonzero(model[i].weight)) for i in (0, 2)] == [26, 819]  # of 128 and 4,096


def test_every_example_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [path.name for path in EXAMPLES.glob("*.py") if f"examples/{path.name}" not in pages] == []
