"""Imports go downwards only, inside functions too. A new package in src/growprune needs a row in MAY_IMPORT."""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

import growprune

SOURCE = Path(growprune.__file__).parent
LIBRARY = "plan methods masks storage sparse"

MAY_IMPORT = {
    "plan": "",
    "methods": "plan",
    "masks": "plan",
    "storage": "masks",
    "sparse": "plan methods masks storage",
    "sharding": "plan masks storage sparse",
    "files": f"{LIBRARY} sharding",
    "training": f"{LIBRARY} files",
    "deployment": f"{LIBRARY} files",
    "tasks": "files.disk",
    "logs": "files.disk",
    "runs": "files logs",
    "engine": f"{LIBRARY} sharding files training logs runs tasks.task",
    "recipes": f"{LIBRARY} tasks engine",
    "compare": f"{LIBRARY} files tasks logs runs engine recipes",
    "report": "plan methods files runs",
    "integrations": f"{LIBRARY} files training",
    "cli": f"{LIBRARY} files deployment tasks logs engine recipes runs compare report",
}
"""What each package may import, lowest first; all may import `errors`. The package itself may import everything."""

INSIDE_FUNCTIONS = {"sparse": ["sharding"]}
"""Upward imports that are allowed inside functions: FSDP2 takes a second to load, and only sharded models need it."""

STANDARD_LIBRARY_ONLY = ("errors.py", "plan/", "methods/", "masks/layers.py", "masks/partition.py")

files = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
inner = [file for file in files if "/" in file]


def imports_of(source: str) -> Iterator[str]:
    """Every module that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            module = node.module or ""
            # `from growprune.files import disk` imports growprune.files.disk
            yield from (f"{module}.{alias.name}" for alias in node.names) if module.count(".") < 2 else (module,)


def upward_imports(package: str, source: str) -> list[str]:
    """What a file of a package imports that its row does not allow."""
    allowed = {"errors", package, *MAY_IMPORT[package].split(), *INSIDE_FUNCTIONS.get(package, ())}
    names = [name.removeprefix("growprune.") for name in imports_of(source) if name.startswith("growprune.")]
    return [name for name in names if not any(f"{name}.".startswith(f"{entry}.") for entry in allowed)]


def test_the_top_level_holds_few_modules_and_every_package_has_a_row() -> None:
    assert {file for file in files if "/" not in file} == {"__init__.py", "__main__.py", "errors.py"}
    assert {file.split("/")[0] for file in inner} == set(MAY_IMPORT)
    assert len(MAY_IMPORT) <= 18


@pytest.mark.parametrize("file", inner)
def test_imports_go_downwards_only(file: str) -> None:
    assert upward_imports(file.split("/")[0], (SOURCE / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", [file for file in inner if file.split("/")[0] in INSIDE_FUNCTIONS])
def test_allowed_upward_imports_are_inside_functions(file: str) -> None:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    upward = [f"growprune.{name}" for name in INSIDE_FUNCTIONS[file.split("/")[0]]]
    assert [line for line in top if any(name in line for name in upward)] == []


def test_an_upward_import_inside_a_function_is_seen() -> None:
    source = "def save():\n    from growprune.engine.recipe import Recipe\n"
    assert upward_imports("sparse", source) == ["engine.recipe"]
    assert upward_imports("cli", source) == []
    assert upward_imports("tasks", "from growprune.files import disk, writer") == ["files.writer"]


def test_rows_go_from_the_lowest_layer_to_the_highest() -> None:
    below = {above: {entry.split(".")[0] for entry in allowed.split()} for above, allowed in MAY_IMPORT.items()}
    assert list(TopologicalSorter(below).static_order())  # no circle
    rows = list(MAY_IMPORT)
    assert [(above, entry) for above in rows for entry in below[above] if rows.index(entry) > rows.index(above)] == []


def test_the_design_page_draws_the_layers_of_the_table() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    drawn = page.split("## Layers")[1].split("```")[1].split("\n")[1:-1]
    assert [line.split()[0] for line in drawn] == [*reversed(MAY_IMPORT)]


def test_the_picture_of_the_layers_is_drawn_from_the_table() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "layers.py"))
    assert names["read_table"]() == MAY_IMPORT
    assert names["PICTURE"].read_text(encoding="utf-8") == names["draw"](MAY_IMPORT), "run docs/layers.py"


def test_nothing_imports_the_command_line() -> None:
    assert [above for above, allowed in MAY_IMPORT.items() if "cli" in allowed.split()] == []


@pytest.mark.parametrize("file", [file for file in files if file.startswith(STANDARD_LIBRARY_ONLY)])
def test_plans_and_methods_use_the_standard_library_only(file: str) -> None:
    modules = imports_of((SOURCE / file).read_text(encoding="utf-8"))
    others = {module.split(".")[0] for module in modules} - {"growprune"}
    assert sorted(others - sys.stdlib_module_names) == []


def writes_to_a_sparse_model(source: str) -> Iterator[str]:
    """Every assignment to an attribute of something called sparse, or to something that it holds."""
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        places = [ast.unparse(target) for target in targets if isinstance(target, (ast.Attribute, ast.Subscript))]
        yield from (place for place in places if re.match(r"(\w+\.)?sparse[.\[]", place))


def test_nobody_outside_of_sparse_writes_the_state_of_a_sparse_model() -> None:
    found = {
        (file, place)
        for file in inner
        if not file.startswith("sparse/")
        for place in writes_to_a_sparse_model((SOURCE / file).read_text())
    }
    assert found == set()
    assert len(list(writes_to_a_sparse_model("self.sparse.gradients.x = sparse.rule = 1; sparse.stored[0] += 1"))) == 3
