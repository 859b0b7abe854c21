"""The page with the whole product behind it: camera, detector, service and a real model server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from pipeline.config import load_config
from samples.video import ensure_video
from tests.browser.whole_product import ROOT, Product
from ui.cli import DEFAULT_CONFIG

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

ARTEFACTS = ROOT / "build"
MODEL_MS = 90_000  # what a small machine may need for a description or an answer under load
PRINT = """canvas => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let print = 0;
    for (let at = 0; at < data.length; at += 4 * 97) print = (print * 31 + data[at] + data[at + 1]) % 2147483647;
    return print;
}"""
DURATION = re.compile(r"^[\d.]+ (ms|s)$")
STALLS = re.compile(r"chat and camera.*; \d+ stalls$")
LONG = "Write a long story about a fisherman, his boat and the sea."


@pytest.fixture
def page(browser: Browser, product: Product) -> Iterator[Page]:
    tab = open_tab(browser, product.page_url)
    yield tab
    tab.close()


def open_tab(browser: Browser, url: str, width_px: int = 1920, height_px: int = 1080) -> Page:
    tab = browser.new_page(viewport={"width": width_px, "height": height_px})
    tab.goto(url)
    expect(tab.get_by_text("Model server ready")).to_be_visible(timeout=30_000)
    return tab


def canvas(tab: Page) -> Locator:
    return tab.locator("canvas[data-frames]").first


def frames(tab: Page) -> int:
    return int(canvas(tab).get_attribute("data-frames") or 0)


def ask(tab: Page, question: str) -> Locator:
    """Ask, and return where the answer will be."""
    answers = tab.locator("[data-role='assistant']")
    number = answers.count()
    box = tab.get_by_placeholder("Ask the model")
    expect(box).to_be_enabled(timeout=30_000)
    box.fill(question)
    box.press("Enter")
    for _ in range(10):  # Streamlit sends nothing while a file is on its way; whoever waits presses Enter again
        if not box.input_value():
            break
        tab.wait_for_timeout(500)
        box.press("Enter")
    return answers.nth(number)


def words(answer: Locator) -> int:
    return len(answer.locator(".say").inner_text().split())


def wait_growing(answer: Locator) -> None:
    """Until the answer was seen at two lengths while it is being written."""
    expect(answer).to_have_attribute("data-state", "streaming", timeout=MODEL_MS)
    before = words(answer)
    deadline = time.monotonic() + MODEL_MS / 1000
    while words(answer) <= before:
        assert time.monotonic() < deadline, "the answer stands still"
        assert answer.get_attribute("data-state") == "streaming", "the answer ended before it was seen to grow"
        time.sleep(0.05)


def test_the_picture_moves_and_tells_its_age(page: Page) -> None:
    canvas(page).wait_for(timeout=30_000)
    first, count = canvas(page).evaluate(PRINT), frames(page)
    page.wait_for_timeout(3000)
    assert canvas(page).evaluate(PRINT) != first
    assert frames(page) >= count + 6, "fewer than two pictures a second"
    expect(page.locator(".age")).to_have_text(re.compile(r"^frame age [\d.]+ (ms|s)$"))


def test_a_description_of_a_person_streams_in_and_is_kept(page: Page, product: Product) -> None:
    writing = page.locator("article[data-state='streaming'] .text")
    expect(writing.first).not_to_be_empty(timeout=MODEL_MS)
    done = page.locator("article[data-state='done']").first
    expect(done.locator(".text")).not_to_be_empty(timeout=MODEL_MS)
    expect(done.locator(".figures")).to_contain_text("TTFT")
    expect(done.locator(".figures")).to_contain_text("last token")
    expect(done.locator("img")).to_be_visible()
    assert done.locator("img").evaluate("picture => picture.naturalWidth") > 0
    kept = httpx.get(f"{product.service_url}/descriptions", params={"state": "done"}, trust_env=False).json()
    assert done.get_attribute("data-id") in {item["description_id"] for item in kept}


def test_an_answer_streams_while_people_are_described(page: Page) -> None:
    answer = ask(page, "What is the capital of France?")
    expect(answer.locator(".say")).not_to_be_empty(timeout=MODEL_MS)
    expect(answer).to_have_attribute("data-state", "done", timeout=MODEL_MS)
    expect(answer.locator(".meta")).to_contain_text("TTFT")


def test_both_classes_have_figures_and_the_screen_is_kept(page: Page) -> None:
    ask(page, LONG)
    for name in ("chat", "camera"):
        for figure in ("ttft", "itl"):
            row = page.locator(f"tr[data-class='{name}'][data-figure='{figure}']")
            expect(row.locator("td").first).to_have_text(DURATION, timeout=MODEL_MS)
    budget = load_config(DEFAULT_CONFIG, environ={}).serving.server.max_num_batched_tokens
    expect(page.get_by_text(f"{budget} tokens", exact=True)).to_be_visible()
    expect(page.locator(".timeline canvas")).to_have_attribute("aria-label", STALLS)
    ARTEFACTS.mkdir(exist_ok=True)
    page.wait_for_timeout(2000)
    page.screenshot(path=ARTEFACTS / "page-wall.png")
    page.set_viewport_size({"width": 1366, "height": 768})
    page.wait_for_timeout(1500)
    page.screenshot(path=ARTEFACTS / "page-laptop.png")
    assert page.evaluate("document.querySelector('.stMain').scrollHeight <= innerHeight"), "the page needs scrolling"


def test_a_reload_keeps_the_chat_and_the_answer_goes_on(page: Page) -> None:
    answer = ask(page, LONG)
    wait_growing(answer)
    before = answer.locator(".say").inner_text()
    page.reload()
    again = page.locator("[data-role='assistant']").first
    expect(again.locator(".say")).to_contain_text(before.split("\n")[0][:40], timeout=30_000)
    expect(again).to_have_attribute("data-state", "done", timeout=3 * MODEL_MS)  # 256 tokens beside the cameras
    assert len(again.locator(".say").inner_text()) > len(before)
    expect(page.get_by_text(LONG)).to_be_visible()


def test_stop_ends_an_answer_and_keeps_what_it_said(page: Page) -> None:
    answer = ask(page, LONG)
    wait_growing(answer)
    answer.get_by_role("button", name="Stop").click()
    expect(answer).to_have_attribute("data-state", "cancelled", timeout=15_000)
    expect(answer.locator(".meta")).to_contain_text("stopped")
    said = words(answer)
    page.wait_for_timeout(1500)
    assert words(answer) == said > 0


def test_two_tabs_show_the_same_and_have_their_own_chats(page: Page, browser: Browser, product: Product) -> None:
    second = open_tab(browser, product.page_url, 1366, 768)
    try:
        answer = ask(second, "Say hello.")
        for tab in (page, second):
            canvas(tab).wait_for(timeout=30_000)
            before = frames(tab)
            tab.wait_for_timeout(2500)
            assert frames(tab) >= before + 5
        expect(answer.locator(".say")).not_to_be_empty(timeout=MODEL_MS)
        expect(page.get_by_text("Say hello.")).to_have_count(0)
        newest = page.locator("article[data-state='done']").first.get_attribute("data-id")
        expect(second.locator(f"article[data-id='{newest}']")).to_be_visible()
        assert page.evaluate("framechatLink.phase") == second.evaluate("framechatLink.phase") == "open"
    finally:
        second.close()


def test_past_descriptions_are_found_with_their_pictures(page: Page, product: Product) -> None:
    expect(page.locator("article[data-state='done']").first).to_be_visible(timeout=MODEL_MS)
    kept = httpx.get(f"{product.service_url}/descriptions", params={"state": "done"}, trust_env=False).json()
    told = next(item["text"] for item in kept if item["text"])
    word = max((part.strip(".,;:") for part in told.split()), key=len)
    box = page.get_by_placeholder("Search past descriptions")
    box.fill(word)
    box.press("Enter")
    expect(page.get_by_role("heading", name=f"for “{word}”")).to_be_visible()
    found = page.get_by_role("article").first
    expect(found.locator(".text")).to_contain_text(word, ignore_case=True)
    expect(found.locator("img")).to_be_visible()
    page.get_by_role("button", name="Back to live").click()
    expect(page.get_by_role("heading", name="Descriptions", exact=True)).to_be_visible()


def test_a_camera_is_added_paused_resumed_and_removed(page: Page) -> None:
    page.get_by_role("button", name="Add camera").click()
    page.get_by_role("tab", name="Address or file").click()
    page.get_by_label("Source", exact=True).fill("sample-photos")
    page.get_by_label("Name", exact=True).first.fill("second view")
    page.get_by_role("button", name="Watch this camera").click()
    tile = page.get_by_role("region", name="Camera second view")
    expect(tile.locator("canvas[data-frames]")).to_be_visible(timeout=30_000)
    page.keyboard.press("Escape")
    tile.get_by_role("button", name="Pause").click()
    expect(tile.get_by_text("Paused")).to_be_visible(timeout=10_000)
    tile.get_by_role("button", name="Resume").click()
    expect(tile.get_by_text("Paused")).to_be_hidden(timeout=10_000)
    tile.get_by_role("button", name="Remove").click()
    tile.get_by_role("button", name="Really remove?").click()
    expect(tile).to_have_count(0, timeout=10_000)


def test_a_video_is_uploaded_and_watched(page: Page) -> None:
    page.get_by_role("button", name="Add camera").click()
    page.get_by_role("tab", name="Upload a video").click()
    form = page.get_by_test_id("stForm").filter(has_text="Upload and watch")
    form.locator("input[type='file']").set_input_files(ensure_video())
    form.get_by_label("Name", exact=True).fill("uploaded")
    form.get_by_role("button", name="Upload and watch").click()
    tile = page.get_by_role("region", name="Camera uploaded")
    expect(tile.locator("canvas[data-frames]")).to_be_visible(timeout=60_000)
    page.keyboard.press("Escape")
    tile.get_by_role("button", name="Remove").click()
    tile.get_by_role("button", name="Really remove?").click()
    expect(tile).to_have_count(0, timeout=10_000)


def test_a_source_with_a_password_is_refused_and_never_shown(page: Page) -> None:
    page.get_by_role("button", name="Add camera").click()
    page.get_by_role("tab", name="Address or file").click()
    page.get_by_label("Source", exact=True).fill("rtsp://viewer:hunter2@127.0.0.1/stream")
    page.get_by_role("button", name="Watch this camera").click()
    problem = page.get_by_role("alert").filter(has_text="password")
    expect(problem).to_be_visible(timeout=10_000)
    assert "hunter2" not in problem.inner_text()


def test_a_document_is_asked_about(page: Page, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("The meeting of the gardeners is on Tuesday at noon. " * 20)
    page.locator("[data-testid='stChatInput'] input[type='file']").set_input_files(note)
    expect(page.get_by_text("note.txt")).to_be_visible(timeout=10_000)
    answer = ask(page, "When is the meeting?")
    expect(answer.locator(".say")).not_to_be_empty(timeout=MODEL_MS)
    expect(page.get_by_text("Attached:")).to_contain_text("note.txt")
    expect(page.locator("tbody[data-class='document']")).to_be_visible(timeout=10_000)


def test_the_current_picture_can_be_attached(page: Page) -> None:
    page.get_by_text("Attach picture").click()
    answer = ask(page, "What do you see?")
    expect(answer.locator(".say")).not_to_be_empty(timeout=MODEL_MS)
    expect(page.locator("[data-role='user'] .attachment")).to_be_visible()


def test_the_page_asks_nothing_of_other_hosts(browser: Browser, product: Product) -> None:
    tab = browser.new_page()
    hosts: set[str] = set()
    tab.on("request", lambda request: hosts.add(httpx.URL(request.url).host) if request.url[:4] == "http" else None)
    tab.goto(product.page_url)
    canvas(tab).wait_for(timeout=30_000)
    tab.close()
    assert hosts == {"127.0.0.1"}
