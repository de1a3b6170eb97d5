"""gp.prune_pretrained: prune a trained model in one shot, with a few calibration batches.

Blocks are pruned in the order in which they compute. Each block sees the outputs of the pruned blocks before it.
Besides the model, only the statistics of one block are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError, warn
from growprune.masks.bits import pack
from growprune.masks.inspection import output_layers
from growprune.masks.layers import Weight, few
from growprune.masks.partition import blocks_of
from growprune.masks.patterns import NofM, Pattern, parse_pattern
from growprune.masks.ranking import check_finite
from growprune.plan import prune
from growprune.plan.settings import check_counts, one_of
from growprune.sparse.calibration import Calibration, Forward, looking_only, read_batches
from growprune.sparse.layer_choice import (
    DAMPENING,
    chosen_by_row,
    chosen_in_all,
    inverse_factor,
    sparsegpt_pruned,
    to_matrix,
    wanda_scores,
    write_matrix,
)
from growprune.sparse.model import SparseModel, check_model
from growprune.sparse.reconstruction import checked_sizes, reconstruct, recorded, without_caches

CRITERIA = ("sparsegpt", "wanda", "magnitude")


def prune_pretrained(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    sparsity: float = 0.5,
    by: str = "sparsegpt",
    pattern: str | Pattern = "unstructured",
    allocation: str | None = None,
    keep_dense: str | Iterable[str] = "auto",
    forward: Forward | None = None,
    unreached: str = "error",
    reconstruct: int = 0,
    steps: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> SparseModel:
    """Prune a trained model in one shot with a few calibration batches, and return its SparseModel.

    Args:
        model: a trained model. Its weights are changed.
        batches: the calibration: a few batches of typical inputs, as tensors, tuples (positional arguments) or dicts
            (keyword arguments). They are moved to the model's device. by="magnitude" needs none without `reconstruct`.
        sparsity: the fraction of zeros in each layer.
        by: "sparsegpt" chooses by the error of a layer's output, and adjusts the remaining weights to reduce it.
            "wanda" chooses by |w| times the norm of its input, and "magnitude" by |w|; neither changes the rest.
        pattern: which positions may be live: "unstructured", a block such as "1x8", or N:M such as "2:4".
        allocation: how sparsity is divided among layers: "uniform" (the default), "erk", or by magnitude also "global".
        keep_dense: names or globs that are never pruned; "auto" for output layers.
        forward: computes a batch, as forward(model, batch), if the model cannot be called with it directly.
        unreached: what to do with layers that no batch reaches: "error", or "magnitude" to prune them by |w|.
        reconstruct: train each block, after it was pruned, for this many steps of Adam (64, say) to compute what the
            dense block computed on the calibration data. Only weights that are left, biases and norms change.
        steps: prune in this many steps, each with statistics of its own. The density falls by the same factor in each.
        progress: called with (blocks done, blocks in all), in each step.
        settings: further arguments of `SparseModel`, such as include, storage and seed.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> sparse = prune_pretrained(model, [torch.randn(32, 8)], sparsity=0.5, keep_dense=[])
        >>> sparse.num_alive
        96
    """
    check_model(model)
    _check(model, by, unreached, allocation or "uniform", reconstruct)
    check_counts(1, steps=steps)
    if steps > 1 and isinstance(parse_pattern(pattern), NofM):
        raise GrowpruneError(f"steps={steps} does not work with {pattern}, which has one sparsity: use steps=1")
    batches = None if by == "magnitude" and not reconstruct else read_batches(batches)
    if keep_dense == "auto":
        keep_dense = output_layers(model, batches[0] if batches and forward is None else None)[0]
    sparse = SparseModel(
        model,
        sparsity=sparsity,
        allocation=allocation or "uniform",
        pattern=pattern,
        keep_dense=keep_dense,
        **settings,
    )
    for step in range(1, steps + 1):
        to = sparse.target_sparsity if step == steps else 1 - (1 - sparse.target_sparsity) ** (step / steps)
        if batches is None:
            sparse.prune(to=to)
        elif kept := _counts(sparse, to):
            _BlockByBlock(sparse, kept, by=by, reconstruct=reconstruct).run(
                batches, forward, by_magnitude=unreached == "magnitude", progress=progress
            )
    return sparse


def _check(model: nn.Module, by: str, unreached: str, allocation: str, reconstruct: int) -> None:
    """Raise, before anything is changed, if the arguments are wrong."""
    check_counts(0, reconstruct=reconstruct)
    one_of("by", by, CRITERIA)
    one_of("unreached", unreached, ("error", "magnitude"))
    if allocation in ("global", "global_no_floor") and (by != "magnitude" or reconstruct):
        what, way = (f"by={by!r}", "by='magnitude'") if by != "magnitude" else ("reconstruct", "reconstruct=0")
        raise GrowpruneError(
            f"allocation={allocation!r} ranks all layers together, but {what} prunes them one at a time: use "
            f"allocation='uniform' or 'erk', or {way}"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise GrowpruneError(f"{name} is on the meta device and has no values: load the model first")


def _counts(own: SparseModel, to: float) -> dict[str, int]:
    """Return how many groups of each weight that has to change are live in the end, by name."""
    edit = prune(own.whole, to=to)
    for weight in own.weights:
        check_finite(weight.of(own.stored[weight.parameter].weight()), weight)
    alive = own.editor.num_alive(own.weights)
    pools = own.editor.changed(own.editor.pools(edit, alive), edit, alive) if to else []
    own.editor.warn_of_dead([pool.weights[0] for pool in pools if not pool.kept], pools)
    return {pool.weights[0].name: pool.kept for pool in pools}


class _BlockByBlock:
    """Prune the blocks of a model in the order in which they compute.

    Args:
        kept: how many groups are live in the end, by the name of each weight to prune.
        by: "sparsegpt", "wanda" or "magnitude".
        reconstruct: for how many steps each block is trained after it was pruned.
    """

    def __init__(self, own: SparseModel, kept: Mapping[str, int], *, by: str, reconstruct: int) -> None:
        self._own, self._kept, self._by, self._steps = own, kept, by, reconstruct
        self._weights = [weight for weight in own.weights if weight.name in kept]
        by_parameter = blocks_of(own.model, keep_dense=own.keep_dense, include=own.include)
        self._block_of = {weight.name: by_parameter[weight.parameter] for weight in self._weights}
        self._done: list[str] = []
        """The names of the weights that are pruned already."""
        self._by_magnitude: list[str] = []
        """The layers among them that had no input."""
        self._not_trained: list[str] = []
        """The blocks whose output could not be seen, so that they were not reconstructed."""
        self._dampened: dict[str, float] = {}
        """The dampening of each Hessian that could not be inverted without it."""

    def run(
        self,
        batches: Sequence[Any],
        forward: Forward | None,
        *,
        by_magnitude: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        own = self._own
        calibration = Calibration(own.model, self._weights, batches, block_of=self._block_of, forward=forward)
        modules = dict(own.model.named_modules()) if self._steps else {}
        modules = {name: modules[name] for name in set(self._block_of.values()) if name in modules}
        try:
            with looking_only(own.model), without_caches(own.model):
                with checked_sizes(modules):
                    order, never = calibration.look()
                if never and not by_magnitude:
                    raise GrowpruneError(
                        f"no calibration input reaches {few(never)}: pass batches that do, add "
                        f"them to keep_dense, or prune them by magnitude with unreached='magnitude'"
                    )
                for number, block in enumerate(order):
                    progress(number, len(order))
                    with recorded(modules.get(block)) as calls:
                        totals = calibration.inputs(block, with_products=self._by == "sparsegpt")
                    self._prune(block, totals)
                    if calls:
                        reconstruct(modules[block], calls, steps=self._steps)
                    elif self._steps:
                        self._not_trained.append(block)
                progress(len(order), len(order))
                for block in dict.fromkeys(b for b in self._block_of.values() if b not in order):
                    self._prune(block, {})
        except BaseException as error:
            if self._done:
                error.add_note(
                    f"growprune: {len(self._done)} of {len(self._weights)} weights are already pruned, up to "
                    f"{self._done[-1]}: load the model again before you prune it again"
                )
            raise
        own.editor.num_edits += 1
        own.editor.lost = {}
        asked_for = {weight.name for weight in never}
        if lost := [name for name in self._by_magnitude if name not in asked_for]:
            warn(f"{few(lost)} had no input after earlier layers were pruned, so it was pruned by magnitude")
        if self._not_trained:
            warn(f"{few(self._not_trained)} cannot be called on its own, so it was not reconstructed")
        if self._dampened:
            warn(
                f"the Hessian of {few(self._dampened)} could not be inverted, so it was dampened by "
                f"{max(self._dampened.values()):.0%} of its mean diagonal; more calibration data may help"
            )

    def _prune(self, block: str, totals: dict[str, Tensor]) -> None:
        """Prune the weights of a block, one parameter at a time."""
        weights = [weight for weight in self._weights if self._block_of[weight.name] == block]
        for name in dict.fromkeys(weight.parameter for weight in weights):
            stored = self._own.stored[name]
            values, mask = stored.weight().clone(), stored.mask().clone()
            for weight in [weight for weight in weights if weight.parameter == name]:
                self._choose(weight, weight.of(values), weight.of(mask), totals.pop(weight.name, None))
                self._done.append(weight.name)
            with self._own.following(name) as stored:
                stored.load(values[mask], pack(mask))

    def _choose(self, weight: Weight, values: Tensor, mask: Tensor, total: Tensor | None) -> None:
        """Write the mask of a weight, and its values where they change."""
        kept, pattern = self._kept[weight.name], self._own.pattern
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        matrix, alive = to_matrix(values, weight).to(dtype), to_matrix(mask, weight)
        if total is not None and not total.isfinite().all():
            raise GrowpruneError(f"the inputs of {weight.name} have NaN or infinity, or are too large for {dtype}")
        if total is None or self._by == "magnitude":
            self._by_magnitude += [] if self._by == "magnitude" else [weight.name]
            chosen = chosen_in_all(pattern, matrix.abs(), alive, kept)
        elif self._by == "wanda":
            chosen = chosen_by_row(pattern, wanda_scores(matrix, total.to(dtype)), alive, kept)
        else:
            factor, dampening = inverse_factor(total.to(dtype))
            if dampening > DAMPENING:
                self._dampened[weight.name] = dampening
            chosen, matrix = sparsegpt_pruned(matrix, alive, factor, kept, pattern)
            write_matrix(matrix.to(values.dtype), values, weight)
        write_matrix(chosen, mask, weight)
