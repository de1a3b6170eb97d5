"""The logs for people: metrics.csv and TensorBoard's files."""

import csv
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy import cyclic, parallel

from growprune import engine
from growprune.engine.recipe import Recipe
from growprune.errors import GrowpruneError
from growprune.logs import Logs


def read(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def epoch(iteration: int, loss: float, branch: int | None = None, **more: Any) -> dict[str, Any]:
    return {"event": "epoch", "stage": 1, "branch": branch, "epoch": iteration // 4, "iteration": iteration} | {
        "loss": loss,
        "layers": {"stem.weight": 0.25},
        **more,
    }


class Crash(Exception):
    pass


def crash_after(num_epochs: int) -> Callable[[dict[str, Any]], None]:
    """A listener that ends a process, without a checkpoint, when it hears of that many epochs."""
    left = itertools.count(num_epochs - 1, -1)

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "epoch" and next(left) == 0:
            raise Crash

    return listen


def stop_after(num_iterations: int) -> Callable[[], bool]:
    left = itertools.count(num_iterations - 1, -1)
    return lambda: next(left) <= 0


def carry_out_with_crashes(recipe: Recipe, folder: Path) -> int:
    """In turns: stop with a checkpoint a few iterations on, and crash some epochs after it. Gives how often."""
    start: Any = engine.train
    for attempt in itertools.count():
        try:
            if attempt % 2:
                start(recipe, folder, on_event=crash_after(3))
            else:
                start(recipe, folder, should_stop=stop_after(7))
            return attempt
        except (Crash, engine.Interrupted):
            start = engine.resume
    raise AssertionError


@pytest.mark.parametrize("recipe", [cyclic(), parallel()], ids=["cyclic", "parallel"])
def test_a_csv_of_a_run_that_crashed_is_that_of_one_that_did_not(recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, log=("csv",), evaluate_every=2)
    result = engine.train(recipe, tmp_path / "whole")
    assert carry_out_with_crashes(recipe, tmp_path / "often") >= 4
    assert (tmp_path / "often" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
    rows = read(tmp_path / "whole")
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in result["history"]]
    assert [row["branch"] for row in rows] == [
        str("" if r["branch"] is None else r["branch"]) for r in result["history"]
    ]
    last, totals = rows[-1], result["sparsity"]
    assert int(last["alive"]) == totals["totals"]["alive"]
    assert float(last["density"]) == totals["totals"]["alive"] / totals["totals"]["prunable"]
    for weight in totals["rows"]:
        assert float(last[f"density/{weight['name']}"]) == weight["alive"] / weight["size"]
    assert float(last["validation/accuracy"]) == result["validation"]["accuracy"]
    assert rows[0]["validation/accuracy"] == ""  # only every second epoch is validated


def test_a_log_asked_for_when_a_run_is_resumed_has_its_beginning_too(tmp_path: Path) -> None:
    with pytest.raises(engine.Interrupted):
        engine.train(cyclic(), tmp_path, should_stop=stop_after(14))
    assert not (tmp_path / "metrics.csv").exists()
    engine.resume(replace(cyclic(), log=("csv",)), tmp_path)
    assert [int(row["epoch"]) for row in read(tmp_path)] == list(range(1, 10))


def test_figures_that_come_later_get_a_column_and_earlier_rows_are_empty_there(tmp_path: Path) -> None:
    log = Logs(["csv"], tmp_path)
    for event in [epoch(4, 3.0), epoch(8, 2.5, churn=0.5, validation={"accuracy": 60.0}), epoch(12, 2.25)]:
        log(event)
    assert (tmp_path / "metrics.csv").read_text() == (
        "epoch,iteration,stage,branch,loss,lr,alive,density,explored,churn,density/stem.weight,validation/accuracy\n"
        "1,4,1,,3.0,,,,,,0.25,\n"
        "2,8,1,,2.5,,,,,0.5,0.25,60.0\n"
        "3,12,1,,2.25,,,,,,0.25,\n"
    )


def test_a_branch_that_goes_back_takes_back_only_its_own_rows(tmp_path: Path) -> None:
    log = Logs(["csv"], tmp_path)
    branches = [epoch(8, 2.0, branch=0), epoch(8, 1.0, branch=1), epoch(12, 0.5, branch=1)]
    back = {"event": "resumed", "stage": 1, "branch": 1, "iteration": 9}
    for event in [epoch(4, 3.0), *branches, back, epoch(12, 0.25, branch=1), {"event": "finished"}]:
        log(event)
    shown = [(row["branch"], row["iteration"], row["loss"]) for row in read(tmp_path)]
    assert shown == [("", "4", "3.0"), ("0", "8", "2.0"), ("1", "8", "1.0"), ("1", "12", "0.25")]


def test_tensorboard_has_each_epoch_once_after_a_crash(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = replace(parallel(), log=("tensorboard",))
    carry_out_with_crashes(recipe, tmp_path)
    result = engine.RunFolder(tmp_path).read_result()
    history, layer = result["history"], result["sparsity"]["rows"][0]["name"]
    for branch in (None, 0, 1, 2):
        below = tmp_path / "tensorboard" / ("" if branch is None else f"branch-{branch}")
        read = EventAccumulator(str(below), purge_orphaned_data=False)
        read.Reload()
        rows = [row for row in history if row["branch"] == branch]
        assert [event.step for event in read.Scalars("loss")] == [row["iteration"] for row in rows]
        assert [event.value for event in read.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
        assert {"lr", "density", "validation/accuracy", f"density/{layer}"} <= {*read.Tags()["scalars"]}


def test_without_tensorboard_one_line_says_what_to_install_and_there_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(GrowpruneError, match=r"\[tensorboard\]"):
        engine.train(replace(cyclic(), log=("tensorboard",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_log_that_there_is_not_is_refused() -> None:
    with pytest.raises(GrowpruneError, match="log must be one of csv, tensorboard, got 'mlflow'"):
        replace(cyclic(), log=("mlflow",))
