"""Sharded by FSDP2, a compact model trains, and is edited, as in one process; ranks hold and send what lives."""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_cases import ForkCursor
from sharded import (
    Arrays,
    Block,
    Run,
    Transformer,
    assert_same,
    batches,
    loss_of,
    make,
    mine,
    ranks,
    received,
    sent,
    weights_of,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import growprune as gp
from growprune import By, Partition, methods
from growprune.sharding import units_of
from growprune.sharding.handles import Ranks
from growprune.storage import block_products
from growprune.storage.kernels import Layout

# Training


def shard_by_hand(sparse: gp.SparseModel, mesh: DeviceMesh) -> None:
    for block in sparse.model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(sparse.model, mesh=mesh)


def trained(mesh: DeviceMesh | None, how: str) -> gp.SparseModel:
    more: dict[str, Any] = {"lr_scaling": 1.0} if how == "lr_scaling" else {}
    sparse = make(is_checkpointed=how == "checkpointed", **more)
    sparse.prune(by=By.RANDOM)
    sparse.grow(Partition.contiguous(sparse.model, 3)[1])
    if mesh is not None and how == "by hand":
        shard_by_hand(sparse, mesh)
    elif mesh is not None:
        sparse.shard(mesh, units=["blocks.*.down", "blocks.1"] if how == "units" else None)
    parameters = sparse.model.parameters()
    kind = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if how == "sgd" else torch.optim.AdamW(parameters, lr=1e-3)
    optimizer = sparse.attach(kind)
    for tokens in batches(4):
        optimizer.zero_grad()
        parts = mine(tokens, mesh).chunk(2) if how == "accumulated" else [mine(tokens, mesh)]
        for part in parts:
            (loss_of(sparse.model, part) / len(parts)).backward()
        nn.utils.clip_grad_norm_(sparse.model.parameters(), 0.5)
        optimizer.step()
    return sparse


def sharded_training(mesh: DeviceMesh, how: str) -> Arrays:
    sparse = trained(mesh, how)
    own = dict(sparse.model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in own.values())
    assert own["blocks.0.up.weight"].dim() == 1
    return sent(weights_of(sparse))


@functools.cache
def trained_alone(how: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    return weights_of(trained(None, how))


HOW = ["adamw", "sgd", "accumulated", "checkpointed", "units", "by hand", "lr_scaling"]


@pytest.mark.parametrize("how", HOW)
def test_two_ranks_train_as_one_process_does(on_two: Run, how: str) -> None:
    for found in on_two(sharded_training, how):
        assert_same(received(found), trained_alone(how))


def mixed(mesh: DeviceMesh) -> None:
    sparse = make()
    sparse.prune(by=By.RANDOM)
    expected = sparse.model(batches(1)[0])
    sparse.shard(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.01))
    for _ in range(2):  # before and after an edit
        out = sparse.model(batches(1)[0])
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        assert {p.grad.dtype for p in sparse.model.parameters()} == {torch.float32}
        if expected is not None:
            torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
        optimizer.step()
        expected = None
        sparse.grow(Partition.contiguous(sparse.model, 3)[0])


def test_what_is_gathered_in_bfloat16_is_trained_in_float32(on_two: Run) -> None:
    on_two(mixed)


# Edits


def plan_of(sparse: gp.SparseModel, method: str, sparsity: float = 0.8) -> Any:
    keep_dense = sparse.keep_dense
    parts = Partition.balanced(sparse.model, 2, keep_dense=keep_dense)
    if method == "rigl":
        layers = Partition.per_layer(sparse.model, keep_dense=keep_dense)
        return methods.rigl(layers, sparsity=sparsity, iterations=6, every=2)
    if method == "gradual_gap":
        return methods.gradual_gap(parts, sparsity=sparsity, iterations=6, every=2, grow_until=1.0)
    if method == "parallel_gap":
        return methods.parallel_gap(parts, sparsity=sparsity, steps=1, epochs=1, finetune=1)
    return methods.cyclic_gap(parts, sparsity=sparsity, steps=2, epochs=1, finetune=1)


def sharded_first(mesh: DeviceMesh, allocation: str) -> gp.SparseModel:
    """A model that was sharded, and has computed, before it is made sparse, as other people's trainers do."""
    torch.manual_seed(0)
    model = Transformer()
    for module in (*(block.up for block in model.blocks), *model.blocks, model):
        fully_shard(module, mesh=mesh)
    model(batches(1)[0])
    return gp.SparseModel(model, sparsity=0.8, storage="compact", seed=3, allocation=allocation)


def planned(mesh: DeviceMesh | None, method: str, how: str = "") -> tuple[list[dict[str, Tensor]], gp.SparseModel]:
    """Masks after each iteration, and the model at the end."""
    # Adam's first steps are all about as long as its learning rate: what has just grown is full of near ties, which
    # only more digits tell apart
    with_adam = method in ("gradual_gap", "rigl") and how in ("", "blocks")
    allocation = {"rigl": "erk", "gradual_gap": "global"}.get(method, "uniform")
    how_sharded: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    if how == "blocks":  # of which products are taken over
        torch.manual_seed(0)
        settings: dict[str, Any] = {"storage": "compact", "pattern": "32x32", "keep_dense": ["head"], "seed": 3}
        sparse = gp.SparseModel(Transformer(64, 1).double(), sparsity=0.5, allocation="uniform", **settings)
        how_sharded = {"units": ["blocks.0.up", "blocks.0"]}
    elif how == "sharded first" and mesh is not None:
        sparse = sharded_first(mesh, allocation)
    else:
        sparse = make(allocation=allocation, dtype=torch.float64 if with_adam else torch.float32)
    if how == "frozen":
        sparse.model.blocks[0].requires_grad_(False)
    if mesh is not None and how != "sharded first":
        sparse.shard(mesh, **how_sharded)
    if how == "compiled":
        sparse.model.blocks[0].compile(backend="aot_eager")
    plan = plan_of(sparse, method, sparse.target_sparsity)
    cursor = ForkCursor(sparse, plan, iterations_per_epoch=2)
    adam = torch.optim.AdamW(sparse.model.parameters(), lr=1e-2 if how == "blocks" else 1e-3)
    sgd = torch.optim.SGD(sparse.model.parameters(), lr=0.1, momentum=0.9)
    optimizer = cursor.attach(adam if with_adam else sgd)
    masks = [sparse.masks]
    with counted_products() if how == "blocks" else nullcontext({}) as counts:
        for tokens in batches(6):
            optimizer.zero_grad()
            parts = mine(tokens, mesh).chunk(2 if how == "sent once" else 1)
            for number, part in enumerate(parts):
                if mesh is not None:
                    sparse.model.set_requires_gradient_sync(number + 1 == len(parts))
                (loss_of(sparse.model, part) / len(parts)).backward()
            optimizer.step()
            masks.append(sparse.masks)
    assert all(count > 0 for count in counts.values()), counts
    assert cursor.is_over
    return masks, sparse


def sharded_plan(mesh: DeviceMesh, method: str, how: str = "") -> tuple[list[Arrays], Arrays]:
    masks, sparse = planned(mesh, method, how)
    return [sent(some) for some in masks], sent(weights_of(sparse))


@functools.cache
def planned_alone(method: str, how: str = "") -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    torch.set_num_threads(1)
    masks, sparse = planned(None, method, how)
    return masks, weights_of(sparse)


def check_plan(found: list[tuple[list[Arrays], Arrays]], method: str, how: str = "") -> None:
    expected, weights = planned_alone(method, how)
    for masks, last in found:
        for own, known in zip(masks, expected, strict=True):
            assert_same(received(own), known)
        assert_same(received(last), weights)


PLANS = {"cyclic_gap": 2, "gradual_gap": 2, "rigl": 2, "parallel_gap": 2}
"""How many times the masks change after the first iteration."""


@pytest.mark.parametrize("method", PLANS)
def test_masks_of_a_plan_are_those_of_one_process_at_every_edit(on_two: Run, method: str) -> None:
    check_plan(on_two(sharded_plan, method), method)
    masks, _ = planned_alone(method)
    assert sum(any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(masks)) == PLANS[method]


@pytest.mark.parametrize("how", ["frozen", "offloaded", "sent once", "sharded first"])
def test_growth_by_gradient_sees_what_one_process_sees(on_two: Run, how: str) -> None:
    check_plan(on_two(sharded_plan, "rigl", how), "rigl", how)


@pytest.mark.slow
def test_compiled_blocks_can_be_sharded() -> None:
    # one in which nobody watched gradients before: torch.compile would look at who did
    with ranks(1) as run:
        check_plan(run(sharded_plan, "cyclic_gap", "compiled"), "cyclic_gap")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_any_number_of_ranks_makes_the_same_masks(world: int) -> None:
    with ranks(world) as run:
        for method in ("cyclic_gap", "gradual_gap", "rigl"):
            check_plan(run(sharded_plan, method), method)
        run(tie)
        for method in BLOCK_PLANS:
            check_plan(run(sharded_plan, method, "blocks"), method, "blocks")


def tie(mesh: DeviceMesh) -> None:
    for allocation in ("uniform", "global"):
        found = []
        for is_sharded in (False, True):
            sparse = make(allocation=allocation)
            with torch.no_grad():
                for weight in sparse.weights:  # few different magnitudes, the same in all layers
                    values = sparse.model.get_parameter(weight.parameter)
                    values.copy_(torch.arange(values.numel()).remainder(3).sub(1.0).view(values.shape))
            if is_sharded:
                sparse.shard(mesh)
            sparse.prune(to=0.5)
            sparse.prune(to=0.9)
            found.append(sparse.masks)
        assert_same(found[1], found[0])


def test_of_equal_weights_the_first_live_whichever_rank_has_them(on_two: Run) -> None:
    on_two(tie)


@pytest.mark.parametrize("pattern", ["1x8", "2:4"])
def test_blocks_are_chosen_as_in_one_process(on_two: Run, pattern: str) -> None:
    on_two(patterned, pattern)


def patterned(mesh: DeviceMesh, pattern: str) -> None:
    found = []
    for own in (None, mesh):
        sparse = make(pattern=pattern, keep_dense=["head"])
        if own is not None:
            sparse.shard(own)
        sparse.prune(to=0.5)
        sparse.prune(to=0.75)
        sparse.grow(Partition.contiguous(sparse.model, 3)[0], to=0.5)
        found.append(weights_of(sparse))
    assert_same(found[1], found[0], tolerance=0)


BLOCK_PLANS = ("gradual_gap", "rigl")


@contextmanager
def counted_products() -> Iterator[dict[str, int]]:
    """While it lasts, layers multiply over live blocks only, and that they do is counted."""
    before, counts = block_products.WAY, {"output": 0, "input_gradient": 0, "values_gradient": 0}
    kept = {name: getattr(block_products, name) for name in counts}
    block_products.WAY = "sparse"

    def counting(name: str, *operands: Any) -> Tensor:
        counts[name] += 1
        product: Tensor = kept[name](*operands)
        return product

    for name in counts:
        setattr(block_products, name, functools.partial(counting, name))
    try:
        yield counts
    finally:
        for name, product in kept.items():
            setattr(block_products, name, product)
        block_products.WAY = before


@pytest.mark.parametrize("method", BLOCK_PLANS)
def test_products_over_live_blocks_are_those_of_one_process(on_two: Run, method: str) -> None:
    check_plan(on_two(sharded_plan, method, "blocks"), method, "blocks")
    masks, _ = planned_alone(method, "blocks")
    assert any(not torch.equal(a[n], b[n]) for a, b in itertools.pairwise(masks[1:]) for n in a)


def scored(mesh: DeviceMesh | None) -> gp.SparseModel:
    """A model in which some layers have no live weight at all, pruned by what gradients say before any training."""
    sparse = make(sparsity=0.99, allocation="global")
    if mesh is not None:
        sparse.shard(mesh)
    sparse.score(By.SNIP, [lambda: loss_of(sparse.model, mine(batches(1)[0], mesh))])
    sparse.prune(by=By.SNIP)
    optimizer = sparse.attach(torch.optim.SGD(sparse.model.parameters(), lr=0.1))
    for is_grown in (False, True):
        loss_of(sparse.model, mine(batches(1)[0], mesh)).backward()
        optimizer.step()
        if not is_grown:
            sparse.grow(Partition.contiguous(sparse.model, 2)[0], to=0.5)
    return sparse


def sharded_scores(mesh: DeviceMesh) -> Arrays:
    return sent(weights_of(scored(mesh)))


def test_layers_may_die_and_grow_again(on_two: Run) -> None:
    with pytest.warns(UserWarning, match="pruned to zero weights"):
        alone = weights_of(scored(None))
    for found in on_two(sharded_scores):
        assert_same(received(found), alone)


def edited(mesh: DeviceMesh) -> list[int]:
    """The largest tensor that ranks put together while a part grows and is pruned again, and what there is."""
    sparse = make()
    sparse.prune(by=By.RANDOM)
    sparse.shard(mesh)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.01))
    loss_of(sparse.model, mine(batches(1)[0], mesh)).backward()
    optimizer.step()
    sizes: list[int] = []
    all_gather = Ranks.all_gather

    def watched(self: Ranks, *arguments: Any, **settings: Any) -> Tensor:
        found = all_gather(self, *arguments, **settings)
        sizes.append(found.numel())
        return found

    Ranks.all_gather = watched  # type: ignore[method-assign]
    part = Partition.contiguous(sparse.model, 3)[0]
    sparse.grow(part)
    sparse.prune(part)
    Ranks.all_gather = all_gather  # type: ignore[method-assign]
    return [max(sizes), max(p.shape.numel() for p in sparse.stored.values()), sparse.num_prunable]


