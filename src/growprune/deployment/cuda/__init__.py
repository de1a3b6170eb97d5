"""Sparse layers for decoding on a GPU: matrices times 1 to 16 samples, where a dense layer waits for its weights.

    formats.py          live weights by rows, for the lanes of a warp (16-bit columns or 8-bit offsets), or as a bitmask
    product_kernels.py  the kernels, in Triton; products.py starts them
    linear.py           prepared layers: sparse, dense, 2:4
    tuning.py           times them on this GPU, and keeps the fastest
    fusing.py           computes layers that read the same tensor as one
    swapping.py         puts them into a copy of a model
    graphs.py           CUDA graphs: to decode with, and to time with

Activations are (batch, features), as torch has them.
"""

from growprune.deployment.cuda.graphs import Graphed, graphed

__all__ = ["Graphed", "graphed"]
