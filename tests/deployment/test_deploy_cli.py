"""`growprune deploy`: what it writes and shows, and one line for what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import growprune as gp
from growprune.cli import app
from growprune.tasks.digits import Digits

MODEL = """
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))

def number():
    return 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deploy") / "run"
    done = CliRunner().invoke(app, ["train", "digits/tiny", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sparse file, and net.py beside it, which builds its model."""
    (tmp_path / "net.py").write_text(MODEL)
    names: dict[str, object] = {}
    exec(MODEL, names)
    sparse = gp.SparseModel(names["build"](), sparsity=0.75)  # type: ignore[operator]
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def refused(*arguments: str) -> str:
    """The one line that a call is refused with."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    return done.stderr


def test_a_run_is_deployed_and_loaded(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", str(run), "--out", str(tmp_path / "out"), "--seconds", "0"])
    assert done.exit_code == 0, done.output
    assert "stage1.0" in done.stdout and "sparse" in done.stdout
    task = Digits(width=4)
    model = gp.load(run / "model.safetensors", task.build_model()).model.eval()
    loaded = gp.load_deployed(tmp_path / "out", task.build_model())
    x = torch.randn_like(task.example())
    with torch.no_grad():
        expected = model(x)
    assert (loaded(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_file_is_deployed_with_its_code_and_shape(file: Path, tmp_path: Path) -> None:
    model = ["--model", f"{tmp_path / 'net.py'}:build", "--example-shape", "4,16"]
    out = ["--out", str(tmp_path / "out"), "--seconds", "0", "--json"]
    done = CliRunner().invoke(app, ["deploy", str(file), *model, *out])
    assert done.exit_code == 0, done.output
    table = json.loads(done.stdout)
    assert [(row["layer"], row["shape"], row["choice"]) for row in table["rows"]] == [
        ("0", "32x16 x 4", "sparse"),
        ("2", "8x32 x 4", "sparse"),
    ]
    assert (table["deployed_ms"], table["torch_ms"]) == (None, None)  # nothing was measured, nothing is claimed


def test_a_model_can_be_deployed_by_its_layers(file: Path, tmp_path: Path) -> None:
    model = ["--model", f"{tmp_path / 'net.py'}:build", "--example-shape", "4,16"]
    out = ["--out", str(tmp_path / "out"), "--seconds", "0", "--by-layer"]
    done = CliRunner().invoke(app, ["deploy", str(file), *model, *out])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "deployed.json").read_text())["is_whole"] is False


def test_bad_input_gives_one_line(run: Path, file: Path, tmp_path: Path) -> None:
    out, net = str(tmp_path / "out"), str(tmp_path / "net.py")
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refused("deploy", str(tmp_path / "none"), "--out", out)
    assert "is not a run folder" in refused("deploy", str(tmp_path / "empty"), "--out", out)
    assert "has no model code. Add --model FILE.py:FUNCTION" in refused("deploy", str(file), "--out", out)
    assert "must be a new or empty folder" in refused("deploy", str(run), "--out", str(run))
    assert "Leave --model out" in refused("deploy", str(run), "--out", out, "--model", f"{net}:build")
    shaped = ["--example-shape", "4,16"]
    assert "must be path.py:function or module:function" in refused(
        "deploy", str(file), "--out", out, "--model", net, *shaped
    )
    assert "has no function 'none'" in refused("deploy", str(file), "--out", out, "--model", f"{net}:none", *shaped)
    assert "must return an nn.Module or a tuple" in refused(
        "deploy", str(file), "--out", out, "--model", f"{net}:number", *shaped
    )
    bad = ["--example-shape", "4,b"]
    assert "--example-shape must be integers >= 1" in refused(
        "deploy", str(file), "--out", out, "--model", f"{net}:build", *bad
    )
    wide = ["--model", f"{net}:build", "--example-shape", "1,17"]
    for options in ([], ["--by-layer"]):
        said = refused("deploy", str(file), "--out", out, *wide, *options)
        assert "the model failed on the example (RuntimeError: mat1 and mat2 shapes cannot be multiplied" in said
    assert not (tmp_path / "out").exists()
