"""What `growprune doctor` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from growprune.cli.console.screen import out
from growprune.cli.doctor import Finding

COLOURS = {"ok": "green", "absent": "dim", "slow": "yellow", "broken": "red"}


def show_findings(findings: Sequence[Finding]) -> None:
    """A line each, with what to do below it, and how many there are of each kind."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text).append(f"\n-> {finding.do}" if finding.do else "", style="bold")
        table.add_row(Text(finding.state, style=COLOURS[finding.state]), finding.name, text)
    out.print(table, highlight=False)
    counts = Counter(finding.state for finding in findings)
    wrong = [f"{counts[state]} {state}" for state in ("broken", "slow") if counts[state]]
    out.print(f"{', '.join(wrong)}: see above" if wrong else "nothing is broken, and nothing slow was found")
