"""A damaged file: every changed byte is refused, or changes nothing of what the file says."""

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_cases import EXAMPLE, header_of, with_header
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.sparse.model import SparseModel

FLIPS = (0x01, 0x03, 0x20, 0x80)
"""Other case, other sign, other version."""


class Mixed(nn.Module):
    """Sparse and dense tensors, of which two each are alike in dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(8, 4)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    sparse = SparseModel(Mixed(), sparsity=0.5, pattern="1x2")
    sparse.prune()
    path = tmp_path / "mixed.safetensors"
    file.save(sparse, path)
    return path


def loaded(path: Path) -> dict[str, Tensor]:
    """The model from a file, with its masks."""
    sparse = file.load(path, Mixed())
    masks = {f"mask of {name}": mask for name, mask in sparse.masks.items()}
    return {**sparse.model.state_dict(), **masks, "edits": torch.tensor(sparse.editor.num_edits)}


def as_example_reads(path: Path) -> dict[str, Tensor]:
    arrays = runpy.run_path(str(EXAMPLE))["read"](path)
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def assert_equal(got: Any, expected: Any) -> None:
    """The same, to the last bit."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert got[name].dtype == value.dtype
            assert got[name].numpy().tobytes() == value.numpy().tobytes(), name
        else:
            assert got[name] == value, name


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {"load": loaded, "read": file.read, "manifest": file.manifest}


def refused(reader: Callable[[Path], dict[str, Any]], path: Path, expected: dict[str, Any]) -> bool:
    try:
        found = reader(path)
    except GrowpruneError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)
        return True
    assert_equal(found, expected)
    return False


@pytest.mark.parametrize("reader", READERS)
def test_every_changed_byte_is_refused_or_changes_nothing(reader: str, mixed: Path) -> None:
    content, expected, changed = mixed.read_bytes(), READERS[reader](mixed), mixed.with_name("changed")
    data = 8 + int.from_bytes(content[:8], "little")
    harmless = set()
    for number, place in enumerate(range(0, len(content), 1 if reader == "read" else 3)):
        flip = FLIPS[number % 4]
        changed.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
        if not refused(READERS[reader], changed, expected):
            harmless.add(place)
    if reader == "manifest":
        harmless -= set(range(data, len(content)))  # it reads the header only
    assert not harmless, f"bytes {sorted(harmless)} of {len(content)} went unseen"


def test_every_changed_byte_of_gaps_is_refused(tmp_path: Path) -> None:
    sparse = SparseModel(nn.Linear(32, 16, bias=False), sparsity=0.97)
    sparse.prune()
    path, changed = tmp_path / "model", tmp_path / "changed"
    file.save(sparse, path)
    content, expected = path.read_bytes(), file.read(path)
    for place in range(len(content)):
        changed.write_bytes(content[:place] + bytes([content[place] ^ 0x01]) + content[place + 1 :])
        assert refused(file.read, changed, expected), place


def test_the_example_refuses_every_changed_byte_of_the_tensors(mixed: Path) -> None:
    read, content, changed = runpy.run_path(str(EXAMPLE))["read"], mixed.read_bytes(), mixed.with_name("changed")
    for place in range(8 + int.from_bytes(content[:8], "little"), len(content)):
        changed.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"^the (values|mask) of .* damaged$"):
            read(changed)


@pytest.mark.parametrize("kind", ["weight.values", "weight.mask", "bias"])
def test_two_tensors_swapped_in_the_header_are_refused(kind: str, mixed: Path) -> None:
    header = header_of(mixed)
    first, second = header[f"first.{kind}"], header[f"second.{kind}"]
    header |= {f"first.{kind}": second, f"second.{kind}": first}
    swapped = with_header(mixed, header)
    what = "a mask" if kind == "weight.mask" else "values"
    for reader in (loaded, file.read):
        with pytest.raises(GrowpruneError, match=rf"has {what} of first\..* whose CRC-32 does not match"):
            reader(swapped)
    with pytest.raises(ValueError, match=r"of first\..* damaged$"):
        as_example_reads(swapped)


def test_two_names_swapped_in_the_manifest_are_refused(mixed: Path) -> None:
    header = header_of(mixed)
    text = header["__metadata__"]["manifest"]
    other = re.sub("first|second", lambda found: "second" if found[0] == "first" else "first", text)
    header["__metadata__"]["manifest"] = other
    swapped = with_header(mixed, header)
    for reader in READERS.values():
        with pytest.raises(GrowpruneError, match=r"\(its CRC-32 does not match\): it is damaged"):
            reader(swapped)
    with pytest.raises(ValueError, match=r"the manifest of .* is damaged"):
        as_example_reads(swapped)


def test_spaces_in_the_header_change_nothing(mixed: Path) -> None:
    header = header_of(mixed)
    spaced = with_header(mixed, header, text=json.dumps(header, indent=2))
    for reader in (loaded, file.read, as_example_reads):
        assert_equal(reader(spaced), reader(mixed))
    assert file.manifest(spaced)["tensors"] == file.manifest(mixed)["tensors"]
