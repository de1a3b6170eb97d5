"""The charts as values: what is drawn where, and in which look."""

from pathlib import Path
from typing import Any

import pytest
from report_runs import history, phase, recipe, result, row, write_run
from test_report import write

from growprune import methods
from growprune.report.charts import Chart, Styles, charts_over_time, frontier_charts
from growprune.report.groups import Group, group_runs, is_control
from growprune.runs import find_runs


def only_group(folder: Path) -> Group:
    (group,) = group_runs(find_runs([folder]))
    return group


def over_time(folder: Path) -> dict[str, Chart]:
    group = only_group(folder)
    return {chart.name: chart for chart in charts_over_time(group, Styles(group.rows))}


def frontiers(folder: Path) -> dict[str, Chart]:
    group = only_group(folder)
    return {chart.name: chart for chart in frontier_charts(group, Styles(group.rows))}


# Over time


def test_explored_is_the_mean_over_seeds_and_the_most_of_branches(tmp_path: Path) -> None:
    for seed in (0, 1):
        rows = [row(1, 1, 100, branch=b, explored=0.2 + 0.2 * b + 0.1 * seed, churn=0.5) for b in (0, 1)]
        write(tmp_path / str(seed), "parallel_gap", seed=seed, rows=[*rows, row(2, 2, 100, explored=1.0)])
    charts = over_time(tmp_path)
    assert charts["explored"].rows == [[1, pytest.approx(0.45)], [2, 1.0]]
    assert charts["churn"].rows == [[1, 0.5]]
    assert charts["live"].rows == [[1, 0.1], [2, 0.1]]
    assert "quality" not in charts  # nothing was validated


def write_phases(folder: Path, alive: list[tuple[int, int]], seed: int = 0) -> Path:
    """A run of two epochs of ten iterations, whose phases start at given iterations with given live weights."""
    made = recipe("gradual_gap", 0.9, seed, allocation="global")
    events = [{**phase(n, n, "grow", 5, live), "iteration": at} for n, (at, live) in enumerate(alive)]
    return write_run(folder, made, result(made, 88.0, history([300, 100])), events=events)


def test_live_weights_have_their_peaks_where_phases_start(tmp_path: Path) -> None:
    write_phases(tmp_path / "run", [(0, 500), (5, 900), (8, 300), (10, 100)])
    live = over_time(tmp_path)["live"]
    expected = [[0, 0.5], [0.5, 0.9], [0.8, 0.3], [1, 0.3], [1, 0.1], [2, 0.1]]
    assert live.rows == [[epoch, pytest.approx(share)] for epoch, share in expected]
    (line,) = live.data
    assert (line["x"], line["line"]["shape"]) == ([epoch for epoch, _ in expected], "hv")


def test_phase_that_a_kill_undid_counts_once(tmp_path: Path) -> None:
    run = write_phases(tmp_path / "run", [(0, 500), (10, 900)])
    log = run / "log.jsonl"
    log.write_text(log.read_text() + log.read_text().splitlines()[1].replace("900", "700") + "\n")
    assert [row for row in over_time(tmp_path)["live"].rows if row[1] != 0.3] == [[0, 0.5], [1, 0.7], [2, 0.1]]


def test_without_a_log_live_weights_are_known_at_ends_of_epochs(tmp_path: Path) -> None:
    write(tmp_path / "run", "rigl")
    live = over_time(tmp_path)["live"]
    assert live.rows == [[1, 1.0], [2, 0.5]]
    assert (live.data[0]["x"], live.data[0]["y"], live.data[0]["line"]["shape"]) == ([0, 1, 2], [1, 1, 0.5], "vh")


def test_bands_reach_from_the_lowest_seed_to_the_highest(tmp_path: Path) -> None:
    for seed, loss in enumerate((1.0, 4.0, 2.5)):
        rows = [{**entry, "loss": loss} for entry in history([1000, 500])]
        write(tmp_path / str(seed), "rigl", seed=seed, rows=rows)
    low, high, line = over_time(tmp_path)["loss"].data
    assert (low["y"], high["y"], line["y"]) == ([1.0, 1.0], [4.0, 4.0], [2.5, 2.5])
    assert high["fill"] == "tonexty" and "fill" not in low
    assert len(over_time(tmp_path)["live"].data) == 1  # seeds that do not differ have no band


