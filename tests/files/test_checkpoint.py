"""Checkpoints hold any nest of plain values and tensors, exactly, and are whole or not there."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from growprune.files import checkpoint

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers()
nests = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=10
)


@settings(max_examples=25, deadline=None)
@given(nest=nests)
def test_any_nest_of_values_comes_back_equal(nest: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("nest")
    checkpoint.save(folder, 1, {"nest": nest})
    assert repr(checkpoint.load(folder / "00000001")["nest"]) == repr(nest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    state = {"a": tensor, "transposed": tensor.t(), "scalar": tensor[0, 1], "shared": [tensor, tensor]}
    checkpoint.save(tmp_path, 1, state)
    loaded = checkpoint.load(tmp_path / "00000001")
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["transposed"], tensor.t())
    assert loaded["scalar"].shape == ()
    assert all(torch.equal(t, tensor) for t in loaded["shared"])


def test_an_object_that_is_no_plain_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot hold a PosixPath"):
        checkpoint.save(tmp_path, 1, {"x": tmp_path})


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "COMPLETE"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_any_damage_to_any_file_is_noticed(name: str, damage: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"x": torch.arange(10), "y": "text"}) / name
    content = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"incomplete|damaged"):
        checkpoint.load(tmp_path / "00000001")


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1})

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write checkpoint .*No space left.*earlier checkpoints are intact"):
        checkpoint.save(tmp_path, 2, {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert checkpoint.load(tmp_path / "00000001") == {"x": 1}


def test_old_checkpoints_and_what_a_kill_left_are_removed(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, number, {"x": number})
    (tmp_path / ".writing-00000004").mkdir()
    checkpoint.remove_old(tmp_path, keep=[1, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000003"]


def test_a_file_named_like_a_checkpoint_is_passed_over_and_left_alone(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1})
    (tmp_path / "00000007").write_text("mine")
    (tmp_path / "²").mkdir()  # a digit, if Python is asked
    said: list[str] = []
    assert checkpoint.load_newest(tmp_path, said.append) == (1, {"x": 1})
    assert len(said) == 1 and "00000007 is incomplete" in said[0]
    assert checkpoint.numbers(tmp_path) == [1, 7]  # so that the next one is not written over it
    checkpoint.remove_old(tmp_path, keep=[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000007", "²"]


def test_a_marker_nested_too_deep_to_read_counts_as_none(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1})
    (tmp_path / "00000001" / "COMPLETE").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="00000001 is incomplete"):
        checkpoint.load(tmp_path / "00000001")
