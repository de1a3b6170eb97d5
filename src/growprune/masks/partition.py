"""How a model is cut into the parts S_0 ... S_{kappa-1} that grow in turn.

Every parameter and buffer belongs to exactly one part: a norm or bias to the part of its layer, so that when
parallel machines combine, each tensor has one owner. Standard library only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from growprune.errors import GrowpruneError
from growprune.masks.layers import first_names, layer_weights, matches, prunable_weights
from growprune.plan import Part
from growprune.plan.settings import as_names, check_counts

LISTS = {"Sequential", "ModuleList", "ModuleDict"}


@dataclass(frozen=True)
class Partition:
    """A sequence of parts, disjoint, and total over all of a model's parameters and buffers.

    Examples:
        >>> import torch
        >>> S = Partition.contiguous(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6))), 3)
        >>> [part.tensors for part in S][0]
        ('0.weight', '0.bias', '1.weight', '1.bias')
    """

    parts: tuple[Part, ...]
    sizes: tuple[int, ...] = ()
    """How many weights each part has that may be pruned; not known if empty."""

    @functools.cached_property
    def whole(self) -> Part:
        """The model as one part."""
        return Part("all", tuple(name for part in self.parts for name in part.tensors))

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int, /) -> Part:
        return self.parts[i]

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    @property
    def largest_share(self) -> float:
        """The share of the prunable weights that the largest part has; parts of unknown size count as equal."""
        return max(self.sizes) / max(1, sum(self.sizes)) if self.sizes else 1 / max(1, len(self.parts))

    @classmethod
    def of(cls, model: Any, prefixes: Iterable[Iterable[str]]) -> Partition:
        """A partition written by hand: for each part, the names of its modules or tensors.

        A tensor goes to its longest prefix. A tensor without a part, or a prefix without a tensor, is an error.
        """
        prefixes = [as_names(names, f"part {i}") for i, names in enumerate(prefixes)]
        owner_of: dict[str, int] = {}
        for i, names in enumerate(prefixes):
            for prefix in names:
                if prefix in owner_of:
                    raise GrowpruneError(
                        f"prefix {prefix!r} is in part {owner_of[prefix]} and in part {i}: name it once"
                    )
                owner_of[prefix] = i
        tensors: list[list[str]] = [[] for _ in prefixes]
        for name in _tensor_names(model):
            tensors[owner_of[_longest_prefix(name, owner_of)]].append(name)
        for prefix in owner_of:
            if not any(matches(name, prefix) for name in [*_tensor_names(model), *first_names(model)]):
                raise GrowpruneError(f"prefix {prefix!r} matches no parameter or buffer of the model")
        for i, part in enumerate(tensors):
            if not part:
                raise GrowpruneError(f"part {i} has no parameter or buffer of its own: leave it out, or name some")
        return cls._numbered(tensors, _layers(model, (), ()))

    @classmethod
    def contiguous(
        cls,
        model: Any,
        kappa: int,
        *,
        weigh: Mapping[str, float] | None = None,
        keep_dense: Iterable[str] = (),
        include: Iterable[str] = (),
    ) -> Partition:
        """kappa parts of neighbouring layers, as equal as can be, that split no residual or attention block.

        Args:
            kappa: the number of parts, from 1 to the number of layers. Blocks are split only if kappa exceeds
                their number.
            weigh: what to balance, by layer name; the number of weights if not given. For FLOPs, give
                `growprune.count_flops(model, example).by_layer`.
            keep_dense, include: what the SparseModel is told: layers that do not grow are no part of their own, and
                parameters that are included count as layers, by the name of their module, or by their own if their
                module holds other layers too.
        """
        layers = _layers(model, keep_dense, include)
        _check_kappa(kappa, len(layers))
        units = _blocks(model, "", layers, is_root=True)
        if kappa > len(units):
            units = list(layers)
        costs = dict.fromkeys(units, 0.0)
        for path in layers:
            unit = _innermost(path, units)
            assert unit is not None, f"layer {path} lies in no unit"
            costs[unit] += (weigh or layers).get(path, 0)
        owner = dict(zip(units, _cut(list(costs.values()), kappa), strict=True))
        return cls._numbered(_gather(model, owner, kappa), layers)

    @classmethod
    def balanced(
        cls, model: Any, kappa: int, *, keep_dense: Iterable[str] = (), include: Iterable[str] = ()
    ) -> Partition:
        """kappa parts of layers from all over the model, as equal in weights as single layers allow.

        The layers, largest first, each go to the part that has the fewest weights so far. So a part that is grown takes
        its weights from everywhere, and the memory of a grown part is about that of 1 / kappa of the model.
        """
        layers = _layers(model, keep_dense, include)
        _check_kappa(kappa, len(layers))
        owner, loads = {}, [0] * kappa
        for path in sorted(layers, key=lambda path: -layers[path]):
            owner[path] = loads.index(min(loads))
            loads[owner[path]] += layers[path]
        return cls._numbered(_gather(model, owner, kappa), layers)

    @classmethod
    def per_layer(cls, model: Any, *, keep_dense: Iterable[str] = (), include: Iterable[str] = ()) -> Partition:
        """The finest partition: every layer is a part."""
        keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
        kappa = max(1, len(_layers(model, keep_dense, include)))
        return cls.contiguous(model, kappa, keep_dense=keep_dense, include=include)

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


def _check_kappa(kappa: int, num_layers: int) -> None:
    check_counts(1, kappa=kappa)
    if not num_layers:
        raise GrowpruneError("the model has no layers to cut: name parameters with include=[...], or give Partition.of")
    if kappa > num_layers:
        raise GrowpruneError(f"kappa is {kappa}, but the model has {num_layers} layers: give at most {num_layers}")


def _tensor_names(model: Any) -> list[str]:
    """All parameters and buffers, each once under its first name."""
    return [name for named in (model.named_parameters(), model.named_buffers()) for name, _ in named]


def _layers(model: Any, keep_dense: Iterable[str], include: Iterable[str]) -> dict[str, int]:
    """The number of weights of each layer that has some to grow, in the order of registration."""
    keep_dense, include = as_names(keep_dense, "keep_dense"), as_names(include, "include")
    known = layer_weights(model)
    weights = [w for ws in known.values() for w in ws]
    if keep_dense or include:
        weights = list(prunable_weights(model, keep_dense=keep_dense, include=include))
    places = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    paths = {weight.parameter: weight.parameter.rpartition(".")[0] for weight in weights}
    sizes: dict[str, int] = {}
    for weight in sorted(weights, key=lambda w: places[w.parameter]):
        path = paths[weight.parameter]
        holds_others = path not in known and any(p != path and _below(p, path) for p in paths.values())
        unit = weight.parameter if holds_others else path
        sizes[unit] = sizes.get(unit, 0) + weight.numel
    return sizes


def _longest_prefix(name: str, prefixes: Mapping[str, int]) -> str:
    found = [prefix for prefix in prefixes if matches(name, prefix)]
    if not found:
        raise GrowpruneError(f"{name!r} belongs to no part: add it, or a module it lies in, to one of them")
    return max(found, key=len)


def _below(path: str, ancestor: str) -> bool:
    return path == ancestor or ancestor == "" or path.startswith(ancestor + ".")


def _innermost(path: str, units: Iterable[str]) -> str | None:
    return max((unit for unit in units if _below(path, unit)), key=len, default=None)


def _blocks(module: Any, path: str, layers: Mapping[str, int], *, is_root: bool = False) -> list[str]:
    """The smallest modules a cut must not go through, in order.

    Module structure shows a block where a module that is no mere list holds layers. A module that holds a list of
    modules with several layers each is a stage or a tower, and is cut between them; so is the model as a whole.
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
    """Whether a module does no more than hold others; a Sequential with a forward of its own may be residual."""
    base: Any = next((c for c in type(module).__mro__ if c.__name__ in LISTS), None)
    return base is not None and (base.__name__ != "Sequential" or type(module).forward is base.forward)


