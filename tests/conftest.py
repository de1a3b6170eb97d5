"""Settings for all tests: one thread (the tensors are tiny), no time limit on a single example, one user of ports."""

import pytest
import torch
from hypothesis import settings

collect_ignore_glob = ["*/conftest.py"]  # they hold no doctests, and several modules of one name cannot be imported
torch.set_num_threads(1)
settings.register_profile("growprune", deadline=None, max_examples=50)
settings.load_profile("growprune")

WITH_PORTS = {
    *("test_compact_ddp", "test_distributed", "test_replicas", "test_starting", "test_benchmarks", "test_exploration"),
    "test_transformers_ddp",
    "test_lightning_ddp",
    "test_report_browser",  # which meets its browser there
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes which meet at a port go to one worker: a free port is free only until it is taken."""
    for item in items:
        if item.path.stem in WITH_PORTS:
            item.add_marker(pytest.mark.xdist_group("ports"))
