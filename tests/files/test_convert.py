"""`growprune convert`: from any file of weights to any other, with the same weights."""

import itertools
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_importers import mlp, pruned_by_torch, zeroed
from torch import nn
from torch.nn.utils import prune
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app
from growprune.files.convert import convert

ALIVE = {"conv.weight": 20, "fc1.weight": 22, "fc2.weight": 11}
MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))

def with_example():
    return build(), torch.randn(2, 8)

def number():
    return 3
"""


def refused(*arguments: Any) -> str:
    """Runs a command that must fail in one line, and gives that line."""
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    return line


def growprune(*arguments: Any) -> str:
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    torch.save(pruned_by_torch().state_dict(), tmp_path / "pruned.pt")
    return tmp_path / "pruned.pt"


@pytest.fixture
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that torch pruned, in which one live weight is zero."""
    model = nn.ModuleDict({"conv": nn.Conv2d(2, 6, 3), "fc1": nn.Linear(11, 6), "fc2": nn.Linear(6, 3)})
    for name, layer in model.items():
        prune.random_unstructured(layer, "weight", amount=layer.weight.numel() - ALIVE[f"{name}.weight"])
    model["fc1"].weight_orig.data[tuple(model["fc1"].weight_mask.nonzero()[0])] = 0.0
    folder = tmp_path_factory.mktemp("masked")
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def dense_of(masked: Path) -> dict[str, torch.Tensor]:
    state = load_file(masked)
    return {name: state[f"{name}_orig"] * state[f"{name}_mask"] for name in ALIVE}


def test_without_the_models_code_a_file_goes_to_sparse_and_dense_and_back(masked: Path, tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"{name}.safetensors" for name in ("one", "two", "three"))
    convert(masked, one)
    convert(one, two)  # sparse goes to dense
    convert(two, three)
    found = load_file(two)
    assert all(torch.equal(found[name], tensor) for name, tensor in dense_of(masked).items())
    for path, zeros in ((one, 0), (three, 1)):  # a dense file cannot tell a live zero from a pruned weight
        tensors = gp.manifest(path)["tensors"]
        alive = ALIVE | {"fc1.weight": 22 - zeros}
        assert {n: about["nnz"] for n, about in tensors.items() if "nnz" in about} == alive


def test_a_sparse_file_made_without_code_loads_into_the_model_with_its_live_zeros(pruned: Path, tmp_path: Path) -> None:
    convert(pruned, tmp_path / "sparse.safetensors")
    model = mlp()
    sparse = gp.load(tmp_path / "sparse.safetensors", model)
    original = pruned_by_torch()
    x = torch.randn(3, 8)
    assert torch.equal(model(x), original(x))
    assert torch.equal(sparse.masks["0.weight"], original[0].weight_mask.bool())
    assert sparse.alive_by_weight() == {"0.weight": 12}  # what has no mask is kept dense


def test_a_model_says_what_is_prunable(pruned: Path, model: Path, tmp_path: Path) -> None:
    growprune(pruned, tmp_path / "sparse.safetensors", "--model", f"{model}:build")
    sparse = gp.load(tmp_path / "sparse.safetensors", mlp())
    assert sparse.alive_by_weight() == {"0.weight": 12, "2.weight": 24}


