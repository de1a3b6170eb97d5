"""Byte-pair encoding with pieces that are learned from the training text of both languages together.

Learning is deterministic. Its result is stored in the user's cache folder, with a digest of the text.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from growprune.errors import GrowpruneError, need
from growprune.tasks import cache
from growprune.tasks.translation.transformer import BOS, EOS, PAD, UNK

CHUNK = 10_000


class Pieces:
    """Converts text to tokens and back.

    Args:
        model: a sentencepiece model.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = _sentencepiece().SentencePieceProcessor(model_proto=model)

    def __len__(self) -> int:
        return int(self._processor.vocab_size())

    def encode(self, lines: list[str], *, is_target: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the tokens of all sentences, and the length of each. All end with EOS, and targets begin with BOS."""
        tokens, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for first in range(0, len(lines), CHUNK):  # in chunks, because lists of numbers are large
            rows = self._processor.encode(lines[first : first + CHUNK], add_bos=is_target, add_eos=True)
            lengths.append(np.array([len(row) for row in rows], np.int64))
            tokens.append(np.fromiter(itertools.chain.from_iterable(rows), np.int32, count=int(lengths[-1].sum())))
        return np.concatenate(tokens), np.concatenate(lengths)

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Return plain text, without padding."""
        return list(self._processor.decode([[token for token in row if token != PAD] for row in rows]))


def learn(lines: Iterable[str], vocab_size: int) -> bytes:
    """Train a sentencepiece model of at most `vocab_size` pieces. Characters without a piece become bytes.

    The same lines always give the same bytes.
    """
    model = io.BytesIO()
    try:
        _sentencepiece().SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # short texts may have fewer pieces
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",  # keep the text as in the references
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,  # several threads are not deterministic
            minloglevel=2,
        )
    except RuntimeError as error:
        raise GrowpruneError(
            f"sentencepiece cannot learn vocab_size={vocab_size} pieces: {error}. Try a larger vocab_size"
        ) from error
    return model.getvalue()


def learn_once(read: Callable[[], Iterable[str]], vocab_size: int, files: tuple[Path, ...]) -> bytes:
    """Return the result of `learn` for the lines of these files, from the cache if possible."""
    digest = hashlib.sha256(f"bpe 1 {vocab_size}".encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    key, place = digest.hexdigest(), files[0].parent / "-".join(["bpe", str(vocab_size), *(f.name for f in files)])
    if arrays := cache.load_arrays(place, key):
        return arrays["model"].tobytes()
    model = learn(read(), vocab_size)
    cache.save_arrays(place, key, {"model": np.frombuffer(model, np.uint8)})
    return model


def _sentencepiece() -> Any:
    return need("sentencepiece", "translation", "translation needs sentencepiece")
