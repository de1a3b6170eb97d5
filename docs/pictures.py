"""Draw the pictures of "How it works" with growprune itself: `python docs/pictures.py`.

- schedule.svg: the plan of `gradual_gap`, applied to a model. Above, a row for each part: the darker, the more of its
  weights are non-zero. Below, the non-zero weights of all parts together. The model has random weights and is not
  trained, so each part keeps the average share when it is pruned.
- part.svg: the weights of one layer before and while it is grown, and after it is pruned back.
- storage.svg: what masked and compact storage hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import growprune as gp
from growprune.plan import Phase

IMAGES = Path(__file__).resolve().parent / "images"
GREY, BLUE, RED = "#808890", "#1f77b4", "#d62728"
WIDTH, HEIGHT, LEFT, RIGHT = 560, 392, 72, 548
"""The width is that of a phone, where the letters must be readable; other screens show it larger."""
ROW, TOP, CURVE, BOTTOM = 30, 46, 214, 330
STEPS, PARTS, ITERATIONS = 16, 4, 640


def densities() -> Iterator[tuple[int, list[float], float]]:
    """Of each phase: its iterations, the share of non-zero weights of each part, and of all."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())])
    parts = gp.Partition.balanced(model, PARTS, keep_dense=())
    sparse = gp.SparseModel(model, sparsity=0.9, allocation="global", keep_dense=())
    every = round(0.75 * ITERATIONS / STEPS)
    for phase in gp.methods.gradual_gap(parts, sparsity=0.9, iterations=ITERATIONS, every=every):
        assert isinstance(phase, Phase)
        sparse.apply(*phase.edits)
        if phase.iterations:
            masks = sparse.masks
            of_parts = [[masks[name] for name in part.tensors if name in masks] for part in parts]
            alive = [sum(int(mask.sum()) for mask in part) for part in of_parts]
            sizes = [sum(mask.numel() for mask in part) for part in of_parts]
            shares = [live / size for live, size in zip(alive, sizes, strict=True)]
            yield phase.iterations, shares, sum(alive) / sum(sizes)


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = GREY, size: int = 15) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def shade(density: float) -> str:
    return f'fill="{BLUE}" fill-opacity="{0.06 + 0.94 * density:.2f}"'


def across(done: float) -> float:
    return LEFT + (RIGHT - LEFT) * done / ITERATIONS


def up(share: float) -> float:
    return BOTTOM - (BOTTOM - CURVE) * share


def legend() -> list[str]:
    body = [text(LEFT, 20, "non-zero weights:")]
    for number, (density, words) in enumerate(((1.0, "all (grown)"), (0.5, "half"), (0.1, "10 %"))):
        x = LEFT + 150 + (0, 122, 200)[number]
        body += [f'<rect x="{x}" y="6" width="18" height="18" {shade(density)}/>', text(x + 24, 20, words)]
    return body


def schedule() -> str:
    """One row a part over time, and the curve of the whole model."""
    phases = list(densities())
    body = legend()
    done, points, peak = 0, [], (0.0, 0.0)
    for iterations, parts, whole in phases:
        x, end = across(done), across(done + iterations)
        for number, density in enumerate(parts):
            size = f'width="{end - x - 0.6:.1f}" height="{ROW - 4}"'
            body.append(f'<rect x="{x:.1f}" y="{TOP + ROW * number}" {size} {shade(density)}/>')
        points += [(x, up(whole)), (end, up(whole))]
        peak = max(peak, (whole, (x + end) / 2))
        done += iterations
    body += [text(LEFT - 8, TOP + ROW * number + 19, f"part {number + 1}", anchor="end") for number in range(PARTS)]
    body.append(text(LEFT, CURVE - 22, "non-zero weights of the whole model"))
    for share in (0.0, 0.5, 1.0):
        y = up(share)
        body.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:g}" y2="{y:g}" stroke="{GREY}" stroke-opacity="0.35"/>')
        body.append(text(LEFT - 8, y + 5, f"{100 * share:.0f} %", anchor="end"))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    body.append(f'<polyline points="{line}" fill="none" stroke="{RED}" stroke-width="2.5"/>')
    body.append(text(peak[1] + 14, up(peak[0]) - 8, f"peak: {100 * peak[0]:.0f} %", colour=RED))
    body.append(text(RIGHT, up(phases[-1][2]) - 8, f"{100 * phases[-1][2]:.0f} %", anchor="end", colour=RED))
    for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
        x = across(share * ITERATIONS)
        body.append(f'<line x1="{x:g}" x2="{x:g}" y1="{BOTTOM}" y2="{BOTTOM + 5}" stroke="{GREY}"/>')
        body.append(text(x, BOTTOM + 22, f"{100 * share:.0f} %", anchor=anchor))
    body.append(text((LEFT + RIGHT) / 2, BOTTOM + 46, "share of the training", anchor="middle"))
    body.append(text((across(0.75 * ITERATIONS) + RIGHT) / 2, CURVE + 36, "fine-tuning", anchor="middle"))
    title = "One part after another is grown to dense and pruned back; then the sparsity of the model rises to 90 %"
    return svg(body, HEIGHT, title)


