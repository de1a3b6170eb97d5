"""The page about runs: what it says, what it lists, and what it refuses."""

import html
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import history, phase, recipe, result, row, write_bare, write_run
from toy import cyclic, parallel
from typer.testing import CliRunner

from growprune import engine, methods
from growprune.cli import app
from growprune.errors import GrowpruneError
from growprune.report import notes, write_page
from growprune.report.groups import group_runs
from growprune.report.page import render
from growprune.report.words import command, compare_command
from growprune.runs import find_runs


def write(folder: Path, method: str, score: float = 88.0, seed: int = 0, sparsity: float = 0.9, **more: Any) -> Path:
    """A finished run of two epochs; dense runs have no sparsity."""
    made = recipe(method, 0.0 if method == "dense" else sparsity, seed, **more.pop("recipe", {"allocation": "global"}))
    rows, origin = more.pop("rows", history([1000, 500])), more.pop("origin", None)
    return write_run(folder, made, result(made, score, rows, **more), origin=origin)


def page_of(*paths: Path) -> str:
    return render(find_runs(paths), "/* drawn by nobody */")


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    found = re.search(rf"{re.escape(heading)}</h\d>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert found is not None, heading
    rows = re.findall(r"<tr>(.*?)</tr>", found[1])
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", each)] for each in rows]


def results(*paths: Path) -> dict[str, dict[str, str]]:
    """The cells of the means over seeds, by row and column."""
    groups = group_runs(find_runs(paths))
    return {row.label: group.table.cells(row) for group in groups for row in group.finished}


def charts_of(page: str) -> Any:
    """The data of the charts, which must be valid JSON."""
    charts = re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)
    return json.loads(charts[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# Results


def test_page_has_means_over_seeds(tmp_path: Path) -> None:
    for seed, score in enumerate((90.0, 91.0)):
        write(tmp_path / f"dense{seed}", "dense", 92.0, seed)
        counts = {"training_flops": 7e9, "peak_alive": 1000, "average_alive": 750.0}
        write(tmp_path / f"rigl{seed}", "rigl", score, seed, seconds=40.0 + 20 * seed, **counts)
    page = page_of(tmp_path)
    assert table(page, "Results") == [[*line.values()] for line in results(tmp_path).values()]
    dense, rigl = results(tmp_path).values()
    assert (dense["row"], dense["test"], dense["vs dense"]) == ("dense", "92.00 ± 0.00", "")
    # the deviation of 90 and 91 is 1 / sqrt(2)
    assert (rigl["row"], rigl["test"], rigl["runs"], rigl["epochs"]) == ("rigl:global", "90.50 ± 0.71", "2", "2")
    assert (rigl["sparsity"], rigl["peak alive"], rigl["average alive"]) == ("0.9", "1.000", "0.750")
    assert (rigl["inference FLOPs"], rigl["memory"], rigl["seconds"]) == ("0.100", "5 MiB", "50.0")
    assert [line[:4] for line in table(page, "All runs")][2:] == [
        ["rigl0", "finished", "rigl", "0.9"],
        ["rigl1", "finished", "rigl", "0.9"],
    ]


def test_minus_dense_is_paired_by_seed(tmp_path: Path) -> None:
    for seed, (dense, gmp) in enumerate([(90.0, 88.0), (92.0, 91.0), (70.0, None)]):
        write(tmp_path / f"dense{seed}", "dense", dense, seed)
        if gmp is not None:
            write(tmp_path / f"gmp{seed}", "gmp", gmp, seed)
    # differences are -2 and -1, of which the standard error is 0.5; seed 2 has no partner
    assert results(tmp_path)["gmp:global 0.9"]["vs dense"] == "-1.50 ± 0.50"
    assert "(-1.50 ± 0.50 against dense)" in page_of(tmp_path)


def test_best_row_is_chosen_by_validation_among_those_that_reach_the_sparsity(tmp_path: Path) -> None:
    write(tmp_path / "rigl", "rigl", 88.0)
    write(tmp_path / "gmp", "gmp", 87.0, validation={"accuracy": 99.0})
    off = write(tmp_path / "set", "set", 90.0, validation={"accuracy": 100.0})
    content = json.loads((off / "result.json").read_text())
    content["sparsity"]["totals"] |= {"alive": 200, "sparsity": 0.8}
    write_bare(off / "result.json", content)
    assert "gmp:global (the best of 2 on validation data) reaches accuracy 87.00" in page_of(tmp_path)
    assert results(tmp_path)["set:global 0.9"]["sparsity"] == "0.9 (reached 0.8)"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_score_that_is_no_number_leaves_other_rows_as_they_are(odd: float, tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path / f"dense{seed}", "dense", 92.0, seed)
        write(tmp_path / f"gmp{seed}", "gmp", odd if seed else 91.0, seed)
        write(tmp_path / f"rigl{seed}", "rigl", 89.0 + seed, seed)
    rows = {name: (cells["test"], cells["vs dense"]) for name, cells in results(tmp_path).items()}
    assert rows["gmp:global 0.9"] == ("nan", "nan")
    assert rows["rigl:global 0.9"] == ("89.50 ± 0.71", "-2.50 ± 0.50")
    page = page_of(tmp_path)
    assert "rigl:global (the best of 2 on validation data) reaches" in page and charts_of(page)


def test_summary_of_one_run(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "one", "cyclic_gap"))
    said = html.unescape(re.sub(r"<[^>]+>", "", page.partition("Summary")[2].partition("</section>")[0]))
    for words in ("Digits, 2 epochs", "At sparsity 0.9, cyclic_gap:global reaches accuracy 88.00"):
        assert words in said, words
    assert "Quality" not in page and "<legend" not in page  # there is nothing to compare it with


def test_head_has_date_and_versions(tmp_path: Path) -> None:
    environment = {"growprune": "0.0.9", "commit": "abc123", "torch": "2.13.0"}
    head = page_of(write(tmp_path / "a", "gmp", environment=environment)).partition("</header>")[0]
    assert re.search(r"Written on \d{4}-\d\d-\d\d by growprune", head)
    assert "abc123" in head and "torch 2.13.0" in head


# What the page is given


def test_page_runs_nothing_it_was_given_and_asks_the_network_for_nothing(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    origin = {"source": evil, "settings": {evil: evil}, "row": evil}
    for seed, name in enumerate(("<b>run", "<b>other")):
        made = recipe(evil, 0.9, seed, allocation="global")
        write_run(tmp_path / name, made, result(made, 88.0, history([1000, 500], edits=evil)), origin=origin)
    write(tmp_path / "dense", "dense")
    page = page_of(tmp_path)
    assert "default-src 'none'" in page
    assert evil not in page and "<b>run" not in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert charts_of(page)


@pytest.mark.parametrize("where", ["recipe", "origin"])
def test_data_of_a_task_may_be_more_than_a_path(where: str, tmp_path: Path) -> None:
    made = recipe("rigl", 0.9, 0, task={"data": ["/disk/a", "/disk/b"]} if where == "recipe" else {})
    origin = {"source": "digits/dense", "settings": {"task.data": 5} if where == "origin" else {}}
    file = write_bare(tmp_path / "run/result.json", result(made, 88.0, history([1000]), origin=origin))
    assert "--data" in page_of(file)


def test_phase_without_iterations_is_no_division_by_zero(tmp_path: Path) -> None:
    odd = {**phase(0, 0, "train", 20, 1000), "iterations": 0}
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 1000), "epoch": 0}
    assert page_of(write_run(tmp_path / "run", recipe("rigl", 0.9, 0), events=[odd, epoch]))


