"""Deploying: sparse models that run faster, on CPUs and for decoding on GPUs.

api.py              `deploy` and `load_deployed`
deployed.py         the model that they return, and its folder; layer_table.py: a table of how each layer runs
example.py          the example that a model is deployed with, and calls of the model
skeleton.py         a model without its sparse weights, and the weights as matrices
parts.py            modules that run as programs, one for each input shape, and single linear layers
graph/              turns a module and an example into a program
cpu/                the kernels in C++, and layers that run on them
cuda/               sparse linear layers for decoding on GPUs
"""
