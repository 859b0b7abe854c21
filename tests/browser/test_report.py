"""A comparison's report in a real browser: every figure drawn, nothing asked of anybody, no text that acts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from serving.compare.report import write_report
from serving.compare.summary import summarise
from tests.comparison_data import comparison

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='document.title=`hurt`'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    made = comparison(folder, rounds=2, block_s=40, name=HOSTILE, command=("framechat", "compare", HOSTILE))
    return write_report(made, summarise(made, resamples=100))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_draws_itself(browser: Browser, report: Path, scheme: Literal["light", "dark"]) -> None:
    page = browser.new_page(viewport={"width": 1366, "height": 768}, color_scheme=scheme)
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if bad(message) else None)
    try:
        page.goto(report.as_uri())
        for summary in page.locator("details > summary").all():
            summary.click()
        draw_all(page)
        assert problems == []
        assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
        assert page.title() != "hurt"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than a laptop"
        ink, ground = (rgb(page, name) for name in ("color", "backgroundColor"))
        assert (sum(ink) > sum(ground)) == (scheme == "dark")
        text = page.locator("[data-figure] svg text").first.evaluate("text => getComputedStyle(text).fill")
        assert numbers(text) == ink, "plots are written in the page's colour"
    finally:
        page.close()


def bad(message: ConsoleMessage) -> bool:
    return message.type in ("error", "warning")


def draw_all(page: Page) -> None:
    figures = page.locator("[data-figure]")
    assert figures.count() >= 5
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        expect(figure).to_have_attribute("data-drawn", "yes", timeout=20_000)
        expect(figure.locator("svg.main-svg").first).to_be_visible()


def rgb(page: Page, name: str) -> list[int]:
    return numbers(page.evaluate("name => getComputedStyle(document.body)[name]", name))


def numbers(colour: str) -> list[int]:
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
