"""The task: how a text is cut, which batches come when, what is measured, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import SHARED
from small_data import language
from tiny_recipes import TINY
from torch import Tensor, nn

from growprune import GrowpruneError, engine
from growprune.compare import of_runs
from growprune.engine.recipe import Recipe
from growprune.runs.result import Metric
from growprune.tasks.language import Language, cut

CPU = torch.device("cpu")
SHAKESPEARE = SHARED / "tinyshakespeare" / "input.txt"


def numbered(folder: Path, size: int) -> str:
    """A text whose byte number n is n."""
    (folder / "text.txt").write_bytes(bytes(range(size)))
    return str(folder / "text.txt")


def small(data: Path | str, **settings: Any) -> Language:
    sizes = {"context": 4, "d_model": 8, "ffn": 16, "heads": 2, "layers": 1, "batch_size": 3, "dropout": 0.0}
    return Language(data=str(data), **{**sizes, **settings})


def tiny(row: str, data: Path, **changes: Any) -> Recipe:
    recipe = TINY[f"language-tiny/{row}"]()
    return replace(recipe, task=replace(recipe.task, data=str(data)), **changes)


def epoch(task: Language, seed: int, start: int = 0) -> list[list[list[int]]]:
    return [batch.tolist() for batch in task.batches(seed=seed, start=start, device=CPU)]


class Constant(nn.Module):
    """Gives every byte the same logits: log 2 to byte 7, 0 to three others, and no chance to the rest."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.full((*tokens.shape, 256), -math.inf)
        logits[..., 7] = math.log(2)
        logits[..., [1, 2, 3]] = 0.0
        return logits


# The text


def test_a_text_is_cut_by_position() -> None:
    text = cut(np.arange(200, dtype=np.uint8))
    assert text["train"].tolist() == list(range(180))
    assert text["validation"].tolist() == list(range(180, 190))
    assert text["test"].tolist() == list(range(190, 200))


def test_an_epoch_goes_over_the_text_in_pieces_that_do_not_overlap(tmp_path: Path) -> None:
    task = small(numbered(tmp_path, 60))  # 54 to train on: 12 pieces of 4 at any offset, 4 batches of 3
    assert task.num_batches() == 4
    for seed in range(20):
        pieces = [piece for batch in epoch(task, seed) for piece in batch]
        starts = sorted(piece[0] for piece in pieces)
        assert all(piece == list(range(piece[0], piece[0] + 5)) for piece in pieces), "the bytes as they stand"
        assert len({start % 4 for start in starts}) == 1 and len(set(starts)) == 12
        assert starts[-1] + 4 < 54, "nothing of the validation text"


def test_offset_and_order_are_drawn_for_each_epoch(tmp_path: Path) -> None:
    task = small(numbered(tmp_path, 60))
    epochs = [epoch(task, seed) for seed in range(20)]
    assert {batches[0][0][0] % 4 for batches in epochs} == {0, 1, 2, 3}
    assert len({str(batches) for batches in epochs}) == 20
    assert epochs[3] == epoch(task, 3)
    assert epoch(task, 3, start=2) == epochs[3][2:], "an epoch can be entered anywhere"


@pytest.mark.parametrize("size", range(40, 53))
def test_all_batches_are_full(size: int, tmp_path: Path) -> None:
    task = small(numbered(tmp_path, size), batch_size=2)
    for seed in range(8):
        batches = list(task.batches(seed=seed, start=0, device=CPU))
        assert len(batches) == task.num_batches()
        assert {tuple(batch.shape) for batch in batches} == {(2, 5)}
        assert {batch.dtype for batch in batches} == {torch.int64}


# Loss and metrics


def test_the_loss_is_the_mean_of_the_bytes_cross_entropies(tmp_path: Path) -> None:
    # p(7) = 2/5 and p(1) = p(2) = 1/5; the first byte of a piece is given
    batch = torch.tensor([[9, 7, 7], [7, 1, 2]])
    expected = (2 * math.log(5 / 2) + 2 * math.log(5)) / 4
    assert float(small(tmp_path).loss(Constant(), batch)) == pytest.approx(expected)


def test_each_byte_of_a_split_but_the_first_counts_once(tmp_path: Path) -> None:
    # 11 bytes to test on: two pieces of 4 that predict 8, and a last one of 2
    content = bytes(range(209)) + bytes([9, 7, 7, 7, 1, 2, 3, 7, 1, 7, 7])
    (tmp_path / "text.txt").write_bytes(content)
    found = small(tmp_path / "text.txt").evaluate(Constant(), "test", device=CPU)
    bits = (6 * math.log2(5 / 2) + 4 * math.log2(5)) / 10
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["loss"] == pytest.approx(bits * math.log(2))
    assert found["perplexity"] == pytest.approx(2**bits)


