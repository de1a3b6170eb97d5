"""A text as tokens, and batches of it. The first 90 % are for training, 5 % for validation and 5 % for test.

The tokens of a plain text are its bytes. A `.npz` file holds the tokens of any tokenizer: `tokens` (integers, the whole
text) and `num_bytes` (for each token of the vocabulary, the number of bytes of its text).

An epoch goes once over the training text. The text is cut into pieces of equal length without overlap, from a random
offset, and the pieces come in random order. So a token is at another place of its piece in each epoch. Tokens that do
not fill a piece or a batch are left out, so that all batches have the same shape.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from growprune.errors import GrowpruneError
from growprune.tasks.bad_records import find

LAYOUT = "a text file with one byte per character, or a .npz of tokens"
BYTES = 256
"""Every byte is a token, whether the text has it or not, so that tokens do not depend on the text."""


@functools.cache
def load(data: str, vocab_size: int = BYTES) -> tuple[dict[str, Tensor], Tensor]:
    """Read a file. Return the tokens of each split, and the number of bytes of each token of the vocabulary."""
    path = find(data, "", layout=LAYOUT)
    if not path.is_file():
        raise GrowpruneError(f"--data must be {LAYOUT}, but {path} is a folder. Give the file itself")
    if path.suffix == ".npz":
        tokens, num_bytes = _read_tokens(path)
    else:
        tokens, num_bytes = np.frombuffer(path.read_bytes(), np.uint8), np.ones(BYTES, np.uint8)
    if len(num_bytes) != vocab_size:
        raise GrowpruneError(
            f"{path} has {len(num_bytes)} kinds of tokens, but task.vocab_size is {vocab_size}. "
            f"Use --set task.vocab_size={len(num_bytes)}"
        )
    return cut(tokens, path), torch.from_numpy(num_bytes.astype(np.int64))


def _read_tokens(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Read a `.npz`. Raise if it lacks an array, or has tokens outside of its vocabulary."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            tokens, num_bytes = arrays["tokens"], arrays["num_bytes"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise GrowpruneError(f"{path} must have the arrays tokens and num_bytes: {error}") from error
    for name, array in (("tokens", tokens), ("num_bytes", num_bytes)):
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise GrowpruneError(f"{name} in {path} must be a list of integers, got {array.dtype} {array.shape}")
    if tokens.min() < 0 or tokens.max() >= len(num_bytes):
        raise GrowpruneError(
            f"tokens in {path} must be in [0, {len(num_bytes)}), the length of num_bytes, got {tokens.min()} to "
            f"{tokens.max()}"
        )
    return tokens, num_bytes


def cut(tokens: NDArray[Any], source: Path | str = "the text") -> dict[str, Tensor]:
    """Cut a text into its first 90 %, the next 5 %, and the rest.

    >>> {split: len(part) for split, part in cut(np.zeros(60, np.uint8)).items()}
    {'train': 54, 'validation': 3, 'test': 3}
    """
    size = len(tokens)
    ends = (size * 90 // 100, size * 95 // 100)
    parts = {"train": tokens[: ends[0]], "validation": tokens[ends[0] : ends[1]], "test": tokens[ends[1] :]}
    if any(len(part) < 2 for part in parts.values()):  # one token to see, and one to predict
        raise GrowpruneError(f"--data must have at least 40 tokens, but {source} has {size}. Use a longer text")
    dtype = np.uint8 if tokens.dtype == np.uint8 else np.int32  # torch cannot index uint16
    return {split: torch.from_numpy(part.astype(dtype)) for split, part in parts.items()}


@functools.cache
def on_device(data: str, split: str, device: torch.device, vocab_size: int = BYTES) -> Tensor:
    """Copy the tokens of a split to a device, once."""
    return load(data, vocab_size)[0][split].to(device)


def num_predicted_bytes(text: Tensor, num_bytes: Tensor) -> int:
    """Count the bytes of all tokens of a text except the first.

    >>> num_predicted_bytes(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 2, 5]))
    9
    """
    return int(torch.bincount(text[1:].long().cpu(), minlength=len(num_bytes)) @ num_bytes)


def num_batches(size: int, context: int, batch_size: int) -> int:
    """Return the number of batches that a text of `size` tokens fills at any offset.

    >>> num_batches(41, context=4, batch_size=3), num_batches(39, context=4, batch_size=3)
    (3, 2)
    """
    return (size - context) // context // batch_size


def shuffled(text: Tensor, context: int, batch_size: int, *, seed: int, start: int) -> Iterator[Tensor]:
    """Yield the batches of an epoch from number `start` on: pieces with one more token, (batch_size, context + 1)."""
    generator = np.random.default_rng(seed)
    offset = int(generator.integers(context))
    num_pieces = (len(text) - 1 - offset) // context
    order = torch.from_numpy(generator.permutation(num_pieces)).to(
        text.device
    )  # once, so that the host does not wait for each batch
    places = torch.arange(context + 1, device=text.device)
    for number in range(start, num_batches(len(text), context, batch_size)):
        pieces = order[number * batch_size : (number + 1) * batch_size]
        yield text[offset + context * pieces[:, None] + places].long()


def in_order(text: Tensor, context: int, batch_size: int) -> Iterator[Tensor]:
    """Yield all pieces of a text in order, in batches. The last piece may be shorter and is a batch of its own.

    So each token except the first is predicted once.
    """
    num_pieces = (len(text) - 1) // context
    places = torch.arange(context + 1, device=text.device)
    for start in range(0, num_pieces, batch_size):
        pieces = torch.arange(start, min(start + batch_size, num_pieces), device=text.device)
        yield text[context * pieces[:, None] + places].long()
    if len(rest := text[context * num_pieces :]) > 1:
        yield rest[None].long()
