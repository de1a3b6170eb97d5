"""Byte-pair pieces, and batches of encoded sentences."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from translation_cases import CPU, sentences, tiny

from growprune.tasks import translation
from growprune.tasks.translation.text import Batches, Pairs, Pieces, Sentences, learn
from growprune.tasks.translation.transformer import BOS, EOS, PAD

# Pieces


LINES = [line for pair in sentences(40) for line in pair]


@given(text=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20))
def test_any_text_survives_being_cut_into_pieces(text: str) -> None:
    cut = Pieces(learn(LINES, 340))
    line = " ".join(text.replace("▁", "").split())  # the sign that sentencepiece writes for a space
    encoded, lengths = cut.encode([line, "eins zwei."], is_target=True)
    assert (encoded[0], encoded[lengths[0] - 1]) == (BOS, EOS)
    assert cut.decode([encoded[1 : lengths[0] - 1].tolist() + [PAD, PAD]]) == [line]


def test_sources_end_and_targets_also_begin() -> None:
    cut = Pieces(learn(LINES, 340))
    source, lengths = cut.encode(["one two", ""], is_target=False)
    assert lengths.tolist() == [len(source) - 1, 1]
    assert source.tolist().count(EOS) == 2
    target, _ = cut.encode(["one two", ""], is_target=True)
    assert target.tolist() == [BOS, *source[:-1].tolist(), BOS, EOS]


def test_learning_twice_gives_the_same_bytes_and_never_too_many_pieces() -> None:
    assert learn(LINES, 340) == learn(LINES, 340)
    assert len(Pieces(learn(LINES, 290))) == 290
    assert len(Pieces(learn(LINES, 8000))) < 500


# Batches


def pairs_of(lengths: list[tuple[int, int]]) -> Pairs:
    """Pairs of these lengths, each of tokens of its own."""
    sides = []
    for side in (0, 1):  # a target has one token more than its decoder is given
        rows = [[1000 + i] * (n[side] + side) for i, n in enumerate(lengths)]
        flat = np.array([token for row in rows for token in row], np.int32)
        sides.append(Sentences.of(flat, np.array([len(row) for row in rows], np.int64)))
    return Pairs(*sides)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)


@given(lengths=LENGTHS, max_tokens=st.integers(40, 200), seed=st.integers(0, 2**63 - 1))
def test_an_epoch_has_every_pair_once_in_batches_that_fit(
    lengths: list[tuple[int, int]], max_tokens: int, seed: int
) -> None:
    batches = Batches(pairs_of(lengths), max_tokens)
    seen = []
    for source, target, scale in batches.shuffled(seed, 0, CPU):
        rows = (source[:, 0] - 1000).tolist()
        seen += rows
        assert len(source) * max(source.shape[1], target.shape[1] - 1) <= max_tokens
        assert source.shape[1] % 8 == (target.shape[1] - 1) % 8 == 0
        assert (source != PAD).sum(1).tolist() == [lengths[row][0] for row in rows]
        assert (target != PAD).sum(1).tolist() == [lengths[row][1] + 1 for row in rows]
        assert torch.equal(source, source.sort(1, descending=True).values), "padding is on the right"
        assert torch.equal(target[:, 0], source[:, 0])
        torch.testing.assert_close(scale, torch.full((len(rows),), len(rows) / sum(lengths[row][1] for row in rows)))
    assert sorted(seen) == list(range(len(lengths)))


def shapes(batches: Batches, seed: int) -> list[tuple[Any, ...]]:
    return sorted((*source.shape, *target.shape) for source, target, _ in batches.shuffled(seed, 0, CPU))


@given(lengths=LENGTHS, seeds=st.tuples(st.integers(0, 99), st.integers(100, 199)))
def test_every_seed_has_batches_of_the_same_shapes(lengths: list[tuple[int, int]], seeds: tuple[int, int]) -> None:
    batches = Batches(pairs_of(lengths), 120)
    first, second = (shapes(batches, seed) for seed in seeds)
    assert first == second
    assert len(first) == len(batches)


def test_seeds_shuffle_pairs_and_batches() -> None:
    batches = Batches(pairs_of([(3 + i % 5, 4) for i in range(64)]), 64)
    first, again, other = ([batch[0] for batch in batches.shuffled(seed, 0, CPU)] for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    groups = [{frozenset(rows[:, 0].tolist()) for rows in epoch} for epoch in (first, other)]
    assert not groups[0] & groups[1]
    mixed = Batches(pairs_of([(n, n) for n in (3, 20, 40) for _ in range(20)]), 80)
    widths = [[batch[0].shape[1] for batch in mixed.shuffled(seed, 0, CPU)] for seed in (1, 2)]
    assert widths[0] != widths[1]


def test_entering_an_epoch_late_gives_the_batches_that_are_left(data: Path) -> None:
    task = tiny(data)
    whole = list(task.batches(seed=7, start=0, device=CPU))
    assert len(whole) == task.num_batches() > 5
    for start in (0, 1, 4, len(whole)):
        late = list(task.batches(seed=7, start=start, device=CPU))
        assert len(late) == len(whole) - start
        for a, b in zip(late, whole[start:], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_holds_translations_of_each_other(data: Path) -> None:
    task = tiny(data)
    cut = translation.load_pieces(str(data), "en", "de", 340)
    expected = sentences(60, 0)
    for source, target, _ in task.batches(seed=0, start=0, device=CPU):
        assert target[:, 0].tolist() == [BOS] * len(target)
        for pair in zip(*(cut.decode(side.tolist()) for side in (source, target)), strict=True):
            assert pair in expected
            expected.remove(pair)
    assert not expected