def test_unfinished_runs_are_listed_with_the_reason(tmp_path: Path) -> None:
    made = recipe("rigl", 0.9, 0, allocation="global")
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 1000, validation={"accuracy": 60.0})}
    first = phase(0, 0, "train", 20, 1000)
    write(tmp_path / "whole", "rigl", seed=1)
    write_run(tmp_path / "killed", made, events=[first, epoch])
    write_run(tmp_path / "stopped", made, events=[first, epoch, {"event": "interrupted"}])
    write_run(tmp_path / "failed", made, events=[first, {"event": "failed", "message": "the loss became nan"}])
    write_run(tmp_path / "again", made, events=[{"event": "failed", "message": "x"}, {"event": "resumed"}])
    write_bare(write_run(tmp_path / "damaged", made, events=[first, epoch]) / "result.json", {})
    (tmp_path / "empty").mkdir()
    records = find_runs([tmp_path / name for name in sorted(path.name for path in tmp_path.iterdir())])
    assert "(1 damaged, 1 failed, 4 unfinished)" in notes(records)[-1]
    assert not any("comparable" in note for note in notes(records))
    status = {line[0]: line[1] for line in table(render(records, ""), "All runs")}
    assert status["killed"] == "unfinished: last seen after epoch 1"
    assert status["stopped"] == "unfinished: interrupted after epoch 1"
    assert status["failed"] == "failed: the loss became nan"
    assert status["again"].startswith("unfinished") and status["damaged"].startswith("damaged: ")
    assert status["empty"] == "unfinished: it has not started: there is no recipe.json"
    assert status["whole"] == "finished" and len(status) == 7


# Commands


def made_by_compare(folder: Path, row: str, seed: int, settings: dict[str, str], **more: Any) -> Path:
    own = {"method": row.partition(":")[0], "options": '{"epochs":2}', "seed": str(seed), "sparsity": "0.9", **settings}
    origin = {"source": "digits/dense", "settings": own, "row": row}
    return write(folder, row.partition(":")[0], 88.0, seed, origin=origin, **more)


def command_of(folder: Path) -> str:
    (group,) = group_runs(find_runs([folder]))
    return compare_command(group)


