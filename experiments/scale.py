"""Memory, bytes and time of a training step past one card, on paper: the figures of scale.md beside it.

    python experiments/scale.py    # prints the tables of the page

Nothing here is measured. The formulas are the ones below; what they say about models that were measured on one card
(blocks/training.json, blocks/sharded-large.json) stands beside the measurement in the first table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GIB = 2**30
FLOPS = 647e12
"""Of one H200 in the products of a step, attention and all else that takes turns with them included; measured."""
OPTIMIZER = 3.5e12
"""Bytes a second of torch's fused AdamW; measured. It moves 28 bytes a weight."""
CASTS = 4.0e12
"""Bytes a second of casts from float32 to bf16, assumed."""
EXPANDING = 2.7e12
"""Bytes a second of making weights dense and gradients sparse; measured."""
NETWORKS = {"NVLink and 8 x 400 Gb/s a node": 360e9, "200 Gb/s a node": 25e9}
"""Bytes a second that a rank gathers or scatters at; assumed, not measured."""
BITS = 1 / 8 + 1 / 128
"""Bytes a weight for which weights live, where each is chosen by itself."""
ROOM = 130
"""GiB of an H200 that a model can have."""


@dataclass(frozen=True)
class Model:
    """Transformer blocks of 12 d^2 weights, trained with AdamW on float32 values, each recomputed in the backward."""

    name: str
    num_blocks: int
    d: int

    @property
    def block(self) -> int:
        return 12 * self.d**2

    @property
    def weights(self) -> int:
        return self.num_blocks * self.block


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    sparsity: float = 0.0
    kappa: int = 8
    ranks: int = 1
    """Among which a model is sharded: those of one group."""
    tokens: int = 8192
    """Of one pass over the model, on each rank."""
    steps_in_backward: bool = False
    """Whether the optimizer steps as soon as a gradient is there, so that gradients are never there at once."""

    @property
    def live(self) -> float:
        """The share of weights that are stored: one part of kappa dense, the rest at the density."""
        density = 1 - self.sparsity
        return 1.0 if self.sparsity == 0 else 1 / self.kappa + (1 - 1 / self.kappa) * density


MODELS = [
    Model("70 B", 80, 8192),
    Model("400 B", 126, 16384),
    Model("1 T", 128, 25600),
]
RANKS = (8, 64, 256, 1024)
SPARSITIES = (0.0, 0.8, 0.9)
BATCH = 4 * 2**20
"""Tokens of one optimizer step, over all ranks."""
NVLINK, ETHERNET = NETWORKS.values()


def memory_gib(model: Model, setting: Setting) -> float:
    """The most a rank holds: its share of values and state, masks, what is gathered, activations."""
    live = setting.live * model.weights
    per_value = 12 if setting.steps_in_backward else 16
    total = per_value * live / setting.ranks
    if setting.sparsity:
        sparse = (1 - 1 / setting.kappa) * model.weights
        total += BITS * sparse  # masks are whole on every rank
    layer = 4 * model.d**2
    if setting.ranks > 1:  # each layer wrapped by itself: two gathered in bf16, and a gradient in float32
        total += (2 * 2 + 4) * layer
    total += 2 * 2 * layer  # the largest layer and its gradient, dense and in bf16
    total += 2 * model.num_blocks * setting.tokens * model.d  # the input of every block
    total += 2 * 12 * setting.tokens * model.d  # a block at work: twice up, and a few of its width
    return total / GIB


def gathered_bytes(model: Model, setting: Setting) -> float:
    """What a rank receives in one pass: live values in bf16 for each of two passes, and gradients in float32."""
    if setting.ranks == 1:
        return 0.0
    received = (2 * 2 + 4) * setting.live * model.weights
    return received * (setting.ranks - 1) / setting.ranks


def compute_seconds(model: Model, setting: Setting) -> float:
    """One pass: dense products, casts of what is dense, making the rest dense and its gradient sparse."""
    sparse = model.weights * (0 if setting.sparsity == 0 else 1 - 1 / setting.kappa)
    dense = model.weights - sparse
    products = 8 * model.weights * setting.tokens / FLOPS  # forward, again for the backward, and two gradients
    return products + 3 * 6 * dense / CASTS + 8 * sparse / EXPANDING


def optimizer_seconds(model: Model, setting: Setting) -> float:
    return 28 * setting.live * model.weights / setting.ranks / OPTIMIZER


def step_seconds(model: Model, setting: Setting, network: float, *, batch: int = BATCH) -> float:
    """An optimizer step of a group: passes in which the slower of computing and gathering counts, then the update."""
    passes = max(1.0, batch / (setting.ranks * setting.tokens))
    one = max(compute_seconds(model, setting), gathered_bytes(model, setting) / network)
    return passes * one + optimizer_seconds(model, setting)


