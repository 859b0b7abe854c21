"""The page "Plan" in a real browser, with neither a model server nor the camera service behind it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from serving.compare.summary import summarise
from serving.compare.tables import write_json
from tests.browser.whole_product import ROOT, free_ports, stop
from tests.comparison_data import comparison

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ARTEFACTS = ROOT / "build"
WORK_MS = 90_000  # compiling the simulator once, on a small machine
NUMBER = re.compile(r"[\d.,]+")


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`framechat ui` alone, with one past comparison."""
    folder = tmp_path_factory.mktemp("plan")
    past = folder / "comparisons" / "evening"
    write_json(past / "summary.json", summarise(comparison(past, rounds=2, block_s=40)))
    port, nobody = free_ports(2)
    settings = {
        "ui.port": port, "service.port": nobody, "run_folder": folder / "runs",
        "comparisons.folder": folder / "comparisons",
    }  # fmt: skip
    command = [sys.executable, "-m", "ui.cli", "ui", "--config", str(ROOT / "configs" / "sample.yaml")]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        answers(f"http://127.0.0.1:{port}/_stcore/health", process, output)
        yield f"http://127.0.0.1:{port}/plan"
    finally:
        stop(process, output)


def answers(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, output.read_text()
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(f"the page does not answer:\n{output.read_text()}")


@pytest.fixture
def page(browser: Browser, page_url: str) -> Iterator[Page]:
    tab = browser.new_page(viewport={"width": 1366, "height": 768})
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(page_url)
    expect(tab.get_by_role("tab", name="fits?")).to_be_visible(timeout=WORK_MS)
    yield tab
    tab.close()
    assert not errors


def metric(tab: Page, label: str) -> Locator:
    cell = tab.get_by_test_id("stMetric").filter(has_text=label).first
    return cell.get_by_test_id("stMetricValue")


def fill(tab: Page, label: str, value: str) -> None:
    box = tab.get_by_label(label, exact=True)
    box.fill(value)
    box.press("Enter")


def test_fits_shows_figures_with_their_formulas_and_follows_its_inputs(page: Page) -> None:
    expect(metric(page, "One token")).to_have_text("23,040 B", timeout=WORK_MS)
    expect(metric(page, "Image tokens a second")).to_have_text("1,664")
    expect(page.get_by_text("What would let more of them run")).to_be_visible(timeout=WORK_MS)
    before = metric(page, "Tokens of cache").inner_text()
    fill(page, "Utilization", "0.5")
    expect(metric(page, "Tokens of cache")).not_to_have_text(before, timeout=WORK_MS)
    page.get_by_text("Formulas and sources").first.click()
    expect(page.get_by_text("2 × layers × KV heads × head size").first).to_be_visible()
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / "plan-fits.png")


def test_a_shape_by_hand_is_the_formula(page: Page) -> None:
    page.get_by_text("Give the shape by hand").click()
    for label, value in (("Layers", "32"), ("KV heads", "32"), ("Head size", "128"), ("Tokens a sequence", "4096")):
        fill(page, label, value)
    expect(metric(page, "1 × 4,096 tokens")).to_have_text("2.00 GiB", timeout=WORK_MS)


def test_bad_input_is_one_line_in_the_page(page: Page) -> None:
    fill(page, "Model", "no/such/model")
    problem = page.get_by_test_id("stAlert").filter(has_text="no/such/model").first
    expect(problem).to_be_visible(timeout=WORK_MS)
    assert "Traceback" not in page.content()
    fill(page, "Model", "sample")
    expect(metric(page, "One token")).to_have_text("23,040 B", timeout=WORK_MS)
    page.get_by_role("tab", name="which budget?").click()
    fill(page, "Step budgets, tokens", "many")
    expect(page.get_by_text("allowed: whole numbers with commas")).to_be_visible(timeout=WORK_MS)


def test_budgets_are_simulated_and_laid_beside_what_was_measured(page: Page) -> None:
    page.get_by_role("tab", name="which budget?").click()
    expect(page.get_by_text("Simulated, not measured")).to_be_visible(timeout=WORK_MS)
    plot = page.get_by_test_id("stPlotlyChart").filter(visible=True)
    expect(plot.get_by_text("both objectives are met")).to_be_visible(timeout=WORK_MS)
    expect(plot.get_by_text("simulated: budgets, in tokens of a step")).to_be_visible()
    page.get_by_role("combobox", name="Past comparison").click()
    page.get_by_role("option", name="evening").click()
    expect(plot.get_by_text("measured, evening")).to_be_visible(timeout=WORK_MS)
    page.screenshot(path=ARTEFACTS / "plan-budget.png")


def test_the_time_line_plays_pauses_and_scrubs_without_the_server(page: Page) -> None:
    page.get_by_role("tab", name="why?").click()
    film = page.locator("canvas[data-at]")
    expect(film).to_have_attribute("aria-label", re.compile("One pass.*; In chunks.*"), timeout=WORK_MS)
    one, chunked = (
        float(NUMBER.findall(part.split("longest gap of a chat")[1])[0])
        for part in (film.get_attribute("aria-label") or "").split("; ")
    )
    assert one > 2 * chunked
    page.evaluate("window.kept = document.querySelector('.stMain')")
    before = page.evaluate("performance.getEntriesByType('resource').length")
    page.get_by_role("button", name="Play").click()
    page.wait_for_timeout(700)
    first = float(film.get_attribute("data-at") or 0)
    page.wait_for_timeout(700)
    second = float(film.get_attribute("data-at") or 0)
    assert second > first > 0
    page.get_by_role("button", name="Pause").click()
    stood = film.get_attribute("data-at")
    page.wait_for_timeout(400)
    assert film.get_attribute("data-at") == stood
    page.get_by_role("slider", name="Time").fill("250")
    assert float(film.get_attribute("data-at") or 0) != float(stood or 0)
    assert page.evaluate("performance.getEntriesByType('resource').length") == before
    assert page.evaluate("window.kept === document.querySelector('.stMain')"), "the page was laid out anew"
    page.screenshot(path=ARTEFACTS / "plan-why.png")


def test_the_attention_proof_runs_for_the_sizes_chosen(page: Page) -> None:
    page.get_by_role("tab", name="why?").click()
    expect(metric(page, "Chunks")).to_have_text("4", timeout=WORK_MS)
    assert float(metric(page, "Largest difference").inner_text()) < 1e-5
    read = metric(page, "KV read here").inner_text()
    fill(page, "Chunk, tokens", "100")
    expect(metric(page, "Chunks")).to_have_text("10", timeout=WORK_MS)
    expect(metric(page, "KV read here")).not_to_have_text(read)
