"""Each rule of a fair comparison, broken once: what differs is refused, and shown if it is allowed."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from paths import TOY as TOY_FILE
from toy import cyclic

from growprune import GrowpruneError, engine, methods
from growprune.compare import Comparison, Request, of_runs
from growprune.engine.recipe import Recipe
from growprune.runs import find_runs
from growprune.runs.result import Metric
from growprune.runs.table import best_baseline

SOURCE = f"{TOY_FILE}:cyclic"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Real results of four short runs: dense and RigL, two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    dense = replace(cyclic(), method=methods.dense, options={"epochs": 3}, sparsity=0.0)
    rigl = replace(cyclic(), method=methods.rigl, options={"epochs": 3, "every": 2}, allocation="erk")
    made = {}
    for name, recipe in {"dense": dense, "rigl": rigl}.items():
        for seed in (0, 1):
            made[f"{name}{seed}"] = engine.train(replace(recipe, seed=seed), folder / f"{name}{seed}")
    return made


@pytest.fixture
def write(results: dict[str, Any], tmp_path: Path) -> Callable[..., list[Path]]:
    """Writes the results to files, one of them changed."""

    def changed(**changes: Any) -> list[Path]:
        paths = []
        for name, result in copy.deepcopy(results).items():
            for key, value in changes.items() if name == "rigl1" else ():
                *path, last = key.split("__")
                inside = result
                for step in path:
                    inside = inside[step]
                inside.pop(last) if value is None else inside.update({last: value})
            paths.append(tmp_path / name / "result.json")
            paths[-1].parent.mkdir()
            paths[-1].write_text(json.dumps(result))
        return paths

    return changed


@pytest.mark.parametrize(
    "change, field",
    [
        ({"recipe__task__name": "Digits"}, "task.name differs: Toy in .*Digits in rigl:erk every=2 0.8 seed 1"),
        ({"recipe__task__batch_size": 8}, "task.batch_size differs: 16 in .*; 8 in rigl"),
        ({"recipe__task__mixup": 0.2, "recipe__task__depth": 4}, "task.depth differs: 3 in .*; 4 in rigl"),
        ({"recipe__optimizer__lr": 0.5}, "optimizer.lr differs: 0.05 in .*; 0.5 in rigl.* --allow optimizer.lr"),
        ({"recipe__clip": 1.0}, "clip differs: None in .*; 1 in rigl"),
        ({"recipe__precision": "bf16"}, "precision differs"),
        ({"recipe__storage": "compact"}, "storage differs"),
        ({"signature": "tok:13a"}, None),
        ({"data__first_batch": "0123"}, "data differ: num_batches 4, first_batch .*; num_batches 4, first_batch 0123"),
        ({"data__num_batches": 5}, "data differ"),
        ({"training_iterations": 16}, "epochs differ: 3 in .*; 4 in rigl:erk every=2 0.8 seed 1"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_a_run_that_is_unlike_the_others_is_refused(
    change: dict[str, Any], field: str | None, write: Callable[..., list[Path]]
) -> None:
    paths = write(**change)
    if field is None:  # what the others do not say is not held against one
        assert of_runs(paths).rows
        return
    with pytest.raises(GrowpruneError, match=field):
        of_runs(paths)


def test_what_is_sparse_must_be_the_same_among_sparse_runs_but_means_nothing_to_a_dense_one(
    write: Callable[..., list[Path]], tmp_path: Path
) -> None:
    with pytest.raises(GrowpruneError, match=r"keep_dense differs: \[\] in rigl.* seed 0; \['fc'\] in rigl.* seed 1"):
        of_runs(write(recipe__keep_dense=["fc"]))
    content = json.loads((tmp_path / "dense0" / "result.json").read_text())
    content["recipe"]["keep_dense"] = ["fc"]
    (tmp_path / "dense0" / "result.json").write_text(json.dumps(content))
    assert len(of_runs([tmp_path / name for name in ("dense0", "rigl0")]).rows) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"recipe__checkpoint_seconds": 5.0},
        {"recipe__claim": "much"},
        {"recipe__evaluate_every": 10},
        {"recipe__device": "cuda"},
        {"recipe__clip": None},
    ],
)
def test_what_has_no_influence_may_differ_and_a_field_not_stored_counts_as_its_default(
    change: dict[str, Any], write: Callable[..., list[Path]]
) -> None:
    assert len(of_runs(write(**change)).rows) == 2


def test_what_is_allowed_to_differ_makes_rows_of_their_own_and_is_said(write: Callable[..., list[Path]]) -> None:
    comparison = of_runs(write(recipe__optimizer__lr=0.5), ["optimizer"])
    assert [row.name for row in comparison.rows][1:] == [
        "rigl:erk every=2 optimizer.lr=0.05",
        "rigl:erk every=2 optimizer.lr=0.5",
    ]
    assert any("optimizer.lr differs: 0.05 in" in note for note in comparison.notes)


def test_data_are_told_apart_by_their_name_where_a_result_has_no_fingerprint(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (run,) = find_runs([ROOT / "experiments/translation-multi30k/dense/seed0"])
        found = run.result.to_dict()
        found["recipe"]["task"]["data"] = f"/somewhere/{name}/multi30k"
        found["recipe"]["seed"] = found["seed"] = len(paths)
        paths.append(tmp_path / name / "result.json")
        paths[-1].parent.mkdir()
        paths[-1].write_text(json.dumps(found))
    assert len(of_runs(paths).rows[0].runs) == 2
    paths[0].write_text(paths[0].read_text().replace("multi30k", "multi31k"))
    with pytest.raises(GrowpruneError, match=r"task.data differs: multi31k in .*; multi30k in"):
        of_runs(paths)


def test_the_same_row_and_seed_twice_is_refused(write: Callable[..., list[Path]]) -> None:
    paths = write()
    with pytest.raises(GrowpruneError, match=r"rigl0 and .*rigl1 have the same row and seed"):
        paths[3].write_text(paths[2].read_text())
        of_runs(paths)


# Rows of one comparison


def request(methods: str, tmp_path: Path, **more: Any) -> Request:
    return Request.parse([SOURCE], methods, "0.8", "0,1", out=tmp_path / "out", **{"epochs": 6, **more})


def test_all_rows_share_data_order_batch_size_optimizer_and_schedule(tmp_path: Path) -> None:
    recipes = [job.recipe for job in request("all", tmp_path).jobs()]
    shared = {(r.task, r.optimizer, r.lr_schedule, r.accumulate, r.clip, r.precision) for r in recipes}
    assert len(shared) == 1
    first: dict[int, set[str]] = {}
    for recipe in recipes:
        first.setdefault(recipe.seed, set()).add(_first_batch(recipe))
    assert [len(digests) for digests in first.values()] == [1, 1]
    assert first[0] != first[1]


def _first_batch(recipe: Recipe) -> str:
    from growprune.engine.trainer import fingerprint

    return str(fingerprint(recipe, 4)["first_batch"])


def test_a_row_with_another_learning_rate_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"optimizer.lr differs: 0.05 in dense 0; 0.5 in rigl:erk optimizer.lr="):
        request("dense,rigl optimizer.lr=0.5", tmp_path).jobs()
    allowed = request("dense,rigl optimizer.lr=0.5", tmp_path, allow=["optimizer.lr"])
    jobs = allowed.jobs()
    assert jobs[1].recipe.optimizer.lr == 0.5
    assert "optimizer.lr differs: 0.05 in dense 0; 0.5 in rigl:erk optimizer.lr=0.5 0.8" in allowed.table(jobs).notes


def test_a_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    job = request("rigl", tmp_path).jobs()[0]
    engine.train(job.recipe, job.folder, origin={"source": job.source, "settings": job.settings})
    with pytest.raises(GrowpruneError, match=r"was started with options.epochs=6, but the recipe has 5 now"):
        request("rigl", tmp_path, epochs=5).jobs()
    (job.folder / "recipe.json").unlink()  # only the result was brought here
    with pytest.raises(GrowpruneError, match=r"has options.epochs=6, but the comparison has 5 now"):
        request("rigl", tmp_path, epochs=5).jobs()
    assert request("rigl", tmp_path).jobs()


@pytest.mark.parametrize("is_lower_better", [False, True])
def test_validation_and_not_test_chooses_the_best_baseline(
    is_lower_better: bool, write: Callable[..., list[Path]], tmp_path: Path
) -> None:
    paths = write()
    base = json.loads(paths[2].read_text())
    base["lower_is_better"] = is_lower_better
    figures = {"a": (90.0, 10.0), "b": (80.0, 99.0), "c": (70.0, 50.0)}
    made = []
    for method, (validation, test) in figures.items():
        base["recipe"]["method"] = method
        base["validation"]["accuracy"], base["test"]["accuracy"] = validation, test
        made.append(tmp_path / method / "result.json")
        made[-1].parent.mkdir()
        made[-1].write_text(json.dumps(base))
    comparison = of_runs(made)
    summaries = {row.method: comparison.summary(row) for row in comparison.rows}
    baselines = {name: summary["baseline"].split(":")[0] for name, summary in summaries.items()}
    assert baselines == ({"a": "c", "b": "c", "c": "b"} if is_lower_better else {"a": "b", "b": "a", "c": "a"})
    # a plain difference, whatever is better
    assert summaries["c"]["minus_baseline"]["mean"] == (-49.0 if is_lower_better else 40.0)
    assert comparison.to_dict()["lower_is_better"] == is_lower_better
    assert ("- a lower accuracy is better\n" in comparison.to_markdown()) == is_lower_better
    assert best_baseline({0: 1.0}, {"other": {1: 5.0}}, Metric("accuracy")) is None


def test_a_baseline_is_another_method_and_not_a_control_of_ones_own(
    write: Callable[..., list[Path]], tmp_path: Path
) -> None:
    base = json.loads(write()[2].read_text())
    made = []
    for validation, (method, options) in enumerate([("b", {}), ("b", {"start": 4}), ("a", {}), ("a", {"power": 1})]):
        base["recipe"] |= {"method": method, "options": options, "allocation": "uniform"}
        base["validation"]["accuracy"] = float(validation)
        made.append(tmp_path / f"{validation}" / "result.json")
        made[-1].parent.mkdir()
        made[-1].write_text(json.dumps(base))
    a, power, b, start = "a:uniform", "a:uniform power=1", "b:uniform", "b:uniform start=4"
    baselines = named_baselines(of_runs(made))
    assert baselines == {a: start, power: start, b: power, start: power}
    alone = named_baselines(of_runs(made[2:]))
    assert alone == {a: power, power: a}  # no other method is there


def named_baselines(comparison: Comparison) -> dict[str, str | None]:
    return {row.name: comparison.summary(row)["baseline"] for row in comparison.rows}
