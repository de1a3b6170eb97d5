"""The serving example: made, served over loopback, loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from paths import ROOT

import growprune as gp
from growprune.tasks.classification.resnet import ResNet

httpx = pytest.importorskip("httpx", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")

SERVE = ROOT / "examples" / "serve"
WIDTH = ["--width", "8"]


def run(script: str, *words: object) -> str:
    return forked.python(str(SERVE / script), *map(str, words), environment=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("serve") / "served"
    assert "layer4.1.conv2" in run("make.py", made, *WIDTH, "--seconds", 0.2)
    return made


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    found = forked.free_port()
    words = (str(SERVE / "server.py"), str(folder), *WIDTH, "--port", str(found))
    with forked.started(*words, environment=environment()):
        yield found


@pytest.mark.xdist_group("serve")
def test_the_served_model_answers_as_torch_does(folder: Path, port: int) -> None:
    said = run("load.py", "--port", port, "--requests", 24, "--at-once", 6)  # which waits until the server is there
    assert said.startswith("24 requests, 6 at once: ")
    model = ResNet("resnet18", num_classes=10, width=8, stem="cifar").eval()
    gp.load(folder / "model.safetensors", model)
    image = torch.randn(3, 32, 32)
    answer = httpx.post(f"http://127.0.0.1:{port}/classify", content=image.numpy().tobytes()).json()
    with torch.no_grad():
        expected = model(image[None])[0]
    torch.testing.assert_close(torch.tensor(answer["scores"]), expected, rtol=1e-4, atol=1e-5)
    assert answer["class"] == int(expected.argmax())
    stats = httpx.get(f"http://127.0.0.1:{port}/stats").json()
    assert stats["requests"] >= 25
    assert 0 < stats["p50"] <= stats["p90"] <= stats["p99"]
    assert 1 <= stats["mean_batch"] <= 8


@pytest.mark.xdist_group("serve")
def test_what_is_no_image_is_refused_and_said(port: int) -> None:
    run("load.py", "--port", port, "--requests", 1)
    answer = httpx.post(f"http://127.0.0.1:{port}/classify", content=b"12345")
    assert answer.status_code == 422
    assert answer.json()["detail"] == "5 bytes came, but an image is 12288: float32, (3, 32, 32)"
