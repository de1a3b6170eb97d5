"""The site in a real browser: it fits on a phone, and search works from disk."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("mkdocs", reason="there is no mkdocs: the extra docs has it")
webdriver = pytest.importorskip("selenium.webdriver", reason="there is no selenium: make test-browser installs it")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="there is no chromium: make test-browser installs it"),
]
WIDTH = 390
OUTSIDE = f"""
return Array.from(document.querySelectorAll('.md-content *')).filter(node =>
    !node.closest('pre, .md-typeset__scrollwrap, .headerlink') && node.getBoundingClientRect().right > {WIDTH} + 1
).map(node => node.outerHTML.slice(0, 80))
"""
"""What is wider than the screen and does not scroll by itself, as code and tables do."""


@pytest.fixture
def browser() -> Iterator[Any]:
    """One that has never been here, with the screen of a phone."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        size = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": True}
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield opened
    finally:
        opened.quit()


def test_no_page_is_wider_than_a_phone(site: Path, browser: Any) -> None:
    docs = ROOT / "docs"
    pages = [site / page.relative_to(docs).with_suffix(".html") for page in sorted(docs.rglob("*.md"))]
    wide = {}
    for page in pages:
        browser.get(page.as_uri())
        wide[page] = _width(browser)
    assert wide == dict.fromkeys(pages, (WIDTH,))


def _width(browser: Any) -> tuple[Any, ...]:
    """How wide a page is, and what is outside, once the theme has put tables into boxes, as it does after loading."""
    for _ in range(20):
        found = (
            browser.execute_script("return document.documentElement.scrollWidth"),
            *browser.execute_script(OUTSIDE),
        )
        if found == (WIDTH,):
            break
        time.sleep(0.1)
    return found


def test_search_finds_a_page_from_disk(site: Path, browser: Any) -> None:
    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('[data-md-toggle=search]').click()")
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys("storage compact")
    for _ in range(100):
        found = browser.execute_script(
            "return Array.from(document.querySelectorAll('.md-search-result__link')).map(a => a.href)"
        )
        if found:
            break
        time.sleep(0.1)
    assert any("memory.html" in link for link in found), found
    outside = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
        ".filter(name => !name.startsWith('file:') && !name.startsWith(location.origin))"
    )
    assert outside == []
