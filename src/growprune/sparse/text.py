"""Text of your own for language models: calibration batches, and perplexity.

batches = growprune.text_batches(tokenizer, "notes.txt")
sparse = growprune.prune_pretrained(model, batches, sparsity=0.5)
print(growprune.perplexity(model, tokenizer, "notes.txt", part="held-out"))

Of each file, the last tenth of the tokens is held out: calibration never sees it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.plan.settings import as_seed, check_counts

LENGTH, SAMPLES = 512, 128
HELD_OUT = 10
"""One of so many tokens is held out, at the end of a text."""
TOKENS = 2048
"""The most tokens of a batch, unless a single window has more."""


def tokens_of(tokenizer: Any, path: str | os.PathLike[str], part: Literal["calibration", "held-out", "all"]) -> Tensor:
    """Return the tokens of a text file in UTF-8, or of a part of it, as a tensor of integers."""
    if not callable(tokenizer):
        raise GrowpruneError(f"tokenizer must be one of transformers, got a {type(tokenizer).__name__}")
    try:
        raw = Path(path).read_bytes()
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise GrowpruneError(f"cannot read the text {path} ({error.strerror}): pass a text file") from error
    except UnicodeDecodeError as error:
        raise GrowpruneError(f"{path} is not text in UTF-8 (byte {error.start}): pass a plain text file") from error
    if "\0" in text:
        raise GrowpruneError(f"{path} is a binary file (it has zero bytes): pass a plain text file")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    first = len(tokens) - len(tokens) // HELD_OUT
    return {"calibration": tokens[:first], "held-out": tokens[first:], "all": tokens}[part]


def text_batches(
    tokenizer: Any, path: str | os.PathLike[str], *, samples: int = SAMPLES, length: int = LENGTH, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Return calibration batches for `prune_pretrained`: windows of a text file.

    Args:
        tokenizer: that of the model, of transformers.
        path: a text file in UTF-8. Its last tenth is held out.
        samples: how many windows, drawn at random.
        length: the tokens of a window.
        seed: the seed of the draw.

    Examples:
        >>> import tempfile
        >>> letters = lambda text, **options: {"input_ids": [ord(letter) for letter in text]}
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("to be or not to be")
        ...     file.flush()
        ...     text_batches(letters, file.name, samples=2, length=8)[0]["input_ids"].shape
        torch.Size([2, 8])
    """
    check_counts(1, samples=samples)
    check_counts(2, length=length)
    tokens = tokens_of(tokenizer, path, "calibration")
    starts = len(tokens) - length + 1
    if starts < samples:
        raise GrowpruneError(
            f"{path} has {len(tokens):,} tokens to calibrate with, too few for {samples} windows of {length}: pass "
            f"more text, fewer samples or a shorter length"
        )
    drawn = torch.randperm(starts, generator=torch.Generator().manual_seed(as_seed(seed)))[:samples]
    windows = torch.stack([tokens[start : start + length] for start in drawn.tolist()])
    return [{"input_ids": some} for some in windows.split(max(1, TOKENS // length))]  # type: ignore[no-untyped-call]


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokenizer: Any,
    path: str | os.PathLike[str],
    *,
    length: int = LENGTH,
    part: Literal["calibration", "held-out", "all"] = "all",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> float:
    """Return the perplexity of a causal language model on a text file.

    The text is cut into windows of `length` tokens that do not overlap; what is left at the end is dropped. A token is
    predicted from those before it in its window, so the first of each window is not counted.

    Args:
        model, tokenizer: those of transformers; the model returns `logits`.
        path: a text file in UTF-8.
        length: the tokens of a window.
        part: "held-out", the last tenth of the tokens; "calibration", the rest; or "all".
        progress: called with (windows done, windows in all).

    Examples:
        >>> import tempfile
        >>> from types import SimpleNamespace
        >>> class Guess(nn.Linear):
        ...     def forward(self, input_ids):
        ...         return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 26))
        >>> letters = lambda text, **options: {"input_ids": [ord(letter) - ord("a") for letter in text]}
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("tobeornottobe")
        ...     file.flush()
        ...     round(perplexity(Guess(1, 1), letters, file.name, length=4), 3)
        26.0
    """
    check_counts(2, length=length)
    tokens = tokens_of(tokenizer, path, part)
    count = len(tokens) // length
    if not count:
        what = "tokens" if part == "all" else f"{part} tokens"
        raise GrowpruneError(
            f"{path} has {len(tokens):,} {what}, too few for one window of {length}: pass more text or a shorter length"
        )
    words = getattr(model, "config", None) and model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if words and (largest := int(tokens.max())) >= words:
        raise GrowpruneError(
            f"the tokenizer gives token {largest}, but the model has {words} tokens: pass the model's own tokenizer"
        )
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    total = 0.0
    try:
        done = 0
        batches = tokens[: count * length].view(count, length).split(max(1, TOKENS // length))  # type: ignore[no-untyped-call]
        for some in batches:
            windows = some.to(device)
            logits = model(input_ids=windows).logits[:, :-1].float().flatten(0, 1)
            total += float(nn.functional.cross_entropy(logits, windows[:, 1:].flatten(), reduction="sum"))
            done += len(windows)
            progress(done, count)
    finally:
        model.train(was_training)
    mean = total / (count * (length - 1))
    return math.exp(mean) if mean < math.log(1e300) else math.inf
