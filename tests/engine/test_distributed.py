"""Several processes: the same bits for any number of mask groups, replicas that add up, faults that cost nothing."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from paths import TOY
from several import progress_of, run_on, start_on
from torch.distributed.distributed_c10d import _set_pg_timeout
from toy import Toy, continuing, parallel, plain, slow_parallel, stopped

import growprune as gp
from growprune import engine, methods
from growprune.engine.mesh import Mesh, check_shape
from growprune.engine.recipe import Recipe
from growprune.engine.trainer import split
from growprune.masks.partition import contiguous


def model_bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def gradual() -> Recipe:
    """Parts that grow no further than a peak allows: which of their weights, is drawn in each branch."""
    options = {"epochs": 4, "every": 4, "peak_density": 0.75, "power": 3}
    return replace(parallel(), method=methods.parallel_gradual_gap, options=options, allocation="global")


@pytest.mark.parametrize(
    "recipe", [parallel(), continuing(parallel()), gradual()], ids=["restart", "continue", "gradual"]
)
def test_any_number_of_processes_gives_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = replace(recipe, task=Toy(depth=4), parts=contiguous(4))
    engine.train(recipe, tmp_path / "1")
    result = json.loads((tmp_path / "1" / "result.json").read_text())
    for world in (2, 3, 4) if recipe.options == parallel().options else (3,):
        assert run_on(world, recipe, tmp_path / str(world)) == []
        assert model_bytes(tmp_path / str(world)) == model_bytes(tmp_path / "1")
        found = json.loads((tmp_path / str(world) / "result.json").read_text())
        assert found["history"] == result["history"]  # with what was explored
        assert found["best"] == result["best"]
        for name in ("training_flops", "training_examples", "peak_alive", "average_alive", "data"):
            assert found[name] == result[name]


def test_each_part_is_sent_once_a_round_and_no_more(tmp_path: Path) -> None:
    recipe = replace(parallel(), task=Toy(depth=4), parts=contiguous(4))
    assert run_on(2, recipe, tmp_path / "run") == []
    model = recipe.task.build_model()
    names = {part.name: part.tensors for part in recipe.parts.cut(model, keep_dense=recipe.keep_dense)}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {w.parameter for w in recipe.resolve(model).make_sparse(model).weights}
    for rank, log in enumerate(("log.jsonl", "log-1.jsonl")):
        events = [json.loads(line) for line in (tmp_path / "run" / log).read_text().splitlines()]
        received = [event["bytes_received"] for event in events if event["event"] == "combined"]
        others = [name for part in ("S1", "S3") if rank == 0 for name in names[part]]
        others += [name for part in ("S0", "S2") if rank == 1 for name in names[part]]
        # of weights, what lives at 80 % and a bit for each; the branch has pruned what it brings
        alive = sum(round(0.2 * tensors[n].numel()) * 4 + -(-tensors[n].numel() // 8) for n in others if n in weights)
        rest = sum(tensors[n].numel() * tensors[n].element_size() for n in others if n not in weights)
        assert received == [alive + rest] * 2


@pytest.mark.parametrize(
    ("storage", "num_examples"),
    [("masked", 49), ("compact", 51)],
    ids=["masked, last batch of 1", "compact, last batch of 3"],
)
def test_two_replicas_equal_one_process_with_the_same_global_batch(
    storage: str, num_examples: int, tmp_path: Path
) -> None:
    task = Toy(is_plain=True, num_examples=num_examples)  # replicas get uneven shares, or none
    recipe = replace(plain(), task=task, storage=storage, accumulate=2, clip=1.0)
    engine.train(recipe, tmp_path / "one")
    assert run_on(2, recipe, tmp_path / "two") == []
    one, two = (gp.read(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name] == 0, one[name] == 0)


@pytest.mark.parametrize("world, num_examples", [(2, 51), (3, 50)], ids=["one example left", "none left"])
def test_batchnorm_sees_the_examples_of_all_replicas_and_no_others(
    world: int, num_examples: int, tmp_path: Path
) -> None:
    task = Toy(is_normed=True, num_examples=num_examples)  # what the last batch leaves for the last replica
    recipe = replace(plain(), task=task, parts=contiguous(2))
    one = engine.train(recipe, tmp_path / "one")
    assert run_on(world, recipe, tmp_path / "two") == []
    two = json.loads((tmp_path / "two" / "result.json").read_text())
    weights = [gp.read(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= set(weights[0])
    for name in weights[0]:
        torch.testing.assert_close(weights[1][name], weights[0][name], rtol=1e-5, atol=1e-5)
    assert two["test"]["accuracy"] == one["test"]["accuracy"]


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (methods.snip, {}),
        (methods.snip, {"accumulate": 3}),
        (methods.snip, {"storage": "compact"}),
        (methods.snip, {"task": Toy(is_normed=True)}),
        (methods.snip, {"storage": "compact", "shard": "fsdp"}),
        (methods.grasp, {}),
    ],
    ids=["snip", "accumulated", "compact", "BatchNorm", "sharded", "grasp"],
)
def test_a_first_edit_by_gradient_is_the_same_on_any_number_of_replicas(
    method: Any, change: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    recipe = replace(plain(), method=method, options={"iterations": 0}, parts=contiguous(1), allocation="global")
    recipe = replace(recipe, **change)
    engine.train(recipe, tmp_path / "1")
    for world in (2, 3):
        assert run_on(world, recipe, tmp_path / str(world)) == []
        assert model_bytes(tmp_path / str(world)) == model_bytes(tmp_path / "1")


def test_batchnorm_of_a_single_example_is_refused_on_replicas_too(tmp_path: Path) -> None:
    recipe = replace(plain(), task=Toy(is_normed=True, num_examples=49), parts=contiguous(2))
    errors = run_on(2, recipe, tmp_path / "two")
    assert errors and all("more than one value per channel" in error or "gave up" in error for error in errors)


def takes_long_to_test(recipe: Recipe, folder: Path) -> None:
    """The first process is not done with testing until the second is seen to ask whether to stop while it waits."""
    asked, evaluate = folder / "asked", Toy.evaluate

    def evaluate_long(task: Toy, model: torch.nn.Module, split: str, **how: Any) -> dict[str, float]:
        if split == "test":
            forked.wait_until(asked.exists)
        return evaluate(task, model, split, **how)

    def should_stop() -> bool:
        if os.environ["RANK"] == "1" and (folder / "model.safetensors").exists():  # which is written before the tests
            asked.touch()
        return False

    Toy.evaluate = evaluate_long  # type: ignore[method-assign]
    engine.train(recipe, folder, should_stop=should_stop)


def test_while_the_first_process_tests_the_others_do_not_wait_in_torch_which_would_time_out(tmp_path: Path) -> None:
    assert run_on(2, replace(plain(), candidates=False), tmp_path / "two", body=takes_long_to_test) == []
    assert (tmp_path / "two" / "result.json").exists()


def test_replicas_may_compute_in_bfloat16(tmp_path: Path) -> None:
    recipe = replace(plain(), precision="bf16")
    engine.train(recipe, tmp_path / "one")
    assert run_on(2, recipe, tmp_path / "two") == []
    one, two = (gp.read(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        assert float((two[name] - one[name]).norm() / (1e-6 + one[name].norm())) < 0.2  # whose sums are rounded


def waiting_little(recipe: Recipe, folder: Path) -> None:
    """Train; wait for others for 10 seconds only, once all have started, which may take long."""
    join, patience = engine.loop.join, timedelta(seconds=10)  # type: ignore[attr-defined]

    def join_patiently(device: torch.device, timeout_seconds: float) -> int:
        rank: int = join(device, forked.HANG_SECONDS)
        _set_pg_timeout(patience)
        return rank

    engine.loop.join = join_patiently  # type: ignore[attr-defined]
    engine.train(replace(recipe, timeout_seconds=patience.total_seconds()), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, waits",
    [
        (
            replace(plain(), task=Toy(is_plain=True, pause=0.05)),
            r"gave up in phase \d \(.*\), while (adding|comparing)",
        ),
        (
            replace(parallel(), task=Toy(pause=0.05)),
            r"gave up in phase \d.*, while waiting for the branches of stage 1",
        ),
    ],
    ids=["replica", "branch"],
)
def test_a_process_that_hangs_is_given_up_and_named(recipe: Recipe, waits: str, tmp_path: Path) -> None:
    processes, errors = start_on(2, recipe, tmp_path / "run", body=waiting_little)
    forked.wait_until((tmp_path / "run" / "log-1.jsonl").exists)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        said = errors.get(timeout=forked.HANG_SECONDS)
    finally:
        os.kill(processes[1].pid, signal.SIGKILL)
        processes[0].kill()  # leaving the others politely would wait for them
    assert re.search(waits, said), said
    assert said.startswith("rank 0: rank 0 of 2")


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "RANK": "0"}
        words = ("train", "digits/tiny", "--out", str(tmp_path / "run"))
        done = forked.growprune(*words, cwd=None, environment={**os.environ, **environment, "WORLD_SIZE": "2"})
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("growprune:")]
    assert len(said) == 1
    assert "cannot connect to 127.0.0.1" in said[0]
    assert "Use a free port" in said[0]


@pytest.mark.parametrize(
    ("storage", "shard"), [("masked", "none"), pytest.param("compact", "fsdp", marks=pytest.mark.slow)]
)
def test_branches_may_have_replicas_and_shards_too(storage: str, shard: str, tmp_path: Path) -> None:
    recipe = replace(parallel(), task=Toy(is_plain=True), parts=contiguous(2), storage=storage)
    engine.train(recipe, tmp_path / "one")
    assert run_on(4, replace(recipe, shard=shard, replicas=2), tmp_path / "four") == []
    one, four = (gp.read(tmp_path / name / "model.safetensors") for name in ("one", "four"))
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-5, atol=1e-6)


def test_a_run_may_be_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    recipe = replace(parallel(), task=Toy(depth=4), parts=contiguous(4))
    engine.train(recipe, tmp_path / "undisturbed")
    stopped(recipe, tmp_path / "run", 10)  # into the third branch of the first fork
    assert len(list((tmp_path / "run" / "checkpoints" / "branches").iterdir())) == 3
    assert run_on(3, recipe, tmp_path / "run") == []
    assert model_bytes(tmp_path / "run") == model_bytes(tmp_path / "undisturbed")


def test_what_differs_between_processes_is_named_before_anything_is_trained(tmp_path: Path) -> None:
    recipe = replace(parallel(), timeout_seconds=20.0)
    errors = run_on(2, recipe, tmp_path / "recipes", last=replace(recipe, clip=1.0))
    assert len(errors) == 2
    assert all("starting: recipe on rank 1 differs from rank 0" in error for error in errors)
    errors = run_on(2, recipe, tmp_path / "kinds", last=replace(recipe, task=Toy(num_examples=51)))
    assert all(" on rank 1 differs from rank 0" in error for error in errors)


def test_more_groups_than_branches_and_odd_replicas_are_refused_with_a_remedy() -> None:
    model = Toy().build_model()
    alone = Mesh(parallel().plan(model), 0)
    assert (alone.groups, alone.replicas, alone.is_first, alone.is_local(2)) == (1, 1, True, True)
    with pytest.raises(ValueError, match=r"8 processes .* 8 groups, but the plan has only 3 branches.*replicas=3"):
        check_shape(8, 1, 3)
    with pytest.raises(ValueError, match="the number of processes must be a multiple of replicas=2, got 5"):
        check_shape(5, 2, 3)


def test_a_batch_is_shared_among_replicas_without_loss() -> None:
    batch = (7, torch.arange(5), {"y": torch.arange(10).view(5, 2)})
    shares = [split(batch, index, 3) for index in range(3)]
    assert [share for _, share in shares] == [2 / 5, 2 / 5, 1 / 5]
    assert [part[1].tolist() for part, _ in shares] == [[0, 3], [1, 4], [2]]
    assert shares[1][0][2]["y"].tolist() == [[2, 3], [8, 9]]
    assert split(torch.arange(2), 2, 3) == (torch.arange(1), 0.0)


def torchrun(*arguments: str, folder: Path, recipe: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *arguments]
    return [*command, "-m", "growprune", "train", f"{TOY}:{recipe}", "--out", str(folder)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TOY.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def workers_of(folder: Path) -> list[int]:
    """The processes that train in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # it ended just now
            continue
        if b"growprune" in words and str(folder).encode() in words and b"torch.distributed.run" not in words:
            found.append(int(path.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
def test_a_run_one_of_whose_workers_is_killed_ends_with_the_undisturbed_bits(tmp_path: Path) -> None:
    engine.train(slow_parallel(), tmp_path / "undisturbed")
    folder, chance = tmp_path / "killed", random.Random(0)
    command = torchrun(
        "--standalone", "--nproc-per-node", "2", "--max-restarts", "100", folder=folder, recipe="slow_parallel"
    )
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        goal = chance.randrange(1, 20)
        forked.wait_until(lambda: progress_of(folder) >= goal, lambda: process.poll() is None)
        os.kill(chance.choice(workers_of(folder)), signal.SIGKILL)
        assert process.wait(forked.HANG_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert any('"resumed"' in log.read_text() for log in folder.glob("log*.jsonl"))
    assert model_bytes(folder) == model_bytes(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
def test_a_machine_that_is_lost_for_good_is_not_waited_for(tmp_path: Path) -> None:
    engine.train(slow_parallel(), tmp_path / "undisturbed")
    folder, port = tmp_path / "run", forked.free_port()
    meeting = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-backend", "c10d"]
    meeting += ["--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf"]
    gate = tmp_path / "gate"  # one machine that is faster than the other waits there, and is not done before it comes
    machines = []
    for is_host in (True, False):  # the first one keeps the meeting place
        conf = f"is_host={is_host},last_call_timeout=2,read_timeout={forked.HANG_SECONDS:.0f}"
        command = torchrun(*meeting, conf, folder=folder, recipe="slow_parallel")
        settings: Any = {"env": {**environment(), "TOY_GATE": str(gate)}, "stderr": subprocess.DEVNULL}
        machines.append(subprocess.Popen(command, start_new_session=True, **settings))
    try:
        forked.wait_until(lambda: len(workers_of(folder)) == 2)
        gate.touch()
        forked.wait_until((folder / "log-1.jsonl").exists)
        os.killpg(machines[1].pid, signal.SIGKILL)
        # when all is done, torchrun itself still waits some minutes for the lost machine's leave; the run does not
        forked.wait_until((folder / "result.json").exists)
    finally:
        for machine in machines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
    assert model_bytes(folder) == model_bytes(tmp_path / "undisturbed")


@pytest.mark.parametrize("make", [plain, parallel], ids=["cyclic", "parallel"])
def test_a_sharded_recipe_equals_one_process_and_goes_on_on_another_number(
    make: Callable[[], Recipe], tmp_path: Path
) -> None:
    recipe = replace(make(), task=Toy(is_plain=True), parts=contiguous(2), storage="compact")
    recipe = replace(recipe, accumulate=2, clip=1.0)
    alone = engine.train(recipe, tmp_path / "one")
    sharded = replace(recipe, shard="fsdp", replicas=2, checkpoint_seconds=0)
    assert run_on(2, sharded, tmp_path / "two") == []
    one, two = (gp.read(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name] == 0, one[name] == 0)
    logs = [json.loads((tmp_path / "two" / log).read_text().splitlines()[0]) for log in ("log.jsonl", "log-1.jsonl")]
    assert [(line["event"], line.get("ranks")) for line in logs] == [("sharded", 2)] * 2
    values = sum(tensor.numel() for tensor in one.values())  # all live when a model is built
    assert abs(logs[0]["own_values"] - values / 2) < 0.1 * values
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["test"]["accuracy"] == alone["test"]["accuracy"]
    (tmp_path / "two" / "result.json").unlink()
    shutil.rmtree(max((tmp_path / "two" / "checkpoints").glob("0*")))
    engine.resume(recipe, tmp_path / "two")  # in this process, not sharded
    for name, tensor in gp.read(tmp_path / "two" / "model.safetensors").items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-5, atol=1e-6)


def test_a_recipe_that_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(gp.GrowpruneError, match=r"storage must be 'compact' with shard='fsdp' .*, got 'masked'"):
        replace(plain(), shard="fsdp")
    recipe = replace(plain(), task=Toy(is_normed=True), parts=contiguous(2), storage="compact", shard="fsdp")
    expected = "shard='fsdp' does not support BatchNorm, but 1 is one. Use replicas instead (shard='none')"
    assert sorted(run_on(2, recipe, tmp_path / "run")) == [f"rank {rank}: {expected}" for rank in range(2)]


def test_with_one_ranking_over_the_model_parts_are_sent_dense_and_pruned_together(tmp_path: Path) -> None:
    recipe = replace(parallel(), task=Toy(depth=4), parts=contiguous(4), allocation="global")
    engine.train(recipe, tmp_path / "one")
    assert run_on(2, recipe, tmp_path / "two") == []
    assert model_bytes(tmp_path / "two") == model_bytes(tmp_path / "one")
    events = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    tensors = dict(recipe.task.build_model().named_parameters())
    dense = sum(tensor.numel() * 4 for name, tensor in tensors.items() if name.startswith(("fc2", "head")))
    assert all(event["bytes_received"] >= dense for event in events if event["event"] == "combined")
