"""Runs: what they train, log, keep, and refuse."""

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import options_of
from toy import Toy, continuing, cyclic, parallel

import growprune as gp
from growprune import engine, methods
from growprune.engine.cost import estimate
from growprune.engine.mesh import Mesh
from growprune.engine.recipe import LRSchedule, OptimizerConfig, Recipe
from growprune.engine.trainer import Training
from growprune.files import checkpoint
from growprune.masks.partition import contiguous, per_layer
from growprune.methods import METHODS
from growprune.plan import Branch, By, Fork, Parts, Phase, Stage, grow, method, prune, walk


def recipe_for(name: str, times: int = 1) -> Recipe:
    """The method's own example, or one that is longer."""
    longer = ("iterations", "epochs", "finetune")
    options = {option: value for option, value in options_of(name).items() if option != "sparsity"}
    options = {option: value * times if option in longer else value for option, value in options.items()}
    partition = per_layer() if name == "random_gap" else contiguous(2)
    return replace(cyclic(), method=METHODS[name], options=options, parts=partition)


@method
def dip(S: Parts, *, sparsity: float, epochs: int) -> Iterator[Phase]:
    """At its target, sparser for a while, and back."""
    yield Phase(prune(S.whole, to=sparsity), epochs=epochs)
    yield Phase(prune(S.whole, to=0.95), epochs=epochs)
    yield Phase(grow(S.whole, to=sparsity), epochs=epochs)


