"""experiments/scale.md: its tables are those of the script, whose formulas meet what was measured."""

import runpy
from typing import Any

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def scale() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "experiments" / "scale.py"))


def test_the_page_quotes_every_table(scale: dict[str, Any]) -> None:
    page = (ROOT / "experiments" / "scale.md").read_text()
    for table in scale["TABLES"].values():
        assert "\n".join(table()) in page


def test_the_short_table_is_a_part_of_the_long_one(scale: dict[str, Any]) -> None:
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in scale["TABLES"]["memory"]()]
    short = ["| " + " | ".join([row[0], *row[2:5]]) + " |" for row in rows if row[1] == "64"]
    assert len(short) == 3
    assert "\n".join(short) in (ROOT / "docs" / "sharding.md").read_text()


def test_the_formulas_are_within_an_eighth_of_what_was_measured(scale: dict[str, Any]) -> None:
    ratios = [float(line.split("|")[-2]) for line in list(scale["checked"]())[2:]]
    assert len(ratios) == 7
    assert all(7 / 8 < ratio < 9 / 8 for ratio in ratios)


def test_stored_weights_are_the_dense_part_and_the_live_ones_of_the_others(scale: dict[str, Any]) -> None:
    assert scale["Setting"](0.9, kappa=4).live == pytest.approx(0.325)
    assert scale["Setting"]().live == 1


def test_a_rank_receives_what_the_others_hold(scale: dict[str, Any]) -> None:
    model, setting = scale["Model"]("tiny", 1, 10), scale["Setting"](0.9, kappa=4, ranks=4)
    assert scale["gathered_bytes"](model, setting) == pytest.approx(8 * 1200 * 0.325 * 3 / 4)
    assert scale["gathered_bytes"](model, scale["Setting"]()) == 0
