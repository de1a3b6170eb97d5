"""benchmarks/bench.py: a deployed model against other engines, each in a process of its own."""

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from paths import ROOT
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app

sys.path.insert(0, str(ROOT / "benchmarks"))
bench = importlib.import_module("bench")
sys.path.pop(0)
bench_app = typer.Typer()
bench_app.command()(bench.main)

NET = """
from torch import nn
def build():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
"""


@pytest.mark.slow
def test_engines_are_timed_in_processes_and_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model = ["--model", f"{tmp_path / 'net.py'}:build", "--example-shape", "4,16"]
    sparse = gp.SparseModel(runpy.run_path(str(tmp_path / "net.py"))["build"](), sparsity=0.9)
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")
    out = ["--out", str(tmp_path / "out"), "--seconds", "0"]
    assert CliRunner().invoke(app, ["deploy", str(tmp_path / "model.safetensors"), *model, *out]).exit_code == 0
    engines = ["--engines", "deployed,torch,onnxruntime", "--python", str(tmp_path / "python"), "--rounds", "1"]
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # one that has no packages
    (tmp_path / "python").chmod(0o755)
    done = CliRunner().invoke(bench_app, [str(tmp_path / "out"), *engines, "--busy", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["busy"] == 1
    deployed, plain, other = json.loads(done.stdout)["engines"]
    assert deployed["engine"] == "deployed" and deployed["ms"] > 0 and deployed["error"] <= 1e-5
    assert plain["ms"] > 0 and plain["error"] == 0
    assert other["ms"] is None and "numpy" in other["why"]


def test_only_what_was_measured_is_claimed() -> None:
    ours, torch_, missing = (
        bench.Timing("deployed", 2.0, 0.1, 0.0),
        bench.Timing("torch", 5.0, 0.2, 0.0),
        bench.Timing("openvino", None),
    )
    assert bench.conclusion([ours, torch_]) == "2.50 times as fast as the best of the others, torch (spread 20%)"
    assert bench.conclusion([ours, torch_, missing]).endswith("(spread 20%); openvino not measured")
    assert bench.conclusion([ours, missing]) == "nothing to compare; openvino not measured"
    busy = bench.conclusion([ours, torch_, missing], busy=2)
    assert busy.endswith("(spread 20%); beside 2 busy processes; openvino not measured")


def test_bad_input_of_bench_gives_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench_app, [str(tmp_path / "none")])
    assert done.exit_code == 2 and "does not exist" in done.stderr
    with pytest.raises(gp.GrowpruneError, match="there is no engine 'fast'"):
        bench.bench("net.py:load", {}, engines=["fast"])


def test_a_model_that_does_not_run_is_said_before_anything_is_timed(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def load():\n    raise ValueError('no weights here')\n")
    with pytest.raises(gp.GrowpruneError, match="cannot be run in torch: ValueError: no weights here"):
        bench.bench(f"{tmp_path / 'net.py'}:load", {}, engines=["deployed"], threads=1)


def test_busy_processes_run_beside_a_block_and_end_with_it_also_when_it_fails() -> None:
    with pytest.raises(KeyError), bench.busy_processes(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
        raise KeyError
    assert all(process.returncode is not None for process in processes)


def test_a_busy_process_ends_when_nobody_waits_for_it() -> None:
    other = "0"  # no process has this number, so that whoever started it counts as gone
    assert subprocess.run([sys.executable, "-c", bench.BUSY, other], timeout=60).returncode == 0
