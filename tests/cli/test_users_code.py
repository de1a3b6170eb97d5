"""Code of users that the command line runs: what is shown when it fails, and when it is run at all."""

import json
import os
import shutil
from pathlib import Path

import pytest
from paths import TOY
from typer.testing import CliRunner

from growprune.cli import app

RECIPE = "from growprune.recipes import digits\ndef recipe():\n    return helper()\ndef helper():\n    {}\n"
METHOD = "import growprune\n@growprune.method\ndef mine(S, *, sparsity):\n    {}\n    yield growprune.Phase()\n"
MODEL = "import torch\ndef build():\n    {}\n"


def fails(*arguments: str) -> list[str]:
    """Runs a command that fails in the code of a user, and gives the lines that it shows."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()


@pytest.mark.parametrize("mistake", ["int('many')", "open('/nowhere')", "raise RuntimeError('odd')"])
def test_a_bug_in_a_recipe_file_is_shown_in_a_few_lines(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE.format(mistake))
    lines = fails("plan", f"{tmp_path}/mine.py:recipe")
    kinds = {"int": "ValueError: invalid", "ope": "FileNotFoundError: [Errno 2]", "rai": "RuntimeError: odd"}
    assert lines[0].startswith(f"growprune: {tmp_path}/mine.py, line 5: {kinds[mistake[:3]]}")
    assert lines[1:] == [
        f'  File "{tmp_path}/mine.py", line 3, in recipe',
        "    return helper()",
        f'  File "{tmp_path}/mine.py", line 5, in helper',
        f"    {mistake}",
    ]


def test_a_bug_in_a_method_file_is_shown_in_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(METHOD.format("1 / 0"))
    lines = fails("plan", "digits/tiny", "--set", f"method={tmp_path}/mine.py:mine")
    assert lines[0] == f"growprune: {tmp_path}/mine.py, line 4: ZeroDivisionError: division by zero"
    assert len(lines) == 3


def test_a_bug_in_a_model_file_is_shown_with_the_innermost_place(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.format("return torch.nn.Linear('a', 2)"))
    (tmp_path / "m.safetensors").touch()
    lines = fails("convert", f"{tmp_path}/m.safetensors", f"{tmp_path}/o.onnx", "--model", f"{tmp_path}/net.py:build")
    assert lines[0].startswith(f"growprune: {tmp_path}/net.py, line 3: TypeError: ")
    assert [line.split('"')[1].rsplit("/", 1)[1] for line in lines if "File" in line] == ["net.py", "linear.py"]
    arguments = ["--out", f"{tmp_path}/d", "--model", f"{tmp_path}/net.py:build", "--example-shape", "1,2"]
    assert fails("deploy", f"{tmp_path}/m.safetensors", *arguments)[0] == lines[0]


def test_a_file_that_is_no_python_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def recipe():\n    return )\n")
    lines = fails("plan", f"{tmp_path}/mine.py:recipe")
    assert lines[0] == f"growprune: {tmp_path}/mine.py, line 2: SyntaxError: unmatched ')'"
    assert len(lines) <= 4


def test_a_deep_stack_of_a_users_is_cut(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def recipe():\n    return recipe()\n")
    assert len(fails("plan", f"{tmp_path}/mine.py:recipe")) <= 11


# A run of a stranger's


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose recipe is in a file, and the file."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(f"{TOY.read_text()}\nPath(__file__).with_name('ran').touch()\n")
    done = CliRunner().invoke(app, ["train", f"{folder}/mine.py:cyclic", "--out", f"{folder}/run"])
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("verb", [["resume"], ["deploy", "--out", "fast", "--example-shape", "1,6", "--seconds", "0"]])
def test_code_that_a_copied_run_names_is_run_only_when_it_is_trusted(
    verb: list[str], trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    file = trained.with_name("mine.py")
    file.with_name("ran").unlink(missing_ok=True)
    done = CliRunner().invoke(app, [*verb, "copy"])
    assert done.exit_code == 2, done.output
    assert f"copy was not started by you in this folder, and its recipe is code in {file}. Read" in done.stderr
    assert not file.with_name("ran").exists()
    file.write_text(file.read_text() + "# changed, because a file is executed once in a process")
    assert CliRunner().invoke(app, [*verb, "copy", "--trust"]).exit_code == 0
    assert file.with_name("ran").exists()


def test_one_who_owns_a_run_is_not_asked(trained: Path) -> None:
    trained.rename(trained.with_name("moved"))
    try:
        assert CliRunner().invoke(app, ["resume", str(trained.with_name("moved"))]).exit_code == 0
    finally:
        trained.with_name("moved").rename(trained)


def test_a_run_of_another_user_is_not_trusted(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: trained.stat().st_uid + 1)
    assert CliRunner().invoke(app, ["resume", str(trained)]).exit_code == 2


def test_a_method_in_a_file_is_code_too(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    content = json.loads((tmp_path / "copy" / "recipe.json").read_text())
    content |= {"source": "digits/tiny", "settings": {"method": "evil.py:mine"}}
    (tmp_path / "copy" / "recipe.json").write_text(json.dumps(content))
    done = CliRunner().invoke(app, ["resume", "copy"])
    assert "its recipe is code in evil.py" in done.stderr


def test_a_copied_run_of_a_named_recipe_runs_no_code_and_needs_no_trust(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "digits/tiny", "--out", "run", "--set", "device=cpu"])
    assert done.exit_code == 0, done.output
    shutil.copytree("run", "copy")
    assert CliRunner().invoke(app, ["resume", "copy"]).exit_code == 0
    assert "inode" not in Path("run/result.json").read_text()
