"""Partitions: divide a model into the parts S_0 ... S_{kappa-1} that grow in turn.

Every parameter and buffer belongs to exactly one part; norms and biases belong to the part of their layer. So each
tensor has one owner when parallel machines merge. Standard library only.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

from growprune.errors import GrowpruneError
from growprune.masks.layers import Layers, few, first_names, layer_weights, matches, prunable_weights
from growprune.plan import Part
from growprune.plan.settings import as_names, check_counts

LISTS = {"Sequential", "ModuleList", "ModuleDict"}


@dataclass(frozen=True)
class Partition:
    """A division of a model into disjoint parts that cover all its parameters and buffers.

    Examples:
        >>> import torch
        >>> S = Partition.contiguous(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6))), 3)
        >>> [part.tensors for part in S][0]
        ('0.weight', '0.bias', '1.weight', '1.bias')
    """

    parts: tuple[Part, ...]
    sizes: tuple[int, ...] = ()
    """The number of prunable weights of each part; unknown if empty."""

    @functools.cached_property
    def whole(self) -> Part:
        """The model as one part."""
        return Part("all", tuple([name for part in self.parts for name in part.tensors]))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int, /) -> Part:
        return self.parts[i]

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    @property
    def largest_share(self) -> float:
        """The largest part's share of the prunable weights. Parts of unknown size count as equal."""
        return max(self.sizes) / max(1, sum(self.sizes)) if self.sizes else 1 / max(1, len(self.parts))

    def counted(
        self, model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = (), layers: Layers | None = None
    ) -> Partition:
        """Return the same parts with the sizes that they have for this model, `keep_dense` and `include`."""
        sizes = _layers(model, keep_dense, include, layers)
        return replace(self, sizes=self._numbered([part.tensors for part in self.parts], sizes).sizes)

    @classmethod
    def of(
        cls,
        model: Any,
        prefixes: Iterable[Iterable[str]],
        *,
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        layers: Layers | None = None,
    ) -> Partition:
        """Build a partition by hand from the names of each part's modules or tensors.

        A tensor belongs to its longest prefix. A tensor without a part is an error, and so is a prefix that matches no
        tensor.
        """
        prefixes = [as_names(listed, f"part {i}") for i, listed in enumerate(prefixes)]
        owner_of: dict[str, int] = {}
        for i, listed in enumerate(prefixes):
            for prefix in listed:
                if prefix in owner_of:
                    raise GrowpruneError(
                        f"prefix {prefix!r} is in part {owner_of[prefix]} and in part {i}: list it only once"
                    )
                owner_of[prefix] = i
        names = _tensor_names(model)
        known = [*names, *first_names(model)]
        for prefix in owner_of:
            if not any(matches(name, prefix) for name in known):
                modules = [path for path, module in model.named_modules() if path and [*module.parameters()]]
                near = difflib.get_close_matches(prefix, [*modules, *known])
                has = f"the model has {few(modules or known)}"
                hint = f"did you mean {' or '.join(map(repr, near))}?" if near else has
                raise GrowpruneError(f"prefix {prefix!r} matches no parameter or buffer of the model; {hint}")
        tensors: list[list[str]] = [[] for _ in prefixes]
        for name in names:
            found = [prefix for prefix in owner_of if matches(name, prefix)]
            if not found:
                raise GrowpruneError(
                    f"{name!r} belongs to no part: add it, or a module that contains it, to one of them"
                )
            tensors[owner_of[max(found, key=len)]].append(name)
        for i, part in enumerate(tensors):
            if not part:
                raise GrowpruneError(f"part {i} has no parameters or buffers: remove it, or add names to it")
        return cls._numbered(tensors, _layers(model, keep_dense, include, layers))

    @classmethod
    def contiguous(
        cls,
        model: Any,
        kappa: int,
        *,
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        layers: Layers | None = None,
    ) -> Partition:
        """Divide a model into kappa parts of neighboring layers of similar size, without splitting blocks.

        Residual and attention blocks stay together.

        Args:
            kappa: the number of parts, from 1 to the number of layers. Blocks are split only if kappa exceeds
                their number.
            keep_dense, include: the same values as for the SparseModel. Layers that stay dense do not form parts.
                Included parameters count as layers, under the name of their module, or under their own name if the
                module has other layers too.
            layers: what `layer_weights` returns, if it is known.
        """
        sizes = _layers(model, keep_dense, include, layers)
        _check_kappa(kappa, len(sizes))
        units = _blocks(model, "", sizes, is_root=True)
        if kappa > len(units):
            units = list(sizes)
        costs = dict.fromkeys(units, 0)
        for path, size in sizes.items():
            costs[_innermost(path, costs) or ""] += size  # the model itself may be the only unit
        owner = dict(zip(units, _cut(list(costs.values()), kappa), strict=True))
        return cls._numbered(_gather(model, owner, kappa), sizes)

    @classmethod
    def balanced(
        cls,
        model: Any,
        kappa: int,
        *,
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
        layers: Layers | None = None,
    ) -> Partition:
        """Divide a model into kappa parts with about the same number of weights, from layers all over the model.

        Each layer, largest first, goes to the part with the fewest weights so far. A grown part then has weights
        everywhere in the model, and takes the memory of about 1 / kappa of the model.
        """
        sizes = _layers(model, keep_dense, include, layers)
        _check_kappa(kappa, len(sizes))
        owner, loads = {}, [0] * kappa
        for path in sorted(sizes, key=lambda path: -sizes[path]):
            owner[path] = loads.index(min(loads))
            loads[owner[path]] += sizes[path]
        return cls._numbered(_gather(model, owner, kappa), sizes)

    @classmethod
    def per_layer(
        cls, model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = (), layers: Layers | None = None
    ) -> Partition:
        """Make every layer its own part, the finest partition."""
        keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
        kappa = max(1, len(_layers(model, keep_dense, include, layers)))
        return cls.contiguous(model, kappa, keep_dense=keep_dense, include=include, layers=layers)

    @classmethod
    def _numbered(cls, tensors: Sequence[Sequence[str]], layers: Mapping[str, int]) -> Partition:
        """Parts by their tensors; the weights of a layer count for the part of its first tensor."""
        owner: dict[str, int] = {}
        for i, names in enumerate(tensors):
            for name in names:
                steps = name.split(".")
                for length in range(len(steps) + 1):
                    owner.setdefault(".".join(steps[:length]), i)
        sizes = [0] * len(tensors)
        for path, size in layers.items():
            sizes[owner[path]] += size
        return cls(tuple(Part(f"S{i}", tuple(names)) for i, names in enumerate(tensors)), tuple(sizes))


