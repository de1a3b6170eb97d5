"""Do two commits train the same bits? Prints `sha256 name` for many tiny trainings.

    python benchmarks/same_bits.py > before.txt     # on one commit
    python benchmarks/same_bits.py > after.txt      # on another, on the same machine
    diff before.txt after.txt

There are two kinds; `--only` selects one.

- loops: own training loops through `gp.sparsify`, `gp.SparseModel` and `gp.Cursor`, each a function below. A digest
  covers parameters and buffers (dense), masks, the state of the optimizers, learning rates, losses, and how many random
  numbers were drawn. In place of a digest, `refused` says that growprune does not allow a case, and `raised` that it
  failed; the reason is on stderr. They take a minute.
- compare: runs of `growprune compare` on digits, in a temporary folder: every method in both storages; blocks of 4x1
  come last, for some methods. The digests are of each run's model.safetensors. They take a few minutes.

Some loops come in several forms that must print the same digest: NAME, NAME-resumed and NAME-resumed-masks (stopped,
and continued in fresh objects); NAME-one-optimizer and NAME-two-optimizers.

These loops are wrong at commit 6f0073a, so that they differ where the defect is mended:

- loops/two-models-scaled-*-one-optimizer: learning rates grow with every step, and in compact storage parameters drop
  out of the optimizer (KeyError). Mended, they equal loops/two-models-scaled-*-two-optimizers, which are right.
- loops/conv-1x4-*-compact-*-resumed: a 1x1 convolution that is dense has other strides after loading. Mended, they
  equal loops/conv-1x4-*-compact-*, which may change too, with those strides.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import growprune as gp

BLOCK_METHODS = "gradual_gap,cyclic_gap,gmp,rigl,set,dpf"

ITERATIONS = 40
EVERY = {
    name: {"every": 4} for name in ("admm", "dpf", "dsr", "gmp", "granet", "iterative_admm", "rigl", "set", "snfs")
}
OPTIONS: dict[str, dict[str, Any]] = {**EVERY, "deepr": {"l1": 1e-3, "temperature": 1e-3}}
"""What a method needs in order to edit often in 40 iterations."""
USUAL_METHODS = ["gradual_gap", "cyclic_gap", "gmp", "rigl", "granet", "admm", "dpf", "str", "deepr", "snip", "grasp"]
CONV_CASES = (
    ("unstructured", "gradual_gap", "sgd"),
    ("4x1", "gradual_gap", "adamw"),
    ("4x1", "rigl", "sgd"),
    ("1x4", "gradual_gap", "sgd"),
    ("1x4", "gradual_gap", "adamw"),
)

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(Adam, lr=2e-3),
    "adamw": partial(AdamW, lr=2e-3, weight_decay=0.05),
    "sgd-fused": partial(SGD, lr=0.05, momentum=0.9, fused=True),
    "adam-fused": partial(Adam, lr=2e-3, fused=True),
}


# The models and the data of the loops


def mlp() -> nn.Sequential:
    """Return six linear layers without normalization."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 8))


def conv_net() -> nn.Sequential:
    """Return convolutions of 3x3 and 1x1 in turn, with BatchNorm."""
    torch.manual_seed(0)
    sizes = [(3, 16, 3), (16, 16, 1), (16, 16, 3), (16, 32, 1), (32, 16, 1)]
    blocks = [nn.Sequential(nn.Conv2d(i, o, k), nn.BatchNorm2d(o), nn.ReLU()) for i, o, k in sizes]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


def loss_of(model: nn.Module, iteration: int) -> Tensor:
    """Return the loss of an iteration on its own random batch, and leave the global generator seeded by it."""
    torch.manual_seed(iteration)
    is_conv = any(isinstance(module, nn.Conv2d) for module in model.modules())
    inputs = torch.randn(8, 3, 8, 8) if is_conv else torch.randn(16, 16)
    return F.cross_entropy(model(inputs), inputs.flatten(1)[:, :8].argmax(1))


# The digest


def add(digest: Any, *things: object) -> None:
    """Add tensors, with their type and shape, and other plain values to a digest."""
    for thing in things:
        if isinstance(thing, Tensor):
            tensor = thing.detach().cpu().contiguous()
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(thing).encode())


