"""Weights & Biases: the numbers of each epoch, over the iterations of the run.

The W&B run has the name of the folder, and an id in `wandb.json`, so that a resumed run continues it. Logged rows
cannot be removed there, but an epoch that is trained again gives the same numbers and is logged once. Without a login,
or with WANDB_MODE=offline, nothing leaves the machine: `wandb sync` uploads it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from growprune.errors import need
from growprune.files.disk import plain_file, replacing
from growprune.logs.rows import Row

STEP = "iteration"
NOT_SHOWN = ("stage", "branch")


class Writer:
    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "wandb.json"
        self._module = need("wandb", "wandb", "--log wandb needs an extra")
        self._run: Any = None
        self._about: dict[str, Any] = {}

    def write(self, rows: Sequence[Row]) -> None:
        self._open()
        logged = {tuple(key) for key in self._about["logged"]}
        for row in rows:
            if row.key in logged:
                continue
            below = "" if row.branch is None else f"branch-{row.branch}/"
            shown = {name: value for name, value in row.figures.items() if value is not None and name not in NOT_SHOWN}
            self._run.log({name if name == STEP else below + name: value for name, value in shown.items()})
            self._about["logged"].append(row.key)
        self._write()

    def _open(self) -> None:
        """Start the run in W&B, or continue it."""
        if self._run is not None:
            return
        self._about = {"id": secrets.token_hex(4), "logged": []} | _json(self._file)
        self._write()
        is_online = self._module.setup().settings.mode == "online"
        has_login = is_online and self._module.login(prompt=False, verify=False)
        self._run = self._module.init(
            id=self._about["id"],
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "growprune"),
            name=os.environ.get("WANDB_NAME", self._folder.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(self._folder)),
            config=_json(self._folder / "recipe.json").get("recipe", {}),
            mode="offline" if is_online and not has_login else None,  # without a login, init would ask for one
            settings=self._module.Settings(console="off"),  # progress draws on the same terminal
        )
        self._run.define_metric("*", step_metric=STEP)

    def _write(self) -> None:
        with replacing(self._file) as file:
            file.write(json.dumps(self._about).encode())

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON file. Empty if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return dict(json.loads(plain_file(path).read_text()))
    return {}
