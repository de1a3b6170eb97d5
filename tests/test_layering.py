"""Imports go downwards only. A new file in src/growprune needs a line in MAY_IMPORT, which says where it belongs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import growprune

SOURCE = Path(growprune.__file__).parent
CORE = (
    "plan layers partition selection patterns scores allocation snapshot storage optimizers gradients edits sparse "
    "cursor"
)

MAY_IMPORT = {
    "lengths": "",
    "errors": "",
    "cores": "",
    "warn": "",
    # what a method may say: standard library only
    "settings": "",
    "plan": "settings",
    "layers": "settings",
    "unpruned": "layers",
    "partition": "plan settings layers",
    "folding": "plan",
    "methods": "plan settings",
    # how masks are made
    "selection": "",
    "patterns": "layers selection",
    "scores": "plan layers selection patterns",
    "allocation": "layers selection patterns",
    # where they live
    "snapshot": "",
    "storage": "layers selection patterns snapshot",
    "zeros": "layers patterns",
    "optimizers": "snapshot storage",
    "adapters": "layers storage",
    "state": "snapshot storage optimizers",
    "gradients": "plan storage",
    "choosing": "plan layers selection patterns scores allocation storage gradients",
    "counts": "plan layers patterns scores allocation storage gradients choosing",
    "edits": "plan layers patterns scores allocation storage optimizers gradients choosing counts",
    "running": "optimizers",
    "wrapped": "",
    "storing": "patterns snapshot storage adapters",
    "checks": "plan layers storage state wrapped",
    "copies": "storage",
    "sparse": (
        "plan settings layers unpruned patterns allocation snapshot storage storing state optimizers gradients edits "
        "running copies zeros checks wrapped"
    ),
    "rules": "plan layers selection patterns scores storage methods running sparse",
    "cursor": "plan settings snapshot optimizers rules sparse",
    "sharding": "atomic plan layers selection patterns scores allocation snapshot storage gradients choosing sparse",
    "init": "plan layers selection scores allocation sparse",
    # what reads sparse models
    "atomic": "",
    "flops": "layers sparse",
    "file": "atomic plan layers selection patterns snapshot storage.kernels sparse sharding",
    "pretrained": "atomic sparse file",
    "summary": "layers sparse flops file",
    "importers": "layers patterns snapshot zeros sparse file",
    "exporters": "atomic layers sparse file pretrained",
    "convert": "layers snapshot sparse file importers exporters",
    "inference": f"atomic {CORE} zeros flops file",
    # what trains them
    "metric": "",
    "tasks": "atomic cores",
    "logs": "atomic",
    "engine": f"atomic settings {CORE} init folding rules methods flops file summary logs metric tasks.task",
    "recipes": "plan partition methods tasks engine",
    "compare": "atomic cores lengths metric settings plan partition methods tasks engine recipes",
    # who runs it
    "doctor": "cores storage",
    "console": "folding plan engine file summary logs doctor convert inference",
    "integrations": f"{CORE} wrapped settings lengths methods engine.checkpoint engine.rng",
    "report": "atomic methods metric engine",
    "console_compare": "compare console metric",
    "cli": (
        f"{CORE} methods flops file summary convert inference tasks engine recipes compare console console_compare "
        "report doctor"
    ),
    "__main__": "cli",
    "__init__": f"{CORE} rules sharding init methods flops file pretrained summary inference tasks engine",
}
WHEN_CALLED = {
    "checks": "sharding",
    "running": "sparse",
    "sparse": "summary cursor sharding",
    "sharding": "cursor",
    "init": "sharding",
}
"""Upward imports that are made inside a function, so that loading a file loads only what lies below it."""

STANDARD_LIBRARY_ONLY = ("errors", "warn", "plan", "settings", "layers", "unpruned", "partition", "folding", "methods")

files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


def room(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(tree: ast.AST, *, is_called: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module imported, and whether it is only when a function is called or types are checked."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_called) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "growprune" else [module]
            yield from ((name, is_called) for name in names)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            yield from imports(node, is_called=is_called or is_function or is_for_types)


def imports_of(file: str) -> list[tuple[str, bool]]:
    return list(imports(ast.parse((SOURCE / file).read_text(encoding="utf-8"))))


def is_among(name: str, allowed: str) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed.split())


def test_every_file_belongs_to_a_room_of_the_table() -> None:
    assert sorted({room(file) for file in files} - set(MAY_IMPORT)) == []


@pytest.mark.parametrize("file", files)
def test_imports_go_downwards_only(file: str) -> None:
    own = room(file)
    for module, is_called in imports_of(file):
        name = module.removeprefix("growprune").removeprefix(".")
        if module.split(".")[0] != "growprune" or room(name.replace(".", "/")) in ("", "errors", "warn", own):
            continue
        allowed = MAY_IMPORT[own] + (" " + WHEN_CALLED.get(own, "") if is_called else "")
        assert is_among(name, allowed), f"{file} may not import growprune.{name}: see MAY_IMPORT"


def test_the_table_goes_round_in_no_circle() -> None:
    below = {above: {entry.split(".")[0] for entry in allowed.split()} for above, allowed in MAY_IMPORT.items()}
    order = list(TopologicalSorter(below).static_order())
    assert set(order) == set(MAY_IMPORT)


def test_tasks_never_see_methods_sparse_models_or_the_engine() -> None:
    assert MAY_IMPORT["tasks"].split() == ["atomic", "cores"]


def test_nothing_imports_the_command_line() -> None:
    assert [above for above, allowed in MAY_IMPORT.items() if "cli" in allowed.split()] == ["__main__"]


@pytest.mark.parametrize("file", [file for file in files if room(file) in STANDARD_LIBRARY_ONLY])
def test_plans_and_methods_use_the_standard_library_only(file: str) -> None:
    others = {module.split(".")[0] for module, _ in imports_of(file)} - {"growprune"}
    assert sorted(others - sys.stdlib_module_names) == []
