"""Which GPU a run takes. There is none here: what torch is asked to do is noted instead."""

from typing import Any

import pytest
import torch

import growprune as gp
from growprune.engine import mesh
from growprune.engine.building import choose_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.device | int]:
    """A machine with four GPUs, and which of them were made the current one."""
    calls: list[torch.device | int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return calls


def test_a_gpu_that_is_named_becomes_the_current_one(taken: list[Any]) -> None:
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:1")]


@pytest.mark.parametrize("name", ["auto", "cuda", "cpu"])
def test_where_none_is_named_the_current_one_stays(name: str, taken: list[Any]) -> None:
    assert choose_device(name).index is None
    assert taken == []


def test_a_gpu_that_is_not_there_is_refused_in_one_line(taken: list[Any]) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"^device must be .* cuda:0 to cuda:3 .*, got 'cuda:4'$"):
        choose_device("cuda:4")
    assert taken == []


@pytest.mark.parametrize(
    ("name", "processes", "gpus", "backend"),
    [("cuda", "4", [3], "nccl"), ("cuda", "8", [3], "gloo"), ("cuda:2", "1", [], "nccl"), ("cuda:2", "2", [], "gloo")],
)
def test_processes_take_the_gpu_that_is_named_or_one_each(
    name: str, processes: str, gpus: list[int], backend: str, taken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert mesh.take_a_gpu(torch.device(name)) == backend
    assert taken == gpus
