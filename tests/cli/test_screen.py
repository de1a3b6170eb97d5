"""What people and machines are shown: progress, tables, JSON, and what doctor finds."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toy import cyclic, parallel
from typer.testing import CliRunner

import growprune as gp
from growprune import engine
from growprune.cli import app, machine
from growprune.cli.screen import Drawing, err
from growprune.engine.trainer import timeline, work_before
from growprune.plan import walk
from growprune.runs.result import scaled


def shown(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert done.exit_code == code, done.output
    return done.stdout


def drawn(drawing: Drawing, columns: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=columns)
    console.print(drawing.draw())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def event(kind: str, done: int = 0, **more: Any) -> dict[str, Any]:
    place = {"index": 1, "last": 3, "stage": 1, "branch": None, "run_done": done, "run_iterations": 100}
    return {"event": kind, **place, **more}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """40 weights of which 10 live, 4 biases."""
    sparse = gp.SparseModel(torch.nn.Linear(10, 4), sparsity=0.75)
    sparse.prune()
    gp.save(sparse, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_the_time_left_is_that_of_all_phases_at_the_pace_of_the_iterations_done_here() -> None:
    seconds = 0.0
    drawing = Drawing("run", err(), clock=lambda: seconds)
    drawing.listen(event("phase", 20, edits="grow S1", density=0.5, iterations=30))  # resumed: 20 were done before
    assert drawn(drawing)[0].endswith(" 20% 0:00:00 elapsed, -:--:-- left")
    seconds = 10.0
    drawing.listen(event("iteration", 25, loss=1.5, lr=0.1))
    first, *rest = drawn(drawing)
    assert first.endswith(" 25% 0:00:10 elapsed, 0:02:30 left")  # 5 in 10 seconds, 75 to go
    assert rest == ["  phase 2 of 4: grow S1", "  loss 1.5000  density 0.5000  lr 0.1"]


def test_what_a_run_came_to_stays_and_fits_the_screen() -> None:
    drawing = Drawing("a recipe with quite a long name, longer than there is room for, seed 0", err(), lambda: 0.0)
    drawing.listen(event("phase", edits="prune S1 to 0.9, grow S2 to dense " * 3, density=0.5, iterations=30))
    scores = {"metric": "accuracy", "validation": {"loss": 9.0, "accuracy": 97.25}}
    drawing.listen(event("epoch", 50, epoch=12, loss=0.25, lr=0.5, density=0.1, **scores))
    assert max(map(len, drawn(drawing))) <= 80
    drawing.listen(event("finished"))
    first, *rest = drawn(drawing)
    assert " 100% 0:00:00 elapsed, " in first
    assert rest == ["  epoch 12  loss 0.2500  validation accuracy 97.25  density 0.1000  lr 0.5"]


def test_the_work_of_a_process_is_the_main_line_and_its_own_branches() -> None:
    recipe = parallel()  # 2 steps of 3 branches of an epoch, 3 epochs of fine-tuning; 4 iterations an epoch
    schedule = list(walk(recipe.plan(recipe.task.build_model())))
    spans = timeline(schedule, 4)
    assert work_before(schedule, spans, lambda branch: True)[-1] == 2 * 3 * 4 + 3 * 4
    assert work_before(schedule, spans, lambda branch: branch == 0)[-1] == 2 * 4 + 3 * 4


def test_progress_counts_up_to_all_iterations_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growprune.engine.loop.SHOW_SECONDS", 0.0)
    events: list[dict[str, Any]] = []
    engine.train(cyclic(), tmp_path / "run", on_event=events.append)
    done = [event["run_done"] for event in events if "run_done" in event]
    assert {event["run_iterations"] for event in events if "run_done" in event} == {36}  # 9 epochs of 4
    assert done == sorted(done)
    assert done[-1] == 35  # after the last iteration there is nothing to show


@pytest.mark.parametrize(
    ("count", "shown"),
    {
        0: "0",
        999: "999",
        1_000: "1.00 k",
        99_949: "99.9 k",
        999_499: "999 k",
        999_500: "1.00 M",
        3_122_563_000: "3.12 G",
        281 * 10**15: "281 P",
        5 * 10**22: "5.00e+04 E",
    }.items(),
)
def test_counts_are_shown_in_three_digits(count: int, shown: str) -> None:
    assert scaled(count) == shown


def test_inspect_shows_a_file_as_a_table_that_fits(model_file: Path) -> None:
    lines = shown("inspect", str(model_file)).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert rows == [
        ["weight", "4x10", "10", "0.7500", "45 B", "4.50", "ok"],  # 10 values of 4 bytes, 40 bits
        ["1 dense tensors", "", "4", "", "16 B", "4.00", "ok"],
        ["all", "", "14", "", "61 B", "4.36", "ok"],
    ]
    assert "10 of 40 prunable weights live: sparsity 0.7500" in lines


def test_inspect_says_which_tensor_is_damaged_and_fails(model_file: Path) -> None:
    content = bytearray(model_file.read_bytes())
    content[-1] ^= 1
    model_file.write_bytes(content)
    done = CliRunner().invoke(app, ["inspect", str(model_file)])
    assert done.exit_code == 2
    assert "damaged" in done.stdout
    assert "is damaged: the digest of" in done.stderr
    assert '"digest": "damaged"' in CliRunner().invoke(app, ["inspect", "--json", str(model_file)]).stdout


def test_json_is_one_object_and_nothing_else(model_file: Path, tmp_path: Path) -> None:
    listed = json.loads(shown("list", "recipes", "--json"))
    assert "classification-imagenet/rigl-90-erk" in listed["recipes"]  # no group is folded
    plan = json.loads(shown("plan", "digits/tiny", "--json"))
    assert plan["method"] == "cyclic_gap"
    assert plan["totals"]["epochs"] == sum(row["epochs"] for row in plan["rows"])
    file = json.loads(shown("inspect", str(model_file), "--json"))
    assert file["totals"]["prunable_nnz"] == 10
    assert file["tensors"]["weight"]["digest"] == "ok"
    assert file["tensors"]["weight"]["sparsity"] == 0.75
    with pytest.raises(engine.Interrupted):
        engine.train(cyclic(), tmp_path / "run", should_stop=lambda: True)
    run = json.loads(shown("inspect", str(tmp_path / "run"), "--json"))
    assert (run["is_finished"], run["result"], run["recipe"]["method"]) == (False, None, "cyclic_gap")
    findings = json.loads(shown("doctor", "--json"))
    assert findings["is_broken"] is False


def test_comparisons_are_json_too(tmp_path: Path) -> None:
    engine.train(cyclic(), tmp_path / "run")
    table = json.loads(shown("compare", str(tmp_path / "run"), "--json"))
    assert [row["method"] for row in table["rows"]] == ["cyclic_gap"]


def test_log_is_kept_with_the_run_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    arguments = ["train", "digits/tiny", "--out", str(tmp_path), "--set", "task.width=2", "--set", "device=cpu"]
    shown(*arguments, "--log", "csv")
    whole = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "result.json").unlink()
    shown("resume", str(tmp_path))
    assert (tmp_path / "metrics.csv").read_bytes() == whole
    done = CliRunner().invoke(app, [*arguments[:-4], "--log", "mlflow"])
    assert "log must be one of csv, tensorboard, got 'mlflow'" in done.stderr


def test_doctor_tries_the_kernels_and_fails_if_they_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing is broken or slow" in shown("doctor")
    monkeypatch.setattr(machine.kernels, "compress", lambda dense, *rest, **more: dense)
    assert "the kernels give wrong results on cpu" in shown("doctor", code=1).replace("\n", " ").replace("  ", "")


def test_doctor_says_what_is_slow_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 0)
    found = next(finding for finding in machine.examine() if finding.name == "threads")
    assert (found.state, found.do) == ("slow", "set OMP_NUM_THREADS=0")


def test_a_shell_can_ask_for_the_verbs() -> None:
    asked = {"_GROWPRUNE_COMPLETE": "complete_bash", "COMP_WORDS": "growprune ins", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="growprune", env=asked).stdout.split() == ["inspect"]
