"""The page about runs: what it reads, what it says, and what it refuses."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from report_runs import finished, history, phase, recipe, result, row, write_bare, write_run
from toy import cyclic, parallel
from typer.testing import CliRunner

from growprune import engine, methods
from growprune.cli import app
from growprune.errors import GrowpruneError
from growprune.report import notes, write_page
from growprune.report.chart import Styles
from growprune.report.frontier import average_live, frontier_charts, peak_live
from growprune.report.groups import Group, group_runs
from growprune.report.over_time import charts_over_time
from growprune.report.page import render
from growprune.report.tables import all_runs
from growprune.report.words import command
from growprune.runs import Record, find_runs
from growprune.runs.metric import Metric

EXPERIMENTS = ROOT / "experiments"


def page_of(*paths: Path) -> str:
    return render(find_runs(paths), "/* drawn by nobody */")


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table after a heading."""
    found = re.search(rf"{re.escape(heading)}</h\d>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert found is not None, heading
    rows = re.findall(r"<tr>(.*?)</tr>", found[1])
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", each)] for each in rows]


def only_group(*paths: Path) -> Group:
    (group,) = group_runs(find_runs(paths))
    return group


# What the page says


def test_the_page_has_the_means_over_seeds_computed_by_hand(tmp_path: Path) -> None:
    for seed, quality in enumerate((90.0, 91.0)):
        finished(tmp_path / f"dense{seed}", "dense", 0.0, seed, 92.0)
        finished(tmp_path / f"rigl{seed}", "rigl", 0.9, seed, quality, seconds=40.0 + 20 * seed, training_flops=7e9)
    page = page_of(tmp_path)
    dense, rigl = table(page, "Results")
    assert dense[:5] == ["dense", "2", "2", "92.00 ± 0.00", ""]
    # the deviation of 90 and 91 is 1 / sqrt(2); live weights are 1000 and then 500 of 1000
    assert rigl[:6] == ["rigl 0.9", "2", "2", "90.50 ± 0.71", "-1.50", "0.9"]
    assert rigl[6:] == ["7.00 G", "200", "100.0%", "75.0%", "-", "5.00 MB", "50 s"]
    assert "At sparsity 0.9, rigl reaches accuracy 90.50 ± 0.71 on test data, 1.50 below dense." in page
    assert [line[:4] for line in table(page, "All runs")][2:] == [
        ["rigl0", "finished", "rigl", "0.9"],
        ["rigl1", "finished", "rigl", "0.9"],
    ]


def test_a_single_run_is_told_in_words_that_need_no_code(tmp_path: Path) -> None:
    page = page_of(finished(tmp_path / "one", "cyclic_gap", 0.9, 0, 88.0, seconds=600.0))
    said = html.unescape(re.sub(r"<[^>]+>", "", page.partition("Summary")[2].partition("</section>")[0]))
    for words in (
        "1 run of Digits, 2 epochs",
        "cyclic_gap at sparsity 0.9",
        "accuracy 88.00",
        "took 10 min on cpu (hand)",
    ):
        assert words in said, words
    assert "Quality against" not in page.replace("Not shown", "")  # nothing to compare it with


def test_the_page_asks_the_network_for_nothing_and_runs_nothing_it_was_given(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    made = recipe(evil, 0.9, 0)
    rows = history([1000, 500], edits=evil)
    write_run(tmp_path / "<b>run", made, result(made, 88.0, rows), origin={"source": evil, "settings": {evil: evil}})
    page = page_of(tmp_path / "<b>run")
    assert "default-src 'none'" in page
    assert evil not in page and "<b>run" not in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    charts = re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)
    assert charts is not None and json.loads(charts[1])


def test_a_loss_that_is_no_number_leaves_the_page_readable(tmp_path: Path) -> None:
    rows = history([1000, 500])
    rows[1]["loss"] = float("nan")
    page = page_of(finished(tmp_path / "one", "rigl", 0.9, 0, 88.0, rows=rows))
    charts = re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)
    assert charts is not None
    json.loads(charts[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_command_is_exact_but_for_where_files_lie(tmp_path: Path) -> None:
    made = recipe("rigl", 0.9, 3, task={"data": "/home/someone/cifar10.npz"})
    settings = {"seed": "3", "claim": "two words", "task.data": "/home/someone/cifar10.npz"}
    origin = {"source": "digits/dense", "settings": settings}
    write_run(tmp_path / "a", made, result(made, 88.0, history([1000])), origin=origin)
    (record,) = find_runs([tmp_path / "a"])
    assert command(record) == (
        "growprune train digits/dense --set seed=3 --set 'claim=two words' --data DATA/cifar10.npz --out a"
    )
    assert "/home/someone" not in page_of(tmp_path / "a")


def test_a_bare_result_knows_the_command_that_made_it(tmp_path: Path) -> None:
    origin = {"source": str(tmp_path / "mine.py:make"), "settings": {"task.data": str(tmp_path / "d"), "seed": "1"}}
    engine.train(cyclic(), tmp_path / "run", origin=origin)
    kept = write_bare(tmp_path / "kept" / "result.json", json.loads((tmp_path / "run/result.json").read_text()))
    assert str(tmp_path) not in kept.read_text()
    (record,) = find_runs([kept])
    assert command(record) == "growprune train mine.py:make --set seed=1 --out kept"
    assert record.metric == Metric("accuracy")


# What it reads


def test_what_is_not_whole_is_shown_as_such_and_the_page_is_made(tmp_path: Path) -> None:
    made = recipe("rigl", 0.9, 0)
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 1000, validation={"accuracy": 60.0})}
    first = phase(0, 0, "train", 20, 1000)
    finished(tmp_path / "whole", "rigl", 0.9, 1, 88.0)
    write_run(tmp_path / "killed", made, events=[first, epoch])
    write_run(tmp_path / "stopped", made, events=[first, epoch, {"event": "interrupted"}])
    write_run(tmp_path / "failed", made, events=[first, {"event": "failed", "message": "the loss became nan"}])
    write_run(tmp_path / "again", made, events=[{"event": "failed", "message": "x"}, {"event": "resumed"}])
    write_run(tmp_path / "damaged", made)
    (tmp_path / "damaged/result.json").write_text("{")
    (tmp_path / "empty").mkdir()
    records = find_runs([tmp_path / name for name in sorted(path.name for path in tmp_path.iterdir())])
    told = {record.name: (record.status, record.why) for record in records}
    assert told["killed"] == ("unfinished", "last seen after epoch 1")
    assert told["stopped"] == ("unfinished", "interrupted after epoch 1")
    assert told["failed"] == ("failed", "the loss became nan")
    assert told["again"][0] == "unfinished"
    assert told["damaged"][0] == "damaged" and "result.json is damaged" in told["damaged"][1]
    assert told["empty"] == ("unfinished", "it has not started: there is no recipe.json")
    assert "(1 damaged, 1 failed, 4 unfinished)" in notes(records)[-1]
    page = render(records, "")
    assert "failed: the loss became nan" in page and len(all_runs(records)) == 7
    # what the unfinished runs did so far is drawn beside: 60 is of the two that validated, and 51 the whole one's
    quality = next(c for c in charts_over_time(group_runs(records)[0], Styles(group_runs(records)[0].cells)))
    assert quality.rows[0] == [1, 51.0, 60.0]


