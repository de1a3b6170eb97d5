"""What is refused on saving, and a save that fails."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from file_cases import THREE_BY_FOUR, linear, three_of_twelve, zoo
from torch import nn

from growprune.errors import GrowpruneError
from growprune.files import sparse_file as file
from growprune.files import writer
from growprune.files.reader import write_metadata
from growprune.sparse.model import SparseModel

# What is refused on saving


def test_a_weight_that_came_back_off_the_mask_is_refused(tmp_path: Path) -> None:
    sparse = three_of_twelve()
    with torch.no_grad():
        sparse.model.weight[0, 1] = 0.5
    with pytest.raises(GrowpruneError, match="1 weights of weight"):
        file.save(sparse, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
    sparse.enforce()
    file.save(sparse, tmp_path / "model.safetensors")


def broken_blocks() -> SparseModel:
    sparse = linear(THREE_BY_FOUR, sparsity=0.5, pattern="1x2")
    sparse.load_state_dict({**sparse.state_dict(), "masks": {"weight": torch.tensor([1, 0], dtype=torch.uint8)}})
    return sparse


def of_a_large_dtype() -> SparseModel:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    return SparseModel(model, sparsity=0.0)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (broken_blocks, "weight .*1x2"),
        (lambda: linear(THREE_BY_FOUR, sparsity=0.0, pattern="1x1025"), "1x1025"),
        (of_a_large_dtype, "phase .*complex128"),
    ],
)
def test_a_model_that_a_file_cannot_hold_is_refused(
    build: Callable[[], SparseModel], named: str, tmp_path: Path
) -> None:
    with pytest.raises(GrowpruneError, match=named):
        file.save(build(), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("setting", "value"), [("seed", np.int64(3)), ("target_sparsity", np.float32(0.75))])
def test_a_setting_that_is_not_json_is_named(setting: str, value: object, tmp_path: Path) -> None:
    sparse = three_of_twelve()
    setattr(sparse, setting, value)
    with pytest.raises(GrowpruneError, match=f"^{setting.removeprefix('target_')}="):
        file.save(sparse, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_setting_that_is_no_number_is_not_json() -> None:
    with pytest.raises(GrowpruneError, match=r"^sparsity=nan cannot be written to a file"):
        write_metadata({"seed": 0, "sparsity": float("nan")}, [])


def test_state_that_is_no_tensor_is_named_in_a_warning(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            del state

    with pytest.warns(UserWarning, match=r"^the extra state of the model \(Counting\) is not saved: a sparse file"):
        file.save(SparseModel(Counting(2, 2), sparsity=0.0), tmp_path / "model.safetensors")


# A save that fails


def assert_old_is_intact(old: Path) -> None:
    assert [path.name for path in old.parent.iterdir()] == [old.name]
    assert file.read(old)["weight"].tolist() == [[9, 0, 0, 0], [0, -8, 0, 0], [0, 0, 0, 7]]


@pytest.mark.parametrize("where", ["pathlib.Path.replace", "os.fsync"])
def test_a_failing_disk_leaves_the_old_file(where: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(where, fail)
    with pytest.raises(OSError, match=r"model\.safetensors: No space left") as caught:
        file.save(zoo(), old)
    assert caught.value.errno == errno.ENOSPC
    assert_old_is_intact(old)


def test_a_file_that_may_not_grow_so_large_leaves_the_old_file(old: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*model.safetensors: File too large"):
            file.save(zoo(), old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_old_is_intact(old)


def test_an_interrupt_leaves_the_old_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(handle: Any, *args: object) -> None:
        handle.write(b"half of i")
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.save(zoo(), old)
    assert_old_is_intact(old)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [("lone.mask", "a mask of lone"), ("lone.values", "values of lone"), ("norm.running_var", "values of norm")],
)
def test_what_is_not_written_as_meant_never_takes_the_name(
    tensor: str, what: str, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = writer.write_safetensors

    def flipped(handle: Any, shapes: Any, tensors: Any, metadata: Any) -> None:
        changed = ((name, (t + 1).to(t.dtype) if name == tensor else t) for name, t in tensors)
        honest(handle, shapes, changed, metadata)

    monkeypatch.setattr(writer, "write_safetensors", flipped)
    with pytest.raises(ValueError, match=f"has {what}.* whose CRC-32 does not match the manifest"):
        file.save(zoo(), old)
    assert_old_is_intact(old)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/model"):
        file.save(three_of_twelve(), tmp_path / "nowhere" / "model")


def test_a_process_killed_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    script = """
import itertools, torch
from growprune.files import sparse_file as file
from growprune.sparse.model import SparseModel
model = torch.nn.Linear(300, 300, bias=False)
sparse = SparseModel(model, sparsity=0.5)
for number in itertools.count(1):
    torch.nn.init.constant_(model.weight, number)
    sparse.prune()
    sparse.enforce()
    file.save(sparse, "model")
    print(number, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"1\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    reported = [1, *map(int, child.stdout.read().split())]
    child.stdout.close()
    values = file.read(tmp_path / "model")["weight"]
    number = int(values.max())
    assert number in (reported[-1], reported[-1] + 1)
    assert torch.equal(values.flatten(), torch.tensor([number] * 45000 + [0] * 45000, dtype=torch.float32))
