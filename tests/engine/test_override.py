"""`--set key=value` against a recipe."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_recipes import TINY
from toy import cyclic, parallel

import growprune as gp
from growprune import GrowpruneError, methods
from growprune.engine.override import load, override, parse_settings
from growprune.engine.recipe import own_options
from growprune.masks.partition import contiguous, per_layer
from growprune.recipes import find
from growprune.recipes.study import total_epochs


def test_fields_are_set_with_the_type_they_have() -> None:
    settings = {
        "sparsity": "0.5",
        "parts.kappa": "2",
        "options.restart": "false",
        "task.batch_size": "8",
        "optimizer.lr": "1",
        "optimizer.betas": "[0.9, 0.99]",
        "optimizer.kind": "adamw",
        "keep_dense": '["head"]',
        "options.steps": "7",
        "clip": "null",
    }
    recipe = override(cyclic(), settings)
    assert (recipe.sparsity, recipe.parts, recipe.options["restart"], recipe.clip) == (0.5, contiguous(2), False, None)
    assert recipe.task.batch_size == 8
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.kind) == (1.0, (0.9, 0.99), "adamw")
    assert isinstance(recipe.optimizer.lr, float)
    assert recipe.keep_dense == ("head",)
    assert recipe.options["steps"] == 7


@pytest.mark.parametrize("order", [1, -1])
def test_fields_that_are_checked_together_are_set_together(order: int) -> None:
    settings = {"task.heads": "5", "task.d_model": "15", "storage": "compact", "shard": "fsdp"}
    recipe = override(TINY["language-tiny/dense"](), dict([*settings.items()][::order]))
    assert (recipe.task.heads, recipe.task.d_model, recipe.storage, recipe.shard) == (5, 15, "compact", "fsdp")
    with pytest.raises(GrowpruneError, match=r"^d_model must be a multiple of heads=5, got 16"):
        override(TINY["language-tiny/dense"](), {"task.heads": "5"})


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("sparsity", ".5", 0.5),
        ("sparsity", "+0.5", 0.5),
        ("sparsity", "0", 0.0),
        ("clip", "5.", 5.0),
        ("clip", "1_000", 1000.0),
        ("clip", "1e-3", 0.001),
        ("accumulate", "+2", 2),
        ("seed", "1_000", 1000),
        ("seed", "007", 7),
    ],
)
def test_numbers_may_be_written_as_python_reads_them(key: str, text: str, value: float) -> None:
    found = getattr(override(cyclic(), {key: text}), key)
    assert (found, type(found)) == (value, type(value))


def test_another_method_keeps_the_options_it_shares() -> None:
    recipe = override(cyclic(), {"method": "one_shot", "options.epochs": "4"})
    assert recipe.method is methods.one_shot
    assert recipe.options == {"epochs": 4, "finetune": 3}


COUNT_ITERATIONS = [name for name, method in methods.METHODS.items() if "iterations" in own_options(method)]


@pytest.mark.parametrize("name", COUNT_ITERATIONS)
def test_a_method_that_counts_iterations_takes_no_epochs_of_one_that_counts_steps(name: str) -> None:
    recipe = replace(cyclic(), options={"steps": 3, "epochs": 2, "finetune": 40})
    found = override(recipe, {"method": name, "options.epochs": "20"})
    assert found.options == {"epochs": 20}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"storage": "compac"}, "--set storage must be one of masked, compact, got compac"),
        ({"sparsty": "0.5"}, "unknown field 'sparsty'. Fields are: task, method"),
        ({"epochs": "2"}, "--set epochs: unknown field 'epochs'. Did you mean options.epochs?"),
        ({"lr": "2"}, "--set lr: unknown field 'lr'. Did you mean optimizer.lr?"),
        ({"sparsity": "high"}, "--set sparsity must be a number, got high"),
        ({"sparsity": "nan"}, "--set sparsity must be a number, got nan"),
        ({"clip": "inf"}, "--set clip must be a number or null, got inf"),
        ({"accumulate": "1e1"}, "--set accumulate must be an integer, got 1e1"),
        ({"accumulate": "9" * 5000}, "--set accumulate must be an integer, got 999"),
        ({"clip": "9" * 400}, "--set clip must be a number or null, got "),
        ({"accumulate": "2.5"}, "--set accumulate must be an integer, got 2.5"),
        ({"accumulate": "true"}, "--set accumulate must be an integer, got true"),
        ({"compile": "1"}, "--set compile must be true or false, got 1"),
        ({"precision": "fp8"}, "--set precision must be one of fp32, bf16, got fp8"),
        ({"clip": "big"}, "--set clip must be a number or null, got "),
        ({"keep_dense": "head"}, "must be a list"),
        ({"task.colour": "3"}, "unknown field 'colour'. Fields are: num_examples"),
        ({"task": "digits"}, "set one of its fields, such as task.num_examples"),
        ({"sparsity.x": "3"}, "sparsity has no nested fields. Set sparsity itself"),
        (
            {"options.rounds": "3"},
            "unknown option of cyclic_gap. Options are: options.steps, options.epochs, options.finetune",
        ),
        ({"options.sparsity": "0.5"}, "sparsity is not an option. Set the recipe's own field: sparsity=0.5"),
        ({"parts.kappa": "0"}, "kappa must be an integer >= 1, got 0"),
        (
            {"method": "random_gap", "options.x": "3"},
            "of random_gap. Options are: options.steps, options.epochs, options.fine",
        ),
        ({"clip": "-1"}, "clip must be > 0, or None for no clipping, got -1.0"),
        ({"clip": "0"}, "clip must be > 0, or None for no clipping, got 0.0"),
        ({"replicas": "-1"}, "replicas must be an integer >= 0, got -1"),
        ({"optimizer.lr": "-1"}, "lr must be >= 0, got -1.0"),
        ({"method": "magic"}, "there is no method 'magic'; available: gradual_gap"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        override(cyclic(), settings)
    assert message in str(error.value)


def test_settings_without_an_equals_sign_are_refused() -> None:
    assert parse_settings(["a=1", "b.c=x=y"]) == {"a": "1", "b.c": "x=y"}
    with pytest.raises(ValueError, match=r"--set must be KEY=VALUE, such as sparsity=0.8, got 'sparsity'"):
        parse_settings(["sparsity"])


@gp.method
def unannotated(S, *, sparsity, steps, epochs=1, drop=0.3, name="cosine", is_fast=False, until=None):  # type: ignore[no-untyped-def]
    """A method of a user who writes no types."""
    yield gp.Phase(gp.prune(S.whole, to=sparsity), epochs=epochs * steps)


def test_options_without_annotations_have_the_type_of_their_default_or_present_value() -> None:
    recipe = replace(cyclic(), method=unannotated, options={"steps": 3})
    settings = {"steps": "7", "epochs": "2", "drop": "1", "name": "5", "is_fast": "true", "until": "[1, 2]"}
    options = override(recipe, {f"options.{name}": text for name, text in settings.items()}).options
    assert options == {"steps": 7, "epochs": 2, "drop": 1.0, "name": "5", "is_fast": True, "until": [1, 2]}
    assert isinstance(options["drop"], float)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"options.steps": "many"}, "--set options.steps must be an integer, got many"),
        ({"options.epochs": "0.5"}, "--set options.epochs must be an integer, got 0.5"),
        ({"options.drop": "a"}, "--set options.drop must be a number, got a"),
        ({"options.x": "3"}, "of unannotated. Options are: options.steps, options.epochs, options.drop, options.name"),
        ({"options.S": "3"}, "unknown option of unannotated. Options are: options.steps"),
    ],
)
def test_a_wrong_option_of_a_method_without_annotations_says_what_is_allowed(
    setting: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        override(replace(cyclic(), method=unannotated, options={"steps": 3}), setting)
    assert message in str(error.value)


def test_a_missing_option_is_named_before_the_method_is_called() -> None:
    recipe = replace(cyclic(), method=unannotated, options={})
    with pytest.raises(ValueError, match=r"unannotated needs steps.* Give it in options"):
        recipe.plan(recipe.task.build_model())


def test_an_error_inside_a_method_is_not_told_as_a_missing_option() -> None:
    @gp.method
    def broken(S, *, epochs):  # type: ignore[no-untyped-def]
        yield gp.Phase(epochs=len(epochs))

    recipe = replace(cyclic(), method=broken, options={"epochs": 3})
    with pytest.raises(TypeError, match=r"object of type 'int' has no len"):
        recipe.plan(recipe.task.build_model())


def test_epochs_of_a_recipe_are_those_of_its_plan_whatever_its_options_are_called() -> None:
    assert total_epochs(replace(cyclic(), method=unannotated, options={"steps": 3, "epochs": 2})) == 6
    assert total_epochs(replace(cyclic(), method=unannotated, options={"steps": 3})) == 3
    assert total_epochs(cyclic()) == 3 * 2 + 3
    assert total_epochs(parallel()) == 2 * 3 * 1 + 3


def test_epochs_and_iterations_take_the_place_of_one_another_and_are_not_given_both() -> None:
    recipe = override(cyclic(), {"method": "gmp", "options.epochs": "4"})
    assert recipe.options == {"epochs": 4}
    recipe = override(recipe, {"options.iterations": "100"})
    assert recipe.options == {"iterations": 100}
    with pytest.raises(ValueError, match="options of gmp has both epochs and iterations"):
        replace(recipe, options={"iterations": 100, "epochs": 4})


def test_a_method_that_lacks_its_length_is_told_both_ways_to_give_it() -> None:
    recipe = override(cyclic(), {"method": "rigl"})  # whose epochs would be those of a step
    with pytest.raises(ValueError, match=r"rigl needs iterations. .* options, or epochs instead"):
        recipe.plan(recipe.task.build_model(), 4)


# What a comparison sets, and anybody may


def test_options_as_a_whole_take_the_place_of_all_there_were() -> None:
    recipe = replace(cyclic(), options={"steps": 3, "epochs": 2, "finetune": 3, "restart": False})
    found = override(recipe, {"options": '{"steps": 4, "epochs": 1, "finetune": 0}'})
    assert found.options == {"steps": 4, "epochs": 1, "finetune": 0}
    with pytest.raises(GrowpruneError, match="--set options must be a JSON object"):
        override(recipe, {"options": "steps=4"})
    with pytest.raises(GrowpruneError, match=r"options.steps must be an integer, got 1.5"):
        override(recipe, {"options": '{"steps": 1.5}'})


def test_a_partition_is_set_as_python_writes_it() -> None:
    assert override(cyclic(), {"parts": "per_layer()"}).chosen()["parts"] == per_layer()
    assert override(cyclic(), {"parts": "contiguous(2)"}).chosen()["parts"] == contiguous(2)
    with pytest.raises(GrowpruneError, match="parts must be a number, contiguous, balanced, per_layer"):
        override(cyclic(), {"parts": "named"})


def test_a_method_may_be_a_function_of_a_file(tmp_path: Path) -> None:
    code = "from growprune import Phase, method\n@method\ndef mine(S, *, epochs):\n    yield Phase(epochs=epochs)\n"
    (tmp_path / "own.py").write_text(code)
    recipe = override(cyclic(), {"method": f"{tmp_path / 'own.py'}:mine", "options.epochs": "2"})
    assert (recipe.method.__name__, recipe.options) == ("mine", {"epochs": 2})
    with pytest.raises(GrowpruneError, match="has no function 'other'"):
        override(cyclic(), {"method": f"{tmp_path / 'own.py'}:other"})


def test_a_file_that_was_changed_within_a_second_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    own = tmp_path / "own.py"
    for number in (1, 2):  # of the same size
        own.write_text(f"def mine():\n    return {number}\n")
        os.utime(own, (1_000_000_000, 1_000_000_000))
        assert load(f"{own}:mine", "recipe")() == number
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]


def test_a_recipe_function_that_wants_arguments_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(width):\n    return None\n")
    says = r"own\.py:mine must work without arguments: missing a required argument: 'width'. Give each a default$"
    with pytest.raises(GrowpruneError, match=says):
        find(f"{tmp_path / 'own.py'}:mine")
