"""A plain torch loop, 90 % sparse: stop it, resume it to the same bits, save the sparse model, load it.

    python examples/own_loop.py --out runs/own                     # all of it
    python examples/own_loop.py --out runs/own --stop-after 50     # as if it were killed ...
    python examples/own_loop.py --out runs/own --resume            # ... and resumed

Takes seconds on a CPU, and needs nothing but growprune. The data are made up: is a point inside a ring?
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import growprune as gp

EPOCHS, BATCH, SIZE = 30, 64, 640


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def points(size: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    radius = x.norm(dim=1)
    return x, ((radius > 0.7) & (radius < 1.6)).long()


def batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
    """The order of an epoch depends on its number alone, so that a resumed loop sees the same batches."""
    x, y = points(SIZE, seed=0)
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(epoch))
    return [(x[indices], y[indices]) for indices in order.split(BATCH)]


def train(model: nn.Module, out: Path, *, resume: bool, stop_after: int) -> gp.Sparsifier:
    per_epoch = len(batches(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.9, iterations=EPOCHS * per_epoch)
    done = 0
    if resume:
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        sparsifier.load_state_dict(state["sparsifier"])
        done = state["done"]

    for epoch in range(done // per_epoch, EPOCHS):
        for x, y in batches(epoch)[done % per_epoch :]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()  # prunes and grows when it is due
            done += 1
            if done == stop_after:
                torch.save({"sparsifier": sparsifier.state_dict(), "done": done}, out / "checkpoint.pt")
                return sparsifier
    return sparsifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/own"))
    parser.add_argument("--stop-after", type=int, default=-1)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sparsifier = train(Net(), options.out, resume=options.resume, stop_after=options.stop_after)
    print(sparsifier)
    if not sparsifier.is_finished:
        return
    path = options.out / "model.safetensors"
    sparsifier.save(path)
    print(sparsifier.summary())

    model = Net().eval()  # somewhere else, later: a plain model that holds zeros
    gp.load(path, model)
    x, y = points(1000, seed=1)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"{100 * accuracy:.1f} % right; {path} has {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
