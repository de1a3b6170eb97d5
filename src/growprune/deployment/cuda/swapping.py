"""`deploy(..., device="cuda")`: a model whose sparse linear layers are each the fastest that this GPU can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from growprune.deployment.cuda.linear import SparseLinear
from growprune.deployment.cuda.products import MOST_SAMPLES
from growprune.deployment.cuda.tuning import DENSE, FORMATS, Choice, choose
from growprune.deployment.deployed import Replaced, Swapped
from growprune.deployment.example import Example, first_inputs, of_the_example, restored
from growprune.deployment.layer_table import Row
from growprune.deployment.skeleton import Skeleton, nothing_like
from growprune.errors import warn


def deploy_linears(
    skeleton: Skeleton, example: Example, *, device: torch.device, seconds: float, known: Sequence[Row]
) -> Swapped:
    """Move a skeleton's module to the device, and swap its sparse linear layers.

    The example shows how many samples each layer is called with. A layer that it does not call stays in torch.

    Args:
        seconds: how long layers may be timed, about; with 0, whatever is sparse runs sparse.
        known: what was measured before.
    """
    module = skeleton.module
    skeleton.fill_in()
    module.to(device).requires_grad_(False)
    with restored(module.modules()), of_the_example():
        on_device = example.mapped(lambda x: x.to(device) if isinstance(x, Tensor) else x)
        inputs = first_inputs(module, on_device)
    swapped, keys, before = Swapped(module), {}, {row.layer: row for row in known}
    for name, matrix in skeleton.matrices.items():
        path = name.removesuffix(".weight")
        plain: Any = module.get_submodule(path)
        given = inputs.get(path)
        x = None if given is None else next(leaf for leaf in given.leaves if isinstance(leaf, Tensor))
        samples = None if x is None else x.numel() // max(1, x.shape[-1])
        about = matrix.rows, matrix.columns, round(matrix.sparsity, 1), plain.weight.dtype
        keys[path] = *about, plain.bias is not None, samples
    share, measured = seconds / max(1, len(set(keys.values()))), dict[object, Choice]()
    for name, matrix in skeleton.matrices.items():
        path = name.removesuffix(".weight")
        owner_path, _, local = path.rpartition(".")
        owner, samples = module.get_submodule(owner_path), keys[path][-1]
        plain = module.get_submodule(path)
        row = Row(path, f"{matrix.rows}x{matrix.columns} x {samples or '-'}", matrix.sparsity, None, None, "torch")
        if samples is None:
            swapped.in_torch.append(f"{path} (the example does not call it)")
            swapped.rows.append(row)
            continue
        entries = matrix.to(device, plain.weight.dtype)
        bias = None if plain.bias is None else plain.bias.detach()
        if path in before:
            row = before[path]
        elif seconds <= 0:  # the likeliest
            row = replace(row, choice="sparse", format="offsets")
        else:
            if (key := keys[path]) not in measured:
                measured[key] = choose(entries, bias=bias, batch=samples, seconds=share)
                for kind, why in measured[key].failed.items():
                    warn(f"{path} was not timed as {kind}: {why}")
            found = measured[key]
            choice = DENSE if found.kind == DENSE else "sparse"
            sparse_ms = None if found.sparse_us is None else found.sparse_us / 1e3
            row = replace(row, choice=choice, format=found.kind, tile=found.tile)
            row = replace(row, dense_ms=found.dense_us / 1e3, sparse_ms=sparse_ms)
        swapped.rows.append(row)
        if row.format in FORMATS:
            few, laid_out = min(samples, MOST_SAMPLES), FORMATS[row.format](entries)
            part = SparseLinear(laid_out, bias=bias, tile=row.tile, samples=few)  # type: ignore[arg-type]
            owner._modules[local] = part
            swapped.replaced.append(Replaced(owner, local, part, plain))
            plain.weight.data = nothing_like(plain.weight.detach(), plain.weight.shape)
    return swapped
