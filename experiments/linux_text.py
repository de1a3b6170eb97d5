"""Prepare the text of `language-linux`: C source of the Linux kernel, as byte-pair tokens.

    apt-get download linux-source-6.1 && dpkg-deb -x linux-source-6.1_*.deb .
    python experiments/linux_text.py collect usr/src/linux-source-6.1.tar.xz linux.txt.xz    # 250 MB of text
    python experiments/linux_text.py tokens linux.txt.xz linux.npz                           # needs tokenizers
    growprune train language-linux/gradual-90-global --data linux.npz --out runs/gpt

`collect` takes .c and .h files in an order that follows from their names, so files of one folder are in all splits.
The packed text is small enough to be moved to another machine, where `tokens` uses all cores.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MEGABYTE = 10**6
END_OF_FILE = b"\0"
"""Between two files. C source has no such byte."""
LEARN_FROM = 20 * MEGABYTE
"""Bytes of text, from the start of the training split, from which the pairs are learned."""
FILES_AT_ONCE = 500


def collect(archive: Path, out: Path, megabytes: float) -> None:
    """Write C files of a tar archive, one after another, until there is enough text."""
    with tarfile.open(archive) as tar:
        texts = {m.name: tar.extractfile(m) for m in tar if m.isfile() and m.name.endswith((".c", ".h"))}
        contents = {name: file.read() for name, file in texts.items() if file is not None}
    names = sorted(contents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    size = 0
    with lzma.open(out, "wb", preset=6) as packed:
        for name in names:
            if size >= megabytes * MEGABYTE:
                break
            content = contents[name].replace(END_OF_FILE, b"") + END_OF_FILE
            packed.write(content)
            size += len(content)
    print(f"{out}: {size / MEGABYTE:.1f} MB of text in {out.stat().st_size / MEGABYTE:.1f} MB")


def to_tokens(packed: Path, out: Path, vocab_size: int) -> None:
    """Learn byte pairs from the first files, and write the tokens of all of them."""
    from tokenizers import ByteLevelBPETokenizer  # in the extra `transformers`

    with lzma.open(packed, "rb") as file:
        files = [part.decode(errors="replace") + "\0" for part in file.read().split(END_OF_FILE)[:-1]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(first(files, LEARN_FROM), vocab_size=vocab_size, min_frequency=1)
    batches = [files[start : start + FILES_AT_ONCE] for start in range(0, len(files), FILES_AT_ONCE)]
    found = [np.array(e.ids, np.uint16) for batch in batches for e in tokenizer.encode_batch(batch)]
    pieces = [tokenizer.id_to_token(number) for number in range(tokenizer.get_vocab_size())]
    tokens, num_bytes = np.concatenate(found), np.array([len(piece) for piece in pieces])  # a character for each byte
    size = sum(len(file.encode()) for file in files)
    assert num_bytes[tokens].sum() == size, "tokens must stand for all bytes"
    np.savez(out, tokens=tokens, num_bytes=num_bytes)
    print(f"{out}: {len(tokens):,} tokens, {size / len(tokens):.2f} bytes each, {len(pieces)} kinds")


def first(files: list[str], size: int) -> Iterator[str]:
    """Yield files until they have a given length together."""
    for file in files:
        if size <= 0:
            return
        size -= len(file)
        yield file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("collect", "tokens"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=250)
    parser.add_argument("--vocab-size", type=int, default=16_384)
    given = parser.parse_args()
    if given.step == "collect":
        collect(given.source, given.out, given.megabytes)
    else:
        to_tokens(given.source, given.out, given.vocab_size)


if __name__ == "__main__":
    main()
