"""Recipes: every row of the paper is there and says what it expects; every tiny one runs, resumes, ends as stated."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from report_runs import history, recipe, result, write_bare
from small_data import EVERY_MAKER, MAKERS
from tiny_recipes import TINY
from toy import stopped

import growprune as gp
from growprune import engine
from growprune.engine.cost import estimate
from growprune.engine.recipe import Recipe
from growprune.recipes import MEASURED, RECIPES, find
from growprune.runs import find_runs
from growprune.tasks.segmentation.shapenet import NAME

EXPERIMENTS = ROOT / "experiments"
PAPER = [name for name in RECIPES if re.match(r"\w+-(imagenet|coco|shapenet|wmt14)/", name)]
METHOD_OF = {"cyclic": "cyclic_gap", "parallel": "parallel_gap", "random": "random_gap", "set": "set"}
METHOD_OF |= {"gradual": "gradual_gap"}
METHOD_OF |= {"static": "static_random", "str": "str", "one-shot": "one_shot", "iterative-admm": "iterative_admm"}
"""What a row calls a method that has another name."""


def one_of_each_kind(names: Iterable[str]) -> list[str]:
    """One row of each method, number of parts, pattern and scope, in some task, no long form; in each task, C-GaP.

    That all the others can be built, and what they cost, the test before the runs sees.
    """
    chosen = {}
    for name in names:
        task, method = name.partition("-")[0], re.split(r"-\d", name.partition("/")[2])[0]
        if not re.search(r"-\d+x$", name):
            extra = re.search(r"kappa1|kappa6|1x8|sparse-fc", name)
            chosen.setdefault(extra[0] if extra else method, name)
            if name.endswith("cyclic-90-uniform"):  # which is cut and resumed
                chosen[task] = name
    return list(dict.fromkeys(chosen.values()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield {task: str(make(tmp_path_factory.mktemp(task))) for task, make in EVERY_MAKER.items()}


def with_data(name: str, data: dict[str, str]) -> Recipe:
    recipe = TINY[name]()
    return replace(recipe, task=replace(recipe.task, data=data[name.partition("-")[0]]))


@pytest.mark.parametrize(
    "name, epochs",
    {
        "classification-imagenet/dense": 250,
        "classification-imagenet/random-90-global": 990,
        "classification-imagenet/parallel-90-uniform": 1110,
        "detection-coco/cyclic-90-uniform": 1345,
        "translation-wmt14/one-shot-80-uniform": 80,
        "translation-wmt14/parallel-80-uniform-kappa6": 340,
    }.items(),
)
def test_epochs_are_counted_as_the_paper_does(name: str, epochs: int) -> None:
    recipe = find(name)
    assert estimate(recipe).epochs == epochs
    assert f"; {epochs} epochs; machines of 8 V100" in recipe.claim


@pytest.mark.parametrize(
    "name, epochs",
    {
        "classification-imagenet/iterative-admm-90-uniform": 1250,
        "classification-cifar10/gmp-80-global": 60,
        "classification-cifar10/rigl-80-erk-5x": 300,
        "detection-coco/iterative-90-uniform": 390,
        "detection-bccd/iterative-90-uniform": 120,
        "segmentation-subset/iterative-admm-80-uniform": 60,
    }.items(),
)
def test_a_baseline_trains_as_long_as_in_the_paper_or_as_all_others_in_small(name: str, epochs: int) -> None:
    recipe = find(name)
    assert recipe.options["epochs"] == epochs
    assert f"; {epochs} epochs; " in recipe.claim


def test_long_forms_have_a_cosine_and_mixup() -> None:
    short, long = (find(f"classification-imagenet/rigl-80-erk{times}") for times in ("", "-5x"))
    assert (short.lr_schedule.shape, long.lr_schedule.shape) == ("step", "cosine")
    assert (vars(short.task)["mixup"], vars(long.task)["mixup"]) == (0.0, 0.2)
    assert (short.keep_dense, find("classification-imagenet/rigl-80-uniform").keep_dense) == ((), ("conv1", "fc"))


@pytest.mark.parametrize("name", PAPER)
def test_a_row_of_the_paper_says_what_it_expects_and_is_what_its_name_says(name: str) -> None:
    recipe = find(name)
    assert re.search(r"Table|Ablation|not in the paper", recipe.claim)
    row = name.partition("/")[2]
    if row == "dense":
        assert recipe.sparsity == 0
        return
    method, sparsity, allocation = re.match(r"(.+?)-(\d+)-(\w+)", row).groups()  # type: ignore[union-attr]
    assert recipe.method.__name__ == METHOD_OF.get(method, method)
    assert (recipe.sparsity, recipe.allocation) == (int(sparsity) / 100, allocation)
    assert recipe.pattern == ("1x8" if row.endswith("1x8") else "unstructured")
    if found := re.search(r"kappa(\d)", row):
        assert recipe.chosen()["parts"].num_parts == int(found[1])


@pytest.mark.parametrize(
    "name, sizes",
    {
        # 3 x 3 and 1 x 1 convolutions of each stage, and nothing else: what is kept dense is in no count
        "classification-imagenet/cyclic-80-uniform": (212_992, 1_212_416, 7_077_888, 14_942_208),
        "classification-imagenet/cyclic-80-global": (222_400, 1_212_416, 7_077_888, 16_990_208),
        # an encoder layer has 12 d^2 weights, a decoder layer 16 d^2
        "translation-wmt14/cyclic-90-uniform": (75_497_472, 50_331_648, 50_331_648),
        "translation-wmt14/cyclic-90-uniform-kappa6": (*[25_165_824] * 3, *[33_554_432] * 3),
        "translation-wmt14/cyclic-90-uniform-kappa1": (176_160_768,),
    }.items(),
)
def test_recipe_parts_have_the_sizes_of_the_paper(name: str, sizes: tuple[int, ...]) -> None:
    recipe = find(name)
    with torch.device("meta"):
        model = recipe.task.build_model()
    sparse = recipe.resolve(model).make_sparse(model)
    assert tuple(sum(w.numel for w in sparse.editor.weights_of(part)) for part in recipe.plan(model).partition) == sizes


@pytest.mark.parametrize("sparsity, flops", [(80, 1_827_782_116), (90, 1_033_958_816)])
def test_resnet50_has_the_flops_of_its_live_weights(sparsity: int, flops: int) -> None:
    found = estimate(find(f"classification-imagenet/cyclic-{sparsity}-uniform"))
    assert found.dense_flops == 8_178_368_512
    assert found.costs[-1].forward_flops == pytest.approx(flops, rel=1e-4)  # each layer keeps a whole number


def test_small_and_tiny_have_every_row_of_the_paper() -> None:
    rows: dict[str, dict[str, set[str]]] = {}
    for name in (*RECIPES, *TINY):
        study, _, row = name.partition("/")
        task, _, dataset = study.partition("-")
        rows.setdefault(task, {}).setdefault(dataset, set()).add(row)
    for task in MAKERS:
        assert len(rows[task]) == 3
        assert len({frozenset(of_one) for of_one in rows[task].values()}) == 1


@pytest.mark.parametrize("task", EVERY_MAKER)
def test_a_tiny_recipe_of_every_row_has_edits_and_a_price(task: str, data: dict[str, str]) -> None:
    rows = {name: make() for name, make in TINY.items() if name.startswith(f"{task}-") and not name.endswith("/dense")}
    # rows at 80 % differ from those at 90 % in the number only, and long forms in the length
    priced = [name for name in rows if name.replace("-80-", "-90-") not in rows.keys() - {name}]
    for name in (name for name in priced if not re.search(r"-\d+x$", name)):
        found = estimate(with_data(name, data))
        assert sum(len(cost.scheduled.phase.edits) for cost in found.costs) > 0, name
        assert found.costs[-1].density == pytest.approx(1 - rows[name].sparsity, abs=0.02), name


@pytest.mark.filterwarnings("ignore:layer.* pruned to zero weights")  # of so small a model, under one ranking
@pytest.mark.parametrize("name", one_of_each_kind(TINY))
def test_a_tiny_recipe_runs_and_ends_at_its_sparsity(name: str, data: dict[str, str], tmp_path: Path) -> None:
    recipe = with_data(name, data)
    # how each method resumes, test_methods.py sees; here, how each task does
    is_cut = re.match(r"\w+-tiny/cyclic-90-uniform$", name)
    result = run_whole_and_cut(recipe, tmp_path) if is_cut else engine.train(recipe, tmp_path / "whole")
    totals = result["sparsity"]["totals"]
    in_file = gp.manifest(tmp_path / "whole/model.safetensors")["totals"]
    assert (in_file["prunable_nnz"], in_file["prunable"]) == (totals["alive"], totals["prunable"])
    assert totals["alive"] / totals["prunable"] == pytest.approx(1 - recipe.sparsity, abs=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", EVERY_MAKER)
def test_a_task_resumes_exactly_on_a_gpu_too(task: str, data: dict[str, str], tmp_path: Path) -> None:
    recipe = with_data(f"{task}-tiny/cyclic-80-uniform", data)
    run_whole_and_cut(replace(recipe, device="cuda", precision="bf16"), tmp_path)


def run_whole_and_cut(recipe: Recipe, tmp_path: Path) -> dict[str, Any]:
    """Run it once, and once broken off half-way and resumed; both must give the same bits. Returns the result."""
    result = engine.train(recipe, tmp_path / "whole")
    iterations = len(result["history"]) * recipe.task.num_batches()
    stopped(recipe, tmp_path / "cut", (iterations // 2))
    again = engine.resume(recipe, tmp_path / "cut")
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    assert again["test"] == result["test"]
    return result


def test_data_may_have_moved_when_a_run_is_resumed(data: dict[str, str], tmp_path: Path) -> None:
    recipe = with_data("translation-tiny/cyclic-80-uniform", data)
    stopped(recipe, tmp_path / "run", 2)
    moved = Path(data["translation"]).rename(tmp_path / "moved")
    result = engine.resume(replace(recipe, task=replace(recipe.task, data=str(moved))), tmp_path / "run")
    moved.rename(data["translation"])
    assert json.loads((tmp_path / "run/recipe.json").read_text())["recipe"]["task"]["data"] == str(moved)
    assert result["sparsity"]["totals"]["alive"] > 0


@pytest.mark.parametrize("task", EVERY_MAKER)
@pytest.mark.parametrize(
    "place, says", [("", "--data is missing.*DIR with"), ("nowhere", "--data nowhere does not exist. Expected")]
)
def test_data_that_is_not_there_is_said_before_a_run_has_a_folder(
    task: str, place: str, says: str, tmp_path: Path
) -> None:
    recipe = TINY[f"{task}-tiny/dense"]()
    with pytest.raises(ValueError, match=says):
        engine.train(replace(recipe, task=replace(recipe.task, data=place)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "task, file",
    {
        "detection": "annotations/val.json",
        "segmentation": f"{NAME}/train_test_split/shuffled_test_file_list.json",
        "translation": "test.de",
    }.items(),
)
def test_a_split_that_is_missing_is_said_at_the_start_not_the_end(task: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    root = MAKERS[task](tmp_path / "data")
    (root / file).unlink()
    recipe = TINY[f"{task}-tiny/dense"]()
    with pytest.raises(ValueError, match=Path(file).name):
        engine.train(replace(recipe, task=replace(recipe.task, data=str(root))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "study", ["classification-cifar10", "translation-multi30k", "segmentation-subset", "detection-bccd"]
)
def test_small_recipes_say_what_was_measured(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import tables

    found, metric = tables.results(study), tables.METRICS[study][0]
    for name in (name for name in RECIPES if name.startswith(f"{study}/")):
        runs = found.get(name.partition("/")[2], [])
        mean = sum(run.figure("test")[metric] for run in runs) / max(1, len(runs))
        expected = f"measured here: {metric} {mean:.2f}" if runs else "not measured here"
        assert re.search(rf", on \S+; {expected}; \d+ epochs; one GPU$", find(name).claim)
        assert (name in MEASURED) == bool(runs)


def test_tables_are_those_of_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import pretrained
    import pretrained_by_data
    import tables

    for path, text in tables.files().items():
        assert path.read_text() == text, "run python experiments/tables.py --write"
    for script in (pretrained, pretrained_by_data):
        expected = script.BEGIN + script.table(script.RESULTS) + script.END
        assert expected in script.PAGE.read_text(), f"run python experiments/{script.__name__}.py --write"


def test_stored_results_do_not_say_where_data_lay() -> None:
    assert [run.path for run in find_runs([EXPERIMENTS]) if "/" in run.recipe["task"]["data"]] == []


def test_results_are_kept_without_curves_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import run

    content = result(recipe("gmp", 0.9, 0, task={"data": "/disk/a.npz"}), 88.0, history([1000, 500]), peak_alive=1000)
    write_bare(tmp_path / "runs/gmp/seed0/result.json", content)
    run.keep(tmp_path / "runs", tmp_path / "kept")
    write_bare(tmp_path / "runs/gmp/seed0/result.json", {**content, "seconds": 7.0, "peak_alive": None})
    (tmp_path / "runs/gmp/seed0").rename(tmp_path / "runs/gmp/seed1")
    run.keep(tmp_path / "runs", tmp_path / "kept")
    assert run.kept(tmp_path / "kept") == {"gmp/seed0", "gmp/seed1"}
    first, second = find_runs([tmp_path / "kept"])
    assert (first.test, first.task["data"], first.figure("seconds")) == (88.0, "a.npz", 30.0)
    assert (first.history, second.figure("seconds")) == ([], 7.0)
    assert [entry["alive"] for entry in second.history] == [1000, 500]  # whose peak nothing else says