def blocks_of(model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = ()) -> dict[str, str]:
    """Map each prunable parameter to its block, which `Partition.contiguous` does not split.

    Examples:
        >>> import torch
        >>> blocks_of(torch.nn.Sequential(torch.nn.TransformerEncoderLayer(4, 2, 8), torch.nn.Linear(4, 2)))["1.weight"]
        '1'
    """
    units = dict.fromkeys(_blocks(model, "", _layers(model, keep_dense, include), is_root=True))
    weights = prunable_weights(model, keep_dense=keep_dense, include=include)
    return {w.parameter: _innermost(w.parameter, units) or w.parameter for w in weights}


def _check_kappa(kappa: int, num_layers: int) -> None:
    check_counts(1, parts=kappa)
    if not num_layers:
        raise GrowpruneError("the model has no layers to divide: name parameters in include=[...], or use Partition.of")
    if kappa > num_layers:
        raise GrowpruneError(f"parts must be <= the number of layers of the model, {num_layers}, got {kappa}")


def _tensor_names(model: Any) -> list[str]:
    """All parameters and buffers, each once under its first name."""
    return [name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named]


def _layers(
    model: Any, keep_dense: Iterable[str], include: Iterable[str], known: Layers | None = None
) -> dict[str, int]:
    """The number of weights of each layer that has some to grow, in the order of registration."""
    keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
    known = layer_weights(model) if known is None else known
    weights = [w for ws in known.values() for w in ws]
    if keep_dense or include:
        weights = list(prunable_weights(model, keep_dense=keep_dense, include=include, layers=known))
    places = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    paths = {weight.parameter: weight.parameter.rpartition(".")[0] for weight in weights}
    sizes: dict[str, int] = {}
    for weight in sorted(weights, key=lambda w: places[w.parameter]):
        path = paths[weight.parameter]
        holds_others = path not in known and any(p != path and _below(p, path) for p in paths.values())
        unit = weight.parameter if holds_others else path
        sizes[unit] = sizes.get(unit, 0) + weight.numel
    return sizes


