"""`--set key=value` against a recipe."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy import cyclic, parallel

import growprune as gp
from growprune import GrowpruneError, methods
from growprune.engine.override import override, parse_settings
from growprune.engine.recipe import own_options
from growprune.engine.source import load
from growprune.masks.partition_kinds import contiguous, per_layer
from growprune.recipes import find
from growprune.recipes.study import total_epochs


def test_fields_are_set_with_the_type_they_have() -> None:
    settings = {
        "sparsity": "0.5",
        "partition.kappa": "2",
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
    assert (recipe.sparsity, recipe.partition, recipe.options["restart"], recipe.clip) == (
        0.5,
        contiguous(2),
        False,
        None,
    )
    assert recipe.task.batch_size == 8
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.kind) == (1.0, (0.9, 0.99), "adamw")
    assert isinstance(recipe.optimizer.lr, float)
    assert recipe.keep_dense == ("head",)
    assert recipe.options["steps"] == 7


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
        ({"storage": "compac"}, "wants one of masked, compact"),
        ({"sparsty": "0.5"}, "there is no 'sparsty'; known are task, method"),
        ({"sparsity": "high"}, "--set sparsity=high: wants a number"),
        ({"sparsity": "nan"}, "--set sparsity=nan: wants a number"),
        ({"clip": "inf"}, "--set clip=inf: wants a number or null"),
        ({"accumulate": "1e1"}, "--set accumulate=1e1: wants a whole number"),
        ({"accumulate": "9" * 5000}, "wants a whole number"),
        ({"clip": "9" * 400}, "wants a number or null"),
        ({"accumulate": "2.5"}, "--set accumulate=2.5: wants a whole number"),
        ({"accumulate": "true"}, "--set accumulate=true: wants a whole number"),
        ({"compile": "1"}, "--set compile=1: wants true or false"),
        ({"precision": "fp8"}, "wants one of fp32, bf16"),
        ({"clip": "big"}, "wants a number or null"),
        ({"keep_dense": "head"}, "wants a list"),
        ({"task.colour": "3"}, "there is no 'colour'; known are num_examples"),
        ({"task": "digits"}, "name a field of it, such as task.num_examples"),
        ({"sparsity.x": "3"}, "sparsity has no fields inside"),
        ({"options.rounds": "3"}, "cyclic_gap takes options.steps, options.epochs, options.finetune"),
        ({"options.sparsity": "0.5"}, "options has sparsity=0.5: set the recipe's own field: sparsity=0.5"),
        ({"partition.kappa": "0"}, "kappa is 0, but must be a whole number of at least 1"),
        ({"method": "random_gap", "options.x": "3"}, "random_gap takes options.steps, options.epochs, options.fine"),
        ({"clip": "-1"}, "clip is -1.0, but must be above 0, or None for no clipping"),
        ({"clip": "0"}, "clip is 0.0, but must be above 0"),
        ({"replicas": "-1"}, "replicas is -1, but must be a whole number of at least 0"),
        ({"optimizer.lr": "-1"}, "lr is -1.0, but must be 0 or more"),
        ({"method": "magic"}, "there is no method 'magic'; there are: gradual_gap"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        override(cyclic(), settings)
    assert message in str(error.value)


def test_settings_without_an_equals_sign_are_refused() -> None:
    assert parse_settings(["a=1", "b.c=x=y"]) == {"a": "1", "b.c": "x=y"}
    with pytest.raises(ValueError, match="'sparsity', but wants key=value"):
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
        ({"options.steps": "many"}, "--set options.steps=many: wants a whole number"),
        ({"options.epochs": "0.5"}, "--set options.epochs=0.5: wants a whole number"),
        ({"options.drop": "a"}, "--set options.drop=a: wants a number"),
        ({"options.x": "3"}, "unannotated takes options.steps, options.epochs, options.drop, options.name"),
        ({"options.S": "3"}, "unannotated takes options.steps"),
    ],
)
def test_a_wrong_option_of_a_method_without_annotations_says_what_is_allowed(
    setting: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        override(replace(cyclic(), method=unannotated, options={"steps": 3}), setting)
    assert message in str(error.value)


def test_a_method_that_takes_no_options_is_said_to() -> None:
    @gp.method
    def nothing(S):  # type: ignore[no-untyped-def]
        yield gp.Phase(epochs=1)

    with pytest.raises(ValueError, match=r"--set options\.x: nothing takes no options"):
        override(replace(cyclic(), method=nothing, options={}), {"options.x": "1"})


def test_a_missing_option_is_named_before_the_method_is_called() -> None:
    recipe = replace(cyclic(), method=unannotated, options={})
    with pytest.raises(ValueError, match=r"unannotated: missing a required .*'steps'; give it with options"):
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
    with pytest.raises(ValueError, match="options has epochs and iterations of gmp: give one of the two"):
        replace(recipe, options={"iterations": 100, "epochs": 4})


def test_a_method_that_lacks_its_length_is_told_both_ways_to_give_it() -> None:
    recipe = override(cyclic(), {"method": "rigl"})  # whose epochs would be those of a step
    with pytest.raises(
        ValueError, match=r"rigl: missing a required argument: 'iterations'; .* options, or epochs instead"
    ):
        recipe.plan(recipe.task.build_model(), 4)


# What a comparison sets, and anybody may


def test_options_as_a_whole_take_the_place_of_all_there_were() -> None:
    recipe = replace(cyclic(), options={"steps": 3, "epochs": 2, "finetune": 3, "restart": False})
    found = override(recipe, {"options": '{"steps": 4, "epochs": 1, "finetune": 0}'})
    assert found.options == {"steps": 4, "epochs": 1, "finetune": 0}
    with pytest.raises(GrowpruneError, match="wants a JSON object"):
        override(recipe, {"options": "steps=4"})
    with pytest.raises(GrowpruneError, match=r"options.steps=1.5: wants a whole number"):
        override(recipe, {"options": '{"steps": 1.5}'})


def test_a_partition_is_set_as_python_writes_it() -> None:
    assert override(cyclic(), {"partition": "per_layer()"}).partition == per_layer()
    assert override(cyclic(), {"partition": "contiguous(2)"}).partition == contiguous(2)
    with pytest.raises(GrowpruneError, match=r"must be contiguous\(4\), balanced\(4\), per_layer\(\)"):
        override(cyclic(), {"partition": "named"})


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
    says = r"own\.py:mine is called without arguments, but missing a required argument: 'width': give each a default$"
    with pytest.raises(GrowpruneError, match=says):
        find(f"{tmp_path / 'own.py'}:mine")
