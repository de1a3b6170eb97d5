"""All passes, one after the other: trace, fold, fuse, lower, choose, bind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from growprune.deployment.fold import drop_identities, fold_constants
from growprune.deployment.fuse import fuse
from growprune.deployment.known import KNOWN
from growprune.deployment.lower import Lowering
from growprune.deployment.measure import Chosen, Row, choose
from growprune.deployment.program import Program
from growprune.deployment.skeleton import Skeleton, dense_weight
from growprune.deployment.trace import trace


@dataclass(frozen=True)
class Compiled:
    """A module as a program, for one shape of inputs."""

    program: Program
    rows: list[Row]
    in_torch: list[str]
    """Operations of it that are torch's."""


def compile_module(
    module: nn.Module,
    skeleton: Skeleton,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    seconds: float,
    threads: int,
    chosen: Mapping[str, Chosen],
) -> Compiled:
    """Make a program of a module, all or part of a skeleton's. Raises NotTraceable."""
    traced = trace(module, args, kwargs)
    parameters = {id(p): name for name, p in skeleton.module.named_parameters()}
    names = {node: parameters.get(id(tensor), node.name) for node, tensor in traced.tensors.items()}
    drop_identities(traced.graph)
    fold_constants(traced, lambda tensor: _weight(skeleton, parameters.get(id(tensor)), tensor))
    fuse(traced.graph, skeleton, names)
    lowered = Lowering(traced, KNOWN).run()
    rows = choose(lowered.layers, seconds=seconds, threads=threads, chosen=chosen)
    return Compiled(Program(lowered, traced.out_spec), rows, lowered.in_torch)


def _weight(skeleton: Skeleton, name: str | None, tensor: Tensor) -> tuple[str, Callable[[], Tensor]] | None:
    if name is None or name not in skeleton.matrices:
        return None
    is_transposed = name in skeleton.transposed
    return name, lambda: dense_weight(skeleton.matrices[name], tuple(tensor.shape), is_transposed=is_transposed)
