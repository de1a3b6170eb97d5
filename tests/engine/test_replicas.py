"""RigL on two replicas: each sees half of the data, both choose the same weights, and a stopped run resumes exactly."""

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from several import run_on
from toy import plain

import growprune as gp
from growprune import engine, methods
from growprune.engine.recipe import Recipe
from growprune.plan import Edit
from growprune.sparse.model import SparseModel


def digest(own: SparseModel) -> str:
    masks = b"".join(mask.numpy().tobytes() for mask in own.packed_masks().values())
    return hashlib.sha256(masks).hexdigest()


def note_masks(recipe: Recipe, folder: Path, stop_after: int) -> None:
    """Train, or resume, and note the masks after each edit."""
    countdown, apply = iter(range(stop_after)), SparseModel.apply

    def noting(own: SparseModel, *edits: Edit) -> None:
        apply(own, *edits)
        with (folder.parent / f"{folder.name}-{os.environ['RANK']}").open("a") as notes:
            notes.write(digest(own) + "\n")

    SparseModel.apply = noting  # type: ignore[method-assign]
    start = engine.resume if (folder / "recipe.json").exists() else engine.train
    with contextlib.suppress(engine.Interrupted):
        start(recipe, folder, should_stop=lambda: next(countdown, None) is None)


def train_on_two(recipe: Recipe, folder: Path, stop_after: int = 1000) -> None:
    assert run_on(2, recipe, folder, body=note_masks, arguments=(stop_after,)) == []


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_rigl_on_two_replicas_has_one_mask_at_every_edit_and_resumes_exactly(storage: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = {"iterations": 40, "every": 5}
    recipe = replace(plain(), method=methods.rigl, options=options, allocation="uniform", storage=storage)
    engine.train(recipe, tmp_path / "one")
    train_on_two(recipe, tmp_path / "two")
    noted = [(tmp_path / f"two-{rank}").read_text().split() for rank in range(2)]
    assert noted[0] == noted[1]
    assert len(noted[0]) == 8, "the random mask, five swaps, and two phases without one"
    assert len(set(noted[0])) == 6
    one, two = (gp.read(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name] == 0, one[name] == 0), "both saw the gradients of all"
    for stop_after in (4, 9, 1000):  # right before an edit, in a phase, and on to the end
        train_on_two(recipe, tmp_path / "stopped", stop_after)
    for name in ("model.safetensors", "best.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
