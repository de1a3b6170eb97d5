"""Translation: the Transformer, its text, batches, search and score."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import growprune as gp
from growprune import engine, methods
from growprune.engine.optim import Curve, Optimizer
from growprune.engine.recipe import Recipe
from growprune.engine.rng import seed_all
from growprune.engine.sharing import split
from growprune.flops import count_flops
from growprune.layers import prunable_weights
from growprune.tasks import translation
from growprune.tasks.translation import Translation, corpus, pieces, search, token_losses
from growprune.tasks.translation.batching import Batches, Pairs, Sentences
from growprune.tasks.translation.pieces import Pieces, learn
from growprune.tasks.translation.search import beam_search
from growprune.tasks.translation.transformer import (
    BOS,
    EOS,
    PAD,
    Attention,
    DecoderLayer,
    Decoding,
    EncoderLayer,
    Shape,
    Transformer,
    sinusoids,
)

CPU = torch.device("cpu")
MULTI30K = Path(__file__).parents[2] / "shared" / "data" / "multi30k"

EN = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
DE = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Numbers in English and German."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(0, 10, draw.integers(2, 13)) for _ in range(count)]
    return [(" ".join(EN[i] for i in row) + ".", " ".join(DE[i] for i in row).capitalize() + ".") for row in rows]


def write(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    folder.mkdir(exist_ok=True)
    for ending, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (folder / f"{name}.{ending}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "growprune"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (name, count) in enumerate({"train": 60, "val": 9, "test": 11}.items()):
        write(tmp_path / "data", name, sentences(count, seed))
    return tmp_path / "data"


def tiny(data: Path | str = "", **settings: Any) -> Translation:
    sizes = {"d_model": 16, "ffn": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 340}
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "relu_dropout": 0.0}
    return Translation(data=str(data), **{**sizes, **rates, "max_tokens": 200, "max_length": 64, **settings})


def seeded(shape: Shape, seed: int = 0, *, scale: float = 1.0) -> Transformer:
    """A model in eval mode; a larger scale makes it more certain of what it says."""
    torch.manual_seed(seed)
    model = Transformer(shape).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
        model.embedding.weight.mul_(scale)
    return model


def model_of(task: Translation) -> Any:
    torch.manual_seed(0)
    return task.build_model().eval()


SMALL = Shape(vocab_size=11, d_model=8, ffn=12, heads=2, encoder_layers=2, decoder_layers=2)


def tokens(*shape: int, seed: int = 0, vocab_size: int = 11) -> Tensor:
    return torch.randint(4, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# The model


def test_the_big_transformer_has_the_papers_weights() -> None:
    big = Translation(d_model=1024, ffn=4096, heads=16)
    with torch.device("meta"):
        model = big.build_model()
        flops = count_flops(model, big.example())
    weights = prunable_weights(model)
    assert len(weights) == 96
    assert sum(weight.numel for weight in weights) == 176_160_768
    assert model.embedding.weight.numel() == 33_712 * 1024
    biases = 6 * (4 * 1024 + 5120) + 6 * (8 * 1024 + 5120)
    norms = 2 * 1024 * (6 * 2 + 1 + 6 * 3 + 1)
    assert sum(p.numel() for p in model.parameters()) == 176_160_768 + 33_712 * 1024 + biases + norms
    attention = 18 * 2 * 2 * 64 * 64 * 1024  # 18 attentions, two products each
    assert flops.dense == 2 * 64 * (176_160_768 + 33_712 * 1024) + attention


def test_weights_have_the_names_recipes_use() -> None:
    names = {weight.name for weight in prunable_weights(Transformer(SMALL))}
    own = {f"self_attention.{letter}" for letter in ("q", "k", "v", "out")} | {"fc1", "fc2"}
    cross = {f"cross_attention.{letter}" for letter in ("q", "k", "v", "out")}
    expected = {f"encoder.layers.{n}.{name}.weight" for n in (0, 1) for name in own}
    assert names == expected | {f"decoder.layers.{n}.{name}.weight" for n in (0, 1) for name in own | cross}


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_torch(is_causal: bool) -> None:
    attention, oracle = Attention(SMALL), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        for layer in (attention.q, attention.k, attention.v, attention.out):
            layer.bias.uniform_(-1, 1)
        oracle.in_proj_weight.copy_(torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))
        oracle.in_proj_bias.copy_(torch.cat([attention.q.bias, attention.k.bias, attention.v.bias]))
        oracle.out_proj.load_state_dict(attention.out.state_dict())
    x, memory = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    if is_causal:
        found = attention(x, *attention.keys_values(memory), is_causal=True)
        expected, _ = oracle(x, memory, memory, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    else:
        seen = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
        found = attention(x, *attention.keys_values(memory), mask=seen[:, None, None, :])
        expected, _ = oracle(x, memory, memory, key_padding_mask=~seen)
    torch.testing.assert_close(found, expected)


def normed(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def attended(attention: Attention, x: Tensor, memory: Tensor, *, is_causal: bool) -> Tensor:
    """Attention head by head and token by token, for one sentence."""
    q, k, v = attention.q(x), attention.k(memory), attention.v(memory)
    out = torch.zeros_like(q)
    for head, t in itertools.product(range(2), range(len(x))):
        own, end = slice(4 * head, 4 * head + 4), t + 1 if is_causal else len(memory)
        weights = torch.stack([q[t, own] @ k[s, own] / 2 for s in range(end)]).softmax(0)
        out[t, own] = sum(weights[s] * v[s, own] for s in range(end))
    return attention.out(out)


def fed_forward(layer: Any, x: Tensor) -> Tensor:
    return x + layer.fc2(layer.fc1(normed(x)).clamp(min=0))


def test_an_encoder_layer_is_pre_norm() -> None:
    layer, x = EncoderLayer(SMALL), torch.randn(4, 8)
    y = x + attended(layer.self_attention, normed(x), normed(x), is_causal=False)
    found = layer(x[None], torch.ones(1, 1, 1, 4, dtype=torch.bool))
    torch.testing.assert_close(found[0], fed_forward(layer, y))


def test_a_decoder_layer_is_pre_norm_and_does_not_normalise_the_source() -> None:
    layer, x, memory = DecoderLayer(SMALL), torch.randn(4, 8), 5 + 3 * torch.randn(6, 8)
    y = x + attended(layer.self_attention, normed(x), normed(x), is_causal=True)
    y = y + attended(layer.cross_attention, normed(y), memory, is_causal=False)
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    found = layer(x[None], *layer.cross_attention.keys_values(memory[None]), mask)
    torch.testing.assert_close(found[0], fed_forward(layer, y))


def test_positions_are_sines_then_cosines() -> None:
    found = sinusoids(3, 4, CPU)
    expected = [[math.sin(t), math.sin(t / 10_000), math.cos(t), math.cos(t / 10_000)] for t in range(3)]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_embeddings_are_scaled_shared_and_the_output() -> None:
    model = Transformer(SMALL)
    source = tokens(1, 3)
    expected = model.embedding.weight[source] * math.sqrt(8) + sinusoids(3, 8, CPU)
    torch.testing.assert_close(model.embed(source), expected)
    x = torch.randn(1, 2, 8)
    torch.testing.assert_close(model.logits(x), normed(x) @ model.embedding.weight.T)
    assert [name for name, p in model.named_parameters() if 11 in p.shape] == ["embedding.weight"]


def test_a_model_starts_as_fairseqs_do() -> None:
    torch.manual_seed(0)
    model = Transformer(Shape(500, 64, 128, 4, 1, 1))
    layer = model.encoder.layers[0]
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    bounds = {layer.self_attention.q: (6 / 256) ** 0.5, layer.self_attention.out: (6 / 128) ** 0.5}
    bounds |= {layer.fc1: (6 / 192) ** 0.5, layer.fc2: (6 / 192) ** 0.5}
    for linear, bound in bounds.items():
        assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.02)
        assert not linear.bias.any()


def test_the_future_has_no_influence() -> None:
    model, source, target = seeded(SMALL), tokens(2, 6), tokens(2, 5, seed=1)
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] - 4 + 1) % 7 + 4
    before, after = model(source, target), model(source, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().amax(2).min() > 1e-4


def test_padding_has_no_influence() -> None:
    model, source, target = seeded(SMALL), tokens(2, 6), tokens(2, 5, seed=1)
    padded = F.pad(source, (0, 3), value=PAD), F.pad(target, (0, 2), value=PAD)
    torch.testing.assert_close(model(*padded)[:, :5], model(source, target))
    assert not torch.allclose(model(padded[0].clamp(min=EOS), padded[1])[:, :5], model(source, target))


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "relu_dropout"])
def test_every_dropout_acts_in_training_only(rate: str) -> None:
    model, pair = seeded(replace(SMALL, **{rate: 0.5})), (tokens(2, 6), tokens(2, 5))
    assert torch.equal(model(*pair), model(*pair))
    model.train()
    assert not torch.allclose(model(*pair), model(*pair))
    assert torch.allclose(seeded(SMALL).train()(*pair), seeded(SMALL)(*pair))


# The loss


def naive_losses(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    losses = torch.zeros(labels.shape)
    for place in itertools.product(*map(range, labels.shape)):
        label, num_classes = int(labels[place]), logits.shape[-1]
        if label != PAD:
            log_p = logits[place] - logits[place].exp().sum().log()
            wanted = torch.full((num_classes,), smoothing / num_classes)
            wanted[label] += 1 - smoothing
            losses[place] = -(wanted * log_p).sum()
    return losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_those_of_a_loop_over_tokens(smoothing: float) -> None:
    logits, labels = torch.randn(3, 4, 11), tokens(3, 4)
    labels[1, 2:] = PAD
    torch.testing.assert_close(
        token_losses(logits, labels, label_smoothing=smoothing), naive_losses(logits, labels, smoothing)
    )


def test_the_loss_is_a_mean_over_tokens(data: Path) -> None:
    task = tiny(data)
    model = model_of(task)
    for source, target, scale in itertools.islice(task.batches(seed=0, start=0, device=CPU), 3):
        losses = naive_losses(model(source, target[:, :-1]).detach(), target[:, 1:], 0.1)
        expected = losses.sum() / (target[:, 1:] != PAD).sum()
        torch.testing.assert_close(task.loss(model, (source, target, scale)), expected)


def test_accumulated_batches_count_by_their_tokens(data: Path, tmp_path: Path) -> None:
    task = tiny(data)
    batches = list(task.batches(seed=0, start=0, device=CPU))
    numbers = [int((target[:, 1:] != PAD).sum()) for _, target, _ in batches]
    assert len(set(numbers)) > 2
    recipe = Recipe(task=task, method=methods.dense, options={"epochs": 1}, curve=Curve("constant"), device="cpu")
    recipe = replace(recipe, optimizer=Optimizer("sgd", lr=1.0))
    engine.train(replace(recipe, accumulate=len(batches)), tmp_path / "run")  # one step
    seed_all(recipe.seed, "model")
    model = cast(Transformer, task.build_model())
    losses = [naive_losses(model(s, t[:, :-1]), t[:, 1:], 0.1).sum() for s, t, _ in batches]
    (sum(losses) / sum(numbers)).backward()
    found = gp.read(tmp_path / "run/model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], (parameter - parameter.grad).detach(), rtol=1e-4, atol=1e-6)


def test_pieces_are_kept_with_a_run_and_must_be_the_same_when_it_is_resumed(data: Path, tmp_path: Path) -> None:
    recipe = Recipe(task=tiny(data), method=methods.dense, options={"epochs": 2}, device="cpu")
    countdown = iter([False] * 2)
    with pytest.raises(engine.Interrupted):
        engine.train(recipe, tmp_path / "run", should_stop=lambda: next(countdown, True))
    kept = (tmp_path / "run/pieces.model").read_bytes()
    assert Pieces(kept).decode([Pieces(kept).encode(["one two."], is_target=False)[0].tolist()]) == ["one two."]
    before = (data / "train.en").read_bytes()
    (data / "train.en").write_bytes(before.upper())
    forget()
    with pytest.raises(ValueError, match=r"pieces.model is not what the data gives now.*start a new run"):
        engine.resume(recipe, tmp_path / "run")
    (data / "train.en").write_bytes(before)
    forget()
    assert engine.resume(recipe, tmp_path / "run")["test"]


def forget() -> None:
    """Read the data again, as another process would."""
    for function in (corpus.load_pieces, corpus.load_training, corpus._training_lines, corpus.load_split):
        function.cache_clear()


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_losses_of_shares_add_up_to_that_of_the_batch(data: Path, replicas: int) -> None:
    task = tiny(data)
    model = model_of(task)
    batch = max(task.batches(seed=0, start=0, device=CPU), key=lambda batch: len(batch[0]))
    shares = [split(batch, index, replicas) for index in range(replicas)]
    total = sum(task.loss(model, mine) * share for mine, share in shares)
    torch.testing.assert_close(total, task.loss(model, batch))


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


def test_what_was_learned_is_kept(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = (data / "train.en", data / "train.de")
    model = pieces.learn_once(lambda: LINES, 340, files)
    assert [path.name[:4] for path in cache.iterdir()] == ["bpe-"]

    def read() -> list[str]:
        raise AssertionError("read")

    assert pieces.learn_once(read, 340, files) == model
    for other in ((341, files), (340, files[::-1])):
        with pytest.raises(AssertionError, match="read"):
            pieces.learn_once(read, *other)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:-1] + b"x", lambda b: b""])
def test_a_damaged_cache_is_learned_again(data: Path, cache: Path, damage: Callable[[bytes], bytes]) -> None:
    files = (data / "train.en", data / "train.de")
    model = pieces.learn_once(lambda: LINES, 340, files)
    kept = next(cache.iterdir())
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert pieces.learn_once(lambda: LINES, 340, files) == model
    assert kept.read_bytes() == whole


def test_no_cache_is_no_error(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tiny(data).num_batches() > 1


def test_without_a_cache_folder_of_its_own_it_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    pieces.learn_once(lambda: LINES, 340, ())
    assert len(list((tmp_path / ".cache" / "growprune").iterdir())) == 1


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


def test_batches_are_nearly_full() -> None:
    lengths = [(int(n), int(n)) for n in np.random.default_rng(0).integers(2, 60, 2000)]
    batches = Batches(pairs_of(lengths), 1024)
    sizes = [source.numel() for source, _, _ in batches.shuffled(0, 0, CPU)]
    assert np.mean(sizes) > 0.9 * 1024


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


# Search


@torch.no_grad()
def greedy(model: Transformer, source: Tensor, max_length: int, num_pieces: int) -> list[int]:
    """The most probable token each time, computed from the start each time."""
    found: list[int] = []
    while len(found) < max_length:
        logits = model(source[None], torch.tensor([[BOS, *found]]))[0, -1]
        allowed = [*([EOS] if found else []), *range(4, num_pieces)]
        token = allowed[int(logits[allowed].argmax())]
        if token == EOS:
            break
        found.append(token)
    return found


def rows(found: Tensor) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in found.tolist()]


def sources(count: int, vocab_size: int = 11) -> Tensor:
    """Sentences of several lengths, padded."""
    source = tokens(count, 9, vocab_size=vocab_size)
    for row, length in enumerate(itertools.islice(itertools.cycle((3, 8, 1, 5)), count)):
        source[row, length] = EOS
        source[row, length + 1 :] = PAD
    return source


FEW = replace(SMALL, vocab_size=8)
"""With few words, of which the last is no piece, translations end at different lengths."""


def test_a_beam_of_one_is_greedy_search() -> None:
    lengths = set()
    for seed in range(5):
        model, source = seeded(FEW, seed, scale=0.5), sources(8, vocab_size=8)
        found = beam_search(model, source, beam=1, length_penalty=1.0, max_length=9, num_pieces=7)
        for row, line in zip(rows(found), source, strict=True):
            assert row == greedy(model, line[line != PAD], 9, 7)
            lengths.add(len(row))
    assert len(lengths) > 3


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
    """The rules of search.py for one sentence, with lists."""
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


@pytest.mark.parametrize("beam", [2, 3, 4])
def test_beam_search_follows_its_rules(beam: int) -> None:
    lengths = set()
    for seed in range(4):
        model, source = seeded(FEW, seed, scale=0.5), sources(8, vocab_size=8)
        found = beam_search(model, source, beam=beam, length_penalty=1.0, max_length=9, num_pieces=7)
        for row, line in zip(rows(found), source, strict=True):
            assert row == naive_beam(model, line[line != PAD], beam, 9)
            lengths.add(len(row))
    assert len(lengths) > 3


def test_a_step_finishes_and_goes_on_with_the_right_candidates() -> None:
    beams = search._Beams.start(1, 3, 4, CPU)
    beams.scores, beams.tokens[0, :, 0] = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([4, 5, 4])
    log_p = torch.full((1, 3, 6), -math.inf)
    log_p[:, :, EOS], log_p[:, :, 4], log_p[:, :, 5] = -0.125, -1.0, -2.25
    candidates = search._candidates(beams.scores, log_p)
    assert candidates[0].tolist() == [[-1.125, -2.0, -2.125, -3.0, -3.125, -3.25]]
    beams.finish(*candidates, step=1, length_penalty=1.0)
    assert (beams.num_finished.tolist(), beams.best_scores.tolist()) == ([2], [-1.125 / 2])
    assert beams.best.tolist() == [[4, PAD, PAD, PAD]]
    assert beams.advance(*candidates, step=1).tolist() == [[0, 1, 0]]
    assert beams.scores.tolist() == [[-2.0, -3.0, -3.25]]
    assert beams.tokens[0, :, :2].tolist() == [[4, 4], [5, 4], [4, 5]]


@torch.no_grad()
def test_continuing_token_by_token_gives_the_logits_of_the_whole() -> None:
    model, source, target = seeded(SMALL), sources(3), tokens(3, 4, 6, seed=2)
    target[:, :, 0] = BOS
    decoding = Decoding(model, source, beam=4, max_steps=6)
    found = torch.stack([decoding.next(target[:, :, step]) for step in range(6)], 2)  # (B, K, T, V)
    for k in range(4):
        torch.testing.assert_close(found[:, k], model(source, target[:, k]))


@torch.no_grad()
def test_reordered_hypotheses_go_on_from_others() -> None:
    model, source, target = seeded(SMALL), sources(2), tokens(2, 3, 4, seed=2)
    decoding = Decoding(model, source, beam=3, max_steps=5)
    for step in range(4):
        decoding.next(target[:, :, step])
    origin = torch.tensor([[2, 0, 0], [1, 1, 2]])
    decoding.reorder(origin)
    newest = tokens(2, 3, seed=3)
    found = decoding.next(newest)
    for b, k in itertools.product(range(2), range(3)):
        whole = torch.cat([target[b, origin[b, k]], newest[b, k : k + 1]])[None]
        torch.testing.assert_close(found[b, k], model(source[b : b + 1], whole)[0, -1])


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


# Evaluation


def test_a_small_model_learns_sentences_by_heart(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        write(tmp_path, name, sentences(8))
    task = tiny(tmp_path, d_model=32, ffn=64, encoder_layers=1, decoder_layers=1)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with torch.no_grad():
        before = task.evaluate(model.eval(), "test", device=CPU)
    for epoch in range(100):
        for batch in task.batches(seed=epoch, start=0, device=CPU):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    with torch.no_grad():
        after = [task.evaluate(model, name, device=CPU) for name in ("validation", "test")]
    assert before["bleu"] < 5
    assert before["loss"] > 4
    assert [metrics["bleu"] for metrics in after] == [pytest.approx(100), pytest.approx(100)]
    assert after[0]["loss"] < 0.3


def test_loss_and_perplexity_are_per_token_and_not_smoothed(data: Path) -> None:
    task = tiny(data)
    model = model_of(task)
    cut = translation.load_pieces(str(data), "en", "de", 340)
    total, count = 0.0, 0
    for en, de in sentences(9, 1):
        source = torch.from_numpy(cut.encode([en], is_target=False)[0]).long()[None]
        target = torch.from_numpy(cut.encode([de], is_target=True)[0]).long()[None]
        losses = naive_losses(model(source, target[:, :-1]).detach(), target[:, 1:], 0.0)
        total, count = total + float(losses.sum()), count + losses.numel()
    with torch.no_grad():
        found = task.evaluate(model, "validation", device=CPU)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_validation_is_greedy_and_test_uses_the_beam(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def copy(model: Transformer, source: Tensor, **options: Any) -> Tensor:
        asked.append((options["beam"], options["length_penalty"], options["max_length"]))
        return source.masked_fill(source == EOS, PAD)

    monkeypatch.setattr(translation, "beam_search", copy)
    task = tiny(data, beam=3, length_penalty=0.6)
    with torch.no_grad():
        for name in ("validation", "test"):
            task.evaluate(model_of(task), name, device=CPU)
    assert set(asked) == {(1, 0.6, 64), (3, 0.6, 64)}


def test_a_copy_of_the_reference_scores_100_and_every_line_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train", sentences(20))
    same = [(de, de) for _, de in sentences(9, 2)]
    write(tmp_path, "val", [*same, ("", "")])
    write(tmp_path, "test", [*same, ("", same[0][1]), (same[0][0] * 20, same[0][0] * 20)])
    monkeypatch.setattr(translation, "beam_search", lambda m, source, **o: source.masked_fill(source == EOS, PAD))
    task = tiny(tmp_path, max_length=40)
    model = model_of(task)
    with torch.no_grad():
        assert task.evaluate(model, "validation", device=CPU)["bleu"] == pytest.approx(100)
        assert 50 < task.evaluate(model, "test", device=CPU)["bleu"] < 99, "an empty translation costs brevity"


def test_lowercase_bleu_is_uncased_and_the_signature_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "val", "test"):
        write(tmp_path, name, [(de.lower(), de) for _, de in sentences(9)])
    monkeypatch.setattr(translation, "beam_search", lambda m, source, **o: source.masked_fill(source == EOS, PAD))
    cased, uncased = tiny(tmp_path), tiny(tmp_path, lowercase=True)
    model = model_of(cased)
    with torch.no_grad():
        assert cased.evaluate(model, "test", device=CPU)["bleu"] < 99
        assert uncased.evaluate(model, "test", device=CPU)["bleu"] == pytest.approx(100)
    assert "case:mixed" in cased.signature
    assert "case:lc|eff:no|tok:13a|smooth:exp|version:" in uncased.signature


def test_bf16_autocast_trains_and_translates(data: Path) -> None:
    task = tiny(data, dropout=0.1, attention_dropout=0.1)
    model = task.build_model()
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.loss(model, next(task.batches(seed=0, start=0, device=CPU)))
        with torch.no_grad():
            metrics = task.evaluate(model.eval(), "test", device=CPU)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert math.isfinite(metrics["loss"])


def test_grow_and_prune_trains_a_translator(data: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        task=tiny(data, d_model=8, ffn=16, encoder_layers=1, decoder_layers=1, beam=2, max_length=40),
        method=methods.cyclic_gap,
        options={"steps": 2, "epochs": 1, "finetune": 2},
        sparsity=0.8,
        kappa=2,
        optimizer=Optimizer("adam", lr=1e-2, betas=(0.9, 0.98)),
        curve=Curve("inverse_sqrt", warmup_epochs=0.5),
        device="cpu",
    )
    result = engine.train(recipe, tmp_path / "run")
    assert set(result["test"]) == {"bleu", "loss", "perplexity"}
    assert result["validation"]["loss"] < math.log(340)
    assert result["sparsity"]["totals"]["alive"] == sum(round(0.2 * n) for n in [64] * 12 + [128] * 4)


# Data


def test_validation_may_be_called_valid(data: Path) -> None:
    for ending in ("en", "de"):
        (data / f"val.{ending}").rename(data / f"valid.{ending}")
    task = tiny(data)
    with torch.no_grad():
        assert "bleu" in task.evaluate(model_of(task), "validation", device=CPU)


def test_bad_training_pairs_are_named_and_skipped(data: Path) -> None:
    for name, at, line in (("en", 1, b""), ("de", 3, b"@@"), ("de", 5, b"Stra\xdfe"), ("en", 7, b"  \r")):
        lines = (data / f"train.{name}").read_bytes().split(b"\n")
        lines[at - 1] = line
        (data / f"train.{name}").write_bytes(b"\n".join(lines))
    with pytest.warns(UserWarning) as caught:
        batches = list(tiny(data).batches(seed=0, start=0, device=CPU))
    expected = ["line 1: train.en has ''", "line 3: train.de has '@@'", "line 5: train.de is not UTF-8", "line 7: "]
    assert len(caught) == 4
    assert all(part in str(one.message) for part, one in zip(expected, caught, strict=True))
    assert sum(len(source) for source, _, _ in batches) == 56


def test_only_newlines_end_lines_and_the_last_may_lack_one(data: Path) -> None:
    text = (data / "train.en").read_text(encoding="utf-8").replace("\n", "\u2028 \x0b\x85 \r x\r\n")
    (data / "train.en").write_bytes(text.encode().removesuffix(b"\n"))
    assert sum(len(batch[0]) for batch in tiny(data, max_tokens=400).batches(seed=0, start=0, device=CPU)) == 60


def test_a_byte_order_mark_is_no_text(data: Path) -> None:
    plain = tiny(data).files()
    for file in data.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    corpus.load_pieces.cache_clear()
    assert tiny(data).files() == plain
    assert corpus.read_whole(str(data), "test", "en", "de")[0][0] == sentences(1, 2)[0][0]


def test_long_pairs_are_left_out_of_training_and_counted(data: Path) -> None:
    task = tiny(data, max_length=20, vocab_size=290)
    lengths = [0, 0]
    cut = Pieces(learn([line for side in zip(*sentences(60, 0), strict=True) for line in side], 290))
    for pair in sentences(60, 0):
        is_long = max(len(cut.encode([line], is_target=False)[0]) for line in pair) > 20
        lengths[is_long] += 1
    assert min(lengths) > 5
    with pytest.warns(UserWarning, match=f"left out {lengths[1]} of 60 training pairs.*more than 20 tokens"):
        batches = list(task.batches(seed=0, start=0, device=CPU))
    assert sum(len(source) for source, _, _ in batches) == lengths[0]


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def empty_both(name: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / f"{name}.{ending}").write_bytes(b"") for ending in ("en", "de")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no .*; expected is a folder with train, val"),
        (remove("train.de"), "has no train.de; expected is a folder with train"),
        (remove("test.en"), "has no test.en; expected"),
        (put("train.en", b"one\n" * 59), r"train.en has 59 lines but .*train.de has 60; line n"),
        (put("test.de", b"eins\n" * 12), r"test.en has 11 lines but .*test.de has 12; line n"),
        (put("test.de", b"eins\n" * 4 + b"f\xfcnf\n" + b"sechs\n" * 6), "test.de: line 5 is not UTF-8; no line of the"),
        (empty_both("train"), "the train split has no examples"),
        (empty_both("test"), "the test split has no examples"),
    ],
)
def test_bad_data_is_refused(data: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(data)
    with pytest.raises(ValueError, match=message):
        tiny(data).num_batches()


def test_too_many_bad_pairs_are_refused(data: Path) -> None:
    (data / "train.de").write_bytes(b"@@\n" * 60)
    with pytest.raises(ValueError, match=r"line 11.*bad record number 11"), pytest.warns(UserWarning):
        tiny(data).num_batches()


def test_no_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"say where the data is with --data DIR; expected is .* \.en and \.de"):
        tiny().num_batches()


def test_pairs_that_are_all_too_long_are_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="all 60 training pairs have more than 3 tokens: raise max_length"):
        tiny(data, max_length=3).num_batches()


def test_a_vocabulary_that_is_too_small_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot learn 100 pieces: .*try a larger vocab_size"):
        tiny(data, vocab_size=100).num_batches()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"d_model is 16, but must be even and a multiple of heads \(3\)"),
        ({"d_model": 15, "heads": 3}, "d_model is 15, but must be even"),
        ({"beam": 0}, "beam is 0, but must be at least 1"),
        ({"encoder_layers": 0}, "encoder_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0, but must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"max_length": 61, "max_tokens": 63}, r"max_tokens is 63, but .* of max_length \(61\): give at least 64"),
        ({"target": "en"}, "source and target are both 'en'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


@pytest.mark.parametrize("package", ["sentencepiece", "sacrebleu"])
def test_a_missing_package_is_named_before_training(package: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    task = tiny(data)
    task.build_model()
    with pytest.raises(ValueError, match=rf"needs {package}: pip install 'growprune\[translation\]'"):
        task.num_batches()


def test_a_language_that_sacrebleu_needs_more_for_is_said_before_training(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "MeCab", None)
    for ending in ("train", "val", "test"):
        (data / f"{ending}.de").rename(data / f"{ending}.ja")
    with pytest.raises(ValueError, match=r"BLEU for target='ja': .*[Jj]apanese"):
        tiny(data, target="ja").num_batches()


@pytest.mark.skipif(not MULTI30K.is_dir(), reason="needs Multi30k in ../shared/data")
def test_multi30k_has_two_broken_lines() -> None:
    task = Translation(data=os.fspath(MULTI30K), vocab_size=8000, max_length=64, max_tokens=4096)
    with pytest.warns(UserWarning) as caught:
        assert task.num_batches() > 100
    assert [str(one.message).split("skipped ")[1][:10] for one in caught] == ["line 16510", "line 16664"]
