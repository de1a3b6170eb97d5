"""Recipes that begin with weights that were trained before."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from toy import Toy, cyclic, stopped
from typer.testing import CliRunner

import growprune as gp
from growprune import cli, engine, methods
from growprune.engine.building import build
from growprune.engine.recipe import Recipe
from growprune.files.importers import load_weights

runner = CliRunner()
storages = pytest.mark.parametrize("storage", ["masked", "compact"])


def recipe_from(weights: Path, **changes: Any) -> Recipe:
    options = {"iterations": 4, "initial_mask": "as_is"}
    chosen: dict[str, Any] = {"method": methods.static_random, "options": options, "sparsity": 0.5, "device": "cpu"}
    return replace(cyclic(), **(chosen | {"allocation": "global", "weights": str(weights)} | changes))


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """A sparse file of the toy's model with half of its weights, and its tensors; some live ones are zero."""
    torch.manual_seed(5)
    sparse = gp.SparseModel(Toy().build_model(), sparsity=0.5, allocation="global")
    sparse.prune()
    row, column = sparse.masks["fc1.weight"].nonzero()[0].tolist()
    sparse.model.fc1.weight.data[row, column] = 0
    folder.mkdir(exist_ok=True)
    gp.save(sparse, folder / "model.safetensors")
    state = {name: tensor.clone() for name, tensor in sparse.model.state_dict().items()}
    save_file(state, folder / "dense.safetensors")
    return state


def built(recipe: Recipe) -> gp.SparseModel:
    return build(recipe, torch.device("cpu"), 4)[0]


@storages
@pytest.mark.parametrize("is_dense", [False, True], ids=["run folder", "dense file"])
def test_a_run_begins_with_the_weights_and_masks_of_a_run_folder_and_with_the_zeros_of_a_dense_file(
    is_dense: bool, storage: str, tmp_path: Path
) -> None:
    state = trained(tmp_path)
    sparse = built(recipe_from(tmp_path / "dense.safetensors" if is_dense else tmp_path, storage=storage))
    if is_dense:
        assert all(torch.equal(mask, state[name] != 0) for name, mask in sparse.masks.items())
    else:
        assert sparse.num_alive == sparse.num_prunable // 2  # the live weight that is zero too
    assert all(torch.equal(tensor, state[name]) for name, tensor in sparse.model.state_dict().items())


@storages
@pytest.mark.parametrize("file", ["model.safetensors", "dense.safetensors"])
def test_for_any_other_plan_all_weights_live_at_first(storage: str, file: str, tmp_path: Path) -> None:
    state = trained(tmp_path)
    options = {"iterations": 4, "initial_mask": "magnitude"}
    sparse = built(recipe_from(tmp_path / file, storage=storage, options=options))
    assert sparse.num_alive == sparse.num_prunable
    assert all(torch.equal(tensor, state[name]) for name, tensor in sparse.model.state_dict().items())


@pytest.mark.parametrize("initial_mask", ["as_is", "magnitude"])
def test_both_storages_train_the_same_bits_from_a_file_and_say_which_it_was(initial_mask: str, tmp_path: Path) -> None:
    trained(tmp_path / "w")
    recipe = recipe_from(tmp_path / "w", options={"iterations": 4, "initial_mask": initial_mask})
    for storage in ("masked", "compact"):
        result = engine.train(replace(recipe, storage=storage), tmp_path / storage)
    ends = [(tmp_path / storage / "model.safetensors").read_bytes() for storage in ("masked", "compact")]
    assert ends[0] == ends[1]
    digest = hashlib.sha256((tmp_path / "w" / "model.safetensors").read_bytes()).hexdigest()
    assert result["weights"] == {"file": "model.safetensors", "sha256": digest}


def test_a_run_from_a_file_is_gone_on_with_to_the_same_bits_wherever_the_file_lies_then(tmp_path: Path) -> None:
    trained(tmp_path / "w")
    recipe = recipe_from(tmp_path / "w")
    engine.train(recipe, tmp_path / "whole")
    stopped(recipe, tmp_path / "cut", 1)
    (tmp_path / "w").rename(tmp_path / "moved")
    engine.resume(replace(recipe, weights=str(tmp_path / "moved")), tmp_path / "cut")
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert ends[0] == ends[1]


