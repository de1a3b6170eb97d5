"""What docs/pretrained.md says beside its code, which test_blocks.py runs: commands, lengths and tables."""

from __future__ import annotations

import re

from paths import ROOT

from growprune.engine.override import override, parse_settings
from growprune.recipes import RECIPES

PAGE = (ROOT / "docs" / "pretrained.md").read_text()


def test_every_command_names_a_recipe_and_settings_that_exist() -> None:
    commands = re.findall(r"^growprune train (\S+) ([^#\n]*)", PAGE, re.M)
    assert len(commands) == 2
    for name, rest in commands:
        override(RECIPES[name](), parse_settings(re.findall(r"--set (\S+)", rest)))


def test_twelve_lines_load_prune_retrain_and_generate() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.split("## Load, prune, retrain, generate")[1], re.S)[0]
    assert "These 12 lines take" in PAGE
    assert len(code.splitlines()) == 12
    assert "from_pretrained" in code.splitlines()[0]
    assert ".generate(" in code.splitlines()[-1]


def test_there_is_a_place_for_the_table() -> None:
    assert re.search(r"<!-- table: begin -->\n.+\n<!-- table: end -->", PAGE, re.S)