@pytest.mark.parametrize("study", sorted({path.parents[2].name for path in EXPERIMENTS.glob("*/*/*/result.json")}))
def test_the_experiments_of_this_repository_can_be_shown(study: str) -> None:
    records = find_runs([EXPERIMENTS / study])
    page = render(records, "")
    for record in records:
        assert record.status == "finished", record.why
        assert f"{record.test:.5g}" in page


# Who may be compared with whom


def test_runs_of_different_tasks_are_not_compared_and_the_page_says_what_differs(tmp_path: Path) -> None:
    finished(tmp_path / "a", "rigl", 0.9, 0, 88.0)
    finished(tmp_path / "b", "gmp", 0.9, 0, 89.0, recipe={"task": {"width": 16}})
    finished(tmp_path / "c", "gmp", 0.9, 0, 30.0, recipe={"task": {"name": "Translation"}})
    records = find_runs([tmp_path])
    assert [(group.title, len(group.cells)) for group in group_runs(records)] == [
        ("Digits, width 16", 1),
        ("Translation", 1),
        ("Digits, width 8", 1),
    ]
    (note,) = notes(records)
    assert "the task is Digits or Translation" in note or "the task is Translation or Digits" in note
    assert "task.width is 16 or 8 (Digits)" in note and "has its own charts" in note
    assert html.escape(note) in render(records, "")


def test_where_data_lie_and_who_loads_them_makes_no_difference(tmp_path: Path) -> None:
    for name, workers in (("a", 0), ("b", 8)):
        task = {"data": f"/disk/{name}/cifar10.npz", "workers": workers}
        finished(tmp_path / name, "rigl", 0.9, ord(name), 88.0, recipe={"task": task})
    assert notes(find_runs([tmp_path])) == []
    assert len(only_group(tmp_path).cells) == 1  # they differ by their seed alone


