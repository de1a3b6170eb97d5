"""Beam search, against searches written with lists."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from translation_cases import SMALL, rows, seeded, tokens

from growprune.tasks.translation.transformer import BOS, EOS, PAD, Decoding, Transformer, beam_search


def sources(count: int, vocab_size: int = 11) -> Tensor:
    """Sentences of several lengths, padded."""
    source = tokens(count, 9, vocab_size=vocab_size)
    for row, length in enumerate(itertools.islice(itertools.cycle((3, 8, 1, 5)), count)):
        source[row, length] = EOS
        source[row, length + 1 :] = PAD
    return source


FEW = replace(SMALL, vocab_size=8)
"""With few words, of which the last is no piece, translations end at different lengths."""


@torch.no_grad()
def log_probability(model: Transformer, source: Tensor, hypothesis: tuple[int, ...]) -> float:
    target = torch.tensor([[BOS, *hypothesis]])
    log_p = model(source[None], target)[0].log_softmax(1)
    return sum(float(log_p[i, token]) for i, token in enumerate((*hypothesis, EOS)))


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_everything_finds_the_best_of_all(seed: int, length_penalty: float) -> None:
    shape = replace(SMALL, vocab_size=7, encoder_layers=1, decoder_layers=1)
    model, source = seeded(shape, seed, scale=1.5), sources(3, vocab_size=7)
    words, max_length = (4, 5, 6), 3
    everything = [h for length in range(1, max_length + 1) for h in itertools.product(words, repeat=length)]
    assert len(everything) == 3 + 9 + 27
    found = beam_search(
        model, source, beam=len(everything), length_penalty=length_penalty, max_length=max_length, num_pieces=7
    )
    for row, line in zip(rows(found), source, strict=True):
        scores = {h: log_probability(model, line[line != PAD], h) / (len(h) + 1) ** length_penalty for h in everything}
        assert tuple(row) == max(scores, key=scores.__getitem__)


@torch.no_grad()
def naive_beam(model: Transformer, source: Tensor, beam: int, max_length: int) -> list[int]:
    """The rules of beam_search for one sentence, with lists. With a beam of one, it is greedy search."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    while len(finished) < beam:
        candidates = []
        for score, h in alive:
            log_p = model(source[None], torch.tensor([[BOS, *h]]))[0, -1].log_softmax(0)
            ends, words = [EOS] if h else [], range(4, 7) if len(h) < max_length else ()
            candidates += [(score + float(log_p[token]), (*h, token)) for token in (*ends, *words)]
        best = sorted(candidates, reverse=True)[: 2 * beam]
        finished += [(score / len(h), h[:-1]) for score, h in best[:beam] if h[-1] == EOS]
        alive = [(score, h) for score, h in best if h[-1] != EOS][:beam]
        if not alive:
            break
    return list(max(finished)[1])


@pytest.mark.parametrize("beam", [1, 2, 3, 4])
def test_beam_search_follows_its_rules(beam: int) -> None:
    lengths = set()
    for seed in range(10 if beam == 1 else 4):
        model, source = seeded(FEW, seed, scale=0.5), sources(8, vocab_size=8)
        found = beam_search(model, source, beam=beam, length_penalty=1.0, max_length=9, num_pieces=7)
        for row, line in zip(rows(found), source, strict=True):
            assert row == naive_beam(model, line[line != PAD], beam, 9)
            lengths.add(len(row))
    assert len(lengths) > 3


@torch.no_grad()
def test_continuing_token_by_token_gives_the_logits_of_the_whole() -> None:
    model, source, target = seeded(SMALL), sources(3), tokens(3, 4, 6, seed=2)
    target[:, :, 0] = BOS
    decoding = Decoding(model, source, beam=4, max_steps=6)
    found = torch.stack([decoding.next(target[:, :, step]) for step in range(6)], 2)  # (B, K, T, V)
    for k in range(4):
        torch.testing.assert_close(found[:, k], model(source, target[:, k]))


def test_translations_end_in_time_and_hold_only_pieces() -> None:
    model = seeded(SMALL, scale=0.1)
    with torch.no_grad():  # a model that never wants to end, and would rather say what is no text
        model.decoder.norm.bias.copy_(10 * model.embedding.weight[[PAD, BOS, 3, 9, 10]].sum(0))
        model.embedding.weight[EOS] = -model.decoder.norm.bias
    for beam in (1, 3):
        found = rows(beam_search(model, sources(4), beam=beam, length_penalty=1.0, max_length=55, num_pieces=9))
        assert [len(row) for row in found] == [53, 55, 51, 55]
        assert {token for row in found for token in row} <= set(range(4, 9))


@pytest.mark.parametrize("beam", [1, 3])
def test_only_an_empty_sentence_has_an_empty_translation(beam: int) -> None:
    model = seeded(SMALL, scale=0.1)
    with torch.no_grad():  # a model that would rather say nothing
        model.decoder.norm.bias.copy_(1e4 * model.embedding.weight[EOS])
    source = torch.tensor([[4, EOS, PAD], [EOS, PAD, PAD], [4, 5, EOS]])
    found = beam_search(model, source, beam=beam, length_penalty=1.0, max_length=9, num_pieces=11)
    assert [len(row) for row in rows(found)] == [1, 0, 1]


def test_a_broken_model_still_gives_an_answer() -> None:
    model = seeded(SMALL)
    nn.init.constant_(model.embedding.weight, math.nan)
    found = beam_search(model, sources(2), beam=3, length_penalty=1.0, max_length=5, num_pieces=11)
    assert rows(found) == [[], []]
