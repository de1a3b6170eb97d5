"""Entering a run folder: who may, when, and with what."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import Toy, cyclic, parallel, stopped

import growprune as gp
from growprune import engine
from growprune.engine.folder import FORMAT, RunFolder
from growprune.engine.recipe import OptimizerConfig
from growprune.engine.state import check_same_tensors, tensors_of


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.engine.folder.PATIENCE", 0.2)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def change_recipe(folder: Path, change: Any) -> None:
    """Rewrite recipe.json as another growprune would have."""
    content = json.loads((folder / "recipe.json").read_text())
    change(content)
    (folder / "recipe.json").write_text(json.dumps(content))


# Two at once


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is put in this list is called when the next run has found its folder free, and builds its model."""
    calls: list[Any] = []
    build = Toy.build_model

    def interrupted(task: Toy) -> nn.Module:
        if calls:
            calls.pop()()
        return build(task)

    monkeypatch.setattr(Toy, "build_model", interrupted)
    yield calls


def test_of_two_that_start_at_once_the_later_changes_nothing_while_the_first_runs(
    tmp_path: Path, meanwhile: list[Any]
) -> None:
    folder = tmp_path / "run"
    locks = []

    def other_has_the_lock() -> None:
        folder.mkdir()
        lock = RunFolder(folder).locked()
        lock.__enter__()
        locks.append(lock)

    meanwhile.append(other_has_the_lock)
    with pytest.raises(ValueError, match="run is in use by another process"):
        engine.train(cyclic(), folder)
    assert files_of(folder) == {}
    locks[0].__exit__(None, None, None)
    assert engine.train(cyclic(), folder)["test"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_of_two_that_start_at_once_the_later_does_not_train_over_the_first(
    is_finished: bool, tmp_path: Path, meanwhile: list[Any]
) -> None:
    folder = tmp_path / "run"
    first = replace(cyclic(), optimizer=OptimizerConfig("sgd", lr=0.01))
    before: dict[str, bytes] = {}

    def other() -> None:
        if is_finished:
            engine.train(first, folder)
        else:
            stopped(first, folder, 5)
        before.update(files_of(folder))

    meanwhile.append(other)
    with pytest.raises(ValueError, match=r"run already has a run of another recipe. Choose another --out"):
        engine.train(cyclic(), folder)
    assert files_of(folder) == before
    assert engine.resume(first, folder)["recipe"]["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_in_use_is_not_resumed(is_finished: bool, tmp_path: Path) -> None:
    engine.train(cyclic(), tmp_path) if is_finished else stopped(cyclic(), tmp_path, 3)
    before = files_of(tmp_path)
    with RunFolder(tmp_path).locked(), pytest.raises(ValueError, match="is in use by another process"):
        engine.resume(cyclic(), tmp_path)
    assert files_of(tmp_path) == before
    assert engine.resume(cyclic(), tmp_path)["test"]


def test_a_folder_that_a_kill_left_before_its_recipe_was_written_is_free(tmp_path: Path) -> None:
    (tmp_path / ".recipe.json.12345678.tmp").write_text('{"form')
    assert engine.train(cyclic(), tmp_path)["test"]


def test_whoever_takes_the_lock_removes_what_killed_writes_left(tmp_path: Path) -> None:
    engine.train(parallel(), tmp_path)
    names = [".best.safetensors.deadbeef.tmp", "checkpoints/.anything.deadbeef.tmp"]
    names += ["checkpoints/branches/1-0/.rows.json.deadbeef.tmp"]
    (tmp_path / "checkpoints" / "branches" / "1-0").mkdir(parents=True, exist_ok=True)
    for name in names:
        (tmp_path / name).write_bytes(b"half a mod")
    with RunFolder(tmp_path, rank=1).locked():
        assert all((tmp_path / name).exists() for name in names), "only the first process has the lock"
    with RunFolder(tmp_path).locked():
        assert not any((tmp_path / name).exists() for name in names)


# torchrun


def under_torchrun(monkeypatch: pytest.MonkeyPatch, job: str, restarts: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/torchelastic_1/{job}/attempt_{restarts}/0/error.json")


@pytest.mark.parametrize("restarts", [0, 1], ids=["started", "refused and started again"])
def test_a_new_job_of_torchrun_is_refused_a_finished_folder(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, "none_old", 0)
    engine.train(cyclic(), tmp_path)
    before = files_of(tmp_path)
    under_torchrun(monkeypatch, "none_new", restarts)
    with pytest.raises(ValueError, match=r"already has a run of this recipe. Resume it with"):
        engine.train(cyclic(), tmp_path)
    assert files_of(tmp_path) == before


def test_a_job_that_torchrun_starts_again_after_its_end_gives_its_result_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_torchrun(monkeypatch, "none_one", 0)
    result = engine.train(cyclic(), tmp_path)
    under_torchrun(monkeypatch, "none_one", 1)
    events: list[dict[str, Any]] = []
    assert engine.train(cyclic(), tmp_path, on_event=events.append) == result
    said = f"{tmp_path} was finished before this restart. Its result is kept"
    assert events == [{"event": "warning", "message": said}]
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["message"] == said


@pytest.mark.parametrize("job", ["none_one", "none_two"])
def test_under_torchrun_an_unfinished_run_goes_on(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_torchrun(monkeypatch, "none_one", 0)
    stopped(cyclic(), tmp_path, 5)
    under_torchrun(monkeypatch, job, 1)
    events: list[dict[str, Any]] = []
    engine.train(cyclic(), tmp_path, on_event=events.append)
    assert events[0]["event"] == "resumed"
    assert json.loads((tmp_path / "recipe.json").read_text())["job"] == job


# Recipes


def test_what_changes_results_may_not_change_on_resume(tmp_path: Path) -> None:
    stopped(cyclic(), tmp_path, 2)
    with pytest.raises(ValueError, match=r"started with sync_batchnorm=True, but the recipe has False now"):
        engine.resume(replace(cyclic(), sync_batchnorm=False), tmp_path)
    assert engine.resume(replace(cyclic(), storage="compact", checkpoint_seconds=1.0, claim="x"), tmp_path)["test"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda recipe: recipe.pop("options"), "without options.steps, but the recipe has 3 now. Restore it"),
        (
            lambda recipe: recipe["task"].update(colour="red"),
            "with task.colour='red', but the recipe has no task.colour",
        ),
    ],
    ids=["new", "gone"],
)
def test_a_field_that_is_new_or_gone_is_named(change: Any, message: str, tmp_path: Path) -> None:
    stopped(cyclic(), tmp_path, 2)
    change_recipe(tmp_path, lambda content: change(content["recipe"]))
    with pytest.raises(ValueError, match=f"was started {message}"):
        engine.resume(cyclic(), tmp_path)


# Formats


@pytest.mark.parametrize(("found", "says"), [(FORMAT - 1, "an older"), (FORMAT + 1, "a newer")])
def test_a_run_of_another_format_is_refused_and_says_both(found: int, says: str, tmp_path: Path) -> None:
    stopped(cyclic(), tmp_path, 2)
    assert json.loads((tmp_path / "recipe.json").read_text())["format"] == FORMAT
    change_recipe(tmp_path, lambda content: content.update(format=found))
    for look in (lambda: engine.resume(cyclic(), tmp_path), RunFolder(tmp_path).read_recipe):
        with pytest.raises(ValueError, match=rf"by {says} growprune.* format {found}, .* reads {FORMAT}"):
            look()


# Models


@dataclass(frozen=True)
class Other(Toy):
    """A toy whose model's code has been changed since, in ways that settings do not tell."""


Other.__name__ = "Toy"  # the recipe is the same


def gained(model: nn.Module) -> nn.Module:
    model.scale = nn.Parameter(torch.ones(1))
    return model


def lost(model: nn.Module) -> nn.Module:
    model.norm = nn.Identity()
    return model


def wider(model: nn.Module) -> nn.Module:
    model.fc2, model.head = nn.Linear(16, 24), nn.Linear(24, 3)
    return model


def rounded(model: nn.Module) -> nn.Module:
    model.norm = nn.BatchNorm1d(16, dtype=torch.bfloat16)
    return model


CHANGES = {
    gained: "scale is float32 (1,) now, and missing in the checkpoint",
    lost: "norm.weight is missing now, and float32 (16,) in the checkpoint",
    wider: "fc2.weight is prunable float32 (24, 16) now, and prunable float32 (16, 16) in the checkpoint",
    rounded: "norm.weight is bfloat16 (16,) now, and float32 (16,) in the checkpoint",
}


@pytest.mark.parametrize("is_within", [False, True], ids=["at the end of a phase", "within a phase"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_does_not_go_on_with_another_model(
    change: Any, is_within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(replace(cyclic(), checkpoint_seconds=1e9), tmp_path, 9 if is_within else 7)  # two epochs of four batches
    build = Toy.build_model
    monkeypatch.setattr(Other, "build_model", lambda task: change(build(task)))
    with pytest.raises(ValueError, match="the model differs from the one in the checkpoint") as error:
        engine.resume(replace(cyclic(), task=Other()), tmp_path)
    assert CHANGES[change] in str(error.value)


def test_what_the_tensors_of_a_model_are_does_not_depend_on_their_storage() -> None:
    masked, compact = (
        gp.SparseModel(Toy().build_model(), sparsity=0.8, storage=kind) for kind in ("masked", "compact")
    )
    masked.prune()
    compact.prune()
    assert tensors_of(masked)["fc2.weight"] == "prunable float32 (16, 16)"
    assert tensors_of(masked) == tensors_of(compact)
    check_same_tensors(compact, tensors_of(masked))
