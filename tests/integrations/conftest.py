"""What every test here may ask for."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def server() -> Iterator[ProcessPoolExecutor]:
    """A process that loads trainers and trains nothing, so that others can be forked from it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as made:
        yield made