def _holds_list_of_blocks(module: Any, path: str, layers: Mapping[str, int]) -> bool:
    for name, descendant in module.named_modules(prefix=path):
        items = [f"{name}.{item}" for item, _ in descendant.named_children()] if _is_list(descendant) else []
        if sum(sum(_below(layer, item) for layer in layers) >= 2 for item in items) >= 2:
            return True
    return False


def _cut(costs: Sequence[float], kappa: int) -> list[int]:
    """The index of the part of each unit, so that the dearest of kappa contiguous parts is as cheap as can be."""
    ends = sorted({load for i in range(len(costs)) for load in accumulate(costs[i:])})
    low, high = 0, len(ends) - 1
    while low < high:  # the smallest cap that some part's cost could be, and that kappa parts can keep to
        middle = (low + high) // 2
        low, high = (low, middle) if _owners_up_to(costs, kappa, ends[middle])[-1] < kappa else (middle + 1, high)
    return _owners_up_to(costs, kappa, ends[low])


def _owners_up_to(costs: Sequence[float], kappa: int, cap: float) -> list[int]:
    """Fill parts from the left up to the cap, but leave at least one unit for every part to come."""
    owner, part, load = [], 0, 0.0
    for i, cost in enumerate(costs):
        must_open = len(costs) - i == kappa - part - 1
        if i > 0 and (load + cost > cap or must_open):
            part, load = part + 1, 0.0
        load += cost
        owner.append(part)
    return owner


def _gather(model: Any, owner: Mapping[str, int], kappa: int) -> list[list[str]]:
    """Give every tensor to the part of its unit; what lies in none follows the unit registered before it."""
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
