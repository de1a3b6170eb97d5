"""`growprune train` loads what it uses, and nothing of the other verbs or of other tasks."""

import subprocess
import sys

import pytest

TRAIN = """
import sys
from growprune.cli import app
app(sys.argv[1:], standalone_mode=False)
print("loaded", *sorted(name for name in sys.modules if name.startswith("growprune.")))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The modules of growprune that a process has after it trained a tiny recipe."""
    out = tmp_path_factory.mktemp("train") / "run"
    command = [sys.executable, "-c", TRAIN, "train", "digits/tiny", "--out", str(out)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (out / "result.json").exists()
    word, *names = text.splitlines()[-1].split()
    assert word == "loaded"
    return [name.removeprefix("growprune.") for name in names]


@pytest.mark.parametrize("package", ["compare", "deployment", "integrations", "report", "sharding"])
def test_training_loads_nothing_of_other_packages(package: str, loaded: list[str]) -> None:
    assert [name for name in loaded if name.split(".")[0] == package] == []


def test_training_loads_nothing_of_other_verbs_tasks_and_recipes(loaded: list[str]) -> None:
    assert not {"cli.machine", "engine.cost", "logs.csv_log"} & set(loaded)
    assert [name for name in loaded if name.startswith(("tasks.", "recipes."))] == [
        "recipes.digits",
        "tasks.digits",
        "tasks.task",
    ]
