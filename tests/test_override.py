"""`--set key=value` against a recipe."""

from __future__ import annotations

import pytest

from growprune import methods
from growprune.engine.override import override, parse_settings
from toy import cyclic


def test_fields_are_set_with_the_type_they_have() -> None:
    settings = {
        "sparsity": "0.5",
        "kappa": "2",
        "restart": "false",
        "task.batch_size": "8",
        "optimizer.lr": "1",
        "optimizer.betas": "[0.9, 0.99]",
        "optimizer.kind": "adamw",
        "keep_dense": '["head"]',
        "parts": '[["fc1"], ["fc2", "norm", "head"]]',
        "options.steps": "7",
        "clip": "null",
    }
    recipe = override(cyclic(), settings)
    assert (recipe.sparsity, recipe.kappa, recipe.restart, recipe.clip) == (0.5, 2, False, None)
    assert recipe.task.batch_size == 8
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.kind) == (1.0, (0.9, 0.99), "adamw")
    assert isinstance(recipe.optimizer.lr, float)
    assert recipe.keep_dense == ("head",)
    assert recipe.parts == (("fc1",), ("fc2", "norm", "head"))
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
        ("kappa", "+2", 2),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsty": "0.5"}, "there is no 'sparsty'; known are task, method"),
        ({"sparsity": "high"}, "--set sparsity=high: wants a number"),
        ({"sparsity": "nan"}, "--set sparsity=nan: wants a number"),
        ({"clip": "inf"}, "--set clip=inf: wants a number or null"),
        ({"kappa": "1e1"}, "--set kappa=1e1: wants a whole number"),
        ({"kappa": "9" * 5000}, "wants a whole number"),
        ({"clip": "9" * 400}, "wants a number or null"),
        ({"kappa": "2.5"}, "--set kappa=2.5: wants a whole number"),
        ({"kappa": "true"}, "--set kappa=true: wants a whole number"),
        ({"restart": "1"}, "--set restart=1: wants true or false"),
        ({"precision": "fp8"}, "wants one of fp32, bf16"),
        ({"clip": "big"}, "wants a number or null"),
        ({"keep_dense": "head"}, "wants a list"),
        ({"task.colour": "3"}, "there is no 'colour'; known are num_examples"),
        ({"task": "digits"}, "name a field of it, such as task.num_examples"),
        ({"sparsity.x": "3"}, "sparsity has no fields inside"),
        ({"options.rounds": "3"}, "cyclic_gap takes options.steps, options.epochs, options.finetune"),
        ({"options.sparsity": "0.5"}, "options has sparsity=0.5: set the recipe's own field: sparsity=0.5"),
        ({"method": "random_gap", "options.kappa": "3"}, "set the recipe's own field: kappa=3"),
        ({"method": "random_gap", "options.x": "3"}, "random_gap takes options.steps, options.epochs, options.fine"),
        ({"clip": "-1"}, "clip is -1.0, but must be above 0, or None for no clipping"),
        ({"clip": "0"}, "clip is 0.0, but must be above 0"),
        ({"replicas": "-1"}, "replicas is -1, but must be a whole number of at least 0"),
        ({"optimizer.lr": "-1"}, "lr is -1.0, but must be 0 or more"),
        ({"method": "magic"}, "method is 'magic', but must be one of cyclic_gap"),
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