def _below(path: str, ancestor: str) -> bool:
    return path == ancestor or ancestor == "" or path.startswith(ancestor + ".")


def _innermost(path: str, units: Mapping[str, object]) -> str | None:
    while path and path not in units:
        path = path.rpartition(".")[0]
    return path if path in units else None


def _blocks(module: Any, path: str, layers: Mapping[str, int], *, is_root: bool = False) -> list[str]:
    """Return the smallest modules that must not be split, in order.

    A module that is not just a list and holds layers is a block. A module that holds a list of modules with several
    layers each is a stage or a tower, and may be split between them; so may the model as a whole.
    """
    prefix = f"{path}." if path else ""
    own = [prefix + name for name, _ in module.named_parameters(recurse=False) if prefix + name in layers]
    children = [(prefix + name, child) for name, child in module.named_children()]
    holding = [(p, child) for p, child in children if any(_below(layer, p) for layer in layers)]
    if path in layers or not (own or holding):
        return [path] if path in layers else []
    if not (is_root or _is_list(module) or _holds_list_of_blocks(module, path, layers)):
        return [path]
    is_wrapper = is_root and len(holding) == 1 and not own
    blocks = own + [block for p, child in holding for block in _blocks(child, p, layers, is_root=is_wrapper)]
    return blocks if is_root or len(blocks) > 1 else [path]  # the outermost, so that its norms lie in it


def _is_list(module: Any) -> bool:
    """True if a module only holds others. A Sequential with its own forward may be residual."""
    base: Any = next((c for c in type(module).__mro__ if c.__name__ in LISTS), None)
    return base is not None and (base.__name__ != "Sequential" or type(module).forward is base.forward)


def _holds_list_of_blocks(module: Any, path: str, layers: Mapping[str, int]) -> bool:
    for name, descendant in module.named_modules(prefix=path):
        items = [f"{name}.{item}" for item, _ in descendant.named_children()] if _is_list(descendant) else []
        if sum(sum(_below(layer, item) for layer in layers) >= 2 for item in items) >= 2:
            return True
    return False


def _cut(costs: Sequence[int], kappa: int) -> list[int]:
    """Return the part of each unit, so that the most expensive of kappa contiguous parts is as cheap as possible."""
    ends = sorted({load for i in range(len(costs)) for load in accumulate(costs[i:])})
    # the smallest cap that some part's cost could be, and that kappa parts can keep to
    least = bisect.bisect_left(ends, True, key=lambda cap: _owners_up_to(costs, kappa, cap)[-1] < kappa)
    return _owners_up_to(costs, kappa, ends[least])


def _owners_up_to(costs: Sequence[int], kappa: int, cap: int) -> list[int]:
    """Fill parts from the left up to the cap, but leave at least one unit for every part to come."""
    owner, part, load = [], 0, 0
    for i, cost in enumerate(costs):
        must_open = len(costs) - i == kappa - part - 1
        if i > 0 and (load + cost > cap or must_open):
            part, load = part + 1, 0
        load += cost
        owner.append(part)
    return owner


