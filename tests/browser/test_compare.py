"""The page Compare with the whole product behind it: a step budget in force, and a small comparison to its end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.whole_product import Product

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

SHOWN_MS = 30_000
COMPARED_MS = 240_000


@pytest.fixture
def page(browser: Browser, product: Product) -> Iterator[Page]:
    tab = browser.new_page(viewport={"width": 1366, "height": 900})
    tab.goto(f"{product.page_url}/compare")
    expect(tab.get_by_text("New comparison")).to_be_visible(timeout=SHOWN_MS)
    yield tab
    httpx.post(f"{product.service_url}/server/budget", json={}, trust_env=False)
    tab.close()


def fill(tab: Page, label: str, value: str) -> None:
    box = tab.get_by_label(label, exact=True)
    expect(box).to_have_count(1, timeout=SHOWN_MS)  # while Streamlit changes a form there may be two
    expect(box).to_be_visible(timeout=SHOWN_MS)
    box.fill(value)
    box.press("Enter")


def test_a_step_budget_is_applied_and_seen_in_force(page: Page, product: Product) -> None:
    fill(page, "Tokens", "48")
    page.get_by_role("button", name="Apply", exact=True).click()
    expect(page.get_by_text(re.compile(r"Budget in force: 48 tokens a step \(started with 256\)"))).to_be_visible(
        timeout=SHOWN_MS
    )
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_text("48 tokens", exact=True)).to_be_visible(timeout=SHOWN_MS)
    asked = httpx.get(f"{product.service_url}/server/budget", trust_env=False).json()
    assert (asked["step_budget"], asked["configured"]) == (48, 256)


def test_a_small_comparison_runs_to_its_end_and_the_cameras_come_back(page: Page, product: Product) -> None:
    page.get_by_text("Step budgets, on the running server").click()
    fill(page, "Budgets, in tokens", "32, 96")
    page.get_by_text("A few fields").click()
    fill(page, "Pictures a second", "0.2")
    fill(page, "Questions a second", "0.3")
    fill(page, "Seconds a block", "5")
    fill(page, "Blocks for each", "1")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("Meanwhile cameras are paused")).to_be_visible(timeout=SHOWN_MS)
    expect(page.get_by_text(re.compile("of 2 blocks"))).to_be_visible(timeout=COMPARED_MS)
    cameras = httpx.get(f"{product.service_url}/cameras", trust_env=False).json()
    assert {camera["state"] for camera in cameras} == {"paused"}
    expect(page.get_by_text("It is complete.")).to_be_visible(timeout=COMPARED_MS)
    expect(page.get_by_role("button", name=re.compile("^Apply 32 tokens, at once"))).to_be_visible(timeout=SHOWN_MS)
    page.get_by_text("Show it here").click()
    report = page.frame_locator("iframe[src*='report.html']")
    expect(report.get_by_text("How it was measured")).to_be_attached(timeout=SHOWN_MS)
    # Figures draw when they come into view. A frame of another origin stands still while it is out of sight, so the
    # page is scrolled to it first, and nothing in it is waited for before.
    page.locator("iframe[src*='report.html']").scroll_into_view_if_needed()
    report.locator("[data-figure]").first.evaluate("figure => figure.scrollIntoView()")
    expect(report.locator("[data-figure][data-drawn]").first).to_be_attached(timeout=SHOWN_MS)
    cameras = httpx.get(f"{product.service_url}/cameras", trust_env=False).json()
    assert "paused" not in {camera["state"] for camera in cameras}
    (found,) = httpx.get(f"{product.service_url}/comparisons", trust_env=False).json()
    assert (found["state"], found["blocks_done"]) == ("done", 2)
    summary = httpx.get(f"{product.service_url}/comparisons/{found['name']}", trust_env=False).json()["summary"]
    # On a machine that is busy with other work the blocks are left out, with that reason; they ran all the same.
    assert {arm["arm"]["name"]: arm["blocks"] for arm in summary["arms"]} == {"step 32": 1, "step 96": 1}
