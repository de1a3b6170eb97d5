"""Carrying out an edit: how many groups of which weights live after it, and which they are."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from growprune.allocation import Pool, Scope, parse_allocation
from growprune.errors import GrowpruneError
from growprune.layers import Weight
from growprune.optimizers import Optimizers
from growprune.patterns import Pattern, count_groups, write_groups
from growprune.plan import Action, By, Edit, Part
from growprune.scores import check_finite, edit_keys, salt_of
from growprune.selection import choose, key_bits
from growprune.storage import SparseParameter


class Editor:
    """Changes masks, and takes the state of optimizers along.

    Args:
        weights: all that may be pruned.
        held: their parameters by name.
        optimizers: those that train them.
        seed: decides every random choice, with the number of the edit.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        sparse_parameter: Mapping[str, SparseParameter],
        optimizers: Optimizers,
        *,
        pattern: Pattern,
        allocation: str,
        scope: Scope,
        seed: int,
    ) -> None:
        self.weights, self._sparse_parameters, self._optimizers = tuple(weights), sparse_parameter, optimizers
        self._pattern, self._allocate, self._scope = pattern, parse_allocation(allocation), scope
        self._seed = seed
        self.num_edits = 0

    def weights_of(self, part: Part) -> tuple[Weight, ...]:
        names = set(part.tensors)
        return tuple(w for w in self.weights if w.parameter in names)

    def pools(self, edit: Edit) -> list[Pool]:
        """How many groups an edit leaves alive, of which weights ranked together."""
        part = self.weights_of(edit.part)
        for weight in part:
            self._pattern.check(weight, edit.to)
        scope = self._scope if edit.action is Action.PRUNE else Scope.PART  # to grow a part leaves the others alone
        return self._allocate(self.weights, part, edit.to, self._pattern, scope) if part else []

    def apply(self, edit: Edit) -> None:
        if edit.to > 0:
            self.select(self.pools(edit), edit)
        elif edit.action is Action.GROW:
            if not self.weights_of(edit.part):
                what = "no weight of it may be pruned; give Partition keep_dense too"
                warnings.warn(f"{edit.part.name} has nothing to grow: {what}", stacklevel=7)
            for name in dict.fromkeys(w.parameter for w in self.weights_of(edit.part)):
                sparse_parameter = self._sparse_parameters[name]
                with self._optimizers.following(sparse_parameter):
                    sparse_parameter.set_mask(torch.ones_like(sparse_parameter.mask()))

    def select(self, pools: Sequence[Pool], edit: Edit) -> None:
        """Do what an edit does to some of its pools; if one of them cannot be, nothing changes."""
        with _Opened(self._sparse_parameters, self._optimizers) as opened:
            for pool in pools:
                self._check(pool, edit, opened)
            for pool in pools:
                self._select(pool, edit, opened)

    def _check(self, pool: Pool, edit: Edit, opened: _Opened) -> None:
        """Raise if an edit cannot reach its count, or would rank what is not a number."""
        alive = self._alive_groups(pool, opened)
        if pool.kept != alive and (pool.kept > alive) is (edit.action is Action.PRUNE):
            raise GrowpruneError(
                f"cannot {edit.action.value} to sparsity {edit.to}: that is {pool.kept} alive, but {alive} are alive "
                f"in {_names(pool.weights)}; {'grow' if edit.action is Action.PRUNE else 'prune'} first"
            )
        for weight in pool.weights if edit.by is By.MAGNITUDE else ():
            check_finite(opened.values(weight), weight)

    def _alive_groups(self, pool: Pool, opened: _Opened) -> int:
        return sum(count_groups(self._pattern, opened.mask(w), w) for w in pool.weights)

    def _select(self, pool: Pool, edit: Edit, opened: _Opened) -> None:
        """Let the best `pool.kept` groups of a pool live."""
        if pool.kept == self._alive_groups(pool, opened):
            return
        dtypes = {self._sparse_parameters[w.parameter].parameter.dtype for w in pool.weights}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        sources = [self._keys(edit, w, dtype, opened) for w in pool.weights]
        for weight, chosen in zip(pool.weights, choose(sources, pool.kept, bits=key_bits(dtype)), strict=True):
            write_groups(self._pattern, opened.mask(weight, to_write=True), weight, chosen)
        self._warn_of_dead_layers(pool, opened)

    def _keys(self, edit: Edit, weight: Weight, dtype: torch.dtype, opened: _Opened) -> Any:
        return edit_keys(
            edit,
            weight,
            self._pattern,
            values=lambda: opened.values(weight),
            mask=lambda: opened.mask(weight),
            salt=salt_of(self._seed, self.num_edits, weight.name),
            dtype=dtype,
        )

    def _warn_of_dead_layers(self, pool: Pool, opened: _Opened) -> None:
        dead = [w for w in pool.weights if not bool(opened.mask(w).any())]
        if dead:
            warnings.warn(
                f"no weight lives in {_names(dead)}: too small for this sparsity; see keep_dense",
                stacklevel=7,
            )


class _Opened:
    """The values and the mask of one parameter at a time, dense: one of many matrices is expanded and set once."""

    def __init__(self, sparse_parameters: Mapping[str, SparseParameter], optimizers: Optimizers) -> None:
        self._sparse_parameters, self._optimizers = sparse_parameters, optimizers
        self._name, self._is_written = "", False
        self._values: Tensor | None = None
        self._mask: Tensor | None = None

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self._open("")  # which writes what is open

    def values(self, weight: Weight) -> Tensor:
        self._open(weight.parameter)
        if self._values is None:
            self._values = self._sparse_parameters[weight.parameter].weight()
        return weight.of(self._values)  # type: ignore[no-any-return]

    def mask(self, weight: Weight, *, to_write: bool = False) -> Tensor:
        self._open(weight.parameter)
        if self._mask is None:
            self._mask = self._sparse_parameters[weight.parameter].mask()
        self._is_written |= to_write
        return weight.of(self._mask)  # type: ignore[no-any-return]

    def _open(self, name: str) -> None:
        """Go to a parameter; the mask of the one before, if it was written to, is set."""
        if name == self._name:
            return
        self._values = None  # first, since setting a mask takes memory too
        if self._is_written and self._mask is not None:
            sparse_parameter = self._sparse_parameters[self._name]
            with self._optimizers.following(sparse_parameter):
                sparse_parameter.set_mask(self._mask)
        self._name, self._is_written, self._mask = name, False, None


def _names(weights: Sequence[Weight]) -> str:
    return ", ".join(w.name for w in weights[:3]) + (f" and {len(weights) - 3} more" if len(weights) > 3 else "")
