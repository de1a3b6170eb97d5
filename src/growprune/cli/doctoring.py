"""The verb that looks at the machine: doctor."""

from __future__ import annotations

import typer

from growprune.cli.app import AsJson, one_line_errors


@one_line_errors
def doctor(as_json: AsJson = False) -> None:
    """Show versions, devices and kernels, and what is slow here and why. Exit code 1 if something is broken."""
    from growprune.cli import console
    from growprune.cli.doctor import examine, to_dict

    findings = examine()
    console.print_json(to_dict(findings)) if as_json else console.show_findings(findings)
    if to_dict(findings)["is_broken"]:
        raise typer.Exit(1)