def _gather(model: Any, owner: Mapping[str, int], kappa: int) -> list[list[str]]:
    """Assign every tensor to the part of its unit. Tensors outside all units follow the unit registered before them."""
    current = 0
    owner_of_module: dict[str, int] = {}
    for path, _ in model.named_modules():
        unit = _innermost(path, owner)
        current = current if unit is None else owner[unit]
        owner_of_module[path] = current
    tensors: list[list[str]] = [[] for _ in range(kappa)]
    for name in _tensor_names(model):
        tensors[owner[name] if name in owner else owner_of_module[name.rpartition(".")[0]]].append(name)
    return tensors


# The kinds of partition, as values without a model. In strings, such as `--set partition=balanced(4)`, write the same
# call: `parse_parts` reads it with the table `KINDS`. Trainers and methods have the number of parts elsewhere, and
# use only the name of the kind.

PARTS = 4
"""The default number of parts."""


@dataclass(frozen=True)
class Contiguous:
    """Choose kappa parts of neighboring layers of similar size, without splitting residual or attention blocks."""

    kappa: int = PARTS

    def __post_init__(self) -> None:
        check_counts(1, kappa=self.kappa)

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.kappa})"

    @property
    def num_parts(self) -> int | None:
        return self.kappa

    def cut(self, model: Any, **names: Any) -> Partition:
        """Divide a model into the parts; `names` are keep_dense, include and layers."""
        return Partition.contiguous(model, self.kappa, **names)


class Balanced(Contiguous):
    """Choose kappa parts with about the same number of weights, from layers all over the model."""

    def cut(self, model: Any, **names: Any) -> Partition:
        return Partition.balanced(model, self.kappa, **names)


@dataclass(frozen=True)
class Named:
    """Choose the parts by hand, as lists of module names."""

    parts: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(tuple(names) for names in self.parts))

    def __str__(self) -> str:
        return f"named({json.dumps(self.parts)})"

    @property
    def num_parts(self) -> int | None:
        return len(self.parts)

    def cut(self, model: Any, **names: Any) -> Partition:
        return Partition.of(model, self.parts, **names)


@dataclass(frozen=True)
class PerLayer:
    """Make every layer its own part, for methods that draw sets of layers."""

    num_parts = None
    """Unknown without a model: the number of its layers."""

    def __str__(self) -> str:
        return "per_layer()"

    def cut(self, model: Any, **names: Any) -> Partition:
        return Partition.per_layer(model, **names)


contiguous = Contiguous
balanced = Balanced
per_layer = PerLayer
named = Named
PartitionConfig: TypeAlias = Contiguous | Named | PerLayer
KINDS: dict[str, Callable[..., PartitionConfig]] = {
    "contiguous": contiguous,
    "balanced": balanced,
    "per_layer": per_layer,
    "named": named,
}


def parse_parts(parts: int | str, *, kind: str = "contiguous", most: int = PARTS) -> PartitionConfig:
    """Return the partition for a number of parts, a kind, or a call such as "balanced(8)".

    Args:
        kind: the kind that the method uses by default.
        most: the number of layers, if known.

    Examples:
        >>> parse_parts(8, kind="balanced"), parse_parts("contiguous"), parse_parts("balanced(3)")
        (Balanced(kappa=8), Contiguous(kappa=4), Balanced(kappa=3))
        >>> print(parse_parts('named([["stem"], ["head"]])'))
        named([["stem"], ["head"]])
    """
    if parts in KINDS and parts != "named":
        kind, parts = str(parts), min(PARTS, most)
    if not isinstance(parts, str):
        check_counts(1, parts=parts)
        return per_layer() if kind == "per_layer" else KINDS[kind](parts)
    name, _, inside = parts.removesuffix(")").partition("(")
    if parts == f"{name}({inside})":
        with contextlib.suppress(KeyError, ValueError, TypeError):  # no kind, no JSON, or not what the kind takes
            return KINDS[name](*json.loads(f"[{inside}]"))
    kinds = 'contiguous, balanced, per_layer, a call such as balanced(8) or named([["a", "b"], ["c"]])'
    raise GrowpruneError(f"parts must be a number, {kinds}, a list of lists of names, or a Partition, got {parts!r}")
