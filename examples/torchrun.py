"""A task and two recipes of one's own, on two processes of one machine.

    torchrun --nproc-per-node 2 examples/torchrun.py --out runs/parallel            # P-GaP: each grows another part
    torchrun --nproc-per-node 2 examples/torchrun.py --out runs/cyclic --cyclic     # C-GaP: they share each batch
    python examples/torchrun.py --out runs/alone                                    # P-GaP on one: the same bits

From the command line, which draws progress, saves when interrupted, and can resume:

    torchrun --nproc-per-node 2 -m growprune train examples/torchrun.py:parallel --out runs/p

Takes seconds on a CPU. The data are made up: is a point inside of a ring? docs/distributed.md has several machines.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import growprune as gp
from growprune.tasks import Task


@dataclass(frozen=True)
class Rings(Task):
    batch_size: int = 64
    num_points: int = 640

    metric = "accuracy"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    def example(self) -> Tensor:
        return torch.zeros(1, 2)

    def num_batches(self) -> int:
        return self.num_points // self.batch_size

    def batches(self, *, seed: int, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = points(self.num_points, seed=0)
        order = torch.randperm(self.num_points, generator=torch.Generator().manual_seed(seed))
        for indices in order.split(self.batch_size)[start:]:
            yield x[indices].to(device), y[indices].to(device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, split: str, *, device: torch.device) -> dict[str, float]:
        x, y = points(500, seed=1 if split == "validation" else 2)
        return {"accuracy": 100 * float((model(x.to(device)).argmax(1).cpu() == y).float().mean())}


def points(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    radius = x.norm(dim=1)
    return x, ((radius > 0.7) & (radius < 1.6)).long()


def parallel() -> gp.Recipe:
    """P-GaP: in each of two rounds one process grows S0 and the other S1; then they exchange the parts."""
    return gp.Recipe(
        task=Rings(),
        method=gp.methods.parallel_gap,
        options={"steps": 2, "epochs": 3, "finetune": 12},
        sparsity=0.8,
        parts=gp.contiguous(2),
        keep_dense=("4",),
        optimizer=gp.OptimizerConfig("sgd", lr=0.2, momentum=0.9),
        lr_schedule=gp.LRSchedule("cosine"),
        device="cpu",
    )


def cyclic() -> gp.Recipe:
    """C-GaP: nothing to do in parallel but the examples of each batch, so all processes are replicas of one model."""
    return replace(parallel(), method=gp.methods.cyclic_gap, options={"steps": 4, "epochs": 3, "finetune": 12})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/parallel"))
    parser.add_argument("--cyclic", action="store_true")
    options = parser.parse_args()

    result = gp.train(cyclic() if options.cyclic else parallel(), options.out)
    is_several = torch.distributed.is_initialized()
    if not is_several or torch.distributed.get_rank() == 0:
        totals = result["sparsity"]["totals"]
        print(f"{result['test']['accuracy']:.1f} % right, {totals['alive']} of {totals['prunable']} weights live")
    if is_several:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
