"""Tables that come from stored runs of the laptop suite, and the suite itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module("defaults")


def test_the_tables_of_the_second_edition_are_those_of_the_stored_runs(defaults: Any) -> None:
    assert defaults.PAGE.read_text() == defaults.page(), "run python experiments/defaults.py --write"


def test_runs_are_picked_by_settings_that_are_said_or_usual(defaults: Any) -> None:
    runs = [
        {"cell": "cifar10", "name": "gmp", "seed": 1, "settings": {"optimizer.lr": "0.4"}},
        {"cell": "cifar10", "name": "gmp", "seed": 0, "settings": {"optimizer.lr": "0.4", "cost_power": "0.1"}},
        {"cell": "cifar10", "name": "gmp", "seed": 0, "settings": {"optimizer.lr": "0.4", "clip": "1"}},
        {"cell": "cifar10", "name": "gmp", "seed": 2, "settings": {"optimizer.lr": "0.2"}},
    ]
    assert defaults.pick(runs, "cifar10", "gmp", "0.4") == [runs[2], runs[0]]
    assert defaults.pick(runs, "cifar10", "gmp", "0.4", cost_power="0.1") == [runs[1]]
