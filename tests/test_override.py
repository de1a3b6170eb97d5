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


def test_another_method_keeps_the_options_it_shares() -> None:
    recipe = override(cyclic(), {"method": "one_shot", "options.epochs": "4"})
    assert recipe.method is methods.one_shot
    assert recipe.options == {"epochs": 4, "finetune": 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsty": "0.5"}, "there is no 'sparsty'; known are task, method"),
        ({"sparsity": "high"}, "--set sparsity=high: wants a number"),
        ({"kappa": "2.5"}, "--set kappa=2.5: wants a whole number"),
        ({"kappa": "true"}, "--set kappa=true: wants a whole number"),
        ({"restart": "1"}, "--set restart=1: wants true or false"),
        ({"precision": "fp8"}, "wants one of fp32, bf16"),
        ({"clip": "big"}, "wants a number or null"),
        ({"keep_dense": "head"}, "wants a list"),
        ({"task.colour": "3"}, "there is no 'colour'; known are num_examples"),
        ({"task": "digits"}, "name a field of it, such as task.num_examples"),
        ({"sparsity.x": "3"}, "sparsity has no fields inside"),
        ({"options.rounds": "3"}, "cyclic_gap takes options.sparsity, options.steps"),
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
