"""Runs made by hand, for the tests of the report: their numbers are known."""

import json
from pathlib import Path
from typing import Any

from growprune.engine.folder import FORMAT

PRUNABLE = 1000


def recipe(method: str, sparsity: float, seed: int, **more: Any) -> dict[str, Any]:
    task = {"name": "Digits", "data": "", "width": 8, "workers": 2} | more.pop("task", {})
    return {"task": task, "method": method, "options": {}, "sparsity": sparsity, "seed": seed, **more}


def row(epoch: int, stage: int, alive: int, edits: str = "train", branch: int | None = None, **more: Any) -> Any:
    about = {"epoch": epoch, "iteration": 10 * epoch, "stage": stage, "branch": branch, "edits": edits, "alive": alive}
    return {**about, "loss": 1.0 / epoch, "metric": "accuracy", **more}


def history(alive: list[int], **more: Any) -> list[dict[str, Any]]:
    """An epoch for each number of live weights."""
    return [
        row(n, n - 1, live, validation={"accuracy": 50.0 + n, "loss": 0.5}, **more) for n, live in enumerate(alive, 1)
    ]


def result(recipe: dict[str, Any], quality: float, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    alive = round((1 - recipe["sparsity"]) * PRUNABLE)
    layer = {"name": "fc.weight", "shape": [10, 100], "size": PRUNABLE, "target": recipe["sparsity"], "alive": alive}
    totals = {"target": recipe["sparsity"], "prunable": PRUNABLE, "alive": alive, "sparsity": 1 - alive / PRUNABLE}
    totals |= {"flops_dense": 2000, "flops_sparse": 2 * alive}
    return {
        "recipe": recipe,
        "origin": {},
        "seed": recipe["seed"],
        "metric": "accuracy",
        "lower_is_better": False,
        "data": None,
        "weights": None,
        "environment": {"growprune": "0.1.0", "commit": "abc123", "torch": "2.13.0", "device": "cpu (hand)"},
        "history": rows,
        "signature": "",
        "validation": {"accuracy": quality},
        "test": {"loss": 0.25, "accuracy": quality},
        "sparsity": {"rows": [{**layer, "sparsity": 1 - alive / PRUNABLE}], "totals": totals},
        "file_bytes": 4321,
        "peak_bytes": 5_000_000,
        "seconds": 30.0,
        "training_flops": None,
        "training_iterations": None,
        "training_examples": None,
        "peak_alive": None,
        "average_alive": None,
        "best": None,
        **more,
    }


def write_bare(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_run(
    folder: Path,
    recipe: dict[str, Any],
    outcome: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    origin: dict[str, Any] | None = None,
) -> Path:
    """A run's folder; without an outcome it is not finished."""
    write_bare(folder / "recipe.json", {"format": FORMAT, **(origin or {}), "recipe": recipe})
    if outcome is not None:
        write_bare(folder / "result.json", outcome)
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events or []))
    return folder


def finished(folder: Path, method: str, sparsity: float, seed: int, quality: float, **more: Any) -> Path:
    """A run of two epochs that is done."""
    made = recipe(method, sparsity, seed, **more.pop("recipe", {}))
    return write_run(folder, made, result(made, quality, more.pop("rows", history([1000, 500])), **more))


def phase(index: int, stage: int, edits: str, iterations: int, alive: int, branch: int | None = None) -> Any:
    about = {"event": "phase", "index": index, "stage": stage, "branch": branch, "edits": edits, "alive": alive}
    return {**about, "epochs": iterations // 10, "iterations": iterations}