def test_an_edit_puts_together_one_layer_at_a_time(on_two: Run) -> None:
    for largest, layer, model in on_two(edited):
        assert largest <= layer < model / 3


def carried_over(mesh: DeviceMesh) -> None:
    """What one process knows of its optimizer, a sharded model can take, and gives back."""
    alone, sharded = make(), make()
    for sparse in (alone, sharded):
        sparse.prune(by=By.RANDOM)
    one = alone.attach(torch.optim.AdamW(alone.model.parameters(), lr=0.01))
    loss_of(alone.model, batches(1)[0]).backward()
    one.step()
    sharded.shard(mesh)
    sharded.restore(alone.snapshot())
    two = sharded.attach(torch.optim.AdamW(sharded.model.parameters(), lr=0.01))
    sharded.load_live_state(two, alone.live_state(one))
    found = sharded.live_state(two)["state"]
    for index, entries in alone.live_state(one)["state"].items():
        assert_same(found[index], entries, tolerance=0)
    assert_same(weights_of(sharded), weights_of(alone), tolerance=0)


def test_a_sharded_model_takes_the_state_of_one_process_and_gives_it_back(on_two: Run) -> None:
    on_two(carried_over)


def evaluated(mesh: DeviceMesh) -> None:
    sparse = make()
    sparse.shard(mesh)
    before = weights_of(sparse)
    with torch.no_grad():
        sparse.model(batches(1)[0])  # after which the outermost weights stay gathered
    with sparse.pruned():
        assert sparse.num_alive < 0.25 * sparse.num_prunable
        sparse.model(batches(1)[0])
    assert_same(weights_of(sparse), before, tolerance=0)
    with torch.no_grad():
        sparse.model(batches(1)[0])
    sparse.prune()
    loss_of(sparse.model, batches(1)[0]).backward()
    assert all(parameter.grad is not None for parameter in sparse.model.parameters())


