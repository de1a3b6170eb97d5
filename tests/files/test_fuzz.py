"""Damaged and forged files by the hundred: each is refused in one line, or is what it was."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files.sparse_file import contents
from growprune.sparse.model import SparseModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.conv = nn.Conv2d(8, 8, 3)
        self.attention = nn.MultiheadAttention(16, 2)


CHANGES = runpy.run_path(str(ROOT / "benchmarks" / "mutations.py"))
DAMAGES = {change.__name__: change for change in CHANGES["PLAIN"]}
FORGERIES = {change.__name__: change for change in CHANGES["FORGED"]}
"""What digests cannot tell: the file is refused, or is another valid file."""

READERS: dict[str, Callable[[Path], Any]] = {
    "read": file.read,
    "load": lambda path: file.load(path, Net()).model.state_dict(),
    "compact": lambda path: file.load(path, Net(), storage="compact").model.state_dict(),
    "mapped": lambda path: file.load(path, Net(), storage="compact", mapped=True).model.state_dict(),
    "manifest": file.manifest,
    "contents": contents,
}


def read_by(reader: Callable[[Path], Any], path: Path) -> dict[str, Tensor] | None:
    """What a reader makes of a file; None if it refuses it, which it must do in one short line."""
    try:
        found: dict[str, Tensor] = reader(path)
    except GrowpruneError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
        return None
    return found


@pytest.mark.parametrize("kind", [*DAMAGES, *FORGERIES])
@pytest.mark.parametrize(("sparsity", "pattern"), [(0.97, "unstructured"), (0.5, "unstructured"), (0.75, "1x8")])
@pytest.mark.filterwarnings("ignore")  # a forged setting may well be worth a warning
def test_a_damaged_or_forged_file_is_refused_or_read(sparsity: float, pattern: str, kind: str, tmp_path: Path) -> None:
    path, draw = tmp_path / "model", random.Random(f"{sparsity} {pattern} {kind}")
    sparse = SparseModel(Net(), sparsity=sparsity, pattern=pattern)
    sparse.prune()
    file.save(sparse, path)
    content, expected = path.read_bytes(), sparse.model.state_dict()
    for _ in range(10):
        path.write_bytes((DAMAGES | FORGERIES)[kind](draw, content))
        for name, reader in READERS.items():
            found = read_by(reader, path)
            if found is not None and kind in DAMAGES and name in ("read", "load", "compact"):
                assert all(torch.equal(found[tensor], value) for tensor, value in expected.items())
