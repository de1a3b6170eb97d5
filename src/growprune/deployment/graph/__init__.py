"""Turn a module and an example into a program of steps, in four passes.

trace.py       what the module does with the example, as a graph; constants and identities are folded
fuse.py        layers with their BatchNorm, bias, residual and activation
places.py      where values lie in memory, and views of them
lower.py       the steps that compute each value, and where it lies; operations.py: steps beside layers
program.py     the steps, bound to one piece of memory
"""
