"""Warnings name the line of the user that they are about."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import growprune as gp
from growprune.errors import warn
from growprune.methods import one_shot
from growprune.sparse.cursor import Cursor


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def places(seen: pytest.WarningsRecorder) -> list[tuple[str, int]]:
    return [(Path(warning.filename).name, warning.lineno) for warning in seen]


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))


def test_a_warning_of_an_edit_names_the_line_that_called_it() -> None:
    sparse = gp.SparseModel(tiny(), sparsity=0.99)
    with pytest.warns(UserWarning, match="layer 1.weight was pruned to zero weights") as seen:
        here = line() + 1
        sparse.prune()
    assert places(seen) == [("test_warnings.py", here)]


def test_a_warning_of_a_plan_names_the_line_that_follows_it() -> None:
    sparse = gp.SparseModel(tiny(), sparsity=0.99, allocation="uniform")
    plan = one_shot(gp.Partition.contiguous(sparse.model, 1), sparsity=0.99, epochs=1, finetune=1)
    phases = iter(Cursor(sparse, plan))
    next(phases)
    with pytest.warns(UserWarning, match="layer 1.weight was pruned to zero weights") as seen:
        here = line() + 1
        next(phases)
    assert places(seen) == [("test_warnings.py", here)]


def test_a_warning_from_a_hook_that_torch_calls_names_the_users_line() -> None:
    layer = nn.Linear(2, 2)
    scope = {"warn": warn}
    exec(compile("def hook(*ignored): warn('here')", str(Path(gp.__file__).parent / "hook.py"), "exec"), scope)
    layer.register_forward_hook(scope["hook"])
    with pytest.warns(UserWarning, match="here") as seen:
        here = line() + 1
        layer(torch.zeros(1, 2))
    assert places(seen) == [("test_warnings.py", here)]
