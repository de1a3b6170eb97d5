"""experiments/linux_text.py, on an archive of three files."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from growprune.tasks.language import Language, load

SCRIPT = Path(__file__).parents[2] / "experiments" / "linux_text.py"
FILES = {"a/main.c": "int main(void) { return 0; }\n" * 40, "a/b.h": "/* naïve */\n" * 40, "a/README": "not C"}


def run(*arguments: str | Path) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_c_files_of_an_archive_become_tokens_that_stand_for_all_of_their_bytes(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with tarfile.open(tmp_path / "source.tar.xz", "w:xz") as tar:
        for name, text in FILES.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    run("collect", tmp_path / "source.tar.xz", tmp_path / "text.xz")
    run("tokens", tmp_path / "text.xz", tmp_path / "tokens.npz", "--vocab-size", "280")
    splits, num_bytes = load(str(tmp_path / "tokens.npz"), 280)
    tokens = torch.cat(list(splits.values())).long()
    size = sum(len(text.encode()) + 1 for name, text in FILES.items() if name != "a/README")
    assert int(num_bytes[tokens].sum()) == size
    task = Language(str(tmp_path / "tokens.npz"), 280, context=8, d_model=8, ffn=16, heads=2, layers=1, batch_size=2)
    with torch.no_grad():
        found = task.evaluate(task.build_model(), "test", device=torch.device("cpu"))
    assert 0 < found["bits_per_byte"] < 8 < found["perplexity"]
