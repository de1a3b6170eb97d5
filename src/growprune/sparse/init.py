"""Build a sparse model that would not fit in memory as a dense model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from growprune.errors import GrowpruneError
from growprune.masks.allocation import Pool
from growprune.masks.layers import Weight, is_normalized
from growprune.masks.ranking import choose, edit_keys, salt_of
from growprune.plan import By, Edit, prune
from growprune.sparse.model import SparseModel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def reset(module: nn.Module) -> None:
    """Initialize a module's own parameters and buffers with its reset_parameters."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is None:
        own = [name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]]
        raise GrowpruneError(
            f"{type(module).__name__} has {', '.join(own)} but no reset_parameters, so sparse_init cannot initialize "
            f"it: add that method, or pass initialise=, a function that takes a module"
        )
    method()


def sparse_init(
    build: Callable[[], nn.Module],
    *,
    sparsity: float,
    device: torch.device | str = "cpu",
    initialise: Callable[[nn.Module], None] = reset,
    mesh: DeviceMesh | None = None,
    sharding: Mapping[str, Any] | None = None,
    **settings: Any,
) -> SparseModel:
    """Build a randomly masked model in compact storage, layer by layer, so that at most one layer is dense at a time.

    The result equals `SparseModel(build(), ...)` followed by a random prune, if every module initializes itself.
    `rescale` is on if the model has no normalization. The masks are those that a plan starts with, for every
    allocation. Initialization in the `__init__` of a parent module, such as `nn.init.normal_(self.head.weight)`, has no
    effect, because memory is allocated later: pass it as `initialise`.

    Args:
        build: creates the model; called on the meta device, where it takes no memory.
        initialise: fills all of one module's own parameters and buffers.
        mesh: shard the model over its ranks, as `SparseModel.shard` does, each unit as soon as it is filled. `device`
            is then that of the mesh. Call torch.manual_seed with the same seed on all ranks.
        sharding: further arguments of `SparseModel.shard`, such as {"mp_policy": ...}.
        settings: further arguments of `SparseModel`.

    Examples:
        >>> sparse_init(lambda: nn.Linear(100, 100), sparsity=0.9).num_alive
        1000
    """
    if (storage := settings.pop("storage", "compact")) != "compact":
        instead = "or create SparseModel(build(), ...) and prune it with by=By.RANDOM"
        raise GrowpruneError(f"sparse_init supports only storage='compact', got {storage!r}: remove it, {instead}")
    if mesh is None and sharding:
        raise GrowpruneError(f"sharding={dict(sharding)} needs a mesh to shard over: pass mesh= too")
    with torch.device("meta"):
        model = build()
    settings.setdefault("rescale", not is_normalized(model))
    sparse = SparseModel(model, sparsity=sparsity, storage="compact", **settings)
    shards: Any = None
    if mesh is not None:
        from growprune.sharding import UnitByUnit  # FSDP2 takes a second to load

        shards = UnitByUnit(sparse, mesh, **(sharding or {}))
        shards.check_random_state()
    device = torch.device(device) if shards is None else shards.ranks.device
    edit = prune(sparse.whole, to=sparse.target_sparsity, by=By.RANDOM)
    pools: dict[str, list[Pool]] = {}
    for shared in sparse.editor.pools(edit) if sparse.target_sparsity > 0 else ():
        for pool in _one_each(shared, sparse, edit, device):
            pools.setdefault(pool.weights[0].parameter.rpartition(".")[0], []).append(pool)
    for path, module in _fill(model, device, initialise):
        sparse.editor.select(pools.get(path, []), edit)
        if shards is not None:
            shards.done(module)
    sparse.skip(1)  # it is done, pool by pool
    sparse.notice_shards()
    return sparse


def dense_init(build: Callable[[], nn.Module], *, initialise: Callable[[nn.Module], None] = reset) -> nn.Module:
    """Build a dense model with the same initial weights as `sparse_init`, drawn in the same order."""
    with torch.device("meta"):
        model = build()
    list(_fill(model, torch.device("cpu"), initialise))
    return model


def _fill(
    model: nn.Module, device: torch.device, initialise: Callable[[nn.Module], None]
) -> Iterator[tuple[str, nn.Module]]:
    """Allocate and fill a model from the meta device; yield the path of each filled module, and the module.

    Only tied tensors are remembered, so that the others can be freed.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    places = Counter(id(tensor) for _, tensor in named)
    tied: dict[int, Tensor | None] = {key: None for key, count in places.items() if count > 1}
    for path, module in _children_first(model):
        new_names = []
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is None or old.device.type != "meta":
                    continue
                new = tied.get(id(old))
                if new is None:
                    new = torch.full_like(old, _nothing(old.dtype), device=device)
                    new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                    if id(old) in tied:
                        tied[id(old)] = new
                    new_names.append(name)
                setattr(module, name, new)  # not past it: recurrent layers keep their parameters twice
        if new_names:
            initialise(module)
        for name in new_names:
            tensor = getattr(module, name)
            if tensor.dtype is torch.bool or not tensor.numel():
                continue
            ends, nothing = tensor.detach().flatten()[[0, -1]], _nothing(tensor.dtype)
            if bool((ends.isnan() if nothing != nothing else ends == nothing).all()):
                raise GrowpruneError(
                    f"{f'{path}.{name}' if path else name} was not initialized, not even by reset_parameters of "
                    f"{type(module).__name__}: pass initialise=, a function that fills it"
                )
        yield path, module


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module after its children, the order in which constructors initialize them."""
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _nothing(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no initialization produces, as far as there is one."""
    if dtype is torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _one_each(pool: Pool, sparse: SparseModel, edit: Edit, device: torch.device) -> list[Pool]:
    """Split a pool into one pool per weight, with the counts that a ranking of all together results in.

    Random keys depend only on positions, so they can be ranked before the weights exist, a few at a time.
    """
    if len(pool.weights) == 1:
        return [pool]

    def read(weight: Weight) -> tuple[Tensor, Tensor]:
        everything = torch.ones((), dtype=torch.bool, device=device).expand(weight.shape)  # takes no memory
        return everything, everything

    salts = [salt_of(sparse.seed, sparse.editor.num_edits, weight.name) for weight in pool.weights]
    sources = [
        edit_keys(edit, weight, sparse.pattern, read=read, salt=salt, dtype=torch.float32)
        for weight, salt in zip(pool.weights, salts, strict=True)
    ]
    walks = choose(sources, pool.kept, device=device, least=pool.least)
    counts = [sum(int(torch.count_nonzero(chosen)) for chosen in walk) for walk in walks]
    return [Pool((weight,), count) for weight, count in zip(pool.weights, counts, strict=True)]