def test_one_compare_command_makes_all_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        for name in ("dense", "gmp:global", "rigl:erk every=5"):
            made_by_compare(tmp_path / f"{name}{seed}", name, seed, {"clip": "1.0", "task.data": "/disk/d.npz"})
    command = command_of(tmp_path)
    assert command in html.unescape(page_of(tmp_path))
    assert command == (
        "growprune compare digits/dense --data DATA/d.npz --methods 'dense,gmp:global,rigl:erk every=5' "
        "--sparsities 0.9 --seeds 0,1 --epochs 2 --set clip=1.0"
    )


def test_compare_command_names_the_file_of_a_method_of_the_user(tmp_path: Path) -> None:
    made_by_compare(tmp_path / "own", "mine:uniform k=2", 0, {"method": "/home/me/own.py:mine"})
    assert "--methods 'own.py:mine:uniform k=2'" in command_of(tmp_path)


@pytest.mark.parametrize("other", [{"clip": "2.0"}, None])
def test_runs_of_several_commands_have_no_common_one(other: dict[str, str] | None, tmp_path: Path) -> None:
    made_by_compare(tmp_path / "a", "gmp:global", 0, {"clip": "1.0"})
    if other is None:
        write(tmp_path / "b", "rigl")
    else:
        made_by_compare(tmp_path / "b", "rigl:global", 0, other)
    assert command_of(tmp_path) == ""


def test_command_of_a_run_has_no_paths(tmp_path: Path) -> None:
    settings = {"seed": "3", "claim": "two words", "task.data": "/home/someone/cifar10.npz"}
    made = {"task": {"data": "/home/someone/cifar10.npz"}, "weights": "/home/someone/dense"}
    write(tmp_path / "a", "rigl", seed=3, recipe=made, origin={"source": "digits/dense", "settings": settings})
    (record,) = find_runs([tmp_path / "a"])
    assert command(record) == (
        "growprune train digits/dense --set seed=3 --set 'claim=two words' --data DATA/cifar10.npz --out a"
    )
    assert "/home/someone" not in page_of(tmp_path / "a")


def test_bare_result_knows_its_command(tmp_path: Path) -> None:
    origin = {"source": str(tmp_path / "mine.py:make"), "settings": {"task.data": str(tmp_path / "d"), "seed": "1"}}
    engine.train(cyclic(), tmp_path / "run", origin=origin)
    kept = write_bare(tmp_path / "kept" / "result.json", json.loads((tmp_path / "run/result.json").read_text()))
    assert str(tmp_path) not in kept.read_text()
    (record,) = find_runs([kept])
    assert command(record) == "growprune train mine.py:make --set seed=1 --out kept"


# The command line


def test_page_of_real_runs_has_every_chart(tmp_path: Path) -> None:
    engine.train(cyclic(), tmp_path / "cyclic")
    engine.train(replace(parallel(), seed=1), tmp_path / "parallel")
    engine.train(replace(cyclic(), method=methods.dense, options={"epochs": 9}, sparsity=0.0), tmp_path / "dense")
    page = page_of(tmp_path)
    assert set(re.findall(r"<h4>(.*?)</h4>", page)) == {
        *("Validation accuracy over time", "Loss over time", "Live weights over time", "Weights ever explored"),
        *("Mask churn", "Sparsity of each layer", "Quality of each row"),
        *(f"Quality against {cost}" for cost in ("training FLOPs", "inference FLOPs", "peak memory")),
        *(f"Quality against {cost}" for cost in ("peak live weights", "average live weights")),
    }
    assert page.count("<details><summary>Table</summary>") == page.count("<figure ")


def run_report(arguments: Sequence[Any]) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return outcome.exit_code, outcome.stderr


def test_bad_input_is_one_line_and_no_page(tmp_path: Path) -> None:
    run, out = write(tmp_path / "run", "rigl"), tmp_path / "page.html"
    (tmp_path / "nothing").mkdir()
    for arguments, words in {
        ("-o", out): "RUN",
        (tmp_path / "gone", "-o", out): "gone",
        (tmp_path / "nothing", "-o", out): "no run found",
        (run, "-o", tmp_path / "no/page.html"): "no/page.html",
        (run, "-o", tmp_path): "-o must be a file",
    }.items():
        code, said = run_report(arguments)
        assert (code, said.count("\n")) == (2, 1), said
        assert words in said
    assert not out.exists()


def test_without_plotly_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(GrowpruneError, match=r"\[report\]"):
        write_page(find_runs([write(tmp_path / "run", "rigl")]), tmp_path / "page.html")


def test_command_writes_a_page_with_plotly_and_warns_of_what_differs(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    write(tmp_path / "runs/a", "rigl")
    write(tmp_path / "runs/b", "rigl", recipe={"task": {"width": 16}})
    code, said = run_report([tmp_path / "runs", "-o", tmp_path / "page.html"])
    assert code == 0 and "task.width is 16 or 8" in said
    assert 1_000_000 < (tmp_path / "page.html").stat().st_size < 8_000_000