def test_other_budgets_are_other_groups_with_the_dense_run_as_reference_of_each(tmp_path: Path) -> None:
    finished(tmp_path / "dense", "dense", 0.0, 0, 90.0)
    finished(tmp_path / "short", "rigl", 0.9, 0, 88.0)
    finished(tmp_path / "long", "rigl", 0.9, 0, 89.0, rows=history([1000] * 8))
    records = find_runs([tmp_path])
    assert [(group.budget, [cell.label for cell in group.cells]) for group in group_runs(records)] == [
        ("8 epochs", ["dense", "rigl 0.9"]),
        ("2 epochs", ["dense", "rigl 0.9"]),
    ]
    assert "the budget is 2 epochs or 8 epochs" in notes(records)[0]


@pytest.mark.parametrize("flops, budgets", [(1.04e9, 1), (1.2e9, 2)])
def test_equal_training_flops_are_one_budget_whatever_the_epochs(tmp_path: Path, flops: float, budgets: int) -> None:
    finished(tmp_path / "a", "rigl", 0.9, 0, 88.0, training_flops=1e9)
    finished(tmp_path / "b", "gmp", 0.9, 0, 89.0, rows=history([1000] * 8), training_flops=flops)
    assert len(group_runs(find_runs([tmp_path]))) == budgets


def test_runs_of_a_method_are_told_apart_by_what_differs_and_nothing_else(tmp_path: Path) -> None:
    for name, seed, more in (
        ("a", 0, {}),
        ("b", 1, {}),
        ("c", 0, {"allocation": "erk"}),
        ("d", 0, {"options": {"every": 5}}),
    ):
        finished(tmp_path / name, "rigl", 0.9, seed, 88.0, recipe={"allocation": "uniform", "claim": name, **more})
    labels = {cell.label: len(cell.records) for cell in only_group(tmp_path).cells}
    assert labels == {
        "rigl, uniform 0.9": 2,
        "rigl, erk 0.9": 1,
        "rigl, uniform, every 5 0.9": 1,
    }


def test_a_recipe_that_lacks_a_field_which_came_later_is_one_that_has_its_default(tmp_path: Path) -> None:
    """And what changes no result, such as graphs and shards, tells no two runs apart."""
    later = {"precision": "fp32", "pattern": "unstructured", "graph": True, "shard": "none"}
    for seed, more in enumerate(({}, later, {**later, "graph": False})):
        finished(tmp_path / str(seed), "rigl", 0.9, seed, 88.0, recipe=more)
    assert {cell.label: len(cell.records) for cell in only_group(tmp_path).sparse} == {"rigl 0.9": 3}


def test_a_setting_that_goes_with_another_is_not_named_twice(tmp_path: Path) -> None:
    for name, more in {"uniform": {"keep_dense": ["conv1"]}, "global": {"keep_dense": []}}.items():
        finished(tmp_path / name, "rigl", 0.9, 0, 88.0, recipe={**more, "allocation": name})
    assert [cell.label for cell in only_group(tmp_path).cells] == ["rigl, global 0.9", "rigl, uniform 0.9"]


def test_a_method_has_one_colour_in_all_charts_and_methods_differ_in_more_than_colour(tmp_path: Path) -> None:
    for method in ("rigl", "gmp", "set"):
        for sparsity in (0.8, 0.9):
            finished(tmp_path / f"{method}{sparsity}", method, sparsity, 0, 88.0)
    group = only_group(tmp_path)
    styles = Styles(group.cells)
    colours: dict[str, set[str]] = {}
    symbols: dict[str, set[str]] = {}
    for chart in [*charts_over_time(group, styles), *frontier_charts(group, styles)]:
        for trace in chart.data:
            colours.setdefault(trace["name"].split()[0], set()).add(trace["line"]["color"])
            symbols.setdefault(trace["name"].split()[0], set()).add(trace["marker"]["symbol"])
    assert set(colours) == {"rigl", "gmp", "set"}
    assert all(len(found) == 1 for found in [*colours.values(), *symbols.values()])
    assert len(set.union(*colours.values())) == len(set.union(*symbols.values())) == 3


def test_no_two_of_all_methods_and_their_variants_look_alike(tmp_path: Path) -> None:
    sparse = [name for name in methods.METHODS if name != "dense"]
    for method in sparse:
        finished(tmp_path / method, method, 0.9, 0, 88.0)
    for control in ("start", "peak"):
        finished(tmp_path / control, "gradual_gap", 0.9, 0, 88.0, recipe={"options": {"control": control}})
    cells = only_group(tmp_path).sparse
    looks = {(style.colour, style.symbol) for style in map(Styles(cells).of, cells)}
    assert len(looks) == len(cells) == len(sparse) + 2


