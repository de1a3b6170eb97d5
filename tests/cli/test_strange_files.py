"""Runs whose files are truncated, or are no files at all, and links where a file is to be written."""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from paths import TOY
from typer.testing import CliRunner

from growprune.cli import app
from growprune.engine.folder import RunFolder
from growprune.files import checkpoint


def show(*arguments: object) -> str:
    """Runs a command that must work, and gives what it prints."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def make_pipe(path: Path) -> list[Path]:
    """Put a pipe in the place of a file; who reads it gets nothing, so that no test hangs, and is in the list."""
    readers: list[Path] = []

    def write() -> None:
        with contextlib.suppress(OSError):  # when the folder of the test is gone
            while True:
                path.open("wb").close()
                readers.append(path)

    path.unlink(missing_ok=True)
    os.mkfifo(path)
    threading.Thread(target=write, daemon=True).start()
    return readers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    show("train", "digits/tiny", "--out", folder, "--set", "device=cpu", "--set", "task.width=2")
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("verb", ["resume", "inspect"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "header"])
def test_a_finished_run_whose_model_is_damaged_is_not_taken_for_whole(verb: str, damage: str, run: Path) -> None:
    model = run / "model.safetensors"
    content = model.read_bytes()
    damaged = {"empty": b"", "truncated": content[:-1], "longer": content + b"0", "header": b"\xff" * len(content)}
    model.unlink()
    if damage in damaged:
        model.write_bytes(damaged[damage])
    done = CliRunner().invoke(app, [verb, str(run)])
    assert done.exit_code == 2, done.output
    assert f"{model} is " in done.stderr
    assert done.stderr.endswith(f"remove {run / 'result.json'} and resume the run to write both again\n")
    (run / "result.json").unlink()
    show("resume", run)
    assert model.read_bytes() == content
    assert "bytes" in show(verb, run)


@pytest.mark.parametrize("verb", ["resume", "inspect"])
@pytest.mark.parametrize("name", ["recipe.json", "result.json", "model.safetensors"])
def test_a_pipe_in_a_run_is_refused_and_not_waited_for(verb: str, name: str, run: Path) -> None:
    make_pipe(run / name)
    done = CliRunner().invoke(app, [verb, str(run)])
    assert done.exit_code == 2, done.output
    assert "not a plain file" in done.stderr
    assert name in done.stderr


@pytest.mark.parametrize("name", ["COMPLETE", "state.json", "tensors.safetensors"])
def test_a_pipe_in_a_checkpoint_makes_it_incomplete(name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1})
    make_pipe(checkpoint.save(tmp_path, 2, {"x": 2}) / name)
    said: list[str] = []
    assert checkpoint.load_newest(tmp_path, said.append) == (1, {"x": 1})
    assert len(said) == 1
    assert "00000002 is incomplete" in said[0] and "not a plain file" in said[0]


def test_pipes_among_the_other_files_of_a_run_are_not_read(run: Path) -> None:
    readers = [make_pipe(run / name) for name in ("log.jsonl", "plan.json")]
    assert "bytes" in show("inspect", run)
    assert RunFolder(run).read_plan() == {}
    assert readers == [[], []]


def test_damaged_tensors_with_a_forged_marker_give_way_to_the_checkpoint_before(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder in (run, whole):
        show("train", f"{TOY}:cyclic", "--out", folder, "--set", "checkpoint_seconds=0")
    (run / "result.json").unlink()
    newest = max(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    content = (newest / "tensors.safetensors").read_bytes()
    (newest / "tensors.safetensors").write_bytes(content[: len(content) // 2])
    names = ("tensors.safetensors", "state.json")
    digests = {name: hashlib.blake2b((newest / name).read_bytes()).hexdigest() for name in names}
    (newest / "COMPLETE").write_text(json.dumps(digests))
    done = CliRunner().invoke(app, ["resume", str(run)])
    assert done.exit_code == 0, done.output
    assert f"checkpoint {newest} is damaged" in done.output
    assert "using the previous checkpoint" in done.output
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_convert_and_report_write_to_the_file_that_a_link_names(run: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
    real.write_text("old")
    link.symlink_to(real)
    done = CliRunner().invoke(app, ["convert", f"{run}/model.safetensors", str(link)])
    assert done.exit_code == 2
    assert f"{link} already exists (a link to {real}): use another name, or --force to replace {real}" in done.stderr
    show("convert", run / "model.safetensors", link, "--force")
    assert link.is_symlink()
    assert real.stat().st_size > 1000
    (tmp_path / "page.html").symlink_to(tmp_path / "real.html")
    show("report", run, "-o", tmp_path / "page.html")
    assert (tmp_path / "page.html").is_symlink()
    assert (tmp_path / "real.html").stat().st_size > 1000


def test_convert_refuses_to_write_over_a_dangling_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nothing.safetensors")
    done = CliRunner().invoke(app, ["convert", f"{run}/model.safetensors", f"{tmp_path}/link.safetensors"])
    assert done.exit_code == 2
    assert "already exists (a link to " in done.stderr
    assert not (tmp_path / "nothing.safetensors").exists()