def test_a_model_can_be_evaluated_between_edits(on_two: Run) -> None:
    on_two(evaluated)


# What it takes


def step_bytes(mesh: DeviceMesh) -> tuple[list[int], list[int], int, list[int]]:
    sparse = make()
    sparse.prune(by=By.RANDOM)
    sparse.grow(Partition.contiguous(sparse.model, 3)[1])
    total = sum(parameter.numel() for parameter in sparse.model.parameters())
    sparse.shard(mesh)
    optimizer = sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=0.01))
    gathered: list[int] = []
    reduced: list[int] = []
    gather, reduce = DefaultAllGather.__call__, DefaultReduceScatter.__call__

    def counting_gather(self: Any, output_tensor: Tensor, *arguments: Any, **settings: Any) -> Any:
        gathered.append(output_tensor.numel())
        return gather(self, output_tensor, *arguments, **settings)

    def counting_reduce(self: Any, output_tensor: Tensor, input_tensor: Tensor, *rest: Any, **settings: Any) -> Any:
        reduced.append(input_tensor.numel())
        return reduce(self, output_tensor, input_tensor, *rest, **settings)

    DefaultAllGather.__call__, DefaultReduceScatter.__call__ = counting_gather, counting_reduce
    loss_of(sparse.model, mine(batches(1)[0], mesh)).backward()
    DefaultAllGather.__call__, DefaultReduceScatter.__call__ = gather, reduce
    optimizer.step()
    own = [parameter.to_local().numel() for parameter in sparse.model.parameters()]
    moments = [t.to_local().numel() for s in optimizer.state.values() for t in s.values() if isinstance(t, DTensor)]
    return gathered, reduced, total, [sum(own), sum(moments)]


