"""The task: what it measures, and the data it reads and refuses."""

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from translation_cases import CPU, MULTI30K, model_of, naive_losses, remove, sentences, tiny, write

from growprune import GrowpruneError
from growprune.tasks import translation
from growprune.tasks.translation import Translation
from growprune.tasks.translation import text as corpus
from growprune.tasks.translation.text import Pieces, learn
from growprune.tasks.translation.transformer import EOS, PAD, Transformer

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
    expected = [
        "line 1: train.en has no",
        "line 3: train.de has no",
        "line 5: train.de is not UTF-8",
        "line 7: train.en",
    ]
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
    assert corpus.read(str(data), "test", "en", "de")[0][0] == sentences(1, 2)[0][0]


def test_long_pairs_are_left_out_of_training_and_counted(data: Path) -> None:
    task = tiny(data, max_length=20, vocab_size=290)
    lengths = [0, 0]
    cut = Pieces(learn([line for side in zip(*sentences(60, 0), strict=True) for line in side], 290))
    for pair in sentences(60, 0):
        is_long = max(len(cut.encode([line], is_target=False)[0]) for line in pair) > 20
        lengths[is_long] += 1
    assert min(lengths) > 5
    with pytest.warns(UserWarning, match=f"skipped {lengths[1]} of 60 training pairs.*more than 20 tokens"):
        batches = list(task.batches(seed=0, start=0, device=CPU))
    assert sum(len(source) for source, _, _ in batches) == lengths[0]


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def empty_both(name: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / f"{name}.{ending}").write_bytes(b"") for ending in ("en", "de")]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shutil.rmtree, "data does not exist"),
        (remove("train.de"), r"train\.de"),
        (remove("test.en"), r"test\.en"),
        (put("train.en", b"one\n" * 59), r"train\.en has 59 .*train\.de has 60"),
        (put("test.de", b"eins\n" * 12), r"test\.en has 11 .*test\.de has 12"),
        (put("test.de", b"eins\n" * 4 + b"f\xfcnf\n" + b"sechs\n" * 6), r"test\.de: line 5"),
        (empty_both("train"), "train split"),
        (empty_both("test"), "test split"),
    ],
)
def test_bad_data_is_refused(data: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(data)
    with pytest.raises(GrowpruneError, match=named):
        tiny(data).num_batches()


def test_too_many_bad_pairs_are_refused(data: Path) -> None:
    (data / "train.de").write_bytes(b"@@\n" * 60)
    with pytest.raises(ValueError, match=r"line 11.*bad record number 11"), pytest.warns(UserWarning):
        tiny(data).num_batches()


@pytest.mark.parametrize(
    ("settings", "named"), [({"data": ""}, "--data"), ({"max_length": 3}, "60 .* 3"), ({"vocab_size": 100}, "100")]
)
def test_data_that_is_missing_or_does_not_fit_the_settings_is_refused(
    data: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(GrowpruneError, match=named):
        tiny(**({"data": data} | settings)).num_batches()


@pytest.mark.parametrize("package", ["sentencepiece", "sacrebleu"])
def test_a_missing_package_is_named_before_training(package: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    translation.bleu.cache_clear()
    task = tiny(data)
    task.build_model()
    with pytest.raises(ValueError, match=rf"needs {package}: .*\[translation\]"):
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