# Charts


def test_explored_is_the_mean_over_seeds_and_of_branches_the_most(tmp_path: Path) -> None:
    for seed in (0, 1):
        rows = [row(1, 1, 100, branch=b, explored=0.2 + 0.2 * b + 0.1 * seed, churn=0.5) for b in (0, 1)]
        finished(tmp_path / str(seed), "parallel_gap", 0.9, seed, 88.0, rows=[*rows, row(2, 2, 100, explored=1.0)])
    group = only_group(tmp_path)
    charts = {chart.name: chart for chart in charts_over_time(group, Styles(group.cells))}
    assert charts["explored"].rows == [[1, pytest.approx(0.45)], [2, 1.0]]
    assert charts["churn"].rows == [[1, 0.5]]
    assert charts["live"].rows == [[1, 0.1], [2, 0.1]]
    assert "quality" not in charts  # nothing was validated


def test_peak_and_average_live_weights_are_the_counted_ones_where_there_are_any(tmp_path: Path) -> None:
    plain = find_runs([finished(tmp_path / "a", "rigl", 0.9, 0, 88.0, rows=history([1000, 200]))])[0]
    counted = find_runs([finished(tmp_path / "b", "rigl", 0.9, 0, 88.0, peak_alive=700, average_alive=250.0)])[0]
    assert (peak_live(plain), average_live(plain)) == (1.0, 0.6)
    assert (peak_live(counted), average_live(counted)) == (0.7, 0.25)


def test_a_sparsity_that_was_not_reached_is_said_in_the_table(tmp_path: Path) -> None:
    made = recipe("str", 0.9, 0)
    outcome = result(made, 88.0, history([1000]))
    outcome["sparsity"]["totals"]["sparsity"] = 0.87
    write_run(tmp_path / "a", made, outcome)
    assert table(page_of(tmp_path / "a"), "Results")[0][5] == "0.87 (target 0.9)"


# From real runs, and from the command line


def test_the_page_of_real_runs_has_every_chart(tmp_path: Path) -> None:
    engine.train(cyclic(), tmp_path / "cyclic")
    engine.train(replace(parallel(), seed=1), tmp_path / "parallel")
    dense = replace(cyclic(), method=methods.dense, options={"epochs": 9}, sparsity=0.0)
    engine.train(dense, tmp_path / "dense")
    page = page_of(tmp_path)
    for title in ("Validation accuracy over time", "Loss over time", "Live weights over time"):
        assert f"<h4>{title}</h4>" in page
    for title in ("Weights ever explored", "Mask churn", "Sparsity of each layer"):
        assert f"<h4>{title}</h4>" in page
    for cost in ("sparsity", "inference FLOPs", "peak live weights", "average live weights", "peak memory"):
        assert f"<h4>Quality against {cost}</h4>" in page
    assert page.count("<details><summary>Table</summary>") == page.count("<figure ")


def told(*arguments: Any) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return outcome.exit_code, outcome.stderr


def test_bad_input_is_one_line_and_no_page(tmp_path: Path) -> None:
    run, out = finished(tmp_path / "run", "rigl", 0.9, 0, 88.0), tmp_path / "page.html"
    (tmp_path / "nothing").mkdir()
    for arguments, words in {
        ("-o", out): "report needs at least one RUN",
        (tmp_path / "gone", "-o", out): "gone does not exist",
        (tmp_path / "nothing", "-o", out): "no run found in",
        (run, "-o", tmp_path / "no/page.html"): "no does not exist",
        (run, "-o", tmp_path): "-o must be a file",
    }.items():
        code, said = told(*arguments)
        assert (code, said.count("\n")) == (2, 1), said
        assert words in said
    assert not out.exists()


def test_without_plotly_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    records: list[Record] = find_runs([finished(tmp_path / "run", "rigl", 0.9, 0, 88.0)])
    with pytest.raises(GrowpruneError, match=r"'growprune\[report\]', or '\.\[report\]' in a clone of the repository"):
        write_page(records, tmp_path / "page.html")


def test_the_command_writes_a_page_with_plotly_in_it_and_warns_of_what_differs(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    finished(tmp_path / "runs/a", "rigl", 0.9, 0, 88.0)
    finished(tmp_path / "runs/b", "rigl", 0.9, 0, 88.0, recipe={"task": {"width": 16}})
    code, said = told(tmp_path / "runs", "-o", tmp_path / "page.html")
    assert code == 0 and "task.width is 16 or 8" in said
    assert 1_000_000 < (tmp_path / "page.html").stat().st_size < 8_000_000
