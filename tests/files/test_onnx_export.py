"""ONNX files, dense and sparse, compute the same in onnxruntime and OpenVINO, with the same zeros."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app
from growprune.files import exporters

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")


class Tied(nn.Module):
    """Both orientations of one weight, and one whose size is no multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 39)
        self.odd = nn.Conv1d(39, 45, 3, padding=1)
        self.back = nn.Linear(45, 39)
        self.head = nn.Linear(39, 96, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.odd(self.tokens(tokens).mT)).mT
        return self.head(self.back(x))


def image_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64)
    )


def sparse_model(model: nn.Module, *examples: torch.Tensor, storage: str = "masked") -> gp.SparseModel:
    for example in examples:
        model(example)  # statistics that are not those of a new model
    sparse = gp.SparseModel(model, sparsity=0.9, storage=storage, include=["*weight"])
    sparse.prune()
    return sparse


def outputs(path: Path, x: torch.Tensor) -> dict[str, Any]:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = {"onnxruntime": session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]}
    try:
        import openvino
    except ImportError:
        return found
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return found | {"openvino": compiled(x.numpy())[0]}


def model_and_inputs(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied(), torch.randint(0, 96, (1, 5)), torch.randint(0, 96, (3, 11))
    return image_net(), torch.randn(1, 3, 6, 6), torch.randn(7, 3, 6, 6)


@pytest.mark.parametrize(("kind", "storage"), [("image", "masked"), ("image", "compact"), ("tied", "masked")])
def test_sparse_and_dense_files_compute_the_same_for_any_batch_and_length(
    kind: str, storage: str, tmp_path: Path
) -> None:
    model, example, other = model_and_inputs(kind)
    sparse = sparse_model(model, *([torch.randn(4, 3, 6, 6)] if kind == "image" else []), storage=storage)
    for name in ("dense", "sparse"):
        gp.export_onnx(sparse, tmp_path / f"{name}.onnx", example, sparse=name == "sparse")
    assert (sparse.storage, sparse.model.training) == (storage, True)
    sparse.model.eval()
    for x in (example, other):
        found = outputs(tmp_path / "sparse.onnx", x)
        for engine, y in outputs(tmp_path / "dense.onnx", x).items():
            assert np.array_equal(found[engine], y), engine  # to the last bit
            assert torch.allclose(torch.from_numpy(y), sparse.model(x), atol=1e-5), engine
    dense, small = ((tmp_path / f"{name}.onnx").stat().st_size for name in ("dense", "sparse"))
    assert small < 0.3 * dense


def test_a_file_stores_as_many_values_as_there_are_non_zero_weights(tmp_path: Path) -> None:
    sparse = sparse_model(image_net())
    gp.export_onnx(sparse, tmp_path / "sparse.onnx", torch.randn(1, 3, 6, 6), sparse=True)
    graph = onnx.load(tmp_path / "sparse.onnx").graph
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    values = sum(len(array) - 1 for name, array in stored.items() if name.endswith(".values"))
    bits = sum(int(np.unpackbits(array).sum()) for name, array in stored.items() if name.endswith(".bits"))
    small = sum(int((array != 0).sum()) for name, array in stored.items() if array.ndim == 4)  # not worth the operators
    assert values == bits == sparse.num_alive - small
    assert not any(node.metadata_props for node in graph.node)  # which would name files of this machine


def test_large_onnx_export_stores_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "MAX_BYTES", 1000)
    model, x, _ = model_and_inputs("image")
    sparse = sparse_model(model)
    gp.export_onnx(sparse, tmp_path / "model.onnx", x, sparse=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    for y in outputs(tmp_path / "model.onnx", x).values():
        assert torch.allclose(torch.from_numpy(y), sparse.model.eval()(x), atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_file_that_would_have_other_zeros_is_not_written(
    sparse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sparse:
        real = np.packbits
        monkeypatch.setattr(np, "packbits", lambda bits, **options: real(~bits, **options))
    else:
        array = exporters._array
        monkeypatch.setattr(exporters, "_array", lambda stored: array(stored) + 1)
    with pytest.raises((gp.GrowpruneError, IndexError)):
        gp.export_onnx(sparse_model(image_net()), tmp_path / "model.onnx", torch.randn(1, 3, 6, 6), sparse=sparse)
    assert not any(tmp_path.iterdir())


def test_a_model_that_fixes_its_batch_is_written_with_a_warning(tmp_path: Path) -> None:
    class Fixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != 1:
                raise RuntimeError("one at a time")
            return super().forward(x)

    with pytest.warns(UserWarning, match="shapes only .*one at a time"):
        gp.export_onnx(Fixed(64, 64), tmp_path / "model.onnx", torch.randn(1, 64))
    assert outputs(tmp_path / "model.onnx", torch.ones(1, 64))["onnxruntime"].shape == (1, 64)


def test_a_model_without_zeros_stays_dense_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no weight has enough zeros"):
        gp.export_onnx(nn.Linear(64, 64), tmp_path / "model.onnx", torch.randn(2, 64), sparse=True)
    assert outputs(tmp_path / "model.onnx", torch.ones(1, 64))["onnxruntime"].shape == (1, 64)


@pytest.mark.parametrize(
    ("model", "example", "options"),
    [
        (nn.Linear(8, 8), torch.randn(2, 9), {}),  # a shape that the model does not take
        (nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64), {"sparse": True, "opset_version": 17}),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    model: nn.Module, example: torch.Tensor, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(gp.GrowpruneError) as raised:
        gp.export_onnx(model, tmp_path / "model.onnx", example, **options)
    assert "\n" not in str(raised.value)
    assert not any(tmp_path.iterdir())


def test_a_folder_of_transformers_needs_no_code(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    sparse = gp.SparseModel(transformers.LlamaForCausalLM(config), sparsity=0.9)
    sparse.prune()
    gp.save_pretrained(sparse, tmp_path / "folder")
    command = ["convert", f"{tmp_path}/folder", f"{tmp_path}/model.onnx", "--sparse", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert sum(matrix["alive"] for matrix in json.loads(done.stdout)["matrices"].values()) == sparse.num_alive
    tokens = torch.randint(0, 50, (3, 21))
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
    expected = sparse.model.eval()(tokens).logits.detach()
    assert torch.allclose(torch.from_numpy(session.run(None, feed)[0]), expected, atol=1e-5)


@pytest.mark.parametrize("config", ["{", '{"architectures": ["NoSuchModel"]}', "{}"])
def test_a_config_that_names_no_model_is_one_line(config: str, tmp_path: Path) -> None:
    gp.save(sparse_model(image_net()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    done = CliRunner().invoke(app, ["convert", str(tmp_path), f"{tmp_path}/m.onnx"])
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 2
    assert "config.json" in line and "--model" in line


class First(nn.ModuleList):
    """Its other layers are not used."""

    def forward(self, x: torch.Tensor) -> Any:
        return self[0](x)


def test_a_weight_that_the_model_does_not_use_is_left_out(tmp_path: Path) -> None:
    model = First([nn.Linear(8, 8), nn.Linear(8, 8)])
    model[0].weight.data[0] = 0
    gp.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 3, 8))  # of three dimensions, so it is transposed
    weight = next(p for p in gp.from_onnx(tmp_path / "model.onnx").parameters() if p.dim() == 2)
    assert int(weight.count_nonzero()) == 56