def test_a_step_moves_what_lives_and_a_rank_holds_its_share(on_two: Run) -> None:
    for gathered, reduced, total, (own, moments) in on_two(step_bytes):
        forward, backward = sum(gathered[:3]), sum(gathered[3:])
        assert len(gathered) == 5  # the outermost weights stay gathered from the forward to the backward pass
        assert total <= forward < total * 1.03
        assert backward == forward - gathered[0]
        assert total <= sum(reduced) < total * 1.03
        assert abs(own - total / 2) < 0.1 * total / 2
        assert moments == 2 * own


def expansions(mesh: DeviceMesh) -> list[int]:
    """How often a step makes a weight dense, in one process and sharded."""
    found = []
    for own in (None, mesh):
        sparse = make()
        sparse.prune(by=By.RANDOM)
        if own is not None:
            sparse.shard(own)
        loss_of(sparse.model, batches(1)[0]).backward()
        count, expand = [0], Layout.expand

        def counting(self: Layout, *operands: Any, count: list[int] = count, expand: Any = expand) -> Tensor:
            count[0] += 1
            dense: Tensor = expand(self, *operands)
            return dense

        Layout.expand = counting  # type: ignore[method-assign]
        loss_of(sparse.model, batches(1)[0]).backward()
        Layout.expand = expand  # type: ignore[method-assign]
        found += count
    return found


