"""Runs that were made by another plan are not averaged with new ones, though their recipes are the same."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import TOY as TOY_FILE
from torch import nn
from toy import Toy, cyclic

from growprune import GrowpruneError, Phase, contiguous, engine, method, methods, prune
from growprune.compare import Request
from growprune.compare.jobs import Job
from growprune.engine.cost import estimate
from growprune.engine.folder import digest_of, phases_of
from growprune.masks.partition import Part, Partition
from growprune.plan import Parts

SOURCE = f"{TOY_FILE}:cyclic"
OWN = """
from growprune import Phase, method, prune

@method
def stairs(S, *, sparsity, iterations, power=1):
    "Prune in eight cuts."
    for n in range(8):
        yield Phase(prune(S.whole, to=sparsity * (0.25 + 0.75 * (n / 7) ** power)), iterations=iterations // 8)
"""


def request(methods: str, out: Path, seeds: str, **more: Any) -> Request:
    return Request.parse([SOURCE], methods, "0.8", seeds, 6, out, **more)


def finish(job: Job) -> dict[str, Any]:
    return engine.train(job.recipe, job.folder, origin={"source": job.source, "settings": job.settings})


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("0.25 + 0.75", "0.5 + 0.5", r"it has 'prune all to 0\.2 .* gives 'prune all to 0\.4 "),
        ("power=1", "power=3", r"its phases look the same in plan\.json, but some numbers"),
    ],
)
def test_a_run_of_an_edited_method_whose_code_was_not_recorded_is_refused(
    old: str, new: str, says: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    (job,) = request(f"{own}:stairs", tmp_path / "out", "0").jobs()
    finish(job)
    assert request(f"{own}:stairs", tmp_path / "out", "0,1").jobs()
    own.write_text(OWN.replace(old, new))
    with pytest.raises(GrowpruneError, match=f"seed0 was started with another plan: {says}"):
        request(f"{own}:stairs", tmp_path / "out", "0,1").jobs()


def test_a_result_that_was_brought_without_its_plan_is_taken_as_it_is(tmp_path: Path) -> None:
    (job,) = request("cyclic_gap", tmp_path, "0").jobs()
    finish(job)
    plan = job.folder / "plan.json"
    plan.write_text(plan.read_text().replace("to 0.8", "to 0.7"))
    with pytest.raises(GrowpruneError, match=r"another plan: it has '.*0\.7.*', but the recipe gives '.*0\.8"):
        request("cyclic_gap", tmp_path, "0").jobs()
    plan.unlink()
    assert request("cyclic_gap", tmp_path, "0").jobs()


def test_every_method_is_found_again_by_the_plan_it_had(tmp_path: Path) -> None:
    """Also where the seed draws the plan."""
    for job in request("all", tmp_path, "0,1").jobs():
        engine.RunFolder(job.folder).make()
        folder = engine.RunFolder(job.folder)
        folder.write_recipe(job.recipe, {})
        folder.write_plan(job.recipe.plan(job.recipe.task.build_model(), 4))
    assert request("all", tmp_path, "0,1").jobs()


def test_a_row_with_a_batch_size_of_its_own_is_found_again(tmp_path: Path) -> None:
    wanted = request("rigl task.batch_size=8", tmp_path, "0", allow=["task.batch_size", "epochs"])
    (job,) = wanted.jobs()
    finish(job)
    assert wanted.jobs()


class Reading(Toy):
    """A task whose model looks at numbers while it is built, as is common for stochastic depth."""

    def build_model(self) -> nn.Module:
        rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(rates[-1]), nn.Linear(16, 3))


def test_a_model_that_needs_real_numbers_to_be_built_is_priced_compared_and_resumed(tmp_path: Path) -> None:
    recipe = replace(cyclic(), task=Reading(), parts=contiguous(2))
    assert estimate(recipe).epochs > 0
    result = engine.train(recipe, tmp_path / "run")
    assert engine.resume(recipe, tmp_path / "run")["test"] == result["test"]


def test_a_task_that_builds_no_model_is_told_so(tmp_path: Path) -> None:
    class Nothing(Toy):
        def build_model(self) -> nn.Module:
            return None  # type: ignore[return-value]

    says = r"^build_model\(\) of Nothing must return a torch\.nn\.Module, got NoneType$"
    with pytest.raises(GrowpruneError, match=says):
        engine.train(replace(cyclic(), task=Nothing()), tmp_path / "run")


@pytest.mark.parametrize("is_iterations", [False, True])
def test_resuming_a_finished_run_of_another_plan_is_refused(is_iterations: bool, tmp_path: Path) -> None:
    recipe = cyclic()
    if is_iterations:
        recipe = replace(recipe, method=methods.gmp, options={"epochs": 3, "every": 2})
    result = engine.train(recipe, tmp_path / "run")
    assert engine.resume(recipe, tmp_path / "run")["test"] == result["test"]
    path = tmp_path / "run" / "plan.json"
    content = json.loads(path.read_text())
    content["phases"][-1]["edits"] = "prune all to 0.7"
    path.write_text(json.dumps(content))
    with pytest.raises(GrowpruneError, match=r"another plan: it has 'prune all to 0\.7'"):
        engine.resume(recipe, tmp_path / "run")


@method
def steps(S: Parts, *, cuts: tuple[float, ...]) -> Iterator[Phase]:
    """Cut so often."""
    for cut in cuts:
        yield Phase(prune(S.whole, to=cut), iterations=5)


def test_the_digest_tells_plans_apart_that_are_the_same_when_folded() -> None:
    S = Partition((Part("S0", ("a", "b")), Part("S1", ("c",))))
    even, late = (steps(S, cuts=cuts) for cuts in ((0.2, 0.4, 0.6), (0.2, 0.3, 0.6)))
    assert phases_of(even) == phases_of(late)
    assert digest_of(even) != digest_of(late)
    assert digest_of(even) == digest_of(steps(S, cuts=(0.2, 0.4, 0.6)))


def test_a_model_that_was_edited_between_two_comparisons_is_refused(tmp_path: Path) -> None:
    (job,) = request("rigl", tmp_path, "0").jobs()
    result = finish(job)
    path = job.folder / "plan.json"
    content = json.loads(path.read_text())
    name = next(iter(content["parts"]))
    content["parts"][name] = ["other.weight"]
    path.write_text(json.dumps(content))
    says = rf"started with another model or other parts: part {name} was \['other.weight'\], and is \['"
    with pytest.raises(GrowpruneError, match=says):
        request("rigl", tmp_path, "0").jobs()
    with pytest.raises(GrowpruneError, match=says):
        engine.resume(job.recipe, job.folder)
    path.write_text(json.dumps({**content, "parts": "lost"}))
    assert engine.resume(job.recipe, job.folder)["test"] == result["test"]
