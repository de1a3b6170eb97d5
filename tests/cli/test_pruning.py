"""`growprune prune` and `growprune perplexity`, on a language model of letters."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app

hf = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

LETTERS = "abcdefgh .\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense folder with a tokenizer of letters, and beside it a text."""
    path = tmp_path_factory.mktemp("model")
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="a"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    hf.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(path / "dense")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.LlamaConfig(vocab_size=len(LETTERS), max_position_embeddings=32, num_key_value_heads=1, **sizes)
    hf.LlamaForCausalLM(config).save_pretrained(path / "dense")
    rng = random.Random(0)
    (path / "text.txt").write_text("".join(rng.choice(LETTERS) for _ in range(1000)))
    return path


def loaded(folder: Path) -> tuple[Any, Any]:
    return hf.AutoModelForCausalLM.from_pretrained(folder).eval(), hf.AutoTokenizer.from_pretrained(folder)


def run(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def by_hand(model: Any, tokens: torch.Tensor, length: int) -> float:
    """Perplexity one token at a time."""
    nll = []
    for start in range(0, len(tokens) - length + 1, length):
        for i in range(1, length):
            with torch.no_grad():
                logits = model(input_ids=tokens[None, start : start + i]).logits[0, -1]
            nll.append(-float(logits.log_softmax(0)[tokens[start + i]]))
    return math.exp(sum(nll) / len(nll))


def test_perplexity_is_that_of_windows_that_do_not_overlap(folder: Path) -> None:
    model, tokenizer = loaded(folder / "dense")
    tokens = torch.tensor([LETTERS.index(c) for c in (folder / "text.txt").read_text()])
    want = by_hand(model, tokens[900:], 16)
    assert gp.perplexity(model, tokenizer, folder / "text.txt", length=16, part="held-out") == pytest.approx(want)
    found = run("perplexity", folder / "dense", "--text", folder / "text.txt", "--length", 16)
    assert found["perplexity"] == pytest.approx(by_hand(model, tokens, 16))
    assert (found["length"], found["stride"]) == (16, 16)


def test_calibration_never_sees_what_is_held_out(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = loaded(folder / "dense")
    (tmp_path / "text.txt").write_text("a" * 90 + "b" * 10)
    batches = gp.text_batches(tokenizer, tmp_path / "text.txt", samples=81, length=10)
    windows = torch.cat([batch["input_ids"] for batch in batches])
    assert windows.shape == (81, 10)
    assert windows.unique().tolist() == [LETTERS.index("a")]
    again = gp.text_batches(tokenizer, folder / "text.txt", samples=5, length=10, seed=3)
    same = gp.text_batches(tokenizer, folder / "text.txt", samples=5, length=10, seed=3)
    assert torch.equal(again[0]["input_ids"], same[0]["input_ids"])


@pytest.mark.parametrize(
    ("by", "pattern", "sparsity", "trained"),
    [("sparsegpt", "2:4", None, {}), ("wanda", "", 0.7, {"reconstruct": 6, "steps": 2}), ("magnitude", "", None, {})],
)
def test_the_command_and_python_give_the_same(
    folder: Path, tmp_path: Path, by: str, pattern: str, sparsity: float | None, trained: dict[str, int]
) -> None:
    text, out = folder / "text.txt", tmp_path / "pruned"
    how = ["--pattern", pattern] if pattern else []
    how += ["--sparsity", str(sparsity)] if sparsity else []
    how += [word for name, count in trained.items() for word in (f"--{name}", str(count))]
    found = run(
        "prune", folder / "dense", "--by", by, "--text", text, "--out", out, "--samples", 9, "--length", 24, *how
    )
    model, tokenizer = loaded(folder / "dense")
    how_measured = {"length": 24, "part": "held-out"}
    before = gp.perplexity(model, tokenizer, text, **how_measured)
    batches = gp.text_batches(tokenizer, text, samples=9, length=24)
    sparse = gp.prune_pretrained(
        model, batches, by=by, sparsity=sparsity or 0.5, pattern=pattern or "unstructured", **trained
    )
    after = gp.perplexity(model, tokenizer, text, **how_measured)
    assert found["perplexity"]["before"] == before
    assert found["perplexity"]["after"] == after
    assert found["sparsity"] == pytest.approx(sparsity or 0.5, abs=0.01)
    again, _ = loaded(out)  # plain transformers
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert gp.from_pretrained(hf.AutoModelForCausalLM, out).num_alive == sparse.num_alive
    assert [path.name for path in tmp_path.iterdir()] == ["pruned"]


def test_what_cannot_be_pruned_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    vit = hf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    vit.save_pretrained(tmp_path / "vit")
    bare = Path(shutil.copytree(folder / "dense", tmp_path / "bare"))
    for path in bare.glob("tokenizer*"):
        path.unlink()
    headless = Path(shutil.copytree(folder / "dense", tmp_path / "headless"))
    hf.AutoModel.from_pretrained(folder / "dense").save_pretrained(headless)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "zeros").write_bytes(b"a\0b")
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    dense, text, out = folder / "dense", folder / "text.txt", tmp_path / "out"
    for arguments, named in [
        ((dense, "--text", tmp_path / "binary", "--out", out), "binary"),
        ((dense, "--text", tmp_path / "zeros", "--out", out), "zeros"),
        ((dense, "--text", tmp_path / "none", "--out", out), "none"),
        ((dense, "--text", tmp_path / "short.txt", "--out", out), "short.txt"),
        ((dense, "--text", text, "--out", tmp_path / "full"), "full"),
        ((dense, "--text", text, "--out", out, "--pattern", "2:4", "--sparsity", "0.9"), "0.9"),
        ((dense, "--text", text, "--out", out, "--by", "luck"), "luck"),
        ((tmp_path / "vit", "--text", text, "--out", out), "vit"),
        ((bare, "--text", text, "--out", out), "bare"),
        ((headless, "--text", text, "--out", out), "lm_head.weight"),
        ((tmp_path, "--text", text, "--out", out), "config.json"),
    ]:
        done = CliRunner().invoke(app, ["prune", *map(str, arguments), "--samples", "4", "--length", "24"])
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert done.exit_code == 2, done.output
        assert len(lines) == 1, done.stderr
        assert named in lines[0]
        assert not out.exists()
