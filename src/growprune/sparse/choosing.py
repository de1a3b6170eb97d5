"""Which groups of weights live after an edit: the best of each pool, by what the edit ranks by.

How many they are, of which weights ranked together, counts.py knows. Where each process has a share of the values only,
sharding/choosing.py chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from growprune.masks.allocation import Pool
from growprune.masks.layers import Weight
from growprune.masks.patterns import Pattern, write_groups
from growprune.masks.scores import check_finite, edit_keys, key_bits_of, salt_of
from growprune.masks.selection import choose
from growprune.plan import Action, By, Edit
from growprune.sparse.gradients import Gradients
from growprune.storage import SparseParameter
from growprune.storage.ranking import can_keep_largest, count_alive, keep_largest

Values = Callable[[Weight], Tensor]
"""A tensor for each weight, shaped like it."""

SetMask = Callable[[str, Tensor], None]
"""Takes the name of a parameter, and its new mask."""

Chosen = Iterator[tuple[Weight, Iterator[Tensor]]]
"""For each weight of a pool, in order, a walk over which of its groups live."""


class Together(Protocol):
    """Chooses for several processes, of which each has a share of the values only."""

    def can_choose(self, weights: Sequence[Weight], edit: Edit) -> bool: ...
    def chosen(self, pool: Pool, edit: Edit, mask: Values) -> Chosen: ...


class Choosing:
    """Ranks weights whose values are all at hand.

    Args:
        parameters: how their parameters are stored, by name.
        gradients: what edits that look at gradients go by.
        seed: decides every random choice, with the number of the edit.
    """

    def __init__(
        self, parameters: Mapping[str, SparseParameter], gradients: Gradients, pattern: Pattern, seed: int
    ) -> None:
        self._parameters, self._gradients, self._pattern, self._seed = parameters, gradients, pattern, seed

    def masks(self) -> Values:
        """Which elements of a weight live now."""
        return OneByOne(lambda name: self._parameters[name].mask())

    def values(self, edit: Edit) -> Values:
        """What an edit ranks a weight by."""
        if edit.by in (By.MAGNITUDE, By.RANDOM):
            return OneByOne(lambda name: self._parameters[name].weight())
        return OneByOne(lambda name: self._gradients.scores(edit.by, name))

    def chosen(self, pool: Pool, edit: Edit, values: Values, mask: Values, *, number: int) -> Chosen:
        """The best `pool.kept` groups of a pool: for each weight, in order, a walk over which of its groups live.

        Args:
            number: how many edits there were before this one.
        """
        dtypes = {self._parameters[w.parameter].parameter.dtype for w in pool.weights}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        sources = [self._keys(edit, w, dtype, values, mask, number) for w in pool.weights]
        yield from zip(pool.weights, choose(sources, pool.kept, bits=key_bits_of(edit, dtype)), strict=True)

    def _keys(self, edit: Edit, weight: Weight, dtype: torch.dtype, values: Values, mask: Values, number: int) -> Any:
        return edit_keys(
            edit,
            weight,
            self._pattern,
            values=lambda: values(weight),
            mask=lambda: mask(weight),
            salt=salt_of(self._seed, number, weight.name),
            dtype=dtype,
        )

    def can_choose_at_once(self, weights: Sequence[Weight], edit: Edit) -> bool:
        """Whether all can be ranked in one go: magnitudes of single weights, stored dense on a GPU."""
        is_plain = edit.action is Action.PRUNE and edit.by is By.MAGNITUDE and self._pattern.is_single
        stored = [self._parameters[weight.parameter] for weight in weights]
        is_dense = bool(stored) and all(parameter.parameter.shape == parameter.shape for parameter in stored)
        return is_plain and is_dense and can_keep_largest([parameter.parameter for parameter in stored])

    def choose_at_once(self, pools: Sequence[Pool], set_mask: SetMask) -> dict[str, int]:
        """Set the masks, and tell how many of each weight live, by its name."""
        weights = [(weight, number) for number, pool in enumerate(pools) for weight in pool.weights]
        masks = {weight.parameter: self._parameters[weight.parameter].mask() for weight, _ in weights}
        values = [weight.of(self._parameters[weight.parameter].weight()) for weight, _ in weights]
        own = [weight.of(masks[weight.parameter]) for weight, _ in weights]
        chosen = keep_largest(values, own, [number for _, number in weights], [pool.kept for pool in pools])
        for (weight, _), value in zip(weights, values, strict=True) if chosen is None else ():
            check_finite(value, weight)
        for mask, new in zip(own, chosen or (), strict=True):
            mask.copy_(new)
        for name, mask in masks.items():
            set_mask(name, mask)
        return dict(zip((weight.name for weight, _ in weights), count_alive(own), strict=True))


class OneByOne:
    """The dense tensors of parameters, one at a time, each made once for all the matrices it has."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        self._make, self._name = make, ""
        self._tensor: Tensor | None = None

    def __call__(self, weight: Weight) -> Tensor:
        if self._tensor is None or weight.parameter != self._name:
            self._tensor = None  # before the next is made
            self._name, self._tensor = weight.parameter, self._make(weight.parameter)
        return weight.of(self._tensor)  # type: ignore[no-any-return]


class Written:
    """Masks that are being written, one at a time; each is set when the next one begins."""

    def __init__(self, pattern: Pattern, begin: Callable[[str], Tensor], set_mask: SetMask) -> None:
        self._pattern, self._begin, self._set_mask = pattern, begin, set_mask
        self._open: tuple[str, Tensor] | None = None

    def write(self, weight: Weight, chosen: Iterator[Tensor]) -> None:
        if self._open is None or self._open[0] != weight.parameter:
            self.close()
            self._open = weight.parameter, self._begin(weight.parameter)
        write_groups(self._pattern, weight.of(self._open[1]), weight, chosen)

    def close(self) -> None:
        if self._open is not None:
            self._set_mask(*self._open)
        self._open = None
