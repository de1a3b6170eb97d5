"""The command as a person types it."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import typer
from paths import TOY as TOY_FILE
from toy import cyclic
from typer.testing import CliRunner

from growprune import engine
from growprune.cli import VERBS, app
from growprune.cli.app import StopFlag, say_how_to_resume
from growprune.engine.folder import RunFolder
from growprune.recipes import find

TINY = ["--set", "device=cpu", "--set", "task.width=2"]


def growprune(*arguments: str, cwd: Path | None = None, columns: int | None = 200) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"COLUMNS": str(columns)} if columns else {}
    return forked.growprune(*arguments, cwd=cwd, environment=environment)


def refused(*arguments: str) -> str:
    """Runs a command (in this process, to be quick) that must fail in one line, and gives that line."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = CliRunner().invoke(app, ["train", "digits/tiny", "--out", str(folder), *TINY])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A finished run of the test's own."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_help_names_the_verbs_and_imports_no_torch() -> None:
    code = "import sys, growprune.cli; sys.argv = ['growprune', '--help']\ntry: growprune.cli.main()\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False")
    verbs = [line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines()[1:] if line.startswith("  ")]
    assert verbs == [*VERBS]


def test_list_shows_every_method_task_and_recipe_with_what_it_is() -> None:
    shown = growprune("list").stdout
    for name in ("cyclic_gap", "parallel_gap", "Digits", "digits/cyclic-90", "C-GaP: each step grows one part"):
        assert name.lower() in shown.lower()
    assert "cyclic_gap" not in growprune("list", "recipes").stdout


def test_list_shows_a_large_study_in_one_row_and_all_of_it_when_asked() -> None:
    shown = growprune("list", "recipes").stdout
    assert "classification-imagenet/... " in shown
    assert "rigl, gmp" in " ".join(shown.split())
    assert len(shown.splitlines()) < 30
    asked = growprune("list", "recipes", "imagenet/rigl").stdout
    assert [line.split()[0] for line in asked.splitlines() if "/" in line] == [
        f"classification-imagenet/rigl-{sparsity}-{allocation}{times}"
        for allocation in ("uniform", "erk")
        for times in ("", "-5x", "-12x")
        for sparsity in (80, 90)
    ]


def test_plan_shows_the_schedule_with_density_and_flops() -> None:
    shown = growprune("plan", "digits/cyclic-90", "--set", "options.steps=5").stdout
    assert shown.count("grow S") == 5
    assert "0.1000" in shown
    assert "34 epochs in total" in shown


def test_a_long_plan_fits_a_screen_unless_all_of_it_is_asked_for() -> None:
    shown = growprune("plan", "digits/gradual-90").stdout
    assert len(shown.splitlines()) <= 40
    assert "9 x prune all" in " ".join(shown.replace("│", " ").split())
    assert "17 phases in 9 rows; --all shows each." in shown
    shown = growprune("plan", "digits/gradual-90", "--all").stdout
    assert shown.count("grow S") == 6
    assert "--all" not in shown


@pytest.mark.parametrize("columns", [80, None], ids=["80 columns", "piped"])
def test_plan_cuts_no_number_off(columns: int | None) -> None:
    shown = growprune("plan", "classification-imagenet/cyclic-90-global", "--all", columns=columns).stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows[0][3:] == ["0", "0.1000", "~818 M", "~0"]
    assert rows[2] == ["1", "", "prune S3 to 0.9,", "30", "0.1078", "~2.23 G", "~201 G"]
    assert rows[3] == ["", "", "grow S0 to dense", "", "", "", ""]


