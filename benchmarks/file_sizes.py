"""How large the files of a sparse model are, with and without gzip. python benchmarks/file_sizes.py

ResNet-18 of half the width, new weights pruned by magnitude, the first convolution and the classifier dense. Trained
weights take the same bytes, but for what gzip finds in them.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import growprune as gp
from growprune.recipes import RECIPES

SPARSITIES = (0.8, 0.9, 0.95, 0.98)
FORMS = [*((sparsity, "unstructured") for sparsity in SPARSITIES), (0.9, "1x8"), (0.5, "2:4")]


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return replace(RECIPES["classification-cifar10/dense"]().task, width=width).build_model()  # type: ignore[call-arg]


def megabytes(path: Path) -> str:
    content = path.read_bytes()
    return f"{len(content) / 1e6:.2f} MB, gzip {len(gzip.compress(content, 6)) / 1e6:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=32)
    width = parser.parse_args().width
    with tempfile.TemporaryDirectory() as folder:
        dense, ours = Path(folder) / "dense.safetensors", Path(folder) / "sparse.safetensors"
        for dtype in (torch.float32, torch.bfloat16):
            save_file(build(width).to(dtype).state_dict(), dense)
            print(f"{dtype}, no zeros: dense file {megabytes(dense)}")
            for sparsity, pattern in FORMS:
                model = build(width)
                sparse = gp.SparseModel(model, sparsity=sparsity, pattern=pattern, keep_dense=["conv1", "fc"])
                sparse.prune()
                model.to(dtype)
                gp.save(sparse, ours)
                save_file(model.state_dict(), dense)
                print(f"{dtype}, {sparsity:.0%}, {pattern}: dense {megabytes(dense)}; sparse {megabytes(ours)}")


if __name__ == "__main__":
    main()
