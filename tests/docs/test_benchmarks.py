"""Every benchmark runs, in its smallest form."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
SMALLEST = {
    "block_training": ["all", "--small", "--repeats", "1"],
    "compact_training blocks": ["blocks", "--small", "--repeats", "1"],
    "compact_training large": ["large", "--small", "--steps", "1", "--changes", "1"],
    "compact_training resnet50": ["resnet50", "--small", "--repeats", "1", "--storages", "dense", "compact"],
    "decode": ["all", "--small"],
    "every_trainer": ["--only", "ViT,Lightning,timm"],
    "fan_in": ["--small", "--threads", "1", "--seconds", "0", "--rounds", "1"],
    "file_sizes": ["--width", "4"],
    "fuzz_files": ["--cases", "60"],
    "generate": ["--small", "--threads", "1", "--rounds", "1", "--seconds", "0"],
    "inference layers": ["layers", "--shapes", "16x24x3", "--rounds", "1"],
    "inference_networks": [
        *("--small", "--rounds", "1", "--seconds", "0", "--threads", "1"),
        *("--only", "encoder", "--engines", "deployed,torch"),
    ],
    "inference_networks of images": [
        *("--small", "--rounds", "1", "--seconds", "0", "--threads", "1"),
        *("--only", "mobilenet,unet", "--engines", "deployed"),
    ],
    "kernels": ["--weights", "4096"],
    "loading": ["--images", "IMAGES", "--workers", "0", "--batches", "1"],
    "loading_files": ["--millions", "1", "--rounds", "1"],
    "merging": ["--small", "--threads", "1", "--rounds", "1"],
    "masking": ["--steps", "1", "--small"],
    "parallel": ["--processes", "1", "--rounds", "2", "--epochs", "1", "--width", "2"],
    "same_bits": [
        *("--match", "two-models-scaled-*"),
        *("--methods", "gmp", "--epochs", "1", "--width", "2", "--storages", "masked"),
    ],
    "selection threshold": ["--one", "growprune, threshold", "--millions", "0.1"],
    "selection prune": ["--one", "growprune, prune()", "--millions", "1"],
    "selection torch": ["--one", "torch global_unstructured", "--millions", "0.1"],
    "sparse_onnx": ["--only", "digits CNN"],
    "trace_files": ["--files", "--only", "SparseModel,deploy"],
    "transformers_trainer": ["--text", __file__, "--small", "--batches", "1", "--steps", "22", "--storage", "compact"],
}
"""By the name of the file, and what is run of it: the smallest arguments."""


def make_images(folder: Path) -> Path:
    """Two classes of four small pictures each."""
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            for i in range(4):
                pixels = np.full((40, 40, 3), 20 * i, dtype=np.uint8)
                image.fromarray(pixels).save(folder / split / label / f"{i}.png")
    return folder


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = BENCHMARKS / f"{name.split(maxsplit=1)[0]}.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(1)  # as all tests have it


def one_process(command: list[str], *, env: dict[str, str], **_: Any) -> None:
    """What torchrun would start if it were asked for one process: a fork that has torch already."""
    before = command.index("-m", 3)
    assert command[1:before] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    forked.python(*command[before:], environment=env)


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_form_of_every_benchmark_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(make_images(tmp_path)) if a == "IMAGES" else a for a in SMALLEST[name]]
    if name == "parallel":
        monkeypatch.setattr(subprocess, "run", one_process)
    run(name, arguments, monkeypatch)
    told = capfd.readouterr().out
    assert json.loads(told)["seconds"] > 0 if name.startswith("selection") else len(told.splitlines()) >= 1


def test_no_benchmark_is_left_out() -> None:
    found = {path.stem for path in BENCHMARKS.glob("*.py")} - {
        "bench",
        "bench_worker",
        "engines",
        "models",
        "mutations",
        "small_networks",
    }
    assert {name.split(maxsplit=1)[0] for name in SMALLEST} == found


def test_benchmarks_use_public_names_only() -> None:
    for path in BENCHMARKS.glob("*.py"):
        assert "sparse._" not in path.read_text(), path.name