def test_a_model_that_is_sure_of_the_wrong_byte_has_an_infinite_perplexity(tmp_path: Path) -> None:
    certain = torch.zeros(256).index_fill(0, torch.tensor(3), 1000.0)  # exp(1000) is no float
    task = small(numbered(tmp_path, 200))
    found = task.evaluate(lambda x: certain.expand(*x.shape, 256), "validation", device=CPU)  # type: ignore[arg-type]
    assert (found["loss"], found["perplexity"]) == (1000.0, math.inf)


# Tokens


def tokens(folder: Path, **arrays: Any) -> Path:
    given = {"tokens": np.arange(60, dtype=np.uint16) % 5, "num_bytes": np.array([1, 2, 3, 4, 5])} | arrays
    np.savez(folder / "tokens.npz", **given)
    return folder / "tokens.npz"


def test_tokens_of_another_tokenizer_are_measured_in_bytes_of_their_text(tmp_path: Path) -> None:
    task = small(tokens(tmp_path), vocab_size=5)
    assert task.num_batches() == 4
    assert {int(token) for batch in task.batches(seed=0, start=0, device=CPU) for token in batch.flatten()} == set(
        range(5)
    )
    # the test text is 2 3 4: two tokens of 4 and 5 bytes are predicted, each with a chance of one in five
    found = task.evaluate(lambda x: torch.zeros(*x.shape, 5), "test", device=CPU)  # type: ignore[arg-type]
    assert found["loss"] == pytest.approx(math.log(5))
    assert found["bits_per_byte"] == pytest.approx(2 * math.log2(5) / 9)
    assert task.build_model().embedding.weight.shape == (5, 8)


def test_bytes_as_tokens_are_the_text_itself(tmp_path: Path) -> None:
    text = small(numbered(tmp_path, 200))
    same = small(tokens(tmp_path, tokens=np.arange(200), num_bytes=np.ones(256, np.uint8)))
    assert epoch(text, 3) == epoch(same, 3)
    assert text.evaluate(Constant(), "test", device=CPU) == same.evaluate(Constant(), "test", device=CPU)


@pytest.mark.parametrize(
    "arrays, named",
    [
        ({"num_bytes": np.ones(9, int)}, "9 .* 5"),
        ({"tokens": np.full(60, 5)}, r"tokens .*\[0, 5\).* 5 to 5"),
        ({"tokens": np.zeros((60, 2), int)}, r"tokens .*\(60, 2\)"),
        ({"num_bytes": np.ones(5)}, "num_bytes .*float64"),
    ],
)
def test_tokens_that_cannot_be_are_refused(arrays: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=named):
        small(tokens(tmp_path, **arrays), vocab_size=5).num_batches()


def test_a_file_that_holds_no_tokens_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", text=np.zeros(3))
    (tmp_path / "broken.npz").write_bytes(b"no zip file")
    for name in ("other", "broken"):
        with pytest.raises(
            GrowpruneError, match=rf"cannot read .*{name}.npz .*Expected an .npz with tokens, num_bytes"
        ):
            small(tmp_path / f"{name}.npz").num_batches()


# Runs


def test_training_lowers_the_bits_and_the_lowest_validation_is_the_best(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    recipe = tiny("cyclic-80-uniform", language(tmp_path / "data"))
    result = engine.train(replace(recipe, optimizer=replace(recipe.optimizer, lr=0.01)), tmp_path / "run")
    seen = [row.get("candidate", row["validation"])["bits_per_byte"] for row in result["history"]]
    assert result["best"]["validation"]["bits_per_byte"] == min(seen) < max(seen)
    assert result["validation"]["bits_per_byte"] < 7.5
    assert (result["metric"], result["lower_is_better"]) == ("bits_per_byte", True)
    comparison = of_runs([tmp_path / "run"])
    assert comparison.metric == Metric("bits_per_byte", lower_is_better=True)


# What is refused


def test_a_text_that_is_none_or_too_short_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(GrowpruneError, match=r"--data must be a text file .*is a folder. Give the file itself"):
        small(tmp_path).num_batches()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(GrowpruneError, match=r"--data must have at least 40 tokens, but .*empty\.txt has 0"):
        small(tmp_path / "empty.txt").num_batches()
    with pytest.raises(GrowpruneError, match=r"has 54 tokens for training \(90 %\), but a batch needs 404\. .*\(100\)"):
        small(numbered(tmp_path, 60), batch_size=100).num_batches()
