"""Running sparse models: kernels that are built on the machine they run on, and what stands in for them elsewhere.

    native/      the kernels, C++
    build.py     makes a library of them at first use, and keeps it
    library.py   that library as Python sees it
    matrix.py    a sparse matrix as the kernels want it
    geometry.py  which columns a layer reads and writes
    layer.py     a prepared layer, on the kernels; torch_layers.py: on torch's CSR, or dense
    pooling.py   pooling in the same layout
    tuning.py    which tile suits a layer on this machine, by measuring

Activations are *feature-major*: a matrix with a row for each feature or channel, and a column for each token or, of
images, for each (image, row, column), `[channels][batch * height * width]`.
"""
