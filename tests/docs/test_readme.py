"""What README and the pages name exists."""

import importlib
import re
import shlex

import pytest
from paths import ROOT
from torch.distributed.run import get_args_parser

from growprune.engine.cost import estimate
from growprune.engine.override import override, parse_settings
from growprune.recipes import RECIPES

PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_command_names_a_recipe_and_settings_that_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    commands = re.findall(r"^ *(?:torchrun .*-m (?:-- )?)?growprune (plan|train) (\S+)([^#\n]*)", text, re.M)
    assert len(commands) > 20
    for verb, name, rest in commands:
        if ".py:" in name:  # a file of the reader's
            continue
        recipe = override(RECIPES[name](), parse_settings(re.findall(r"--set (\S+)", rest)))
        if verb == "plan":
            assert estimate(recipe).costs


def torchrun_commands() -> list[str]:
    """The lines of the pages that start growprune by torchrun, in one line each, without what a shell would put in."""
    text = re.sub(r"\\\n *", "", "\n".join(page.read_text() for page in PAGES))
    found = re.findall(r"^ *(?:srun )?(torchrun [^\n]*-m (?:-- )?growprune [^#\n]*)", text, re.M)
    return [re.sub(r"\$\([^)]*\)|\$\w+", "1", line).strip() for line in found]


@pytest.mark.parametrize("line", torchrun_commands())
def test_torchrun_leaves_to_growprune_what_is_for_growprune(line: str) -> None:
    own, _, rest = line.partition("growprune ")
    found = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (found.module, found.training_script) == (True, "growprune")
    assert found.training_script_args == shlex.split(rest)
    alone = get_args_parser().parse_args([*shlex.split(own)[1:], "growprune"])
    assert found.log_dir == alone.log_dir is None


def test_every_file_that_is_linked_exists() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for path in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name} links {path}"


def test_every_public_name_exists_and_has_a_docstring() -> None:
    package = importlib.import_module("growprune")
    for name in package.__all__:
        assert getattr(package, name).__doc__, name
    assert sorted(package.__all__) == sorted(package._HOME)
