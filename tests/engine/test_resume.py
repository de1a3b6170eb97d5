"""A run that is killed, again and again, at random points, ends with the bits of one that was never disturbed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from several import carry_on, progress_of
from toy import continuing, cyclic, parallel, stopped

import growprune as gp
from growprune import GrowpruneError, engine, methods
from growprune.engine.override import override
from growprune.engine.recipe import OptimizerConfig, Recipe
from growprune.files import checkpoint


def editing_often(method: Callable[..., gp.Plan]) -> Recipe:
    """An edit every 5 iterations, where an epoch has 4."""
    return replace(cyclic(), method=method, options={"iterations": 44, "every": 5})


RECIPES = {
    "cyclic, restart": cyclic(),
    "cyclic, continue": continuing(cyclic()),
    "parallel, restart": parallel(),
    "parallel, continue": continuing(parallel()),
    "cyclic, compact": replace(continuing(cyclic()), storage="compact"),
    "rigl": editing_often(methods.rigl),
    "rigl, compact": replace(editing_often(methods.rigl), storage="compact", optimizer=OptimizerConfig("adamw")),
    "gmp": editing_often(methods.gmp),
    "admm": editing_often(methods.admm),
    "dpf": editing_often(methods.dpf),
    "str": replace(cyclic(), method=methods.str_, options={"iterations": 44}, optimizer=OptimizerConfig("adam", 0.01)),
    "deepr": replace(cyclic(), method=methods.deepr, options={"iterations": 44}, clip=1.0),
}
NUM_KILLS = {"cyclic, restart": 4, "parallel, continue": 4, "cyclic, compact": 4, "rigl, compact": 2, "admm": 2}
"""How often some of them are killed; what a checkpoint of the others holds, the test below sees of all."""


def live(recipe: Recipe, folder: Path) -> None:
    torch.set_num_threads(1)
    carry_on(recipe, folder)


def outcome(folder: Path) -> tuple[bytes, bytes, Any]:
    """Everything a run leaves that must not depend on interruptions."""
    result = engine.RunFolder(folder)
    state = checkpoint.load_newest(result.checkpoints, lambda message: None)
    assert state is not None
    tensors: dict[str, torch.Tensor] = {}
    nest = checkpoint.encode({k: v for k, v in state[1].items() if k != "seconds"}, tensors)
    bits = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    found = result.read_result() if result.result.exists() else {}
    told = {
        name: found.get(name) for name in ("history", "best", "test", "training_flops", "average_alive", "peak_alive")
    }
    return result.model.read_bytes(), result.best.read_bytes(), (nest, bits, told)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_KILLS)
def test_a_run_killed_at_many_random_points_ends_with_the_undisturbed_bits(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = replace(RECIPES[name], checkpoint_seconds=0.0)
    engine.train(recipe, tmp_path / "undisturbed")
    # lives fork from a process that has loaded torch (and what an optimizer's first step imports), but not used it
    context = forked.context()
    chance = random.Random(name)
    kills, folder, undisturbed = 0, tmp_path / "killed", outcome(tmp_path / "undisturbed")
    while kills < NUM_KILLS[name]:
        process = context.Process(target=live, args=(recipe, folder))
        process.start()
        goal = progress_of(folder) + chance.randrange(1, 5)
        while process.is_alive() and progress_of(folder) < goal:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        if (folder / "result.json").exists():  # it came to its end between two kills: another one is killed
            assert outcome(folder) == undisturbed
            folder = tmp_path / f"killed-{kills}-times-before"
    carry_on(recipe, folder)
    assert outcome(folder) == undisturbed


@pytest.mark.parametrize("name", RECIPES)
def test_stopping_after_any_iteration_and_resuming_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    engine.train(recipe, tmp_path / "undisturbed")
    folder = tmp_path / "stopped"
    lives = 0
    while not (folder / "result.json").exists():
        countdown = iter([False] * (lives % 7) + [True])
        start = engine.resume if (folder / "recipe.json").exists() else engine.train
        try:
            start(recipe, folder, should_stop=lambda it=countdown: next(it, True))
        except engine.Interrupted:
            lives += 1
    assert lives > 5
    assert outcome(folder) == outcome(tmp_path / "undisturbed")


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    recipe = replace(cyclic(), checkpoint_seconds=0.0)
    engine.train(recipe, tmp_path / "undisturbed")
    folder = tmp_path / "damaged"
    stopped(recipe, folder, 9)
    newest = max(checkpoint.numbers(folder / "checkpoints"))
    with (folder / "checkpoints" / f"{newest:08d}" / "tensors.safetensors").open("r+b") as file:
        file.truncate(100)
    events: list[dict[str, Any]] = []
    engine.resume(recipe, folder, on_event=events.append)
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert len(warnings) == 1
    assert f"{newest:08d} is damaged" in warnings[0]
    assert "using the previous checkpoint" in warnings[0]
    assert outcome(folder)[:2] == outcome(tmp_path / "undisturbed")[:2]


@pytest.mark.parametrize(
    ("recipe", "iterations"),
    [(cyclic(), 9), (parallel(), 9), (parallel(), 26)],
    ids=["cyclic", "parallel, in a branch", "parallel, after the forks"],
)
def test_if_every_checkpoint_is_damaged_the_run_starts_over_to_the_same_bits(
    recipe: Recipe, iterations: int, tmp_path: Path
) -> None:
    recipe = replace(recipe, checkpoint_seconds=0.0)
    engine.train(recipe, tmp_path / "undisturbed")
    folder = tmp_path / "damaged"
    stopped(recipe, folder, iterations)
    damaged = list(folder.rglob("tensors.safetensors"))
    for path in damaged:
        os.truncate(path, 100)
    events: list[dict[str, Any]] = []
    engine.resume(recipe, folder, on_event=events.append)
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert len(warnings) == len(damaged)
    assert warnings[-1].endswith("no other checkpoint, so starting over")
    assert outcome(folder) == outcome(tmp_path / "undisturbed")


def test_a_run_that_has_no_checkpoint_yet_says_that_it_starts_over(tmp_path: Path) -> None:
    recipe = replace(cyclic(), checkpoint_seconds=1e6)
    engine.train(recipe, tmp_path / "undisturbed")
    stopped(recipe, tmp_path / "killed", 2)
    shutil.rmtree(tmp_path / "killed" / "checkpoints")  # a stop writes one, kill -9 does not
    events: list[dict[str, Any]] = []
    engine.resume(recipe, tmp_path / "killed", on_event=events.append)
    (said,) = [event["message"] for event in events if event["event"] == "warning"]
    assert said.endswith("killed has no checkpoint yet, so it starts over. See checkpoint_seconds")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "undisturbed")


def in_its_second_phase(folder: Path) -> Path:
    """A run in its second phase; its plan."""
    stopped(cyclic(), folder, 3)
    return folder / "plan.json"


def test_resuming_after_a_default_of_the_method_changed_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    plan = in_its_second_phase(tmp_path / "run")
    plan.write_text(plan.read_text().replace("prune all to 0.8", "prune all to 0.7"))  # as an older version had it
    before = plan.read_bytes()
    with pytest.raises(gp.GrowpruneError, match=r"another plan: it has 'prune all to 0\.7.*gives 'prune all to 0\.8"):
        engine.resume(cyclic(), tmp_path / "run")
    assert plan.read_bytes() == before


@pytest.mark.parametrize(
    "content", [None, "", "{}", '{"phases": 1}', "[" * 100_000], ids=["lost", "empty", "no phases", "a number", "deep"]
)
def test_a_run_goes_on_without_its_plan_file_which_is_written_again(content: str | None, tmp_path: Path) -> None:
    plan = in_its_second_phase(tmp_path / "run")
    whole = plan.read_bytes()
    plan.unlink() if content is None else plan.write_text(content)
    engine.resume(cyclic(), tmp_path / "run")
    assert plan.read_bytes() == whole


def test_resuming_a_finished_run_returns_its_result_and_trains_nothing(tmp_path: Path) -> None:
    result = engine.train(cyclic(), tmp_path / "run")
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert engine.resume(cyclic(), tmp_path / "run")["test"] == result["test"]
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "content",
    ['{"rows": [{"stage": 1, "bra', "{}", '{"rows": [{"stage": "one"}]}', "[" * 100_000],
    ids=["cut off", "empty", "no number", "too deep"],
)
def test_damaged_notes_of_a_branch_are_written_again_by_who_trained_it(content: str, tmp_path: Path) -> None:
    engine.train(parallel(), tmp_path / "undisturbed")
    folder = tmp_path / "run"
    stopped(parallel(), folder, 5)  # into the second branch
    rows = folder / "checkpoints" / "branches" / "1-0" / "rows.json"
    rows.write_text(content)
    with pytest.raises(ValueError, match=r"rows\.json is damaged .*: remove .*1-0 and resume"):
        engine.RunFolder(folder).read_rows(1, 0)
    engine.resume(parallel(), folder)
    assert outcome(folder)[:2] == outcome(tmp_path / "undisturbed")[:2]


def test_a_recipe_says_how_rates_follow_density_and_storages_agree(tmp_path: Path) -> None:
    recipe = override(cyclic(), {"lr_scaling": "1"})
    assert (recipe.chosen()["lr_scaling"], cyclic().chosen()["lr_scaling"]) == (1.0, 0.0)
    engine.train(recipe, tmp_path / "masked")
    engine.train(replace(recipe, storage="compact"), tmp_path / "compact")
    engine.train(cyclic(), tmp_path / "plain")
    found = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("masked", "compact", "plain")]
    assert found[0] == found[1] != found[2]
    with pytest.raises(GrowpruneError, match=r"^lr_scaling must be 'auto' or an exponent in \[0, 2\], got 7\.0"):
        override(cyclic(), {"lr_scaling": "7"})


def test_a_checkpoint_without_its_marker_is_never_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1})
    checkpoint.save(tmp_path, 2, {"x": 2})
    (tmp_path / "00000002" / "COMPLETE").unlink()
    assert checkpoint.load_newest(tmp_path, lambda message: None) == (1, {"x": 1})
