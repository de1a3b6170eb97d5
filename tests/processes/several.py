"""A recipe on several processes that meet at a port, as torchrun would start them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import torch

from growprune import engine
from growprune.engine.recipe import Recipe

Body = Callable[..., Any]
"""Given a recipe, a folder, and more arguments."""


def carry_on(recipe: Recipe, folder: Path) -> None:
    """Train in a new folder, or resume the run that is there."""
    (engine.resume if (folder / "recipe.json").exists() else engine.train)(recipe, folder)


def progress_of(folder: Path) -> int:
    """How many events the processes of a run have logged."""
    return sum(log.read_bytes().count(b"\n") for log in folder.glob("log*.jsonl"))


def run_on(
    world: int, recipe: Recipe, folder: Path, *, last: Recipe | None = None, body: Body = carry_on, arguments: Any = ()
) -> list[str]:
    """Train or resume a recipe on some processes, and return their complaints.

    Args:
        last: what the last process gets instead of the recipe.
        body: what every process does.
    """
    processes, errors = start_on(world, recipe, folder, last=last, body=body, arguments=arguments)
    for process in processes:
        process.join(forked.HANG_SECONDS)
        assert process.exitcode == 0
    return [errors.get() for _ in range(errors.qsize())]


def start_on(
    world: int, recipe: Recipe, folder: Path, *, last: Recipe | None = None, body: Body = carry_on, arguments: Any = ()
) -> tuple[list[Any], Any]:
    """The processes, started, and the queue of their complaints."""
    context = forked.context()
    errors, port = context.Queue(), forked.free_port()
    recipes = [recipe] * (world - 1) + [last or recipe]
    processes = [
        context.Process(target=_member, args=(rank, world, port, errors, body, recipes[rank], folder, *arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, errors


def _member(rank: int, world: int, port: int, errors: Any, body: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        body(*arguments)
    except (ValueError, engine.PeerFailed, engine.TrainingDiverged) as error:
        errors.put(f"rank {rank}: {error}")
    finally:
        engine.leave()
