"""The page in a real browser: everything is drawn, nothing complains, nothing is fetched, and it fits on a phone."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import history, phase, recipe, result, write_run
from toy import cyclic, parallel

from growprune import engine, methods
from growprune.report import write_page
from growprune.runs import find_runs

pytest.importorskip("plotly", reason="the page needs plotly: make test-browser installs it")
webdriver = pytest.importorskip("selenium.webdriver", reason="there is no selenium: make test-browser installs it")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="there is no chromium: make test-browser installs it"),
]


def write_many(folder: Path) -> Path:
    """37 rows with long names: dense, and nine methods with and without growth at two sparsities."""
    methods_ = ["gmp", "rigl", "set", "snip", "str", "dpf", "acdc", "granet", "gradual_gap"]
    rows: list[tuple[str, dict[str, Any]]] = [("dense", {})]
    rows += [(name, options) for name in methods_ for options in ({"power": 3}, {"power": 3, "control": "peak"})]
    for number, (method, options) in enumerate(rows):
        for sparsity, seed in [(s, seed) for s in ((0.0,) if method == "dense" else (0.9, 0.95)) for seed in (0, 1)]:
            made = recipe(method, sparsity, seed, options=options, allocation="global")
            epochs = history([1000 - 80 * epoch for epoch in range(8)])
            content = result(made, 85.0 + number / 9 + seed, epochs, seconds=90.0 + number, peak_alive=1000)
            events = [{**phase(0, 0, "train", 20, 1000), "iteration": 0}]
            write_run(folder / f"{method}{len(options)}-{sparsity}-{seed}", made, content, events)
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: of runs with everything, of one run, and of 37 rows."""
    folder = tmp_path_factory.mktemp("pages")
    runs = folder / "runs"
    for seed in (0, 1):
        engine.train(replace(cyclic(), seed=seed), runs / f"cyclic{seed}")
    engine.train(replace(cyclic(), method=methods.rigl, options={"epochs": 9}), runs / "rigl")
    engine.train(replace(cyclic(), method=methods.dense, options={"epochs": 9}, sparsity=0.0), runs / "dense")
    engine.train(replace(parallel(), options={"steps": 2, "epochs": 1, "finetune": 3}), runs / "parallel")
    shown = {"several": runs, "one": runs / "cyclic0", "many": write_many(folder / "many")}
    for name, path in shown.items():
        write_page(find_runs([path]), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in shown}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-background-networking"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield opened
    finally:
        opened.quit()


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def show(browser: Any, page: Path, *, width: int = 1280, scheme: str = "light") -> int:
    """Open a page, wait until it says that it has drawn, and return how many charts it has."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before is none of ours
    browser.get(page.as_uri())
    return int(wait_for(lambda: browser.execute_script("return document.documentElement.dataset.drawn")))


@pytest.mark.parametrize(
    "name, charts, width, scheme",
    [
        ("several", 12, 1280, "light"),
        ("several", 12, 390, "dark"),
        ("one", 6, 390, "light"),
        ("many", 8, 1280, "dark"),
        ("many", 8, 390, "light"),
    ],
)
def test_every_chart_is_drawn_without_complaint_and_without_a_network(
    name: str, charts: int, width: int, scheme: str, pages: dict[str, Path], browser: Any
) -> None:
    assert show(browser, pages[name], width=width, scheme=scheme) == charts
    drawn = browser.execute_script(
        "return Array.from(document.querySelectorAll('.plot'), plot =>"
        " plot.querySelectorAll('.scatterlayer .trace path, .barlayer .point path').length)"
    )
    assert len(drawn) == charts and all(drawn), drawn
    sizes = browser.execute_script(
        "return Array.from(document.querySelectorAll('.plot'), p => [p.clientWidth,"
        " p.querySelector('.main-svg').clientWidth, p.clientHeight, p.querySelector('.main-svg').clientHeight])"
    )
    assert all(inner <= outer and high == tall > 100 for outer, inner, high, tall in sizes), sizes
    assert browser.get_log("browser") == []  # a breach of the page's own policy would be here too
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [pages[name].as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    outside = browser.execute_script(
        "return Array.from(document.querySelectorAll('main *')).filter(node => !node.closest('.scroll, pre, .plot')"
        " && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML.slice(0, 80))"
    )
    assert outside == []


def test_on_a_phone_names_of_rows_are_whole_and_leave_room(pages: dict[str, Path], browser: Any) -> None:
    num_charts = show(browser, pages["many"], width=390)
    left, share = browser.execute_script(
        f"const plot = document.getElementById('plot-{num_charts - 1}'), whole = plot.getBoundingClientRect();"
        "const names = Array.from(plot.querySelectorAll('.ytick text'), name => name.getBoundingClientRect().left);"
        "return [Math.min(...names) - whole.left, plot._fullLayout._size.w / whole.width];"
    )  # of the training time, which has a line for each row
    assert left >= 0 and share > 0.45


def num_lines(browser: Any, number: int) -> int:
    """How many lines a chart shows."""
    return int(browser.execute_script(f"return document.querySelectorAll('#plot-{number} .lines path.js-line').length"))


def test_one_legend_hides_rows_in_all_charts_and_controls_at_first(pages: dict[str, Path], browser: Any) -> None:
    show(browser, pages["many"])
    assert len(browser.find_elements("css selector", ".legend")) == 1
    boxes = browser.find_elements("css selector", ".legend input")
    off = [box.get_attribute("value") for box in boxes if not box.is_selected()]
    assert off == ["gradual_gap:global power=3 control=peak"]  # the other methods declare no control
    drawn = [num_lines(browser, number) for number in (0, 2)]
    assert min(drawn) >= 35
    next(box for box in boxes if box.get_attribute("value") == "0.95").click()
    assert [num_lines(browser, number) for number in (0, 2)] == [n - 17 for n in drawn]
    browser.find_element("css selector", ".legend button[data-all='']").click()
    assert [num_lines(browser, number) for number in (0, 2)] == [0, 0]
    browser.find_element("css selector", ".legend button[data-all='1']").click()
    assert [num_lines(browser, number) for number in (0, 2)] == [n + 2 for n in drawn]


def test_the_switch_changes_the_colours_of_page_and_charts(pages: dict[str, Path], browser: Any) -> None:
    show(browser, pages["one"])
    ink = "return document.querySelector('.xtitle').style.fill"
    seen = []
    for _ in range(3):
        browser.execute_script("document.getElementById('theme').click()")
        paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        seen.append((browser.execute_script("return document.getElementById('theme').textContent"), paper))
        seen[-1] += (browser.execute_script(ink),)
    white, black = ("rgb(255, 255, 255)", "rgb(27, 32, 38)"), ("rgb(18, 22, 27)", "rgb(230, 234, 238)")
    assert seen == [("Theme: light", *white), ("Theme: dark", *black), ("Theme: auto", *white)]


def test_a_chart_can_be_saved_as_png_svg_and_csv(pages: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    show(browser, pages["one"])
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    for kind in ("png", "svg", "csv"):
        browser.execute_script(f"document.querySelector('#chart-0 button[data-kind={kind}]').click()")
        wait_for((tmp_path / f"01-quality.{kind}").exists)
    assert (tmp_path / "01-quality.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "01-quality.svg").read_text().startswith("<svg")
    lines = (tmp_path / "01-quality.csv").read_text().splitlines()
    result = json.loads((pages["one"].parent / "runs/cyclic0/result.json").read_text())
    assert lines[0] == "epoch,cyclic_gap:uniform steps=3 epochs=2 finetune=3 0.8"
    assert lines[1:] == [f"{row['epoch']},{row['validation']['accuracy']!r}" for row in result["history"]]
    assert browser.get_log("browser") == []


def test_it_prints_white_and_no_wider_than_paper(pages: dict[str, Path], browser: Any) -> None:
    show(browser, pages["several"], width=1280, scheme="dark")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    widths = browser.execute_script("return Array.from(document.querySelectorAll('.main-svg'), svg => svg.clientWidth)")
    assert widths and max(widths) <= 660
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