def test_attention_is_known_by_its_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = nn.MultiheadAttention(8, 2).state_dict()
    state["in_proj_weight"][:, 1:] = 0.0
    save_file(state, tmp_path / "dense.safetensors")
    convert(tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors")
    sparse = gp.load(tmp_path / "sparse.safetensors", nn.MultiheadAttention(8, 2))
    assert sparse.alive_by_weight() == {f"in_proj_weight[{letter}]": 8 for letter in "qkv"}


def test_a_transposed_layer_needs_the_model_and_has_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = nn.ConvTranspose2d(4, 2, 3).state_dict()
    state["weight"][:, 1:] = 0.0
    save_file(state, tmp_path / "dense.safetensors")
    done = convert(tmp_path / "dense.safetensors", tmp_path / "bare.safetensors")
    assert "transposed layers, stacked experts and tied weights need --model" in done.notes[0]
    with pytest.raises(gp.GrowpruneError, match="the file has other matrices in weight"):
        gp.load(tmp_path / "bare.safetensors", nn.ConvTranspose2d(4, 2, 3))
    convert(tmp_path / "dense.safetensors", tmp_path / "whole.safetensors", model=nn.ConvTranspose2d(4, 2, 3))
    assert gp.load(tmp_path / "whole.safetensors", nn.ConvTranspose2d(4, 2, 3)).num_alive == 36


def test_the_table_shows_sizes_before_and_after_and_the_sparsity(tmp_path: Path) -> None:
    state = {"fc.weight": torch.randn(64, 100), "fc.bias": torch.randn(64)}
    state["fc.weight"][:, 10:] = 0.0
    save_file(state, tmp_path / "dense.safetensors")
    shown = growprune(tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors")
    rows = [line.split("│") for line in shown.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    sizes = {row[0]: row[2:] for row in cells if row[0] in ("from", "to")}
    assert sizes["from"] == ["dense", "25.4 KiB", "1.01x"]
    assert sizes["to"][0] == "sparse"
    assert float(sizes["to"][2].removesuffix("x")) < 0.25
    assert "sparse matrices: 1, with 640 live weights, sparsity 0.9000" in shown


def test_convert_json_reports_sizes_and_sparsity(masked: Path, tmp_path: Path) -> None:
    content = json.loads(growprune(masked, tmp_path / "sparse.safetensors", "--json"))
    assert content["source"] == {"path": str(masked), "format": "torch-prune", "bytes": masked.stat().st_size}
    assert content["dest"]["bytes"] == (tmp_path / "sparse.safetensors").stat().st_size
    assert content["sparsity"] == 1 - 53 / 192
    assert content["matrices"]["fc1.weight"] == {"shape": [6, 11], "alive": 22}
    assert content["dense_bytes"] == 4 * (66 + 6 + 108 + 6 + 18 + 3)


def test_nothing_sparse_works_and_says_so(tmp_path: Path) -> None:
    save_file(mlp().state_dict(), tmp_path / "dense.safetensors")
    done = convert(tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors")
    assert "the source has no sparse weights: no matrix has a mask, or 5 % zeros" in done.notes
    assert gp.load(tmp_path / "sparse.safetensors", mlp()).num_alive == 72


def test_a_file_without_a_matrix_can_only_be_dense(tmp_path: Path) -> None:
    save_file({"scale": torch.ones(3)}, tmp_path / "vector.safetensors")
    assert "has no matrix that can be sparse" in refused(
        tmp_path / "vector.safetensors", tmp_path / "sparse.safetensors"
    )
    convert(tmp_path / "vector.safetensors", tmp_path / "out.safetensors", to="dense")
    assert load_file(tmp_path / "out.safetensors")["scale"].tolist() == [1, 1, 1]


def test_names_of_one_tensor_come_through(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.data[:, 2:] = 0.0
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    sparse, dense, again = (tmp_path / f"{name}.safetensors" for name in ("sparse", "dense", "again"))
    convert(tmp_path / "tied.pt", sparse)
    convert(sparse, dense)
    assert sorted(load_file(dense)) == ["0.bias", "0.weight", "1.bias", "2.bias", "2.weight"]
    convert(dense, again)
    for path in (sparse, again):
        assert gp.manifest(path)["aliases"] == {"1.weight": "0.weight"}
        assert gp.load(path, model).num_alive == 16


# Folders


def test_a_folder_gets_weights_for_everybody_and_for_us_and_keeps_what_lay_beside(masked: Path, tmp_path: Path) -> None:
    source = masked.parent
    (source / "config.json").write_text(json.dumps({"model_type": "mine"}))
    (source / "tokenizer.json").write_text("{}")
    (source / "optimizer.pt").write_text("large")
    done = convert(source, tmp_path / "folder")
    folder = tmp_path / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "growprune.json",
        "growprune.safetensors",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "mine"}
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in dense_of(masked).items())
    assert done.dest_bytes == sum(path.stat().st_size for path in folder.iterdir())
    back = convert(folder, tmp_path / "back.safetensors", to="dense")
    assert (back.format, len(back.matrices)) == ("growprune", 3)


def test_a_folder_of_transformers_is_loaded_by_it_as_before(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.shape[0] != 32:
            parameter.data[:, ::2] = 0
    model.save_pretrained(tmp_path / "theirs")
    done = convert(tmp_path / "theirs", tmp_path / "ours")
    again = transformers.BertModel.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(6)[None]
    assert torch.equal(again(tokens).last_hidden_state, model(tokens).last_hidden_state)
    assert "encoder.layer.0.attention.self.query.weight" in done.matrices


# What is there already


def test_nothing_is_overwritten_without_force(pruned: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out.safetensors"
    dest.write_text("mine")
    assert "already exists" in refused(pruned, dest)
    assert dest.read_text() == "mine"
    growprune(pruned, dest, "--force")
    assert gp.manifest(dest)["totals"]["prunable_nnz"] == 12


def test_a_folder_is_replaced_only_by_force_and_only_if_it_holds_a_model(
    pruned: Path, masked: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("mine")
    assert "is a folder without a model" in refused(pruned, tmp_path / "home", "--force")
    convert(pruned, tmp_path / "folder")
    assert "already exists" in refused(pruned, tmp_path / "folder")
    convert(masked, tmp_path / "folder", force=True)
    assert "conv.weight" in load_file(tmp_path / "folder" / "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "home", "pruned.pt"]


def test_a_folder_that_a_link_means_is_replaced_and_the_link_stays(masked: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(masked, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "growprune.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_whoever_is_interrupted_while_a_folder_is_replaced_has_the_old_one(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp") and self.is_dir():
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(masked, tmp_path / "folder", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["config.json"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError("the disk is full")

    convert(pruned, tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer.json").write_text("{}")
    monkeypatch.setattr("shutil.copyfile", failing)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match="the disk is full"):
        convert(tmp_path / "folder", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_source_is_never_its_own_destination(tmp_path: Path) -> None:
    save_file(zeroed(), tmp_path / "a.safetensors")
    assert "is the source itself" in refused(tmp_path / "a.safetensors", tmp_path / "." / "a.safetensors", "--force")


# Mistakes


def test_a_sparse_file_goes_to_sparse_as_it_is(model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    sparse = gp.SparseModel(mlp(), sparsity=0.5, pattern="1x2", seed=7)
    sparse.prune()
    gp.save(sparse, one)
    growprune(one, two, "--to", "sparse")
    assert one.read_bytes() == two.read_bytes()
    growprune(one, two, "--force", "--to", "sparse", "--model", f"{model}:build")
    assert gp.manifest(two)["pattern"] == "1x2"
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["out.bin"], "out.bin does not say which format to write"),
        (["out.safetensors", "--to", "gguf"], "'gguf'"),
        (["out.onnx"], "--model"),
        (["out.onnx", "--model", "model.py:build"], "--example-shape"),
        (["out.safetensors", "--model", "model.py"], "path.py:function or module:function"),
        (["out.safetensors", "--model", "model.py:nothing"], "'nothing'"),
        (["out.safetensors", "--model", "no_such_module:f"], "no_such_module"),
        (["out.safetensors", "--model", "model.py:number"], "got int"),
    ],
)
def test_mistakes_are_said_in_one_line(
    arguments: list[str], said: str, model: Path, pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what Python keeps of model.py is not ours
    assert said in refused(pruned, *arguments)
    assert sorted(path.name for path in model.parent.iterdir()) == ["model.py", "pruned.pt"]


def test_names_that_no_model_can_have_are_refused(tmp_path: Path) -> None:
    for names in (("a", "a.b"), ("a..b",), ("x" + ".x" * 100,), ("training",)):
        save_file({name: torch.zeros(4, 4) + torch.eye(4) for name in names}, tmp_path / "odd.safetensors")
        with pytest.raises(gp.GrowpruneError, match=r"a model cannot have a tensor named|more than 64 dots"):
            convert(tmp_path / "odd.safetensors", tmp_path / "out.safetensors")


def header_of(path: Path, names: list[str]) -> Path:
    """Safetensors with matrices of one byte of these names."""
    about = {
        name: {"dtype": "F16", "shape": [1, 1], "data_offsets": [2 * i, 2 * i + 2]} for i, name in enumerate(names)
    }
    text = json.dumps(about).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * len(names)))
    return path


def test_a_header_of_very_many_names_does_not_hang(tmp_path: Path) -> None:
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
    convert(header_of(tmp_path / "many.safetensors", words), tmp_path / "out.safetensors")
    assert gp.manifest(tmp_path / "out.safetensors")["include"] == sorted(words)
    globs = header_of(tmp_path / "globs.safetensors", [f"*{word}" for word in words])
    assert "4096 matrices with *, ? or [" in refused(globs, tmp_path / "out.safetensors", "--force")


def test_matrices_of_a_model_without_code_keep_their_kind(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(30)))
    model = nn.Sequential(layers, nn.Linear(4, 2))
    for block in layers:
        block[0].weight.data[:, 1:] = 0.0
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    convert(tmp_path / "dense.safetensors", tmp_path / "sparse.safetensors")
    assert len(gp.manifest(tmp_path / "sparse.safetensors")["include"]) == 30
    assert gp.load(tmp_path / "sparse.safetensors", model).num_alive == 30 * 4


# Graphs


def test_a_graph_is_made_of_the_models_code(model: Path, pruned: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    growprune(pruned, tmp_path / "model.onnx", "--model", f"{model}:with_example")
    stored = [onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer]
    assert [int((array != 0).sum()) for array in stored if array.shape == (6, 8)] == [11]


def test_the_shape_of_an_example_can_be_given_for_a_graph(
    model: Path, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def write(filled: gp.SparseModel, path: Path, example: torch.Tensor, *, sparse: bool) -> None:
        assert not sparse
        shapes.append(filled.model(example).shape)
        path.touch()

    monkeypatch.setattr("growprune.files.convert.export_onnx", write)
    build, graph = ["--model", f"{model}:build"], tmp_path / "a.onnx"
    line = refused(pruned, graph, *build)
    assert "pass --model and --example-shape" in line
    growprune(pruned, graph, *build, "--example-shape", "2x8")
    growprune(pruned, graph, "--force", "--model", f"{model}:with_example", "--example-shape", "3,8")
    assert shapes == [(2, 4), (3, 4)]
    assert (
        "--example-shape must be integers >= 1 such as 1,3,224,224, or 1,128:int for integer inputs, got 'many'"
        in refused(pruned, graph, "--force", *build, "--example-shape", "many")
    )
    assert "--sparse" in refused(pruned, tmp_path / "c.safetensors", "--sparse")
    assert "--example-shape needs --model" in refused(pruned, tmp_path / "b.safetensors", "--example-shape", "2,8")