def record(digest: Any, iteration: int, loss: Tensor, models: Sequence[Any], optimizers: Iterable[Optimizer]) -> None:
    """Add the loss of an iteration to a digest; in every fifth one, add everything.

    Optimizer state and learning rates are added by the name of their parameter, so that it does not matter which
    optimizer trains it. A parameter that none trains, or two, is noticed.

    Args:
        models: Sparsifiers or SparseModels.
    """
    add(digest, iteration, loss)
    if iteration % 5 != 4:
        return
    add(digest, torch.get_rng_state())
    held: dict[int, list[tuple[float, dict[str, Any]]]] = {}
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            add(digest, float(group["lr"]), float(saved_group["lr"]))
            for parameter, index in zip(group["params"], saved_group["params"], strict=True):
                held.setdefault(id(parameter), []).append((float(group["lr"]), saved["state"].get(index, {})))
    for model in models:
        sparse = model if isinstance(model, gp.SparseModel) else model.sparse
        for name, mask in sparse.masks.items():
            add(digest, name, mask)
        for name, parameter in sparse.model.named_parameters():
            for rate, state in held.get(id(parameter), []):
                add(digest, name, rate, *[part for key in sorted(state) for part in (key, state[key])])
        dense = copy.deepcopy(sparse).to_dense_()
        for name, tensor in dense.state_dict().items():
            add(digest, name, tensor)


# The loops


def method(digest: Any, name: str, storage: str, optimizer_name: str) -> None:
    """A method with its defaults, on an MLP."""
    model = mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses = [partial(loss_of, model, 100), partial(loss_of, model, 101)] if name in ("snip", "grasp") else None
    settings = {"storage": storage, "losses": losses, **OPTIONS.get(name, {})}
    sparsifier = gp.sparsify(model, optimizer, name, sparsity=0.8, iterations=ITERATIONS, **settings)
    for iteration in range(ITERATIONS + 5):  # the last five are after the end of the plan
        optimizer.zero_grad()
        loss = loss_of(model, iteration)
        loss.backward()
        optimizer.step()
        record(digest, iteration, loss, [sparsifier], [optimizer])


def closure(digest: Any, name: str, storage: str, optimizer_name: str) -> None:
    """Steps whose closure computes the gradients."""
    model = mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    settings = {"storage": storage, **OPTIONS.get(name, {})}
    sparsifier = gp.sparsify(model, optimizer, name, sparsity=0.8, iterations=ITERATIONS, **settings)

    def compute(iteration: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, iteration)
        loss.backward()
        return loss

    for iteration in range(ITERATIONS):
        loss: Any = optimizer.step(partial(compute, iteration))
        record(digest, iteration, loss, [sparsifier], [optimizer])


