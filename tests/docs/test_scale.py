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
    assert "\n".join(short) in (ROOT / "docs" / "distributed.md").read_text()


def test_the_formulas_are_within_an_eighth_of_what_was_measured(scale: dict[str, Any]) -> None:
    ratios = [float(line.split("|")[-2]) for line in list(scale["checked"]())[2:]]
    assert len(ratios) == 7
    assert all(7 / 8 < ratio < 9 / 8 for ratio in ratios)