def test_train_resume_and_inspect(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    done = growprune("train", "digits/tiny", "--out", out, *TINY)
    assert done.returncode == 0, done.stderr
    assert "alive:" in done.stdout
    assert "epoch 1: density" in done.stderr  # plain lines, as this is no terminal
    assert growprune("resume", out).stdout == done.stdout
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
    with forked.started("-m", "growprune", "train", "digits/cyclic-90", "--out", str(out), *TINY) as command:
        while not (out / "log.jsonl").exists() or "epoch" not in (out / "log.jsonl").read_text():
            assert command.poll() is None
            time.sleep(0.01)
        command.send_signal(number)
        done = command.wait()
    assert done.returncode == code
    assert f"Interrupted; checkpoint saved. Resume with: growprune resume {out}\n" in done.stderr
    newest = max((out / "checkpoints").glob("0*"))
    assert json.loads((newest / "state.json").read_text())


def test_bad_input_gives_one_line_and_exit_code_2(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert "unknown recipe 'digits/best'. Did you mean digits/dense" in refused("plan", "digits/best")
    assert "nowhere.py" in refused("train", "nowhere.py:recipe", *out)
    assert "KIND must be one of methods, tasks, recipes, got 'people'" in refused("list", "people")
    assert "'mars'" in refused("list", "recipes", "mars")
    assert "nothing.safetensors" in refused("inspect", str(tmp_path / "nothing.safetensors"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("in the way")
    for name in ("nothing", "empty", "file"):
        assert f"{tmp_path / name} is no run folder: cannot read recipe.json" in refused("resume", str(tmp_path / name))
    assert f"{tmp_path / 'file'} exists" in refused("train", "digits/tiny", "--out", str(tmp_path / "file"))
    beyond = tmp_path / "file" / "run"
    assert f"cannot write to {beyond}" in refused("train", "digits/tiny", "--out", str(beyond))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("sparsty=1", "'sparsty'"),
        ("sparsity=1.5", "1.5"),
        ("options.steps=999999999", "100,000 phases"),
        ("options.sparsity=0.5", "sparsity=0.5"),
        ("parts.kappa=0", "kappa"),
        ("parts.kappa=5", "got 5"),
        ('keep_dense=["tail.*"]', "tail"),
        ('keep_dense=["*"]', "nothing to prune"),
        ("pattern=2:4", "4 inputs"),
        ("method=magic", "'magic'"),
        ("task.batch_size=0", "batch_size"),
        ("task.label_smoothing=2", "2.0"),
        ("optimizer.lr=-1", "-1.0"),
        ("optimizer.kind=adam", "momentum, nesterov"),
        ("clip=-1", "-1.0"),
    ],
)
def test_a_setting_that_cannot_be_meant_gives_one_line_and_leaves_no_folder(
    setting: str, named: str, tmp_path: Path
) -> None:
    assert named in refused("train", "digits/tiny", "--out", str(tmp_path / "run"), "--set", setting)
    assert not (tmp_path / "run").exists()


def test_data_for_a_task_that_reads_no_files_is_refused(run: Path, tmp_path: Path) -> None:
    says = "--data is not used by the task Digits, which reads no files; got here. Leave --data out"
    assert says in refused("train", "digits/tiny", "--out", str(tmp_path / "new"), "--data", "here")
    assert says in refused("resume", str(run), "--data", "here")


@pytest.mark.parametrize("name", ["recipe.json", "result.json"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"recipe": {"meth', b"\xff\xfe", b"[]", b"{}", b'{"recipe": {}, "sparsity": {"totals": 3}}'),
        b"[" * 100_000 + b"]" * 100_000,
    ],
    ids=["empty", "cut off", "no text", "a list", "no recipe", "no sparsity", "too deep"],
)
def test_a_damaged_file_of_a_run_gives_one_line_that_names_it(name: str, content: bytes, run: Path) -> None:
    (run / name).write_bytes(content)
    for command in ("inspect", "resume"):
        assert f"{run / name} is damaged" in refused(command, str(run))


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "values", "what"),
    [
        ("recipe.json", {"settings": {"seed": 3}}, "its settings.* is 3"),
        ("recipe.json", {"recipe": {"task": {"name": 3}, "method": "m", "sparsity": 0.5}}, "its recipe.task.name is 3"),
        ("recipe.json", {"format": True}, "its format is True"),
        ("recipe.json", {"source": ["x" * 100_000]}, "its source is ['xxx"),
        ("result.json", {"history": [{"stage": 1}]}, "it has no history.*.branch"),
        ("result.json", {"test": {"accuracy": "high"}}, "its test.* is 'high'"),
        ("result.json", {"best": {"stage": "last"}}, "its best.stage is 'last'"),
    ],
)
def test_a_value_of_a_wrong_kind_gives_one_short_line(name: str, values: Any, what: str, run: Path) -> None:
    changed(run / name, **values)
    for command in ("inspect", "resume"):
        said = refused(command, str(run))
        assert f"{name} is damaged ({what}" in said
        assert len(said) < 1200


def test_long_input_is_not_echoed_whole(tmp_path: Path) -> None:
    long = "x" * 100_000
    for arguments in (
        ["plan", long],
        ["list", long],
        ["plan", "digits/tiny", "--set", f"{long}=1"],
        ["plan", "digits/tiny", "--set", f"sparsity={'[' * 100_000}"],
        ["plan", "digits/tiny", "--set", "options=" + "x " * 300],
        ["plan", "digits/tiny", "--set", "method=" + "x" * 500],
        ["plan", "digits/tiny", "--set", "device=" + "it's " * 100],
        ["deploy", __file__, "--out", "out", "--model", "x" * 500, "--example-shape", "1"],
        ["train", "digits/tiny", "--out", str(tmp_path / "run"), "--set", f'keep_dense=["{long}"]'],
        ["train", "digits/tiny", "--out", long],
    ):
        assert len(refused(*arguments)) < (1200 if long in arguments[-1] else 490)


def test_a_path_in_square_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "[" / "run]"
    done = CliRunner().invoke(app, ["train", "digits/tiny", "--out", str(out), *TINY])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert shown.exit_code == 0, shown.output
    (out / "result.json").unlink()
    resume = shlex.join(["growprune", "resume", str(out)])
    assert f"Not finished. Resume with `{resume}`" in CliRunner().invoke(app, ["inspect", str(out)]).stdout


def test_a_run_of_an_older_format_is_refused_in_one_line(run: Path) -> None:
    changed(run / "recipe.json", format=1)
    for command in ("inspect", "resume"):
        assert "was started by an older growprune: it has format 1, " in refused(command, str(run))


def test_the_version_is_shown() -> None:
    from importlib.metadata import version

    import growprune as gp

    assert gp.__version__ == version("growprune")
    assert CliRunner().invoke(app, ["--version"]).stdout == f"growprune {version('growprune')}\n"


def test_a_run_without_its_settings_is_not_resumed_with_others(run: Path) -> None:
    stored = json.loads((run / "recipe.json").read_text())
    del stored["settings"]
    (run / "recipe.json").write_text(json.dumps(stored))
    assert "was started with" in refused("resume", str(run))


def test_a_run_from_python_is_shown_with_how_to_resume_in_python(tmp_path: Path) -> None:
    with pytest.raises(engine.Interrupted):
        engine.train(cyclic(), tmp_path, should_stop=lambda: True)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
    assert f"Not finished. Resume with growprune.resume(recipe, '{tmp_path}')" in shown
    assert "was started from Python" in refused("resume", str(tmp_path))


def test_an_error_meant_for_users_is_one_line_wherever_it_is_raised(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from growprune.errors import GrowpruneError\n"
        "def recipe():\n    raise GrowpruneError('there is no data for Mondays')\n"
    )
    assert refused("plan", f"{tmp_path / 'mine.py'}:recipe") == "growprune: there is no data for Mondays"


def test_a_disk_that_takes_no_more_ends_in_one_line_and_the_run_resumes_with_room(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with forked.started("-m", "growprune", "train", "digits/tiny", "--out", out, most_bytes=15_000) as command:
        done = command.wait()
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("growprune: cannot write ")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob(".*"))  # nothing half-written stays behind
    assert growprune("resume", out).returncode == 0


def test_a_command_to_resume_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my run"
    with pytest.raises(typer.Exit), say_how_to_resume(folder, StopFlag()):
        raise engine.Interrupted
    assert f"Resume with: growprune resume '{folder}'" in capsys.readouterr().err
    engine.RunFolder(folder).make()
    engine.RunFolder(folder).write_recipe(find("digits/tiny"), {"source": "digits/tiny"})
    assert engine.RunFolder(folder).how_to_resume() == f"`growprune resume '{folder}'`"


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_another_process_begins_in_the_meantime_is_resumed_if_that_was_asked(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", f"{TOY_FILE}:cyclic", "--out", str(tmp_path / "run")]
    make = RunFolder.make

    def after_another(folder: RunFolder) -> None:
        monkeypatch.setattr(RunFolder, "make", make)
        assert CliRunner().invoke(app, arguments).exit_code == 0
        make(folder)

    monkeypatch.setattr(RunFolder, "make", after_another)
    done = CliRunner().invoke(app, [*arguments, *(["--resume"] if resume else [])])
    assert done.exit_code == (0 if resume else 2), done.output
    assert ("already has a run of this recipe" in done.stderr) is not resume


@pytest.mark.parametrize("epochs", ["0", "-1"])
def test_no_epochs_are_refused_and_not_taken_for_those_of_the_recipe(epochs: str, tmp_path: Path) -> None:
    arguments = ["compare", "digits/tiny", "--methods", "dense", "--epochs", epochs, "--print-jobs"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("growprune: Invalid value for '--epochs': ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digits/tiny", "--out", "run", "--foo"], "No such option: --foo"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "digits/tiny"], "Missing option '--out'"),
        (["demo", "--seeds", "many"], "Invalid value for '--seeds'"),
        (["trian"], "No such command 'trian'. Did you mean 'train'? See `"),
        (["--foo"], "No such option: --foo"),
    ],
)
def test_a_usage_error_is_one_line_that_ends_with_the_hint_to_help(arguments: list[str], message: str) -> None:
    said = refused(*arguments)
    assert said.startswith(f"growprune: {message}")
    verb = f" {arguments[0]}" if arguments[0] in VERBS else ""
    assert said.endswith(f"{verb} --help`.")


def test_without_arguments_the_help_is_shown() -> None:
    assert "Commands:" in CliRunner().invoke(app, []).output
