"""Running sparse models: kernels that are built on the machine they run on, and what stands in for them elsewhere.

    native/      the kernels, C++
    build.py     makes a library of them at first use, and keeps it
    library.py   that library as Python sees it
    matrix.py    a sparse matrix as the kernels want it
    geometry.py  which columns a layer reads and writes
    layer.py     a prepared layer, on the kernels; torch_layers.py: on torch's CSR, or dense
    pooling.py   pooling in the same layout
    tuning.py    which tile suits a layer on this machine, by measuring

    skeleton.py  a model without its sparse weights, and these as matrices
    trace.py     what it does with an example, as a graph; then, one after the other (compiling.py),
    fold.py      constants and identities
    fuse.py      layers with their BatchNorm, bias, residual and activation
    lower.py     where each value lies (strides.py, views.py) and which steps bring it there (steps.py; known.py and
                 attention.py are what is done feature-major beside layers)
    measure.py   each layer sparse or dense, whichever is faster here; table.py: what came of it
    arena.py     memory for all values; program.py: the steps bound to it
    parts.py     a module that runs as programs, one for each shape; apart.py: a model part by part
    deployed.py  `deploy`, and what it returns; saving.py: folders of that
    cuda/        the same for decoding on GPUs, layer by layer
    bench.py     whole models against other engines, in processes (bench_worker.py)

Activations are *feature-major*: a matrix with a row for each feature or channel, and a column for each token or, of
images, for each (image, row, column), `[channels][batch * height * width]`.
"""
