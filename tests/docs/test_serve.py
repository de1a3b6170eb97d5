"""The serving example: made, served over loopback, loaded."""

import os
import socket
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
    words = (str(SERVE / "server.py"), str(folder), *WIDTH, "--port", str(found), "--patience", "1")
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


@pytest.mark.xdist_group("serve")
def test_a_body_that_is_too_long_is_refused_before_it_is_read_whole(port: int) -> None:
    run("load.py", "--port", port, "--requests", 1)
    chunks = iter([bytes(1 << 14)] * 64)  # 1 MiB, whose length no header tells
    answer = httpx.post(f"http://127.0.0.1:{port}/classify", content=chunks)
    assert (answer.status_code, answer.json()["detail"][:28]) == (413, "more than 12288 bytes came, ")


@pytest.mark.xdist_group("serve")
def test_an_image_with_nan_is_refused(port: int) -> None:
    run("load.py", "--port", port, "--requests", 1)
    image = torch.full((3, 32, 32), torch.nan)
    answer = httpx.post(f"http://127.0.0.1:{port}/classify", content=image.numpy().tobytes())
    assert (answer.status_code, answer.json()["detail"]) == (422, "the image has values that are NaN or infinite")


@pytest.mark.xdist_group("serve")
def test_a_half_sent_request_is_answered_and_closed(port: int) -> None:
    run("load.py", "--port", port, "--requests", 1)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: 12288\r\n\r\n" + bytes(100))
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