def best_step_seconds(model: Model, setting: Setting, network: float) -> float:
    """The same; ranks that are too many for the batch have shorter passes."""
    tokens = min(setting.tokens, BATCH // setting.ranks)
    return step_seconds(model, Setting(**{**vars(setting), "tokens": tokens}), network)


def checked() -> Iterator[str]:
    """The formulas against what was measured on one H200."""
    yield "| | formula | measured | formula / measured |"
    yield "|---|---:|---:|---:|"
    small, large = Model("1.6 B", 8, 4096), Model("40 B", 50, 8192)
    dense, compact = Setting(), Setting(0.9, kappa=4)
    one_of_fifty = Setting(0.9, kappa=50, tokens=1024, steps_in_backward=True)
    rows = [
        ("1.6 B dense, 8,192 tokens, GiB", memory_gib(small, dense), 25.12),
        ("1.6 B compact at 90 %, kappa = 4, GiB", memory_gib(small, compact), 8.83),
        ("40 B compact, one of 50 blocks dense, 1,024 tokens, GiB", memory_gib(large, one_of_fifty), 64.8),
        ("1.6 B dense, ms", 1000 * step_seconds(small, dense, NVLINK, batch=8192), 182.9),
        ("1.6 B compact, ms", 1000 * step_seconds(small, compact, NVLINK, batch=8192), 161.6),
        ("of which AdamW, compact, ms", 1000 * optimizer_seconds(small, compact), 4.41),
        ("40 B compact, s", step_seconds(large, one_of_fifty, NVLINK, batch=1024), 0.738),
    ]
    for name, formula, measured in rows:
        yield f"| {name} | {formula:.4g} | {measured:g} | {formula / measured:.2f} |"


def memory_table() -> Iterator[str]:
    yield "| model | GPUs | dense | 80 % | 90 % |"
    yield "|---|---:|---:|---:|---:|"
    for model in MODELS:
        for ranks in RANKS:
            cells = [memory_gib(model, Setting(sparsity, ranks=ranks)) for sparsity in SPARSITIES]
            shown = " | ".join(f"{c:,.0f}" if c > ROOM else f"**{c:,.0f}**" for c in cells)
            yield f"| {model.name} | {ranks:,} | {shown} |"


def traffic_table() -> Iterator[str]:
    """One pass of 8,192 tokens a rank, on 64 ranks."""
    yield (
        "| model | GB a pass: dense | 80 % | 90 % | computing, s | gathering, s: dense | 90 % "
        "| at 200 Gb/s: dense | 90 % |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for model in MODELS:
        settings = [Setting(sparsity, ranks=64) for sparsity in SPARSITIES]
        sizes = [gathered_bytes(model, setting) for setting in settings]
        seconds = [size / network for network in (NVLINK, ETHERNET) for size in (sizes[0], sizes[2])]
        cells = [*(f"{size / 1e9:,.0f}" for size in sizes), f"{compute_seconds(model, settings[0]):.3g}"]
        yield f"| {model.name} | " + " | ".join([*cells, *(f"{s:.3g}" for s in seconds)]) + " |"


def time_table() -> Iterator[str]:
    """Seconds for every part to have been dense for one step of 4 M tokens; groups train their parts side by side."""
    yield "| model | GPUs | dense x 8 | C-GaP | P-GaP | at 200 Gb/s: dense x 8 | C-GaP | P-GaP |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for model in MODELS:
        for ranks in RANKS[1:]:
            cells = [cell for network in NETWORKS.values() for cell in _times(model, ranks, network)]
            yield f"| {model.name} | {ranks:,} | " + " | ".join(cells) + " |"


def _times(model: Model, ranks: int, network: float) -> list[str]:
    """Seconds of eight dense steps, of eight compact steps in turn, and of one step in each of eight groups."""
    dense, compact, group = Setting(ranks=ranks), Setting(0.9, ranks=ranks), Setting(0.9, ranks=ranks // 8)
    near = NVLINK if ranks // 8 <= 8 else network  # a group that fits a node
    seconds = [
        8 * best_step_seconds(model, dense, network),
        8 * best_step_seconds(model, compact, network),
        best_step_seconds(model, group, near),
    ]
    fits = [memory_gib(model, setting) <= ROOM for setting in (dense, compact, group)]
    return [f"{s:,.0f}" if fit else "-" for s, fit in zip(seconds, fits, strict=True)]


def merge_table() -> Iterator[str]:
    """What a group receives when P-GaP's branches are merged: the other parts, live values and bits."""
    yield "| model | GB a merge at 80 % | 90 % | minutes at 90 %, 10 Gb/s | 1 Gb/s |"
    yield "|---|---:|---:|---:|---:|"
    for model in MODELS:
        sizes = [(4 * (1 - s) + 1 / 8) * 7 / 8 * model.weights for s in SPARSITIES[1:]]
        minutes = [sizes[1] * 8 / speed / 60 for speed in (10e9, 1e9)]
        cells = [*(f"{size / 1e9:,.0f}" for size in sizes), *(f"{m:,.1f}" for m in minutes)]
        yield f"| {model.name} | " + " | ".join(cells) + " |"


TABLES = {
    "checked": checked,
    "memory": memory_table,
    "traffic": traffic_table,
    "time": time_table,
    "merge": merge_table,
}


def main() -> None:
    for name, table in TABLES.items():
        print(f"\n{name}\n" + "\n".join(table()))


if __name__ == "__main__":
    main()
