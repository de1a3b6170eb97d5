"""The command line in processes that fork from one which has loaded torch: each starts seconds sooner."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PRELOAD = ["growprune.engine", "toy", "torch._dynamo"]
"""What a process has that others fork from; the last is what an optimizer's first step imports. None of it is used."""


def growprune(*arguments: str, cwd: Path | None, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(target=_become, args=(arguments, cwd, dict(environment), out, err))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def _become(arguments: tuple[str, ...], cwd: Path | None, environment: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd or Path.cwd())
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.argv = ["growprune", *arguments]
    sys.path[0] = ""  # as if started here with -m

    from growprune.cli import main

    main()
