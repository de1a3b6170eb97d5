"""The site: its code runs, every public name is in it, and it is built without a complaint."""

import ast
import doctest
import inspect
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT
from test_blocks import code_of

import growprune
from growprune.methods import METHODS
from growprune.recipes import RECIPES

DOCS = ROOT / "docs"
MODULES = ("methods", "tasks")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)


def test_the_algorithm_shown_is_the_code_that_runs() -> None:
    (shown,) = blocks("paper")
    source = (ROOT / "src" / "growprune" / "methods" / "cyclic_gap.py").read_text()
    assert shown.startswith("yield Phase")
    assert "".join(shown.split()) in "".join(source.split())


def test_every_row_of_the_papers_tables_is_the_recipe_that_the_page_names() -> None:
    page = (ROOT / "experiments" / "paper.md").read_text()
    rows = re.findall(r"^\| `(\S+/\S+)` \| (.*) \| ([\d,]+) \|$", page, re.M)
    for name, figure, epochs in rows:
        expected = f": {figure}; not measured here; {epochs.replace(',', '')} epochs; machines of 8 V100"
        assert RECIPES[name]().claim.endswith(expected), name
    claimed = {name for name, make in RECIPES.items() if re.match("Table|Ablation", make().claim)}
    assert {name for name, *_ in rows} == claimed


def test_every_method_is_named_where_one_chooses() -> None:
    page = (DOCS / "choosing.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in page] == []


def test_a_list_that_follows_its_sentence_at_once_is_a_list_and_code_stays_as_it_is() -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    page = "So:\n- one\n  and more\n- two\nRun\n```\na\n- b\n```\nor"
    expected = "So:\n\n- one\n  and more\n- two\nRun\n\n```\na\n- b\n```\nor"
    assert list(hooks["part_lists"](page.splitlines())) == expected.splitlines()


@pytest.mark.parametrize(
    ("page", "shown", "expected"),
    [
        ("faq.md", "[b](api.md#x) [c](../LICENSE) [d](nothing.md)", "[b](api.md#x) [c](LICENSE) [d](nothing.md)"),
        ("results/laptop.md", "[b](../api.md) [c](../../LICENSE)", "[b](../api.md) [c](../LICENSE)"),
        ("experiments/README.md", "[b](../docs/api.md#x) [c](scale.md)", "[b](../api.md#x) [c](scale.md)"),
        ("faq.md", "<!-- tabs -->\n**A**\nx\n**B**\ny\n<!-- end of tabs -->", '=== "A"\n\n    x\n\n=== "B"\n\n    y'),
        ("api.md", "<!-- reference\n::: a\n-->", "::: a"),
    ],
)
def test_a_page_of_the_repository_becomes_a_page_of_the_site(page: str, shown: str, expected: str) -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    given = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    assert hooks["on_page_markdown"](shown, page=given) == expected
    assert ("search" in given.meta) == page.startswith("experiments")


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text()
    public = {name: getattr(growprune, name) for name in growprune.__all__ if name not in MODULES}
    homes = {f"::: {growprune._HOME[name]}.{thing.__name__}" for name, thing in public.items()}
    homes |= {f"::: {method.__module__}.{method.__qualname__}" for method in METHODS.values()}
    assert homes - set(reference.splitlines()) == set()


def test_the_tables_of_the_reference_are_those_that_the_script_writes() -> None:
    written = runpy.run_path(str(DOCS / "api_summary.py"))["page"]()
    assert (DOCS / "api.md").read_text() == written, "run docs/api_summary.py"


def test_the_reference_has_the_public_methods_of_a_sparse_model_only() -> None:
    public, _, internal = inspect.getsource(growprune.SparseModel).partition("# For the other packages of growprune")
    listed = (DOCS / "api.md").read_text().partition("model.SparseModel\n")[2].partition(":::")[0]
    listed_names = set(re.findall(r"- (\w+)", listed))
    assert set(re.findall(r"^    def ([a-z]\w*)\(", public, re.M)) - listed_names == set()
    assert listed_names.isdisjoint(re.findall(r"^    def (\w+)\(", internal, re.M))


def test_every_public_name_has_an_example_that_runs() -> None:
    """As a doctest in its docstring, or in the code of the reference, which test_blocks.py runs."""
    nodes = ast.walk(ast.parse(code_of(DOCS / "api.md")))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "gp"}
    missing = [name for name in growprune.__all__ if name not in used]
    assert [name for name in missing if f"{name}(" not in doctests(getattr(growprune, name))] == []


def doctests(thing: Any) -> str:
    return "".join(example.source for example in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))


def test_every_function_says_what_its_arguments_are() -> None:
    functions = [getattr(growprune, name) for name in growprune.__all__ if name not in MODULES]
    for function in (*filter(inspect.isfunction, functions), *METHODS.values()):
        text = inspect.getdoc(function) or ""
        missing = [name for name in inspect.signature(function).parameters if not re.search(rf"\b{name}\b", text)]
        assert missing == [], function.__name__


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_the_site_is_built_without_a_complaint(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert "peak_density" in page
    for linked in ("experiments/theory/explored.svg", "experiments/index.html", "examples/own_loop.py"):
        assert (site / linked).exists()
    assert '"location":"experiments' not in (site / "search" / "search_index.json").read_text()
    for built in site.rglob("*.html"):
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', built.read_text()), built.name


@pytest.mark.parametrize("folder", ["experiments", "docs"])
def test_pictures_are_those_that_the_script_draws(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    for name, draw in runpy.run_path(str(ROOT / folder / "pictures.py"))["PICTURES"].items():
        assert (DOCS / "images" / name).read_text() == draw(), f"run {folder}/pictures.py for {name}"
