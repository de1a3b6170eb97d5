"""Deploying: sparse models that run faster, on CPUs and for decoding on GPUs.

api.py              `deploy` and `load_deployed`
deployed.py         what they return; deployed_folder.py: folders of it; layer_table.py: how each layer runs
example.py          the example a model is deployed with, and whether the model keeps a state
skeleton.py         a model without its sparse weights, and these as matrices
parts.py            modules that run as programs, one for each shape; the parts of a model that is none
graph/              from a module and an example to a program
cpu/                the kernels in C++, and layers that run on them
cuda/               sparse layers for decoding on GPUs, swapped one by one
"""
