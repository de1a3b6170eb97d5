"""The site: its code runs, every public name is in it, and it is built without a complaint."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from test_readme import ROOT, run

import growprune
from growprune.methods import METHODS
from growprune.recipes import RECIPES
from growprune.sparse.internals import internals

DOCS = ROOT / "docs"
GUIDES = ("index", "own-loop", "choosing", "deploying", "importing", "extending")
ELSEWHERE = {
    "lightning": "integrations/test_lightning_docs.py",
    "pretrained": "test_pretrained_page.py",
    "transformers": "integrations/test_transformers_page.py",
    "memory": "test_the_code_about_memory_runs",
    "sharding": "files/test_sharded_checkpoints.py",
    "paper": "test_the_algorithm_shown_is_the_code_that_runs",
    "design": "none: it shows what is in plan.py, shortened",
}
"""Pages whose code is not run here, and where it is."""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)


@pytest.mark.filterwarnings("ignore:deployed, the model takes")  # a model so small may be faster in torch
@pytest.mark.parametrize("page", GUIDES)
def test_the_code_of_a_guide_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert found
    for code in found:  # each with a model, data and a loss of its own
        run(f"import growprune as gp\n{code}")


def test_the_code_of_every_page_is_run_somewhere() -> None:
    assert {page.stem for page in DOCS.glob("*.md") if blocks(page.stem)} == {*GUIDES, *ELSEWHERE}


def test_the_first_loop_ends_with_a_tenth_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(blocks("index")[0])
    assert names["sparse"].num_alive == 997  # of 432 + 2,304 + 2,304 + 4,608 + 320
    assert names["cursor"].is_over


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_the_loop_that_stops_goes_on_to_the_same_bits_whatever_the_storage(storage: str) -> None:
    (code,) = [code for code in blocks("own-loop") if "kept =" in code]
    code = code.replace("sparsity=0.9)", f"sparsity=0.9, storage={storage!r})", 1)
    making, loading = code.split("kept =")
    loading = f"kept ={loading}"
    keeping, loading = loading.split("\n\n")
    train = """
while cursor.iteration < {}:
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
"""
    first = run(making + train.format(14) + f"import copy\n{keeping}\nkept = copy.deepcopy(kept)" + train.format(30))
    second = run(making)
    second["kept"] = first["kept"]
    exec(loading + train.format(30), second)
    for (name, mine), its in zip(first["model"].named_parameters(), second["model"].parameters(), strict=True):
        assert torch.equal(mine, its), name


def test_the_loop_over_phases_ends_sparse() -> None:
    (code,) = [code for code in blocks("own-loop") if "for phase in" in code]
    assert run(code)["sparse"].masks["blocks.2.weight"].sum() == 461  # a tenth of 4,608


def test_the_model_that_is_deployed_is_the_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = [code for code in blocks("deploying") if "gp.read" in code]
    names = run(code)
    assert capsys.readouterr().out == "True\n"
    assert int((names["tensors"]["blocks.2.weight"] != 0).sum()) == 461


@pytest.mark.filterwarnings("ignore:deployed, the model takes")
def test_the_model_on_sparse_kernels_gives_what_the_model_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(blocks("deploying")[0])
    assert "sparsity" in capsys.readouterr().out
    with torch.no_grad():
        expected = names["model"].eval()(names["example"])
    for outputs in (names["outputs"], names["again"](names["example"])):
        assert (outputs - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_the_code_about_memory_runs() -> None:
    storages, threads = blocks("memory")
    sparse = run(storages)["sparse"]
    assert internals(sparse).storage == "compact"
    assert sparse.num_alive == 996  # a tenth of each layer: 43 + 230 + 230 + 461 + 32
    before = torch.autograd.is_multithreading_enabled()
    try:
        run(threads)
        assert not torch.autograd.is_multithreading_enabled()
    finally:
        torch.autograd.set_multithreading_enabled(before)


def test_the_algorithm_shown_is_the_code_that_runs() -> None:
    (shown,) = blocks("paper")
    source = (ROOT / "src" / "growprune" / "methods" / "cyclic_gap.py").read_text()
    assert shown.startswith("yield Phase")
    assert "".join(shown.split()) in "".join(source.split())


def test_every_row_of_the_papers_tables_is_the_recipe_that_the_page_names() -> None:
    page = (DOCS / "paper.md").read_text()
    rows = re.findall(r"^\| `(\S+/\S+)` \| (.*) \| (.*) \| ([\d,]+) \|$", page, re.M)
    for name, row, figure, epochs in rows:
        expected = f"{row}: {figure}; {epochs.replace(',', '')} epochs; machines of 8 V100"
        assert re.fullmatch(r"(Table \d, )?" + re.escape(expected), RECIPES[name]().claim), name
    claimed = {name for name, make in RECIPES.items() if re.match("Table|Ablation", make().claim)}
    assert {name for name, *_ in rows} == claimed


def test_every_method_is_named_where_one_chooses() -> None:
    page = (DOCS / "choosing.md").read_text()
    assert [name for name in METHODS if f"`{name}`" not in page] == []


def test_a_list_that_follows_its_sentence_at_once_is_a_list_and_code_stays_as_it_is() -> None:
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    page = "So:\n- one\n  and more\n- two\nRun\n```\na\n- b\n```\nor"
    expected = "So:\n\n- one\n  and more\n- two\nRun\n\n```\na\n- b\n```\nor"
    assert hooks["on_page_markdown"](page) == expected


def test_every_public_name_is_in_the_reference() -> None:
    reference = (DOCS / "api.md").read_text()
    homes = {f"::: {growprune._HOME[name]}.{name}" for name in growprune.__all__ if name not in ("methods", "tasks")}
    homes |= {f"::: growprune.methods.{name}.{name}" for name in METHODS}
    assert homes - set(reference.splitlines()) == set()


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f" {page.name}\n" not in navigation] == []


def test_the_site_is_built_without_a_complaint(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert "peak_density" in page
    assert (site / "experiments" / "theory" / "explored.svg").exists()
    for built in site.rglob("*.html"):
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', built.read_text()), built.name


def test_pictures_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import pictures

    for name, draw in pictures.PICTURES.items():
        assert (DOCS / "images" / name).read_text() == draw(), f"run experiments/pictures.py for {name}"
