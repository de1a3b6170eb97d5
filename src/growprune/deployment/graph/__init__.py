"""Turn a module and an example into a program of steps, in four passes.

trace.py       traces the module with the example to a graph, and folds constants and identities
fuse.py        joins each layer with its BatchNorm, bias, residual and activation
places.py      layouts of values in memory, and views of them
lower.py       chooses the steps that compute each value, and its layout; operations.py: steps other than layers
program.py     binds the steps to one piece of memory
"""
