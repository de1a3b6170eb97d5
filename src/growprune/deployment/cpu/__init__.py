"""Sparse layers on a CPU: kernels in C++ that are built on the machine they run on.

    native/      the kernels
    library.py   builds them at first use, keeps the library, and calls it
    matrix.py    a sparse matrix as the kernels want it
    geometry.py  which columns a layer reads and writes
    prepared.py  layers and pools, ready to run: on the kernels, or dense in torch
    tuning.py    which of them is fastest here

Activations are *feature-major*: a matrix with a row for each feature or channel, and a column for each token or, of
images, for each (image, row, column), `[channels][batch * height * width]`.
"""
