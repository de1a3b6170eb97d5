"""The table of a comparison, of results made by hand: who is dense, who is a baseline, and what is no number."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from paths import TOY as TOY_FILE
from report_runs import history, recipe, result, write_bare
from typer.testing import CliRunner

from growprune import GrowpruneError, engine
from growprune.cli import app
from growprune.compare import Comparison, Request, of_runs

TOY = f"{TOY_FILE}:cyclic"
OWN = """
from growprune import Phase, method, prune

@method(length="epochs")
def own(S, *, epochs):
    "A half, whatever one wants."
    yield Phase(prune(S.whole, to=0.5), epochs=epochs)
"""


def write(folder: Path, method: str, sparsity: float, score: float, seed: int = 0, **more: Any) -> Path:
    made = recipe(method, sparsity, seed, allocation="uniform")
    name = folder / f"{method}-{sparsity!r}-{seed}" / "result.json"
    return write_bare(name, result(made, score, history([1000, 500]), **more))


def shown(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(text: str) -> list[str]:
    """The first column of the first table."""
    lines = text.partition("cost, as a fraction")[0].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(" ───") or set(line.strip()) == {"─"})
    return [line.split("  ")[0].strip() for line in lines[start + 1 :] if line.strip()]


# Who is dense


def test_only_the_method_dense_is_the_reference_also_beside_others_at_sparsity_0(tmp_path: Path) -> None:
    write(tmp_path, "gmp", 0.0, 95.0)
    write(tmp_path, "mine", 0.0, 96.0)
    write(tmp_path, "gmp", 0.9, 90.0)
    write(tmp_path, "dense", 0.0, 92.0)
    comparison = of_runs([tmp_path])
    found = {(row.name, row.sparsity): comparison.summary(row) for row in comparison.rows}
    gaps = {key: summary["minus_dense"] and summary["minus_dense"]["mean"] for key, summary in found.items()}
    assert gaps == {
        ("dense", 0.0): None,
        ("gmp:uniform", 0.0): 3.0,
        ("gmp:uniform", 0.9): -2.0,
        ("mine:uniform", 0.0): 4.0,
    }
    baselines = {key: summary["baseline"] for key, summary in found.items()}
    assert (baselines["gmp:uniform", 0.0], baselines["mine:uniform", 0.0]) == ("mine:uniform", "gmp:uniform")


def test_a_method_of_ones_own_that_takes_no_sparsity_is_run_once_and_is_no_reference(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    request = Request.parse([TOY], f"{tmp_path / 'own.py'}:own,rigl", "0.5,0.8", "0", 6, tmp_path / "out")
    jobs = request.jobs()
    assert [job.name for job in jobs] == ["own seed 0", "rigl:erk 0.5 seed 0", "rigl:erk 0.8 seed 0"]
    engine.train(jobs[0].recipe, jobs[0].folder)
    own = (table := request.table(jobs)).rows[0]
    assert not own.is_dense
    assert table.cells(own)["sparsity"].startswith("0 (reached 0.5")


def test_dense_training_leaves_a_sparsity_of_its_recipe_aside(tmp_path: Path) -> None:
    path = write(tmp_path, "dense", 0.9, 92.0)
    content = json.loads(path.read_text())
    content["sparsity"]["totals"] |= {"alive": 1000, "sparsity": 0.0}
    path.write_text(json.dumps(content))
    table = of_runs([tmp_path])
    assert table.cells(table.rows[0])["sparsity"] == "0"


# What is no number


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_lower_better", [False, True])
def test_a_score_that_is_no_number_is_shown_as_nan_and_the_others_are_as_they_were(
    odd: float, is_lower_better: bool, tmp_path: Path
) -> None:
    for seed, score in enumerate((90.0, odd)):
        write(tmp_path, "gmp", 0.9, score, seed, lower_is_better=is_lower_better)
    for method, score in {"rigl": 80.0, "set": 70.0}.items():
        for seed in (0, 1):
            write(tmp_path, method, 0.9, score + seed, seed, lower_is_better=is_lower_better)
    comparison = of_runs([tmp_path])
    cells = {row.method: comparison.cells(row) for row in comparison.rows}
    assert (cells["gmp"]["test"], cells["gmp"]["vs baseline"]) == ("nan", "nan")
    assert (cells["rigl"]["test"], cells["rigl"]["vs baseline"]) == ("80.50 ± 0.71", "+10.00 ± 0.00")
    assert {row.method: comparison.summary(row)["baseline"] for row in comparison.rows}["rigl"] == "set:uniform"
    _check_json(shown(tmp_path, "--json", "--out", tmp_path / "table"))
    _check_json((tmp_path / "table" / "comparison.json").read_text())
    assert "nan" in shown(tmp_path) and "| nan |" in shown(tmp_path, "--markdown")


def _check_json(text: str) -> None:
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    gmp = next(row for row in content["rows"] if row["method"] == "gmp")
    assert [run["test"] for run in gmp["runs"]] == [90.0, None]
    assert gmp["summary"]["test"] == {"mean": None, "deviation": None, "count": 2}


# Who is a baseline


def with_alive(path: Path, alive: int) -> None:
    content = json.loads(path.read_text())
    content["sparsity"]["totals"]["alive"] = alive
    path.write_text(json.dumps(content))


def baselines(comparison: Comparison) -> dict[str, str | None]:
    return {row.method: comparison.summary(row)["baseline"] for row in comparison.rows}


def test_a_row_that_misses_its_sparsity_is_no_baseline_of_rows_that_reach_it(tmp_path: Path) -> None:
    paths = {name: write(tmp_path, name, 0.9, score) for name, score in (("a", 99.0), ("b", 80.0), ("c", 70.0))}
    with_alive(paths["a"], 300)
    assert baselines(of_runs([tmp_path])) == {"a": "b:uniform", "b": "c:uniform", "c": "b:uniform"}
    for path in paths.values():  # a tiny model, say, in which nobody can reach it
        with_alive(path, 110)
    assert baselines(of_runs([tmp_path])) == {"a": "b:uniform", "b": "a:uniform", "c": "a:uniform"}


# Sparsities that are nearly the same


def test_sparsities_that_differ_are_never_written_alike(tmp_path: Path) -> None:
    jobs = Request.parse([TOY], "rigl", "0,0.9,0.9000001,0.95", "0", 6, tmp_path).jobs()
    assert [job.folder.parent.name for job in jobs] == ["0", "0.9", "0.9000001", "0.95"]
    assert [job.recipe.sparsity for job in jobs] == [0.0, 0.9, 0.9000001, 0.95]
    assert jobs[2].name == "rigl:erk 0.9000001 seed 0"
    for sparsity in (0.9, 0.9000001):
        write(tmp_path, "gmp", sparsity, 90.0)
    assert rows_of(shown(tmp_path)) == ["gmp:uniform 0.9", "gmp:uniform 0.9000001"]


# Bad input


def test_a_result_that_someone_changed_is_one_line_with_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path, "gmp", 0.9, 90.0, peak_bytes="many")
    with pytest.raises(GrowpruneError, match=r"result\.json is damaged \(its peak_bytes is 'many'"):
        of_runs([tmp_path])


def test_settings_that_differ_late_in_their_digits_differ(tmp_path: Path) -> None:
    for method, rate in {"gmp": 0.1, "rigl": 0.1000001}.items():
        path = write(tmp_path, method, 0.9, 90.0)
        content = json.loads(path.read_text())
        content["recipe"]["optimizer"] = {"lr": rate}
        path.write_text(json.dumps(content))
    with pytest.raises(GrowpruneError, match=r"optimizer\.lr differs: 0\.1 in gmp.*; 0\.1000001 in rigl"):
        of_runs([tmp_path])


def test_a_place_that_cannot_be_written_to_is_named_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "runs", "gmp", 0.9, 90.0)
    (tmp_path / "file").write_text("not a folder")
    out = tmp_path / "file" / "table"
    there = ["compare", str(tmp_path / "runs"), "--out", str(out)]
    new = ["compare", TOY, "--methods", "rigl", "--epochs", "6", "--seeds", "0", "--out", str(out)]
    for command in (there, new):
        done = CliRunner().invoke(app, command)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"cannot write to {out}" in done.stderr and "choose another --out" in done.stderr


def test_a_row_whose_name_is_too_long_for_a_folder_is_refused(tmp_path: Path) -> None:
    options = f"cyclic_gap restart={'1' * 250}"
    with pytest.raises(GrowpruneError, match=r"name of 277 characters, but folder names can have 255"):
        Request.parse([TOY], options, "0.8", "0", 6, tmp_path).jobs()


def test_names_of_rows_are_whole_in_a_terminal_of_80_columns(tmp_path: Path) -> None:
    for seed in range(2):
        for method, score in {"parallel_gradual_gap": 80.25, "gmp": 70.5, "dense": 90.125}.items():
            sparsity = 0.0 if method == "dense" else 0.9
            write(tmp_path, method, sparsity, score + seed, seed, peak_bytes=12_345 * 2**20, seconds=12_345.6)
    done = CliRunner().invoke(app, ["compare", str(tmp_path)], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    quality, _, cost = done.stdout.partition("cost, as a fraction")
    for table in (quality, cost):
        assert any(line.startswith(" parallel_gradual_gap:uniform ") for line in table.splitlines()), table
    assert "12345 MiB" in cost and "12345.6" in cost