def test_curves_of_finished_and_unfinished_seeds_are_apart(tmp_path: Path) -> None:
    write(tmp_path / "whole", "rigl", seed=1, rows=history([1000, 500, 500]))
    epoch = {"event": "epoch", "index": 0, **row(1, 0, 100, validation={"accuracy": 10.0})}
    write_run(tmp_path / "begun", recipe("rigl", 0.9, 0, allocation="global"), events=[epoch])
    quality = over_time(tmp_path)["quality"]
    assert quality.columns[1:] == ["rigl:global 0.9", "rigl:global unfinished 0.9"]
    assert quality.rows == [[1, 51.0, 10.0], [2, 52.0, None], [3, 53.0, None]]


# Quality and cost


def test_one_sparsity_has_a_line_for_each_row_the_best_at_the_top(tmp_path: Path) -> None:
    for method, score in {"gmp": 87.0, "dense": 89.0, "rigl": 88.0}.items():
        write(tmp_path / method, method, score)
    chart = frontiers(tmp_path)["quality-sparsity"]
    assert chart.layout["yaxis"]["categoryarray"] == ["gmp:global 0.9", "rigl:global 0.9", "dense"]  # from the bottom
    assert [(trace["x"], trace["y"]) for trace in chart.data] == [
        ([89.0], ["dense"]),
        ([88.0], ["rigl:global 0.9"]),
        ([87.0], ["gmp:global 0.9"]),
    ]
    assert [shape["x0"] for shape in chart.layout["shapes"]] == [89.0]


def test_several_sparsities_are_an_axis(tmp_path: Path) -> None:
    for sparsity, seed in [(sparsity, seed) for sparsity in (0.8, 0.95) for seed in range(3)]:
        write(tmp_path / f"{sparsity}-{seed}", "gmp", 100 * sparsity, seed, sparsity)
    chart = frontiers(tmp_path)["quality-sparsity"]
    assert chart.layout["xaxis"]["tickvals"] == [0.8, 0.95]  # not a rounded mean over seeds
    assert (chart.data[0]["x"], chart.data[0]["y"]) == ([0.8, 0.95], [80.0, 95.0])


def test_peak_live_weights_are_the_counted_ones(tmp_path: Path) -> None:
    write(tmp_path / "a", "rigl", peak_alive=700)
    assert frontiers(tmp_path)["quality-peak-live-weights"].data[0]["x"] == [0.7]
    write(tmp_path / "b", "gmp")  # which has not counted them
    assert [trace["name"] for trace in frontiers(tmp_path)["quality-peak-live-weights"].data] == ["rigl:global"]


# Looks


def test_look_of_a_row_is_the_same_in_all_charts(tmp_path: Path) -> None:
    for method in ("rigl", "gmp", "set"):
        for sparsity in (0.8, 0.9):
            write(tmp_path / f"{method}{sparsity}", method, sparsity=sparsity)
    looks: dict[str, set[Any]] = {}
    for chart in [*over_time(tmp_path).values(), *frontiers(tmp_path).values()]:
        for trace in chart.data:
            looks.setdefault(trace["legendgroup"], set()).add((trace["line"]["color"], trace["marker"]["symbol"]))
    assert set(looks) == {"rigl:global", "gmp:global", "set:global"}
    assert all(len(found) == 1 for found in looks.values())
    assert len({look[0] for found in looks.values() for look in found}) == 3


def test_no_two_of_all_methods_and_their_controls_look_alike(tmp_path: Path) -> None:
    sparse = [name for name in methods.METHODS if name != "dense"]
    for method in sparse:
        write(tmp_path / method, method)
    for control in ("start", "peak"):
        made = {"options": {"control": control}, "allocation": "global"}
        write(tmp_path / control, "gradual_gap", recipe=made)
    rows = only_group(tmp_path).sparse
    looks = {(style.colour, style.symbol) for style in map(Styles(rows).of, rows)}
    assert len(looks) == len(rows) == len(sparse) + 2
    controls = [row.name for row in rows if is_control(row)]
    assert controls == ["gradual_gap:global control=peak", "gradual_gap:global control=start"]