def scaler(digest: Any, name: str, storage: str, optimizer_name: str) -> None:
    """A GradScaler, which skips two steps of infinite loss. Every third time, gradients are unscaled and clipped."""
    model = mlp()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    settings = {"storage": storage, **OPTIONS.get(name, {})}
    sparsifier = gp.sparsify(model, optimizer, name, sparsity=0.8, iterations=ITERATIONS, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
    for iteration in range(ITERATIONS + 5):  # of which two do not count
        optimizer.zero_grad()
        loss = loss_of(model, iteration) * (float("inf") if iteration in (7, 23) else 1)
        scaled: Any = scaler.scale(loss)
        scaled.backward()
        if iteration % 3 == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        add(digest, scaler.get_scale(), sparsifier.sparsity, sparsifier.is_finished)
        record(digest, iteration, loss, [sparsifier], [optimizer])


def stopped(
    digest: Any,
    make_model: Callable[[], nn.Module],
    name: str,
    storage: str,
    pattern: str,
    optimizer_name: str,
    dtype: torch.dtype,
    how: str,
) -> None:
    """A loop that may stop in the middle of a phase, and continue in fresh objects.

    Args:
        dtype: the loss is computed under autocast to it, unless it is float32.
        how: "-resumed" from the state of the Sparsifier in a file; "-resumed-masks" from its state of masks alone, and
            from those of the model and optimizer after it; or "", not stopped at all.
    """

    def begin() -> tuple[nn.Module, Optimizer, gp.Sparsifier]:
        model = make_model()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        settings = {"storage": storage, "pattern": pattern, **OPTIONS.get(name, {})}
        return model, optimizer, gp.sparsify(model, optimizer, name, sparsity=0.7, iterations=ITERATIONS, **settings)

    model, optimizer, sparsifier = begin()
    for iteration in range(ITERATIONS):
        if iteration == 19 and how:  # one step before swaps by gradient; a 1x1 convolution is dense then
            file = io.BytesIO()
            state = sparsifier.state_dict(only_masks=how == "-resumed-masks")
            torch.save((state, model.state_dict(), optimizer.state_dict()), file)
            model, optimizer, sparsifier = begin()
            state, of_model, of_optimizer = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            sparsifier.load_state_dict(state)
            if how == "-resumed-masks":
                model.load_state_dict(of_model)
                optimizer.load_state_dict(of_optimizer)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(model, iteration)
        loss.backward()
        optimizer.step()
        record(digest, iteration, loss, [sparsifier], [optimizer])


def two_optimizers(digest: Any, name: str, storage: str) -> None:
    """One model whose layers are trained by SGD and AdamW in turn, one step after the other."""
    model = mlp()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    sgd = OPTIMIZERS["sgd"]([parameter for layer in layers[::2] for parameter in layer.parameters()])
    adamw = OPTIMIZERS["adamw"]([parameter for layer in layers[1::2] for parameter in layer.parameters()])
    settings = {"storage": storage, **OPTIONS.get(name, {})}
    sparsifier = gp.sparsify(model, [sgd, adamw], name, sparsity=0.8, iterations=ITERATIONS, **settings)
    for iteration in range(ITERATIONS):
        model.zero_grad()
        loss = loss_of(model, iteration)
        loss.backward()
        sgd.step()
        adamw.step()
        record(digest, iteration, loss, [sparsifier], [sgd, adamw])


def two_models(digest: Any, name: str, storage: str, lr_scaling: float, are_apart: bool) -> None:
    """Two sparse models in one loss, trained by one Adam with a group for each, or by an Adam for each."""
    models = [mlp(), mlp()]
    if are_apart:
        optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    else:
        optimizers = [OPTIMIZERS["adam"]([{"params": model.parameters()} for model in models])]
    settings = {"storage": storage, "lr_scaling": lr_scaling, **OPTIONS.get(name, {})}
    sparsifiers = [
        gp.sparsify(model, optimizer, name, sparsity=sparsity, iterations=ITERATIONS, **settings)
        for model, sparsity, optimizer in zip(models, (0.9, 0.7), (optimizers[0], optimizers[-1]), strict=True)
    ]
    for iteration in range(ITERATIONS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(models[0], iteration) + loss_of(models[1], iteration + 1000)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        record(digest, iteration, loss, sparsifiers, optimizers)


def two_attached(digest: Any, storage: str, are_apart: bool) -> None:
    """Two SparseModels without a plan, attached to one Adam or to two, edited by hand."""
    models = [mlp(), mlp()]
    sparse = [gp.SparseModel(model, 0.8, storage=storage, seed=seed) for seed, model in enumerate(models)]
    if are_apart:
        optimizers = [OPTIMIZERS["adam"](model.parameters()) for model in models]
    else:
        optimizers = [OPTIMIZERS["adam"]([{"params": model.parameters()} for model in models])]
    sparse[0].attach(optimizers[0])
    sparse[1].attach(optimizers[-1])
    for iteration in range(20):
        if iteration == 3:
            sparse[0].prune()
        elif iteration == 8:
            sparse[0].grow(to=0.5)
            sparse[1].prune()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(models[0], iteration) + loss_of(models[1], iteration + 1000)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        record(digest, iteration, loss, sparse, optimizers)


def groups(digest: Any, storage: str, schedule: str, lr_scaling: Any) -> None:
    """Two param groups with a learning rate and weight decay of their own, and a schedule that steps each iteration."""
    model = mlp()
    names = [name for name, _ in model.named_parameters()]
    slow = {"params": [model.get_parameter(name) for name in names[:6]], "lr": 1e-3, "weight_decay": 0.1}
    fast = {"params": [model.get_parameter(name) for name in names[6:]], "lr": 4e-3, "weight_decay": 0.0}
    optimizer = AdamW([slow, fast])
    settings = {"storage": storage, "lr_scaling": lr_scaling}
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.9, iterations=ITERATIONS, **settings)
    scheduler: Any
    if schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ITERATIONS)
    else:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-2], total_steps=ITERATIONS + 1)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        loss = loss_of(model, iteration)
        loss.backward()
        optimizer.step()
        scheduler.step()
        add(digest, scheduler.get_last_lr(), [group["lr"] for group in optimizer.param_groups])
        record(digest, iteration, loss, [sparsifier], [optimizer])


