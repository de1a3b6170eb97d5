"""Sparse layers on a CPU: kernels in C++ that are built on the machine they run on.

    native/      the kernels
    library.py   builds them at first use, keeps the library, and calls it
    matrix.py    the sparse matrix format of the kernels
    geometry.py  the columns that a layer reads and writes
    prepared.py  layers and pools that are ready to run, on the kernels or dense in torch
    tuning.py    times layers and chooses the fastest on this machine

Activations are *feature-major*: a matrix with a row for each feature or channel, and a column for each token. Images
have a column for each (image, row, column): `[channels][batch * height * width]`.
"""