def test_gathering_a_layer_does_not_make_its_weight_dense(on_two: Run) -> None:
    for alone, sharded in on_two(expansions):
        assert 0 < sharded == alone


# Mistakes


def told(body: Any) -> str:
    with pytest.raises(gp.GrowpruneError) as caught:
        body()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mistakes(mesh: DeviceMesh) -> list[str]:
    found = []
    sparse = gp.SparseModel(Transformer(), sparsity=0.8)
    found.append(told(lambda: sparse.shard(mesh)))
    sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(sharded, mesh=mesh)
    found.append(told(lambda: gp.SparseModel(sharded, sparsity=0.8)))
    twice = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shards", "tensors"))
    cut = parallelize_module(nn.Sequential(nn.Linear(8, 8)), twice["tensors"], {"0": ColwiseParallel()})
    found.append(told(lambda: gp.SparseModel(cut, sparsity=0.8, storage="compact")))
    fully_shard(cut, mesh=twice["shards"])
    found.append(told(lambda: gp.SparseModel(cut, sparsity=0.8, storage="compact")))
    two_dimensions = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    found.append(told(lambda: make().shard(two_dimensions)))
    replicated = nn.Sequential(nn.Linear(8, 8))
    fully_shard(replicated, mesh=two_dimensions)
    found.append(told(lambda: gp.SparseModel(replicated, sparsity=0.8, storage="compact")))
    assert type(replicated[0]) is nn.Linear  # a refused call changes nothing
    other = make(seed=mesh.get_rank())
    other.prune(by=By.RANDOM)
    found.append(told(lambda: other.shard(mesh)))
    found.append(told(lambda: make().shard("cpu:2")))  # type: ignore[arg-type]
    found.append(told(lambda: make().shard(mesh, units=["layers.*"])))
    small = DeviceMesh("cpu", [0])
    if mesh.get_rank() == 1:
        found.append(told(lambda: make().shard(small)))
    ready = make()
    ready.shard(mesh)
    found.append(told(lambda: ready.shard(mesh)))
    found.append(told(ready.to_dense_))
    torch.manual_seed(mesh.get_rank())
    found.append(told(lambda: gp.sparse_init(Transformer, sparsity=0.8, mesh=mesh)))
    return found


