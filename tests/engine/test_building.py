"""A compact recipe is built sparse: the dense model is never there, and the run ends with the bits of a masked one."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from growprune import engine
from growprune.engine import building
from growprune.methods import METHODS
from growprune.recipes.digits import tiny
from growprune.tasks.digits import Digits


def real_elements() -> int:
    """How many elements all parameters have that take memory."""
    found = {id(o): o for o in gc.get_objects() if type(o) is nn.Parameter and o.device.type != "meta"}
    return sum(parameter.numel() for parameter in found.values())


def test_a_compact_recipe_never_has_more_than_one_dense_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(tiny(), storage="compact", device="cpu")
    gc.collect()
    before, most, initialise = real_elements(), 0, Digits.initialise

    def watched(self: Digits, module: nn.Module) -> None:
        nonlocal most
        initialise(self, module)
        most = max(most, real_elements() - before)

    monkeypatch.setattr(Digits, "initialise", watched)
    sparse, _, is_begun = building.build(recipe, torch.device("cpu"), 1)
    assert is_begun
    # weights 36, 288, 576, 1280; of the first three a tenth lives when the last one is dense; norms and bias
    assert most == 4 + 29 + 58 + 1280 + 2 * (4 + 8 + 8) + 10
    assert {name: sparse.model.get_submodule(name[:-7])._parameters["weight"].shape for name in sparse.masks} == {
        "stem.0.weight": (4,),
        "stage1.0.weight": (29,),
        "stage2.0.weight": (58,),
        "head.weight": (128,),
    }


@pytest.mark.parametrize("method", ["cyclic_gap", "rigl", "granet", "dsr", "snip", "iterative"])
def test_masked_and_compact_runs_of_a_recipe_end_with_the_same_bits(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(tiny().options)
    if method != "cyclic_gap":
        options = {"iterations": 12, **({} if method in ("snip", "iterative") else {"every": 3})}
    recipe = replace(tiny(), method=METHODS[method], options=options, device="cpu")
    for storage in ("masked", "compact"):
        engine.train(replace(recipe, storage=storage), tmp_path / storage)
    for name in ("model.safetensors", "best.safetensors"):
        assert (tmp_path / "masked" / name).read_bytes() == (tmp_path / "compact" / name).read_bytes()