def svg(body: list[str], height: int, title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.2 * WIDTH:g}" viewBox="0 0 {WIDTH} {height}"'
    return "\n".join([f'{head} font-family="sans-serif" role="img">', f"<title>{title}</title>", *body, "</svg>\n"])


SIDE, CELL = 6, 24
"""Of the matrix in part.svg: the number of rows and columns, and the size of a weight."""


def matrix(x: float, y: float, values: torch.Tensor, kinds: torch.Tensor, side: float = CELL) -> list[str]:
    """Weights as squares: the larger, the darker. Kind 0 is zero, 1 blue, 2 red."""
    body = []
    for row, column in itertools.product(range(values.shape[0]), range(values.shape[1])):
        kind, size = int(kinds[row, column]), float(values[row, column].abs())
        place = f'x="{x + side * column:g}" y="{y + side * row:g}" width="{side - 2:g}" height="{side - 2:g}"'
        colour, opacity = (GREY, 0.12) if kind == 0 else ((BLUE, RED)[kind - 1], 0.25 + 0.75 * size)
        body.append(f'<rect {place} fill="{colour}" fill-opacity="{opacity:.2f}"/>')
    return body


def layers() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The weights and the mask of a layer: sparse, grown, trained, pruned back. Training is made up: it adds noise."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False))
    weight = model[0].weight
    sparse = gp.SparseModel(model, sparsity=2 / 3, keep_dense=())
    (part,) = gp.Partition.balanced(model, 1, keep_dense=())
    for edit in (gp.prune(part, to=2 / 3, by="random"), gp.grow(part), None, gp.prune(part, to=2 / 3)):
        if edit is None:
            with torch.no_grad():
                weight.add_(0.24 * torch.randn(SIDE, SIDE))
        else:
            sparse.apply(edit)
        yield weight.detach().clone(), sparse.masks["0.weight"].clone()


def part() -> str:
    """One layer in four states."""
    states = list(layers())
    first, last = states[0][1], states[-1][1]
    most = max(float(values.abs().max()) for values, _ in states)
    new = int((last & ~first).sum())
    said = ["sparse", "grown", "trained", "pruned back"]
    below = [f"{int(first.sum())} of 36 weights", "24 more, at zero", "all 36 move", f"12 largest, {new} new"]
    body = []
    for number, (values, mask) in enumerate(states):
        x = 2 + number * (WIDTH + 12) / 4
        kinds = mask.int() + (mask & ~first).int()
        body += matrix(x, 26, values / most, kinds, 21)
        body += [text(x, 16, said[number]), text(x, 172, below[number], size=13)]
    return svg(body, 180, "A layer with 12 of 36 weights is grown, trained and pruned back; some are new")


def storage() -> str:
    """The same matrix in masked and in compact storage."""
    values, mask = list(layers())[-1]
    values = values / values.abs().max()
    row = values[mask].unsqueeze(0)
    body = [text(2, 16, "masked: all values, and the mask"), *matrix(2, 26, values, mask.int(), 21)]
    body += matrix(150, 26, torch.ones_like(values) * 0.6, mask.int(), 21)
    body += [text(308, 16, "compact: values and bits")]
    body += matrix(308, 26, row, torch.ones_like(row).int(), 20)
    bits = ["".join(str(int(bit)) for bit in line) for line in mask]
    body += [text(308, 74 + 20 * n, "  ".join(bits[2 * n : 2 * n + 2]), size=15) for n in range(3)]
    return svg(body, 160, "Masked storage holds all values and a mask; compact storage non-zero values and bits")


PICTURES = {"schedule.svg": schedule, "part.svg": part, "storage.svg": storage}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
