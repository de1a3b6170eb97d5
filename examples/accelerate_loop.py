"""A loop of one's own with accelerate, 90 % sparse: on one device, or `accelerate launch` it on several.

pip install '.[transformers]'
python accelerate_loop.py --out /tmp/run --stop-after 30    # as if it were killed
python accelerate_loop.py --out /tmp/run --resume           # goes on to the same bits
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import growprune as gp
from growprune.integrations.accelerate import keep_in_checkpoints

EPOCHS, BATCH = 6, 32


def make_data(size: int = 320) -> TensorDataset:
    """Points in two rings."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(size, 2, generator=draw)
    return TensorDataset(points, (points.norm(dim=1) > 1.2).long())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="accelerate_run")
    parser.add_argument("--stop-after", type=int, default=-1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--storage", default="masked", help="compact works in one process")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    loader = DataLoader(make_data(), BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    sparsifier = gp.sparsify(
        model, optimizer, sparsity=0.9, iterations=EPOCHS * len(loader), storage=options.storage, parts=2
    )
    keep_in_checkpoints(accelerator, sparsifier)
    if options.resume:
        accelerator.load_state(options.out)

    first = sparsifier.cursor.iteration // len(loader)
    for epoch in range(first, EPOCHS):
        done = sparsifier.cursor.iteration % len(loader) if epoch == first else 0
        for x, y in accelerator.skip_first_batches(loader, done):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            if sparsifier.cursor.iteration == options.stop_after:
                accelerator.save_state(options.out)
                return
    accelerator.print(f"loss {loss.item():.6f}, {sparsifier}")


if __name__ == "__main__":
    main()