def accumulation(digest: Any, name: str, storage: str) -> None:
    """Two backward passes for each step, gradients set to zero instead of None, and clipped."""
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    settings = {"storage": storage, **OPTIONS.get(name, {})}
    sparsifier = gp.sparsify(model, optimizer, name, sparsity=0.8, iterations=ITERATIONS, **settings)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, iteration + 1000).backward()
        loss = loss_of(model, iteration)
        loss.backward()
        add(digest, nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        record(digest, iteration, loss, [sparsifier], [optimizer])


def phases(digest: Any, storage: str) -> None:
    """The paper's own loop over the phases of C-GaP, each with a fresh optimizer."""
    model = mlp()
    sparse = gp.SparseModel(model, 0.9, storage=storage)
    plan = gp.methods.cyclic_gap(gp.Partition.contiguous(model, 3), sparsity=0.9, steps=4, epochs=1, finetune=2)
    iteration = 0
    for phase in gp.Cursor(sparse, plan):
        optimizer = sparse.attach(OPTIMIZERS["sgd"](model.parameters()))
        for _ in range(7 * phase.epochs):
            optimizer.zero_grad()
            loss = loss_of(model, iteration)
            loss.backward()
            optimizer.step()
            record(digest, iteration, loss, [sparse], [optimizer])
            iteration += 1


def trained_first(digest: Any, initial_mask: str, storage: str) -> None:
    """A model that was trained dense before, pruned, saved, loaded, and pruned further from its zeros."""
    model = mlp()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for iteration in range(10):
        optimizer.zero_grad()
        loss_of(model, iteration).backward()
        optimizer.step()
    calibration = None if initial_mask == "magnitude" else [torch.randn(16, 16) for _ in range(2)]
    settings = {"storage": storage, "initial_mask": initial_mask, "calibration": calibration}
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.7, iterations=ITERATIONS, **settings)
    for iteration in range(ITERATIONS):
        optimizer.zero_grad()
        loss = loss_of(model, iteration)
        loss.backward()
        optimizer.step()
        record(digest, iteration, loss, [sparsifier], [optimizer])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        gp.save(sparsifier.sparse, path)
        loaded = gp.load(path, mlp()).to_dense_()
    optimizer = OPTIMIZERS["sgd"](loaded.parameters())
    settings = {"storage": storage, "initial_mask": "as_is"}
    sparsifier = gp.sparsify(loaded, optimizer, sparsity=0.9, iterations=20, **settings)
    for iteration in range(20):
        optimizer.zero_grad()
        loss = loss_of(loaded, iteration)
        loss.backward()
        optimizer.step()
        record(digest, iteration, loss, [sparsifier], [optimizer])