def test_what_cannot_be_sharded_is_refused_in_one_line(on_two: Run) -> None:
    expected = [
        "a model with storage='masked' cannot be sharded",
        "a model with storage='masked' cannot be sharded",
        "0.weight is already sharded (it is a DTensor)",
        "0.weight was sharded by tensor parallelism before FSDP2",
        "the mesh has 2 dimensions, as for HSDP",
        "0.weight is sharded over a mesh of two dimensions (HSDP)",
        "rank 1 has another mask of blocks.0.attention.in_proj_weight than rank 0",
        "mesh must be a DeviceMesh, got a str",
        "units has 'layers.*', which matches no module of the model",
        "the mesh has ranks [0], but this is rank 1 of 2",
        "the model is already sharded",
        "a sharded model cannot be made dense on one rank",
        "rank 1 has another random state than rank 0",
    ]
    first, second = on_two(mistakes)
    on_first = [start for start in expected if not start.startswith("the mesh has ranks")]
    for lines, starts in ((first, on_first), (second, expected)):
        assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def flattened(mesh: DeviceMesh) -> list[str]:
    del mesh
    settings = {"device_id": torch.device("cpu")}
    after = make()
    return [
        told(lambda: FullyShardedDataParallel(after.model, use_orig_params=True, **settings)),
        told(lambda: FullyShardedDataParallel(make().model, **settings)),
        told(lambda: gp.SparseModel(FullyShardedDataParallel(Transformer(), **settings), sparsity=0.8)),
    ]


def test_fsdp1_is_refused_before_and_after(on_two: Run) -> None:
    for lines in on_two(flattened):
        assert all("FSDP1 (FullyShardedDataParallel)" in line and "sparse.shard(mesh)" in line for line in lines)


def test_settings_of_sharding_need_a_mesh(tmp_path: Path) -> None:
    expected = "sharding={'units': ['0']} needs a mesh to shard over: pass mesh= too"
    settings = {"units": ["0"]}
    assert told(lambda: gp.sparse_init(lambda: nn.Linear(4, 4), sparsity=0.5, sharding=settings)) == expected
    gp.save(gp.SparseModel(nn.Linear(4, 4), sparsity=0.0), tmp_path / "model.safetensors")
    assert told(lambda: gp.load(tmp_path / "model.safetensors", nn.Linear(4, 4), sharding=settings)) == expected


def test_deepspeed_is_refused_in_one_line() -> None:
    kind = type("ZeroOptimizer", (torch.optim.SGD,), {"__module__": "deepspeed.runtime.zero"})
    sparse = make()
    assert told(lambda: sparse.attach(kind(sparse.model.parameters(), lr=0.1))) == (
        "DeepSpeed's ZeroOptimizer cannot train a sparse model: shard it with sparse.shard(mesh), which is torch's "
        "FSDP2 (fully_shard)"
    )
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    assert told(lambda: gp.SparseModel(engine(8, 8), sparsity=0.5)).startswith("DeepSpeed cannot train a sparse model")
    zero = nn.Linear(8, 8)
    zero.weight.ds_id = 0  # type: ignore[assignment]
    assert told(lambda: gp.SparseModel(zero, sparsity=0.5)).startswith("weight belongs to DeepSpeed's ZeRO")


def test_units_are_the_blocks_of_the_outermost_lists_and_then_the_model() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Transformer(8, 2))
    kinds = [type(module) for module in units_of(model, None)]
    assert kinds == [nn.Linear, Transformer, nn.Sequential]
    assert [type(m) for m in units_of(model[1], None)] == [Block, Block, Transformer]
    inner_first = units_of(model, ["1.blocks.*", "1.blocks.0.up"])
    assert inner_first.index(model[1].blocks[0].up) < inner_first.index(model[1].blocks[0])
    assert inner_first[-1] is model
