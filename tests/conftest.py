"""Settings for all tests: one thread (the tensors are tiny), and no time limit on a single example."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("growprune", deadline=None, max_examples=50)
settings.load_profile("growprune")
