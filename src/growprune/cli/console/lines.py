"""A run as it goes, in plain lines, where there is no terminal."""

from __future__ import annotations

from growprune.cli.console.screen import err, metrics_text
from growprune.engine import Event


def show_line(title: str, event: Event) -> None:
    match event:
        case {"event": "phase"} if event["epochs"] or event["index"] in (0, event["last"]):
            length = f"{event['epochs']} epochs" if event["epochs"] else f"{event['iterations']} iterations"
            say = f"stage {event['stage']}: {event['edits']}; {event['alive']:,} alive, {length}"
        case {"event": "epoch"}:
            validation = f", {metrics_text(event['validation'])} (validation)" if "validation" in event else ""
            say = f"epoch {event['epoch']}: loss {event['loss']:.4f}{validation}"
        case {"event": "warning"}:
            say = f"warning: {event['message']}"
        case {"event": "resumed"}:
            say = f"resumed from checkpoint {event['number']}"
        case _:
            return
    who = [title, f"rank {event['rank']}, branch {event['branch']}" if "rank" in event else ""]
    err.print(": ".join(filter(None, [*who, say])), markup=False, highlight=False, soft_wrap=True)