def test_going_on_with_another_file_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "w")
    recipe = recipe_from(tmp_path / "w")
    stopped(recipe, tmp_path / "run", 0)
    with pytest.raises(gp.GrowpruneError, match=r"weights.json differs .* the file of initial weights, changed"):
        engine.resume(replace(recipe, weights=str(tmp_path / "w" / "dense.safetensors")), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "weights.json").read_text())["file"] == "model.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc1.bias"), "lacks fc1.bias, which the model has"),
        (lambda t: t.update(more=torch.zeros(1)), "has more, which the model lacks"),
        (
            lambda t: t.update({"fc1.bias": torch.zeros(3)}),
            r"has fc1.bias with shape \(3,\), but the model has \(16,\)",
        ),
    ],
)
def test_the_weights_of_another_model_are_refused_before_there_is_a_folder(
    change: Any, message: str, tmp_path: Path
) -> None:
    tensors = trained(tmp_path)
    change(tensors)
    save_file(tensors, tmp_path / "other.safetensors")
    with pytest.raises(gp.GrowpruneError, match=message):
        engine.train(recipe_from(tmp_path / "other.safetensors"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_weights_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"has no weights: pass a .safetensors file, or a folder with"):
        engine.train(recipe_from(tmp_path), tmp_path / "run")
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    with pytest.raises(gp.GrowpruneError, match=r"bad.safetensors is neither safetensors nor a torch.save file"):
        engine.train(recipe_from(tmp_path / "bad.safetensors"), tmp_path / "run")


def test_a_file_without_masks_for_a_plan_as_it_is_says_what_to_do(tmp_path: Path) -> None:
    save_file(dict(Toy().build_model().state_dict()), tmp_path / "dense.safetensors")
    with pytest.raises(gp.GrowpruneError, match=r"'as_is' does not fit: .* has 400 live weights.*'magnitude'"):
        engine.train(recipe_from(tmp_path / "dense.safetensors"), tmp_path / "run")


def test_tied_weights_may_have_any_of_their_names_and_what_is_kept_dense_lives(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.out = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
            self.out.weight = self.embed.weight

    file, body = tmp_path / "tied.safetensors", torch.tensor([[1.0, 0, 2, 0]] * 4)
    save_file({"out.weight": torch.ones(6, 4), "body.weight": body, "body.bias": torch.zeros(4)}, file)
    sparse = gp.SparseModel(Tied(), sparsity=0.5)
    load_weights(sparse, file, with_masks=True)
    assert torch.equal(sparse.masks["body.weight"], body != 0)
    assert bool((sparse.model.embed.weight == 1).all())
    attention = gp.SparseModel(nn.MultiheadAttention(4, 1, bias=False), sparsity=0.5, keep_dense=["in_proj_weight[q]"])
    save_file({"in_proj_weight": torch.eye(12, 4), "out_proj.weight": torch.eye(4)}, file)
    load_weights(attention, file, with_masks=True)
    assert attention.masks["in_proj_weight"].sum(1).tolist() == [4] * 4 + [0] * 8


def test_the_command_line_starts_from_a_run_and_finds_it_again_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--set", "options.steps=1", "--set", "options.finetune=0", "--set", "device=cpu"]
    assert runner.invoke(cli.app, ["train", "digits/tiny", "--out", "first", *small]).exit_code == 0
    more = ["--set", "weights=first", "--set", "options.initial_mask=magnitude"]
    assert runner.invoke(cli.app, ["train", "digits/tiny", "--out", "second", *small, *more]).exit_code == 0
    result = json.loads(Path("second/result.json").read_text())
    assert result["origin"]["settings"]["weights"] == "first"  # without where it lies
    assert json.loads(Path("second/recipe.json").read_text())["settings"]["weights"] == str(tmp_path / "first")
    assert result["weights"]["sha256"] == hashlib.sha256(Path("first/model.safetensors").read_bytes()).hexdigest()