def loops() -> Iterator[tuple[str, Callable[..., None], tuple[Any, ...]]]:
    """Yield the name of each loop, the function that adds its training to a digest, and the function's arguments."""
    for storage in ("masked", "compact"):
        for name in gp.methods.METHODS:
            for optimizer in ("sgd", "adam", "adamw") if name in USUAL_METHODS else ("sgd",):
                yield f"method-{name}-{storage}-{optimizer}", method, (name, storage, optimizer)
        is_masked = storage == "masked"  # other methods refuse compact storage
        for name in ("gradual_gap", "rigl", "admm") if is_masked else ("gradual_gap", "rigl"):
            for optimizer in ("sgd", "adam"):
                yield f"closure-{name}-{storage}-{optimizer}", closure, (name, storage, optimizer)
            yield f"accumulation-{name}-{storage}", accumulation, (name, storage)
            yield f"two-optimizers-{name}-{storage}", two_optimizers, (name, storage)
        for name in ("gradual_gap", "rigl", "snfs", "admm", "deepr") if is_masked else ("gradual_gap", "rigl"):
            for optimizer in ("sgd", "sgd-fused", "adam-fused"):
                yield f"scaler-{name}-{storage}-{optimizer}", scaler, (name, storage, optimizer)
        for how in ("", "-resumed", "-resumed-masks"):
            for name in ("gradual_gap", "rigl", "snfs", "admm", "dpf", "str") if is_masked else ("gradual_gap", "rigl"):
                arguments = (mlp, name, storage, "unstructured", "adamw", torch.bfloat16, how)
                yield f"bfloat16-{name}-{storage}{how}", stopped, arguments
            for pattern, name, optimizer in CONV_CASES:
                arguments = (conv_net, name, storage, pattern, optimizer, torch.float32, how)
                yield f"conv-{pattern}-{name}-{storage}-{optimizer}{how}", stopped, arguments
        for are_apart, end in ((False, f"{storage}-one-optimizer"), (True, f"{storage}-two-optimizers")):
            yield f"two-models-gradual_gap-{end}", two_models, ("gradual_gap", storage, 0, are_apart)
            yield f"two-models-rigl-{end}", two_models, ("rigl", storage, 0, are_apart)
            yield f"two-models-scaled-{end}", two_models, ("gradual_gap", storage, "auto", are_apart)
            yield f"two-attached-{end}", two_attached, (storage, are_apart)
        for schedule in ("cosine", "one-cycle"):
            for lr_scaling in ("auto", 0.5):
                yield f"groups-{schedule}-{lr_scaling}-{storage}", groups, (storage, schedule, lr_scaling)
        for initial_mask in ("magnitude", "wanda", "sparsegpt"):
            yield f"trained-{initial_mask}-{storage}", trained_first, (initial_mask, storage)
        yield f"phases-{storage}", phases, (storage,)


def run_loops(match: str) -> None:
    torch.set_num_threads(1)
    for name, loop, arguments in loops():
        if not fnmatch.fnmatch(name, match):
            continue
        digest = hashlib.sha256()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loop(digest, *arguments)
            print(digest.hexdigest(), f"loops/{name}", flush=True)
        except gp.GrowpruneError as error:
            print("refused", type(error).__name__, f"loops/{name}", flush=True)
            print(f"loops/{name}: {error}", file=sys.stderr)
        except Exception as error:
            print("raised", type(error).__name__, f"loops/{name}", flush=True)
            print(f"loops/{name}:\n{traceback.format_exc()}", file=sys.stderr)


# Runs of growprune compare


def compare(out: Path, arguments: argparse.Namespace, *settings: str) -> None:
    command = [sys.executable, "-m", "growprune", "compare", "digits/dense", "--sparsities", "0.9", "--seeds", "0"]
    command += ["--epochs", str(arguments.epochs), "--workers", str(arguments.workers), "--out", str(out), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)  # a method that refuses its storage is one of them
    if not any(out.rglob("model.safetensors")):
        raise SystemExit(f"no run of {out.name} ended")


def run_compare(arguments: argparse.Namespace) -> None:
    width, methods = f"task.width={arguments.width}", arguments.methods
    with tempfile.TemporaryDirectory() as folder:
        for storage in arguments.storages.split(","):
            settings = ["--methods", methods, "--set", width]
            if storage == "compact":
                settings += ["--set", "storage=compact"]
            elif storage == "blocks":
                few = BLOCK_METHODS if methods == "all" else methods
                settings = ["--methods", few, "--set", f"task.width={2 * arguments.width}", "--set", "pattern=4x1"]
            compare(Path(folder) / storage, arguments, *settings)
        for path in sorted(Path(folder).rglob("model.safetensors")):
            name = path.parent.relative_to(folder).as_posix()
            print(hashlib.sha256(path.read_bytes()).hexdigest(), name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("all", "loops", "compare"), default="all")
    parser.add_argument("--match", default="*", help="the loops to run, such as 'conv-*'")
    parser.add_argument("--methods", default="all", help="the methods of compare")
    parser.add_argument(
        "--storages", default="masked,compact,blocks", help="some of masked, compact, blocks, for compare"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.only != "compare":
        run_loops(arguments.match)
    if arguments.only != "loops":
        run_compare(arguments)


if __name__ == "__main__":
    main()
