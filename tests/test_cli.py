"""The command as a person types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from growprune.cli import app

TINY = ["--set", "device=cpu", "--set", "task.width=2"]


def growprune(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "growprune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "200"})


def refused(*arguments: str) -> str:
    """Runs a command (in this process, to be quick) that must fail in one line, and gives that line."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_help_names_the_verbs_and_imports_no_torch() -> None:
    code = (
        "import sys, growprune.cli; sys.argv = ['growprune', '--help']\ntry: growprune.cli.main()\nexcept SystemExit: "
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False")
    verbs = [line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines()[1:] if line.startswith("  ")]
    assert verbs == ["demo", "list", "plan", "train", "resume", "inspect"]


def test_list_shows_every_method_task_and_recipe_with_what_it_is() -> None:
    shown = growprune("list").stdout
    for name in ("cyclic_gap", "parallel_gap", "Digits", "digits/cyclic-90", "C-GaP: each step grows one part"):
        assert name.lower() in shown.lower()
    assert "cyclic_gap" not in growprune("list", "recipes").stdout


def test_plan_shows_the_schedule_with_density_and_flops() -> None:
    shown = growprune("plan", "digits/cyclic-90", "--set", "options.steps=5").stdout
    assert shown.count("grow S") == 5
    assert "0.1000" in shown
    assert "34 epochs in all" in shown


def test_train_resume_extend_and_inspect(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = growprune("train", "digits/tiny", "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    assert "alive:" in done.stdout
    assert "epoch 1: loss" in done.stderr  # plain lines, as this is no terminal
    assert growprune("resume", out).stdout == done.stdout
    assert growprune("resume", out, "--extend", "2").returncode == 0
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]["options"]["steps"] == 5
    assert growprune("resume", out, "--extend", "1").returncode == 0
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]["options"]["steps"] == 6
    shown = growprune("inspect", out).stdout
    assert "cyclic_gap at sparsity 0.9" in shown
    assert "grow S1 to dense" in shown
    assert "stem.0.weight" in growprune("inspect", f"{out}/model.safetensors").stdout


def test_a_recipe_can_be_a_function_in_a_file_and_is_found_again_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, replace\n"
        "from growprune.recipes import digits\n"
        "@dataclass(frozen=True)\nclass Mine(digits.Digits):\n    shade: float = 0.5\n"
        "def recipe():\n    return replace(digits.tiny(), task=Mine(width=4), sparsity=0.5)\n"
    )
    done = growprune("train", "mine.py:recipe", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "result.json").unlink()
    assert growprune("resume", str(tmp_path / "run")).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_how_to_resume_and_exits_with_its_code(number: int, code: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "growprune", "train", "digits/cyclic-90", "--out", str(out), "--set", "device=cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out / "log.jsonl").exists() or "epoch" not in (out / "log.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"go on with `growprune resume {out}`" in shown
    newest = max((out / "checkpoints").glob("0*"))
    assert json.loads((newest / "state.json").read_text())


def test_bad_input_gives_one_line_and_exit_code_2(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert "there is no recipe 'digits/best'; close are: digits/dense" in refused("plan", "digits/best")
    assert "there is no recipe file nowhere.py" in refused("train", "nowhere.py:recipe", *out)
    assert "there is no 'sparsty'" in refused("train", "digits/tiny", *out, "--set", "sparsty=1")
    assert "sparsity is 1.5" in refused("train", "digits/tiny", *out, "--set", "sparsity=1.5")
    assert "model has 4 layers: give at most 4" in refused("plan", "digits/tiny", "--set", "kappa=5")
    assert "kappa is 0, but must be" in refused("plan", "digits/tiny", "--set", "kappa=0")
    assert "matches no parameter" in refused("train", "digits/tiny", *out, "--set", 'keep_dense=["tail.*"]')
    assert "needs a multiple of 4 inputs" in refused("train", "digits/tiny", *out, "--set", "pattern=2:4")
    assert "nothing to prune" in refused("train", "digits/tiny", *out, "--set", 'keep_dense=["*"]')
    assert "method is 'magic'" in refused("plan", "digits/tiny", "--set", "method=magic")
    assert "there is no list of 'people'" in refused("list", "people")
    assert "none of the recipes has 'mars' in its name" in refused("list", "recipes", "mars")
    assert "holds no run" in refused("resume", str(tmp_path / "nothing"))
    assert "nothing.safetensors" in refused("inspect", str(tmp_path / "nothing.safetensors"))
    (tmp_path / "file").write_text("in the way")
    assert "is not an empty folder" in refused("train", "digits/tiny", "--out", str(tmp_path / "file"))
    assert "cannot write to" in refused("train", "digits/tiny", "--out", str(tmp_path / "file" / "run"))
    assert not (tmp_path / "run").exists()


def test_a_disk_that_takes_no_more_ends_in_one_line_and_the_run_resumes_with_room(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000)); "
    code = f"{limit}import sys; sys.argv = ['growprune', 'train', 'digits/tiny', '--out', {out!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}from growprune.cli import main; main()"], capture_output=True, text=True
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("growprune: cannot write ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob(".*"))  # nothing half-written stays behind
    assert growprune("resume", out).returncode == 0
