"""Settings for all tests: one thread (the tensors are tiny), no time limit on a single example, one user of ports."""

import ctypes
import functools
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from sharded import Run, ranks

from growprune.engine import building

collect_ignore_glob = ["*/conftest.py"]  # they hold no doctests, and several modules of one name cannot be imported
torch.set_num_threads(1)
settings.register_profile("growprune", deadline=None, max_examples=50)
settings.load_profile("growprune")
building.commit = functools.cache(building.commit)  # asking git twice a run takes as long as some of the runs here

WITH_PORTS = {
    *("test_distributed", "test_replicas", "test_examples", "test_report_browser"),
    *("test_transformers_ddp", "test_lightning_ddp", "test_killed"),  # the last shares a process with the two before
}


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in this hook, too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes which meet at a port go to one worker: a free port is free only until it is taken.

    So do those that look at the site, which is built once, and those of two ranks, which are started once.
    """
    for item in items:
        if item.path.stem in WITH_PORTS:
            item.add_marker(pytest.mark.xdist_group("ports"))
        elif item.path.stem in ("test_docs", "test_docs_browser"):
            item.add_marker(pytest.mark.xdist_group("site"))
        elif item.path.stem in ("test_sharding", "test_sharded_checkpoints"):
            item.add_marker(pytest.mark.xdist_group("ranks"))


class AlternateStack(ctypes.Structure):
    """The C struct stack_t."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def pytest_runtest_teardown() -> None:
    """Run signal handlers on the usual stack again, after a test with OpenVINO.

    Each of its cores (2026.4) sets an alternate stack. Of two, the last to go leaves the stack of the other behind,
    which is unmapped. The next signal with a handler of Python, such as that of a child's end, would kill the process.
    """
    if "openvino" in sys.modules:
        off = 2  # SS_DISABLE
        ctypes.CDLL(None).sigaltstack(ctypes.byref(AlternateStack(None, off, 0)), None)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of garbage, which tests call often, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def on_two() -> Iterator[Run]:
    """Two ranks with a mesh, which run a function."""
    with ranks(2) as run:
        yield run


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as a site, built without a complaint."""
    pytest.importorskip("mkdocs")
    folder, root = tmp_path_factory.mktemp("site"), Path(__file__).parent.parent
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return folder
