"""Sharded models are built, saved, loaded and resumed without any rank having all of one."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from paths import ROOT
from sharded import Run, Transformer, assert_same, batches, loss_of, make, mine, weights_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import growprune as gp
from growprune import By, Partition, methods
from growprune.files import writer
from growprune.files.sharded_checkpoints import prepare_optimizer

# Building, files


def built(mesh: DeviceMesh, allocation: str) -> list[int]:
    torch.manual_seed(5)
    sparse = gp.sparse_init(Transformer, sparsity=0.8, mesh=mesh, allocation=allocation)
    torch.manual_seed(5)
    assert_same(weights_of(sparse), weights_of(gp.sparse_init(Transformer, sparsity=0.8, allocation=allocation)))
    parameters = list(sparse.model.parameters())
    return [sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)]


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_model_built_on_a_mesh_is_the_one_that_one_process_builds(on_two: Run, allocation: str) -> None:
    (own, total), (others, _) = on_two(built, allocation)
    assert own + others == total
    assert abs(own - total / 2) < 0.05 * total


def filed(mesh: DeviceMesh, folder: str) -> None:
    """Saved by two ranks, a file has the bytes that one process writes; and both load it again."""
    sparse = make()
    sparse.prune(by=By.RANDOM)
    sparse.grow(Partition.contiguous(sparse.model, 3)[1])
    gp.save(sparse, f"{folder}/one-{mesh.get_rank()}.safetensors")
    sparse.shard(mesh)
    gp.save(sparse, f"{folder}/two.safetensors")
    assert Path(f"{folder}/two.safetensors").read_bytes() == Path(f"{folder}/one-0.safetensors").read_bytes()
    with torch.device("meta"):
        model = Transformer()
    again = gp.load(f"{folder}/two.safetensors", model, storage="compact", mesh=mesh)
    assert_same(weights_of(again), weights_of(sparse), tolerance=0)
    assert again.ranks is not None
    again.prune()
    sparse.prune()
    assert_same(weights_of(again), weights_of(sparse), tolerance=0)


def test_ranks_write_and_read_the_file_of_one_process(on_two: Run, tmp_path: Path) -> None:
    on_two(filed, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one-0.safetensors",
        "one-1.safetensors",
        "two.safetensors",
    ]


def unwritable(mesh: DeviceMesh, folder: str) -> str:
    sparse = make()
    sparse.shard(mesh)
    with pytest.raises((OSError, gp.GrowpruneError)) as caught:
        gp.save(sparse, f"{folder}/nowhere/model.safetensors")
    gp.save(sparse, f"{folder}/model.safetensors")  # nobody is left waiting
    return str(caught.value)


def damaged(mesh: DeviceMesh, folder: str) -> str:
    sparse = make()
    sparse.shard(mesh)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(gp.GrowpruneError) as caught:
        patch.setattr(writer, "crc32", lambda tensor: 0)  # the file that was written is not as its manifest says
        gp.save(sparse, f"{folder}/model.safetensors")
    return str(caught.value)


@pytest.mark.parametrize(("save", "named"), [(unwritable, "cannot write"), (damaged, "CRC-32")])
def test_all_ranks_are_told_that_a_file_could_not_be_written(
    on_two: Run, save: Any, named: str, tmp_path: Path
) -> None:
    first, second = on_two(save, str(tmp_path))
    assert named in first
    assert second.startswith("the first rank could not write")


# Checkpoints


def plan_of(sparse: gp.SparseModel) -> Any:
    parts = Partition.per_layer(sparse.model)
    return methods.rigl(parts, sparsity=0.8, iterations=12, every=3)


def started(mesh: DeviceMesh | None) -> tuple[gp.Cursor, torch.optim.Optimizer]:
    sparse = make(allocation="erk")
    if mesh is not None:
        sparse.shard(mesh)
    cursor = gp.Cursor(sparse, plan_of(sparse))
    return cursor, sparse.attach(torch.optim.AdamW(sparse.model.parameters(), lr=1e-3))


def go_on(cursor: gp.Cursor, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, to: int) -> None:
    cursor.advance(cursor.iteration)
    for tokens in batches(12)[cursor.iteration : to]:
        optimizer.zero_grad()
        loss_of(cursor.sparse.model, mine(tokens, mesh)).backward()
        optimizer.step()
        if cursor.iteration + 1 == to:
            break  # so that a checkpoint has the gradients that the next edit looks at
        cursor.advance(cursor.iteration + 1)


def first_half(mesh: DeviceMesh | None, folder: str) -> None:
    cursor, optimizer = started(mesh)
    optimizer.param_groups[0]["lr"] = 2e-3
    go_on(cursor, optimizer, mesh, to=6)
    assert cursor.sparse.gradients.are_seen(By.GRADIENT)
    cursor.iteration += 1
    gp.save_sharded_checkpoint(folder, cursor.sparse, optimizer, cursor=cursor)


def second_half(mesh: DeviceMesh | None, folder: str) -> dict[str, Tensor]:
    cursor, optimizer = started(mesh)
    gp.load_sharded_checkpoint(folder, cursor.sparse, optimizer, cursor=cursor)
    assert cursor.iteration == 6
    assert optimizer.param_groups[0]["lr"] == 2e-3
    go_on(cursor, optimizer, mesh, to=12)
    return weights_of(cursor.sparse)


def uninterrupted(mesh: DeviceMesh | None) -> dict[str, Tensor]:
    cursor, optimizer = started(mesh)
    optimizer.param_groups[0]["lr"] = 2e-3
    go_on(cursor, optimizer, mesh, to=12)
    return weights_of(cursor.sparse)


def resumed(mesh: DeviceMesh, folder: str) -> dict[str, Tensor]:
    first_half(mesh, folder)
    assert_same(second_half(mesh, folder), uninterrupted(mesh), tolerance=0)
    return {}


def test_a_checkpoint_is_resumed_on_the_same_and_on_another_number_of_ranks(on_two: Run, tmp_path: Path) -> None:
    on_two(resumed, str(tmp_path / "two"))
    torch.set_num_threads(1)
    expected = uninterrupted(None)
    assert_same(second_half(None, str(tmp_path / "two")), expected)  # one process, not sharded at all
    first_half(None, str(tmp_path / "one"))
    on_two(going_on_with_two, str(tmp_path / "one"))


def compact() -> tuple[gp.Cursor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    sparse = gp.SparseModel(model, sparsity=0.5, allocation="global", storage="compact")
    plan = methods.rigl(Partition.contiguous(model, 1), sparsity=0.5, iterations=12, every=4)
    cursor = gp.Cursor(sparse, plan)
    return cursor, cursor.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def train_on(cursor: gp.Cursor, optimizer: torch.optim.Optimizer, to: int) -> None:
    while cursor.iteration < to:
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(cursor.iteration))
        optimizer.zero_grad()
        cursor.sparse.model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_checkpoint_is_loaded_to_where_torch_would_keep_the_state_of_an_optimizer(is_fused: bool) -> None:
    """The meta device stands in for a GPU: a fused kernel counts steps there, others count them on the CPU."""
    model = torch.nn.Linear(8, 8, device="meta")
    sparse = gp.SparseModel(model, sparsity=0.5)
    optimizer = sparse.attach(torch.optim.AdamW(model.parameters()))
    group = {"params": ["weight", "bias"], "lr": 0.1, "fused": is_fused}
    about = {"like": ["exp_avg"], "own": {"step": [[], "float32"], "row": [[8], "float32"]}, "plain": {}}
    index = {"kind": "AdamW", "groups": [group], "states": {"weight": about, "bias": about}}
    prepare_optimizer(sparse, optimizer, index)
    found = {key: entry.device.type for key, entry in optimizer.state[model.weight].items()}
    assert found == {"exp_avg": "meta", "step": "meta" if is_fused else "cpu", "row": "meta"}


def going_on_with_two(mesh: DeviceMesh, folder: str) -> None:
    found = second_half(mesh, folder)
    if mesh.get_rank() == 0:
        assert_same(found, uninterrupted(None))


def cut_short(mesh: DeviceMesh, folder: str) -> list[str]:
    cursor, optimizer = started(mesh)
    cursor.advance(0)
    gp.save_sharded_checkpoint(f"{folder}/1", cursor.sparse, optimizer, cursor=cursor)
    found = []
    for body in (
        lambda: gp.save_sharded_checkpoint(f"{folder}/1", cursor.sparse),
        lambda: gp.load_sharded_checkpoint(f"{folder}/2", cursor.sparse),
        lambda: gp.load_sharded_checkpoint(f"{folder}/none", cursor.sparse),
        lambda: gp.load_sharded_checkpoint(
            f"{folder}/1", cursor.sparse, torch.optim.SGD(cursor.sparse.model.parameters(), lr=0.1)
        ),
    ):
        with pytest.raises(gp.GrowpruneError) as caught:
            body()
        found.append(str(caught.value).replace(folder, "DIR"))
    return found


def test_a_checkpoint_without_its_index_is_refused(on_two: Run, tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    for lines in on_two(cut_short, str(tmp_path)):
        assert lines == [
            "DIR/1 already has a checkpoint: use a new folder, such as state-{iteration}",
            "DIR/2 has no growprune.json, because its checkpoint is incomplete: resume from a complete checkpoint "
            "(gp.newest_sharded_checkpoint finds it)",
            "DIR/none has no growprune.json, because the folder does not exist: resume from a complete checkpoint "
            "(gp.newest_sharded_checkpoint finds it)",
            "DIR/1 has the state of AdamW, but the optimizer is SGD: resume with the same optimizer",
        ]
    assert gp.newest_sharded_checkpoint(tmp_path) == tmp_path / "1"
    shutil.rmtree(tmp_path / "1")
    assert gp.newest_sharded_checkpoint(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2, None])
def test_a_checkpoint_of_another_version_is_refused(version: int | None, tmp_path: Path) -> None:
    (tmp_path / "growprune.json").write_text(json.dumps({"format": "growprune-state", "version": version}))
    sparse = gp.SparseModel(torch.nn.Linear(4, 4), sparsity=0.5)
    with pytest.raises(gp.GrowpruneError, match="storage='compact', got 'masked'"):
        gp.save_sharded_checkpoint(tmp_path / "masked", sparse)
    with pytest.raises(gp.GrowpruneError, match=f"has version {version}, this growprune reads 3"):
        gp.load_sharded_checkpoint(tmp_path, sparse)


@pytest.mark.parametrize("what", ["optimizer", "groups", "plan", "no plan", "index"])
def test_a_checkpoint_that_is_refused_changes_nothing(what: str, tmp_path: Path) -> None:
    cursor, optimizer = compact()
    train_on(cursor, optimizer, 6)
    saved = None if what == "no plan" else cursor
    gp.save_sharded_checkpoint(tmp_path / "six", cursor.sparse, optimizer, cursor=saved)
    if what == "index":
        index = tmp_path / "six" / "growprune.json"
        index.write_text(index.read_text()[:-20])
    again, other = compact()
    if what == "plan":
        plan = methods.rigl(Partition.contiguous(again.sparse.model, 1), sparsity=0.5, iterations=15, every=5)
        again = gp.Cursor(again.sparse, plan)
    elif what == "optimizer":
        other = torch.optim.Adam(again.sparse.model.parameters())
    elif what == "groups":
        other = torch.optim.SGD([{"params": [p]} for p in again.sparse.model.parameters()], lr=0.1, momentum=0.9)
    before = weights_of(again.sparse)
    with pytest.raises(gp.GrowpruneError, match=rf"^{tmp_path / 'six'}[^\n]*$"):
        gp.load_sharded_checkpoint(tmp_path / "six", again.sparse, other, cursor=again)
    assert_same(weights_of(again.sparse), before, tolerance=0)
    assert not other.state


# The page


def page(mesh: DeviceMesh, folder: str) -> list[Any]:
    del mesh
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "distributed.md").read_text(), re.S)
    os.chdir(folder)
    names: dict[str, Any] = {}
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda: None  # there is one
    try:
        exec(code, names)
    finally:
        torch.distributed.init_process_group = begin
    return [names["sparse"].num_alive, names["cursor"].iteration, names["newest"] is not None]


def test_the_code_of_the_page_runs_and_goes_on_where_it_was(on_two: Run, tmp_path: Path) -> None:
    alive = 2 * (round(0.1 * 64 * 64) * 4 + round(0.1 * 64 * 256) * 2)
    assert on_two(page, str(tmp_path)) == [[alive, 6, False]] * 2
    for last in ("5", "6"):
        shutil.rmtree(tmp_path / "states" / last)
    assert on_two(page, str(tmp_path)) == [[alive, 6, True]] * 2
    assert gp.manifest(tmp_path / "model.safetensors")["totals"]["prunable_nnz"] == alive


# Killed


def member(rank: int, world: int, meeting: str, folder: str) -> None:
    """Train with a checkpoint after each phase, from the newest one on, and save the file at the end."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    cursor, optimizer = started(mesh)
    if (newest := gp.newest_sharded_checkpoint(folder)) is not None:
        gp.load_sharded_checkpoint(newest, cursor.sparse, optimizer, cursor=cursor)
    cursor.advance(cursor.iteration)
    for tokens in batches(12)[cursor.iteration :]:
        optimizer.zero_grad()
        loss_of(cursor.sparse.model, mine(tokens, mesh)).backward()
        optimizer.step()
        cursor.advance(cursor.iteration + 1)
        gp.save_sharded_checkpoint(f"{folder}/{cursor.iteration}", cursor.sparse, optimizer, cursor=cursor)
        if world > 1 and cursor.iteration == 5:
            time.sleep(600)  # until one of them is killed
    gp.save(cursor.sparse, f"{folder}/model.safetensors")
    torch.distributed.destroy_process_group()


def start(world: int, meeting: Path, folder: Path) -> list[Any]:
    context = forked.context()
    processes = [context.Process(target=member, args=(r, world, str(meeting), str(folder))) for r in range(world)]
    for process in processes:
        process.start()
    return processes


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_what_came_after_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    processes = start(2, tmp_path / "meeting", folder)
    deadline = time.monotonic() + 60
    while not (folder / "5" / "growprune.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for process in reversed(processes):
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    shutil.rmtree(folder / "5")  # as if it had been killed while it saved
    (folder / "5").mkdir()
    for process in start(1, tmp_path / "another", folder):
        process.join(60)
        assert process.exitcode == 0
    cursor, optimizer = started(None)
    for iteration, tokens in enumerate(batches(12)):
        cursor.advance(iteration)
        optimizer.zero_grad()
        loss_of(cursor.sparse.model, tokens).backward()
        optimizer.step()
    cursor.advance(12)
    found = gp.load(folder / "model.safetensors", Transformer(), storage="compact")
    assert_same(weights_of(found), weights_of(cursor.sparse))
