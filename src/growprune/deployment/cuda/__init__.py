"""Sparse layers for decoding on a GPU: matrices times 1 to 16 samples, where a dense layer waits for its weights.

    entries.py         live weights by rows, of a dense weight and mask, of compact storage, of a file's values and bits
    lanes.py           the formats: 16-bit columns, or 8-bit offsets, laid out for the lanes of a warp
    bitmask.py         ... or one bit a weight, for tensor cores
    triton_kernels.py  the kernels; products.py starts them
    linear.py          prepared layers: sparse, dense, 2:4
    choosing.py        times them on this GPU, and keeps the fastest; timing.py: how
    swapping.py        puts them into a model
    layers.py          the sparse layers of a model, and a copy of it without them
    deploying.py       what `deploy` does for a GPU
    graphs.py          CUDA graphs: to decode with, and to time with

Activations are (batch, features), as torch has them.
"""

from growprune.deployment.cuda.choosing import Choice, Timed, choose, table
from growprune.deployment.cuda.entries import Entries, from_bits, from_dense, from_mask
from growprune.deployment.cuda.graphs import Graphed, graphed
from growprune.deployment.cuda.linear import DenseLinear, SemiStructuredLinear, SparseLinear
from growprune.deployment.cuda.products import product
from growprune.deployment.cuda.swapping import swap_linears
from growprune.deployment.cuda.timing import microseconds

__all__ = [
    "Choice",
    "DenseLinear",
    "Entries",
    "Graphed",
    "SemiStructuredLinear",
    "SparseLinear",
    "Timed",
    "choose",
    "from_bits",
    "from_dense",
    "from_mask",
    "graphed",
    "microseconds",
    "product",
    "swap_linears",
    "table",
]
