"""Sparse layers for decoding on a GPU: products with 1 to 16 samples, where a dense layer waits for its weights.

    products.py         matrices cut for the lanes of a warp, products, and the sparse layer that uses them
    product_kernels.py  the kernels, in Triton
    tuning.py           times layers on this GPU, sparse and dense, and puts the faster ones into a copy of a model
    graphs.py           CUDA graphs, for decoding and for timing

Activations are (batch, features), as in torch.
"""

from growprune.deployment.cuda.graphs import graphed as graphed
