"""The timeline of a page: how dense each part, or the whole model, is when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_runs import finished, phase, recipe, result, row, write_bare, write_run

from growprune.report.groups import Group, group_runs
from growprune.report.schedule import parse_edits, schedule_chart
from growprune.runs import find_runs

CYCLIC = ("prune S1 to 0.8, grow S0 to dense", "prune S0 to 0.8, grow S1 to dense", "prune S1 to 0.8")


def only_group(path: Path) -> Group:
    (group,) = group_runs(find_runs([path]))
    return group


def stretches(group: Group) -> dict[str, list[tuple[Any, ...]]]:
    chart = schedule_chart(group)
    assert chart is not None
    found: dict[str, list[tuple[Any, ...]]] = {}
    for label, start, end, density in chart.rows:
        found.setdefault(str(label), []).append((start, end, density))
    return found


def test_the_timeline_of_a_log_has_every_edit(tmp_path: Path) -> None:
    made = recipe("cyclic_gap", 0.8, 0)
    edits = ("prune all to 0.8 by random", *CYCLIC)
    events = [phase(n, n, each, 20 if n else 0, 500) for n, each in enumerate(edits)]
    write_run(tmp_path / "a", made, result(made, 88.0, [row(6, 3, 200)]), events)
    assert stretches(only_group(tmp_path / "a")) == {
        "S0": [(0, 2, 1.0), (2, 6, 0.2)],
        "S1": [(0, 2, 0.2), (2, 4, 1.0), (4, 6, 0.2)],
    }


def test_the_timeline_of_a_bare_result_goes_by_its_epochs(tmp_path: Path) -> None:
    made = recipe("cyclic_gap", 0.8, 0)
    rows = [row(n, n, 500, edits) for n, edits in enumerate(CYCLIC, 1)]
    path = write_bare(tmp_path / "result.json", result(made, 88.0, rows))
    assert stretches(only_group(path)) == {
        "S0": [(0, 1, 1.0), (1, 3, 0.2)],
        "S1": [(0, 1, 0.2), (1, 2, 1.0), (2, 3, 0.2)],
    }


def test_in_a_fork_each_part_is_as_dense_as_where_it_is_trained(tmp_path: Path) -> None:
    made = recipe("parallel_gap", 0.8, 0)
    events = [
        phase(0, 0, "prune all to 0.8 by random", 0, 200),
        phase(1, 1, "grow S0 to dense", 10, 500, branch=0),
        phase(2, 1, "grow S1 to 0.5", 10, 700, branch=1),
        phase(3, 2, "train", 10, 800),
        phase(4, 3, "prune all to 0.8", 20, 200),
    ]
    write_run(tmp_path / "a", made, result(made, 88.0, [row(1, 1, 500, branch=0), row(3, 3, 200)]), events)
    assert stretches(only_group(tmp_path / "a")) == {
        "S0": [(0, 2, 1.0), (2, 4, 0.2)],  # combined, both are as their branches left them, until they are pruned
        "S1": [(0, 2, 0.5), (2, 4, 0.2)],
    }


def test_a_bare_result_with_forks_shows_what_was_pruned_between_them(tmp_path: Path) -> None:
    """Its epochs have no row of a pruning that is not followed by training; the live weights tell of it."""
    made = recipe("parallel_gradual_gap", 0.8, 0)
    rows = [  # 1,000 weights: S0 has 600 of them, S1 400
        row(1, 1, 760, "grow S0 to dense", branch=0),  # with 0.4 of the rest
        row(2, 1, 760, "grow S0 to dense", branch=0),
        row(1, 1, 640, "grow S1 to dense", branch=1),  # a history has one branch after the other
        row(2, 1, 640, "grow S1 to dense", branch=1),
        row(3, 3, 700, "grow S0 to dense", branch=0),  # with 0.25
        row(3, 3, 550, "grow S1 to dense", branch=1),
        row(4, 5, 200),
        row(5, 5, 200),
    ]
    path = write_bare(tmp_path / "result.json", result(made, 88.0, rows))
    assert stretches(only_group(path)) == {"S0": [(0, 3, 1.0), (3, 5, 0.2)], "S1": [(0, 3, 1.0), (3, 5, 0.2)]}


def test_a_method_that_edits_the_whole_model_has_one_row_by_its_live_weights(tmp_path: Path) -> None:
    rows = [
        row(n, n, alive, "prune 0.3 of all, grow all to 0.9 by gradient") for n, alive in ((1, 400), (2, 400), (3, 100))
    ]
    path = finished(tmp_path / "a", "rigl", 0.9, 0, 88.0, rows=rows)
    assert stretches(only_group(path)) == {"whole model": [(0, 2, 0.4), (2, 3, 0.1)]}


def test_an_edit_that_says_how_layers_share_it_names_its_part_alone() -> None:
    edits = parse_edits("prune 0.1 of all spread by ranking, grow S1 to 0.5 spread by live")
    assert [part for _, part, _, _ in edits] == ["all", "S1"]