def events_of(recipe: Recipe, folder: Path) -> list[dict[str, Any]]:
    engine.train(recipe, folder)
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_to_its_target_and_lowers_the_loss(name: str, tmp_path: Path) -> None:
    recipe = replace(recipe_for(name, times=3), task=Toy(num_examples=200))
    sparsity = 0.0 if name == "dense" else 0.8
    result = engine.train(replace(recipe, sparsity=sparsity), tmp_path / "run")
    assert result["sparsity"]["totals"]["alive"] == round((1 - sparsity) * (6 * 16 + 16 * 16 + 16 * 3))
    losses = [row["loss"] for row in result["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_gives_others(name: str, tmp_path: Path) -> None:
    files = []
    for run, seed in enumerate((0, 0, 1)):
        engine.train(replace(recipe_for(name), seed=seed), tmp_path / str(run))
        files.append((tmp_path / str(run) / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_a_run_folder_holds_what_it_should(tmp_path: Path) -> None:
    result = engine.train(cyclic(), tmp_path / "run", origin={"source": "toy"})
    folder = tmp_path / "run"
    names = {"recipe.json", "plan.json", "log.jsonl", "checkpoints", "best.safetensors", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names | {"result.json"}
    assert json.loads((folder / "recipe.json").read_text())["recipe"]["method"] == "cyclic_gap"
    plan = json.loads((folder / "plan.json").read_text())
    edits = {"stage": 1, "edits": "prune S2 to 0.8, grow S0 to dense"}
    assert plan["phases"][1] == {**edits, "epochs": 2, "restart": True}
    assert result == json.loads((folder / "result.json").read_text())
    assert result["recipe"]["sparsity"] == 0.8
    alive = [80 - 19 + 96, 80 - 51 + 256, 80 - 10 + 48]
    assert [row["alive"] for row in result["history"]] == [n for n in alive for _ in range(2)] + [80] * 3
    assert result["peak_bytes"] > 0
    assert result["environment"]["torch"] == torch.__version__


def test_the_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    result = engine.train(cyclic(), tmp_path / "run")
    model = Toy().build_model()
    gp.load(tmp_path / "run" / "model.safetensors", model)
    with torch.no_grad():
        assert Toy().evaluate(model.eval(), "test", device=torch.device("cpu")) == result["test"]


def test_the_best_candidate_is_the_best_by_validation_and_is_sparse(tmp_path: Path) -> None:
    log = events_of(cyclic(), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    epochs = [event for event in log if event["event"] == "epoch"]
    seen = [event["candidate"]["accuracy"] for event in epochs if "candidate" in event]
    last = [event for event in epochs if event["index"] == event["last"]]
    seen += [event["validation"]["accuracy"] for event in last]
    assert len(seen) == 3 + 3
    assert result["best"]["validation"]["accuracy"] == max(seen)
    model = Toy().build_model()
    assert gp.load(tmp_path / "run" / "best.safetensors", model).num_alive == 80


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (continuing(cyclic()), {"candidates": False}),
        (replace(parallel(), checkpoint_seconds=0.0), {"checkpoint_seconds": 1e9}),
        (replace(cyclic(), method=methods.rigl, options={"iterations": 20, "every": 5}), {"exploration": False}),
        (cyclic(), {"compile": True}),  # which is for GPUs
    ],
    ids=["candidates", "checkpoints", "exploration", "compile"],
)
def test_what_only_looks_on_changes_nothing(recipe: Recipe, changes: dict[str, Any], tmp_path: Path) -> None:
    engine.train(recipe, tmp_path / "one")
    engine.train(replace(recipe, **changes), tmp_path / "other")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


def learning_rates(recipe: Recipe) -> list[list[float]]:
    model = recipe.task.build_model()
    plan = recipe.plan(model)
    schedule, per_epoch = list(walk(plan)), recipe.task.num_batches()
    sparse = recipe.resolve(model).make_sparse(model)
    training = Training(recipe, schedule, sparse, torch.device("cpu"), Mesh(plan, 1), per_epoch)
    return [
        [round(training.learning_rate(s, epoch * per_epoch), 4) for epoch in range(s.phase.epochs)] for s in schedule
    ]


def in_one_go(recipe: Recipe) -> Recipe:
    return replace(recipe, options={**recipe.options, "restart": False})


def test_restart_starts_every_phase_at_the_start_of_the_curve() -> None:
    assert learning_rates(cyclic()) == [[], [0.0125, 0.05], [0.0125, 0.05], [0.0125, 0.05], [0.0125, 0.05, 0.025]]


def test_continue_draws_one_curve_over_the_whole_plan() -> None:
    rates = [rate for scheduled in learning_rates(in_one_go(cyclic())) for rate in scheduled]
    assert rates == [0.0125, 0.05, 0.0481, 0.0427, 0.0346, 0.025, 0.0154, 0.0073, 0.0019]


def test_branches_of_a_fork_stand_side_by_side_on_the_curve() -> None:
    rates = learning_rates(in_one_go(parallel()))
    assert rates[1] == rates[2] == rates[3] == [0.0125]
    assert rates[5] == rates[6] == rates[7]
    assert rates[5] != rates[1]


def test_the_rate_that_an_epoch_is_logged_with_is_that_of_its_last_iteration(tmp_path: Path) -> None:
    schedule = LRSchedule("cosine")
    recipe = replace(cyclic(), method=methods.dense, options={"epochs": 2}, sparsity=0.0, lr_schedule=schedule)
    rows = [event for event in events_of(recipe, tmp_path / "run") if event["event"] == "epoch"]
    # of 8 iterations, the fourth and the eighth: 0.05 (1 + cos(3/8 pi)) / 2 and 0.05 (1 + cos(7/8 pi)) / 2
    assert [row["lr"] for row in rows] == pytest.approx([0.0345671, 0.0019030], rel=1e-4)


def test_a_plan_that_is_sparser_than_its_target_for_a_while_runs_through(tmp_path: Path) -> None:
    result = engine.train(
        replace(cyclic(), method=dip, options={"epochs": 1}, sparsity=0.9, optimizer=OptimizerConfig("sgd", lr=0.05)),
        tmp_path / "run",
    )
    # of 96, 256 and 48 weights: 10 + 26 + 5 at 90 %, 5 + 13 + 2 at 95 %
    assert [row["alive"] for row in result["history"]] == [41, 20, 41]
    assert ["candidate" in row for row in result["history"]] == [False, False, False]
    assert result["sparsity"]["totals"]["alive"] == 41
    assert result["best"]["stage"] in (0, 2), "never the one that is too sparse"


def test_accumulated_batches_equal_one_of_all_their_examples(tmp_path: Path) -> None:
    found = []
    for batch_size, accumulate in ((16, 4), (50, 1)):  # batches of 16, 16, 16 and 2
        task = Toy(num_examples=50, batch_size=batch_size, is_plain=True)
        recipe = replace(cyclic(), task=task, accumulate=accumulate, optimizer=OptimizerConfig("sgd", lr=0.5))
        folder = tmp_path / str(batch_size)
        losses = [event["loss"] for event in events_of(recipe, folder) if event["event"] == "epoch"]
        found.append((gp.read(folder / "model.safetensors"), losses))
    for name, tensor in found[0][0].items():
        torch.testing.assert_close(tensor, found[1][0][name], rtol=1e-4, atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_a_first_edit_by_gradient_weighs_accumulated_batches_as_training_does(tmp_path: Path) -> None:
    models = []
    for batch_size, accumulate in ((48, 2), (50, 1)):  # batches of 48 and 2
        task = Toy(num_examples=50, batch_size=batch_size, is_plain=True)
        recipe = replace(cyclic(), task=task, accumulate=accumulate, method=methods.snip, options={"iterations": 0})
        engine.train(recipe, tmp_path / str(batch_size))
        models.append((tmp_path / str(batch_size) / "model.safetensors").read_bytes())
    assert models[0] == models[1]


def test_batches_may_be_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.train(replace(cyclic(), accumulate=2), tmp_path / "made")
    batches = Toy.batches
    monkeypatch.setattr(Toy, "batches", lambda *args, **kwargs: list(batches(*args, **kwargs)))
    engine.train(replace(cyclic(), accumulate=2), tmp_path / "listed")
    made, listed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("made", "listed"))
    assert made == listed


def test_every_round_of_parallel_gap_is_saved_and_its_branches_are_gone(tmp_path: Path) -> None:
    recipe = replace(parallel(), options={**parallel().options, "steps": 4})
    found: list[tuple[int, int]] = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "phase" and event["branch"] == 0:
            checkpoints = tmp_path / "run/checkpoints"
            branches = len(list((checkpoints / "branches").glob("*")))
            found.append((len(list(checkpoints.glob("0*"))), branches))

    engine.train(recipe, tmp_path / "run", on_event=look)
    assert found == [(0, 1), (1, 1), (2, 1), (2, 1)]  # the branch that begins has a folder, and no other


def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, calls = Toy.evaluate, iter(range(1000))

    def sometimes_nan(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = evaluate(*args, **kwargs)
        return metrics | ({"accuracy": float("nan")} if next(calls) % 2 == 0 else {})

    monkeypatch.setattr(Toy, "evaluate", sometimes_nan)
    best = engine.train(cyclic(), tmp_path / "run")["best"]
    assert best["validation"]["accuracy"] > 0


def test_metrics_may_be_tensors_but_must_have_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "evaluate", lambda *args, **kwargs: {"accuracy": torch.tensor(3.0)})
    assert engine.train(cyclic(), tmp_path / "run")["test"] == {"accuracy": 3.0}
    monkeypatch.setattr(Toy, "evaluate", lambda *args, **kwargs: {"f1": 3.0})
    with pytest.raises(ValueError, match=r"evaluate\(\) of the task must return its metric 'accuracy', got f1"):
        engine.train(cyclic(), tmp_path / "other")


def test_an_epoch_without_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_batches must be an integer >= 1, got 0"):
        engine.train(replace(cyclic(), task=Toy(num_examples=0)), tmp_path / "run")


def test_accumulated_batches_are_made_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    batches = Toy.batches

    def watched(*args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal most
        for batch in batches(*args, **kwargs):
            alive.append(weakref.ref(batch[1]))
            most = max(most, sum(one() is not None for one in alive))
            yield batch

    monkeypatch.setattr(Toy, "batches", watched)
    engine.train(replace(cyclic(), task=Toy(num_examples=64, batch_size=8), accumulate=8), tmp_path / "run")
    assert most <= 3  # the first, the one before and this one


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    recipe = replace(cyclic(), task=Toy(poison=2), checkpoint_seconds=0.0)
    with pytest.raises(engine.TrainingDiverged, match=r"nan in phase 1 \(stage 1: prune S2.*Lower optimizer\.lr"):
        engine.train(recipe, tmp_path / "run")
    found = checkpoint.load_newest(tmp_path / "run" / "checkpoints", lambda message: None)
    assert found[1]["place"]["iteration"] - found[1]["place"]["start"] == 2
    assert all(torch.isfinite(values).all() for values, _ in found[1]["model"].values())


def test_bf16_and_clipping_train_too(tmp_path: Path) -> None:
    result = engine.train(replace(cyclic(), precision="bf16", clip=0.1), tmp_path / "run")
    assert result["sparsity"]["totals"]["alive"] == 80


@pytest.mark.parametrize(
    ("origin", "advice"),
    [({}, "growprune.resume(recipe, '{}'), or"), ({"source": "toy", "settings": {}}, "`growprune resume {}`, or")],
)
def test_a_folder_with_a_run_is_refused_left_alone_and_how_to_go_on_depends_on_who_started_it(
    origin: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    engine.train(cyclic(), tmp_path / "run", origin=origin)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=r"already has a run of another recipe. Choose another --out"):
        engine.train(parallel(), tmp_path / "run")
    with pytest.raises(ValueError, match=r"already has a run of this recipe") as error:
        engine.train(cyclic(), tmp_path / "run")
    assert f"Resume it with {advice.format(tmp_path / 'run')} choose another --out" in str(error.value)
    assert {path.name for path in (tmp_path / "run").iterdir()} == before


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--out must be a new or empty folder"):
        engine.train(cyclic(), tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot write to"):
        engine.train(cyclic(), tmp_path / "run")


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": contiguous(9)},
        {"sparsity": 1.0},
        {"pattern": "2:5"},
        {"keep_dense": ("nothing",)},
        {"optimizer": OptimizerConfig("adam", momentum=0.9)},
    ],
)
def test_a_recipe_that_cannot_run_leaves_no_folder(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        engine.train(replace(cyclic(), **wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_line_cut_short_spoils_no_other(tmp_path: Path) -> None:
    folder = engine.RunFolder(tmp_path)
    folder.append({"event": "one"})
    with folder.log.open("ab") as log:
        log.write(b'{"event": "tw')
    folder.append({"event": "three"})
    lines = folder.log.read_text().splitlines()
    assert [json.loads(lines[i])["event"] for i in (0, 2)] == ["one", "three"]


def test_options_the_method_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'rounds' of cyclic_gap.* steps, epochs, finetune"):
        replace(cyclic(), options={"rounds": 3})


@pytest.mark.parametrize("name", ["sparsity", "seed"])
def test_options_that_the_recipe_has_a_field_for_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Set the recipe's own field: {name}=2"):
        replace(cyclic(), method=methods.random_gap, options={**cyclic().options, name: 2})


@pytest.mark.parametrize(
    ("field", "allowed"), [("precision", "one of fp32, bf16"), ("device", "auto, cpu, cuda or cuda:N")]
)
def test_a_choice_that_is_none_is_refused_when_the_recipe_is_made(field: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be {allowed}, got 'fp16'"):
        replace(cyclic(), **{field: "fp16"})


@method
def one_part_comes_back(S: Parts, *, sparsity: float) -> Iterator[Stage]:
    yield Phase(prune(S.whole, to=sparsity, by=By.RANDOM), epochs=1)
    yield Fork(Branch(Phase(grow(S[0]), epochs=1), returns=S[0]), Branch(Phase(grow(S[1]), epochs=1), returns=S[2]))
    yield Phase(epochs=1)


def test_after_a_fork_that_returns_some_parts_the_others_cost_what_they_did_before() -> None:
    recipe = replace(cyclic(), method=one_part_comes_back, options={}, sparsity=0.8)
    densities = [cost.density * 400 for cost in estimate(recipe).costs]
    # of 96, 256 and 48 weights, 19, 51 and 10 live; S0 comes back dense, and S1 is as it was before the fork
    assert densities == pytest.approx([80, 96 + 51 + 10, 19 + 256 + 10, 96 + 51 + 10])


def test_a_plan_in_iterations_is_priced_in_epochs_of_the_data() -> None:
    recipe = replace(cyclic(), method=methods.static_random, options={"iterations": 10})
    assert estimate(recipe).epochs == 2.5  # four batches of 50 examples


def test_parameters_that_a_recipe_includes_are_layers_of_its_partition() -> None:
    recipe = replace(cyclic(), parts=per_layer(), include=("lone",))
    model = recipe.task.build_model()
    model.lone = torch.nn.Parameter(torch.zeros(4, 4))
    assert len(recipe.plan(model).partition) == 4


def test_on_gpus_replicas_ask_each_other_whether_to_stop_once_in_sixteen_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, asked = Mesh(cyclic().plan(Toy().build_model()), 1), []
    monkeypatch.setattr(mesh, "data_group", "a group")
    device = ["cuda"]
    monkeypatch.setattr(mesh, "device", lambda: torch.device(device[0]))
    monkeypatch.setattr(mesh, "sum_over_replicas", lambda flag: asked.append(1) or flag)
    assert [mesh.any(True, iteration) for iteration in range(1, 16)] == [False] * 15
    assert asked == []
    device[0] = "cpu"  # where a flag can be made
    assert mesh.any(True, 16)
    assert asked == [1]
