"""Sparse layers for decoding on a GPU: matrices times 1 to 16 samples, where a dense layer waits for its weights.

    entries.py         live weights by rows, of a dense weight and mask, of compact storage, of a file's values and bits
    lanes.py           the formats: 16-bit columns, or 8-bit offsets, laid out for the lanes of a warp
    bitmask.py         ... or one bit a weight, for tensor cores
    triton_kernels.py  the kernels; products.py starts them
    linear.py          prepared layers: sparse, dense, 2:4
    choosing.py        times them on this GPU, and keeps the fastest
    swapping.py        puts them into a model
    timing.py          CUDA graphs: to time with, and to decode with

Activations are (batch, features), as torch has them.
"""

from growprune.inference.cuda.choosing import Choice, Timed, choose, choose_all, table
from growprune.inference.cuda.entries import Entries, from_bits, from_dense, from_mask
from growprune.inference.cuda.linear import DenseLinear, SemiStructuredLinear, SparseLinear
from growprune.inference.cuda.products import product
from growprune.inference.cuda.swapping import swap_linears
from growprune.inference.cuda.timing import Captured, microseconds

__all__ = [
    "Captured",
    "Choice",
    "DenseLinear",
    "Entries",
    "SemiStructuredLinear",
    "SparseLinear",
    "Timed",
    "choose",
    "choose_all",
    "from_bits",
    "from_dense",
    "from_mask",
    "microseconds",
    "product",
    "swap_linears",
    "table",
]
