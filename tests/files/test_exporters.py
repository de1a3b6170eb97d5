"""What other runtimes get computes the same, with the same zeros."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import growprune as gp
from growprune.files import exporters


def make(storage: str = "masked") -> gp.SparseModel:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    model(torch.randn(4, 3, 6, 6))  # statistics that are not those of a new model
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage)
    sparse.prune()
    return sparse


EXAMPLE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
ALIVE = {(8, 3, 3, 3): 22, (10, 288): 288}
"""Of the two weights, by shape: a tenth of 216 and of 2,880."""


def expected(sparse: gp.SparseModel) -> torch.Tensor:
    with exporters.plain(sparse) as module, torch.no_grad():
        return module(EXAMPLE)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_dense_safetensors_are_read_by_safetensors_itself(storage: str, tmp_path: Path) -> None:
    sparse = make(storage)
    exporters.to_dense(sparse, tmp_path / "dense.safetensors")
    fresh = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    load_model(fresh, tmp_path / "dense.safetensors")
    assert torch.equal(fresh.eval()(EXAMPLE), expected(sparse))
    stored = load_file(tmp_path / "dense.safetensors").values()
    assert {tuple(t.shape): int(t.count_nonzero()) for t in stored if tuple(t.shape) in ALIVE} == ALIVE


def test_a_tied_tensor_is_in_a_dense_file_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    exporters.to_dense(model, tmp_path / "tied.safetensors")
    assert sorted(load_file(tmp_path / "tied.safetensors")) == ["0.bias", "0.weight", "1.bias"]
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fresh[1].weight = fresh[0].weight
    load_model(fresh, tmp_path / "tied.safetensors")
    assert torch.equal(fresh[1].weight, model[0].weight)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "onnxscript":
        pytest.importorskip("onnx")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(gp.GrowpruneError, match=rf"needs the package {missing} "):
        gp.export_onnx(make(), tmp_path / "m.onnx", EXAMPLE)
    assert not any(tmp_path.iterdir())


def test_a_compact_module_without_its_sparse_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match="pass its SparseModel"):
        exporters.to_dense(make("compact").model, tmp_path / "dense.safetensors")


def test_a_graph_goes_where_a_link_means_and_never_over_what_is_no_plain_file(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.onnx").symlink_to(tmp_path / "elsewhere" / "real.onnx")
    gp.export_onnx(make(), tmp_path / "link.onnx", EXAMPLE)
    assert (tmp_path / "link.onnx").is_symlink()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["real.onnx"]
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(OSError, match="it is not a plain file"):
        gp.export_onnx(make(), tmp_path / "pipe.onnx", EXAMPLE)
    assert (tmp_path / "pipe.onnx").is_fifo()


def test_a_failed_export_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").write_text("old")

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setitem(sys.modules, "onnx", sys)
    monkeypatch.setitem(sys.modules, "onnxscript", sys)
    monkeypatch.setattr(torch.onnx, "export", failing)
    with pytest.raises(gp.GrowpruneError, match="no such operator"):
        gp.export_onnx(make(), tmp_path / "model.onnx", EXAMPLE)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.onnx", "old")]
