"""Settings for all tests: one thread (the tensors are tiny), and no time limit on a single example."""

import torch
from hypothesis import settings

collect_ignore_glob = ["*/conftest.py"]  # they hold no doctests, and several modules of one name cannot be imported
torch.set_num_threads(1)
settings.register_profile("growprune", deadline=None, max_examples=50)
settings.load_profile("growprune")
