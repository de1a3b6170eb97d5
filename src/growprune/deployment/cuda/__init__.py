"""Sparse layers for decoding on a GPU: matrices times 1 to 16 samples, where a dense layer waits for its weights.

    formats.py          live weights by rows, for the lanes of a warp (16-bit columns or 8-bit offsets)
    product_kernels.py  the kernels, in Triton
    products.py         starts them; the sparse layer
    tuning.py           times layers on this GPU, sparse and dense, and puts the fastest into a copy of a model
    graphs.py           CUDA graphs: to decode with, and to time with

Activations are (batch, features), as torch has them.
"""

from growprune.deployment.cuda.graphs import Graphed, graphed

__all__ = ["Graphed", "graphed"]
