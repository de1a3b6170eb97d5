"""Make the folder that server.py serves: a ResNet-18 for images of 32 x 32, 90 % sparse, deployed on this machine.

python examples/serve/make.py served                                  # new weights, to try it without data
python examples/serve/make.py served --weights runs/mine/model.safetensors   # of a run of classification-cifar10
"""

import argparse

import torch

import growprune as gp
from growprune.tasks.classification.resnet import ResNet

SHAPE = (3, 32, 32)


def build(width: int = 64) -> torch.nn.Module:
    """The model whose weights are served; put your own here."""
    return ResNet("resnet18", num_classes=10, width=width, stem="cifar").eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--weights", help="a sparse file; new weights, pruned, if not given")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10, help="how long layers are timed")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, example = build(options.width), torch.randn(1, *SHAPE)
    if options.weights:
        sparse = gp.load(options.weights, model)
    else:
        sparse = gp.SparseModel(model, sparsity=0.9, keep_dense=["conv1", "fc"])
        sparse.prune()
    deployed = gp.deploy(sparse, example, seconds=options.seconds)
    print(deployed.table)
    deployed.save(options.folder)


if __name__ == "__main__":
    main()
