"""A run that any error ends is failed, and says why; a run that Ctrl-C ends is interrupted, and resumes."""

import errno
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from several import run_on
from toy import Toy, cyclic, plain, stopped

from growprune import engine
from growprune.engine import building
from growprune.engine.recipe import Recipe
from growprune.runs import read_run


@dataclass(frozen=True)
class Failing(Toy):
    """Its loss raises an error in the third batch, as long as there is a file that says so."""

    file: str = ""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if batch[0] == 3 and Path(self.file).exists():
            raise ERRORS[Path(self.file).name]
        return super().loss(model, batch)


Failing.__name__ = "Toy"
ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "memory": MemoryError(),
    "users": KeyError("label"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "ctrl-c": KeyboardInterrupt(),
}
SAYS = {
    "gpu": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "memory": "MemoryError",
    "users": "KeyError: 'label'",
    "disk": "OSError: [Errno 28] No space left on device",
}


def failing(file: Path) -> Recipe:
    file.touch()
    return replace(cyclic(), task=Failing(file=str(file)))


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SAYS)
def test_any_error_is_logged_with_its_last_line_and_the_run_is_failed(name: str, tmp_path: Path) -> None:
    with pytest.raises(type(ERRORS[name])):
        engine.train(failing(tmp_path / name), tmp_path / "run")
    assert {**log_of(tmp_path / "run")[-1], "time": 0} == {"time": 0, "event": "failed", "message": SAYS[name]}
    run = read_run(tmp_path / "run")
    assert (run.status, run.why) == ("failed", SAYS[name])


@pytest.mark.parametrize("name", ["ctrl-c", "gpu"])
def test_a_run_that_was_interrupted_or_failed_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    recipe = failing(tmp_path / name)
    with pytest.raises(type(ERRORS[name])):
        engine.train(recipe, tmp_path / "run")
    assert log_of(tmp_path / "run")[-1]["event"] == ("interrupted" if name == "ctrl-c" else "failed")
    (tmp_path / name).unlink()
    engine.resume(recipe, tmp_path / "run")
    engine.train(recipe, tmp_path / "undisturbed")
    models = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("run", "undisturbed")]
    assert models[0] == models[1]
    assert read_run(tmp_path / "run").status == "finished"


def test_a_listener_that_fails_fails_the_run(tmp_path: Path) -> None:
    def listen(event: dict[str, Any]) -> None:
        if event["event"] in ("epoch", "failed"):
            raise RuntimeError("no connection to the server")

    with pytest.raises(RuntimeError, match="no connection to the server"):
        engine.train(cyclic(), tmp_path / "run", on_event=listen)
    assert read_run(tmp_path / "run").why == "RuntimeError: no connection to the server"


def test_a_run_that_is_refused_on_resume_is_not_failed(tmp_path: Path) -> None:
    stopped(cyclic(), tmp_path / "run", 3)
    with pytest.raises(ValueError, match=r"was started with sparsity=0\.8"):
        engine.resume(replace(cyclic(), sparsity=0.5), tmp_path / "run")
    assert read_run(tmp_path / "run").status == "unfinished"


def fails_to_test(recipe: Recipe, folder: Path) -> None:
    """Rank 0 fails when it tests the model, but its process lives on, as in a notebook."""
    evaluate = Toy.evaluate

    def failing(task: Toy, model: torch.nn.Module, split: str, **how: Any) -> dict[str, float]:
        if split == "test":
            raise ValueError("the test data are gone")
        return evaluate(task, model, split, **how)

    Toy.evaluate = failing  # type: ignore[method-assign]
    try:
        engine.train(recipe, folder)
    finally:
        until = time.monotonic() + 60
        while "failed" not in (folder / "log-1.jsonl").read_text() and time.monotonic() < until:
            time.sleep(0.05)


def test_who_waits_for_the_result_of_a_first_process_that_fails_is_told(tmp_path: Path) -> None:
    errors = sorted(run_on(2, replace(plain(), candidates=False), tmp_path / "run", body=fails_to_test))
    assert errors[0].startswith("rank 0: the test data are gone")
    assert "waiting for the result of rank 0: the test data are gone" in errors[1]
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_result_tells_the_source_unless_a_clean_commit_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(building, "commit", lambda: "0123456789ab")
    assert "source" not in building.environment(cpu)
    for unclear in ("0123456789ab-dirty", ""):
        monkeypatch.setattr(building, "commit", lambda said=unclear: said)
        assert building.environment(cpu)["source"] == building.source_digest()
    engine.train(cyclic(), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["environment"]
    assert len(stored["source"]) == 16
    assert stored["source"] == building.source_digest()
