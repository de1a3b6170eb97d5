"""The log to Weights & Biases: with a module in its place, and with the package itself, offline."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from forked import wait_until
from test_logs import carry_out_with_crashes, epoch
from toy import cyclic, parallel
from typer.testing import CliRunner

from growprune import engine
from growprune.cli import app
from growprune.errors import GrowpruneError
from growprune.logs import Logs


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.steps = settings, {}
        self.rows: list[dict[str, Any]] = []
        self.is_finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.steps[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        assert not self.is_finished
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


class FakeWandb(ModuleType):
    """What the log uses of wandb; all its runs are kept."""

    def __init__(self, mode: str = "online", has_login: bool = True) -> None:
        super().__init__("wandb")
        self.mode, self.has_login = mode, has_login
        self.runs: list[FakeRun] = []

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify
        return self.has_login

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **settings: Any) -> FakeRun:
        self.runs.append(FakeRun(**settings))
        return self.runs[-1]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for run in self.runs for row in run.rows]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_every_epoch_is_logged_over_the_iterations_with_the_recipe(tmp_path: Path, wandb: FakeWandb) -> None:
    result = engine.train(replace(cyclic(), log=("wandb",)), tmp_path / "mine")
    (run,) = wandb.runs
    assert [row["loss"] for row in run.rows] == [row["loss"] for row in result["history"]]
    assert [row["iteration"] for row in run.rows] == [row["iteration"] for row in result["history"]]
    assert "validation/accuracy" in run.rows[-1]
    assert not {"stage", "branch"} & run.rows[-1].keys()
    assert run.steps == {"*": "iteration"}
    assert (run.settings["name"], run.settings["project"], run.settings["mode"]) == ("mine", "growprune", None)
    assert run.settings["config"]["method"] == "cyclic_gap"
    assert run.is_finished


def test_a_run_that_crashed_continues_the_same_run_and_logs_each_epoch_once(tmp_path: Path, wandb: FakeWandb) -> None:
    assert carry_out_with_crashes(replace(cyclic(), log=("wandb",)), tmp_path) >= 4
    assert len(wandb.runs) > 4
    known = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert {(run.settings["id"], run.settings["resume"]) for run in wandb.runs} == {(known, "allow")}
    history = engine.RunFolder(tmp_path).read_result()["history"]
    assert [row["loss"] for row in wandb.rows] == [row["loss"] for row in history]


def test_branches_of_a_fork_have_names_of_their_own(tmp_path: Path, wandb: FakeWandb) -> None:
    result = engine.train(replace(parallel(), log=("wandb",)), tmp_path)
    for branch in (0, 1, 2):
        rows = [row for row in result["history"] if row["branch"] == branch]
        logged = [row for row in wandb.rows if f"branch-{branch}/loss" in row]
        assert [row[f"branch-{branch}/loss"] for row in logged] == [row["loss"] for row in rows]
        assert [row["iteration"] for row in logged] == [row["iteration"] for row in rows]


@pytest.mark.parametrize(
    ("mode", "has_login", "given"),
    [("online", True, None), ("online", False, "offline"), ("offline", False, None), ("disabled", False, None)],
)
def test_nothing_is_uploaded_unless_wandb_is_set_up_for_it(
    mode: str, has_login: bool, given: str | None, tmp_path: Path, wandb: FakeWandb
) -> None:
    wandb.mode, wandb.has_login = mode, has_login
    Logs(["wandb"], tmp_path)(epoch(4, 3.0))
    assert wandb.runs[0].settings["mode"] == given


def test_the_environment_names_project_run_and_folder(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PROJECT", "NAME", "DIR"):
        monkeypatch.setenv(f"WANDB_{name}", f"my {name}")
    Logs(["wandb"], tmp_path)(epoch(4, 3.0))
    settings = wandb.runs[0].settings
    assert (settings["project"], settings["name"], settings["dir"]) == ("my PROJECT", "my NAME", "my DIR")


def test_a_damaged_id_file_starts_a_new_run(tmp_path: Path, wandb: FakeWandb) -> None:
    (tmp_path / "wandb.json").write_text("[1")
    Logs(["wandb"], tmp_path)(epoch(4, 3.0))
    assert [row["loss"] for row in wandb.rows] == [3.0]


def test_without_wandb_one_line_says_what_to_install_and_there_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(GrowpruneError, match=r"--log wandb needs an extra: .*\[wandb\]"):
        engine.train(replace(cyclic(), log=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_package_itself_writes_offline_and_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'growprune[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    arguments = ["digits/tiny", "--out", str(run), "--log", "wandb", "--set", "device=cpu", "--set", "task.width=2"]
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0, done.output
    (run / "result.json").unlink()
    (run / "wandb.json").write_text(json.dumps(json.loads((run / "wandb.json").read_text()) | {"logged": []}))
    (tmp_path / "later").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "later"))  # folders of one second have one name
    done = CliRunner().invoke(app, ["resume", str(run)])
    assert done.exit_code == 0, done.output
    known = json.loads((run / "wandb.json").read_text())["id"]
    for folder in (run, tmp_path / "later"):
        (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
        assert file.name == f"run-{known}.wandb"
        # wandb's own process writes it, and may still do so
        wait_until(lambda file=file: b"validation/accuracy" in file.read_bytes())  # type: ignore[misc]
