"""The report: complete by itself, escaped, bounded, and readable whatever is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from serving.compare.capacity import ArmCapacity, Capacity, Probe
from serving.compare.plan import Arm
from serving.compare.report import render, write_report
from serving.compare.summary import Figure, Summary, summarise
from serving.compare.tables import ComparisonError, Results, read_results, write_json
from tests.comparison_data import comparison

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> & "quotes" </td>'
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return comparison(tmp_path_factory.mktemp("toy"), rounds=2, block_s=40)


@pytest.fixture(scope="module")
def summary(results: Results) -> Summary:
    return summarise(results, resamples=100)


class _Page(HTMLParser):
    """Text outside scripts and styles, the elements with their attributes, and the figures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[dict[str, Any]] = []
        self._inside = ""
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if dict(attrs).get("id") == "figures":
            self._inside = "figures"

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "figures":
            self.figures = json.loads(data)
        elif self._inside not in ("script", "style"):
            self.words.append(data)


def titles(page: _Page) -> list[str]:
    return [figure["layout"].get("title", {}).get("text", "") for figure in page.figures]


def test_it_is_one_file_that_needs_no_network(results: Results, summary: Summary) -> None:
    path = write_report(results, summary)
    html = path.read_text(encoding="utf-8")
    page = _Page(html)
    assert path.stat().st_size < MOST_BYTES
    assert "Plotly.newPlot" in html
    for tag, attributes in page.elements:
        assert not (tag in ("script", "img", "iframe") and "src" in attributes)
        assert tag != "link"
    (policy,) = [item["content"] for tag, item in page.elements if item.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert list(path.parent.glob(".report*")) == []


def test_it_says_all_that_is_needed_to_do_it_again(results: Results, summary: Summary) -> None:
    page = _Page(render(results, summary))
    for words in (
        "framechat compare --step-budgets 64,256,2048", "vllm toy", "cores: 2", "Seed", "step 64", "step 2048",
        "at most 300 ms", '"rate_per_s": 0.25', "every gap one sample",
    ):  # fmt: skip
        assert words in page.text


def test_the_figures_are_there_and_are_of_this_comparison(results: Results, summary: Summary) -> None:
    page = _Page(render(results, summary))
    places = [item for tag, item in page.elements if "data-figure" in item]
    assert [int(item["data-figure"] or -1) for item in places] == list(range(len(page.figures)))
    curve = page.figures[0]
    points = next(trace for trace in curve["data"] if trace.get("text") == ["step 64", "step 256", "step 2048"])
    by_name = {arm.arm.name: arm for arm in summary.arms}
    for x, y, name in zip(points["x"], points["y"], points["text"], strict=True):
        assert x == pytest.approx(by_name[name].classes["camera"].ttft.p95.value)
        assert y == pytest.approx(by_name[name].classes["chat"].itl.p99.value)
    box = next(trace for trace in curve["data"] if trace.get("fill") == "toself")
    assert (max(box["x"]), max(box["y"])) == (6_000, 300)
    assert any(title.startswith("chat; dashed: the objective") for title in titles(page))
    assert any("block" in title and "stalls" in title for title in titles(page))


@pytest.mark.parametrize("alone", [pytest.param(True, id="alone"), pytest.param(False, id="beside a comparison")])
def test_a_capacity_search_is_shown(results: Results, summary: Summary, tmp_path: Path, alone: bool) -> None:
    arms = [arm.model_copy(update={"name": name}) for arm, name in zip(results.experiment.arms, "abc", strict=True)]
    tried = [
        Probe(rate_per_s=0.2, holds=True, itl_p99_ms=Figure(value=210.0, low=190.0, high=260.0), requests=30),
        Probe(rate_per_s=0.4, holds=False, why=HOSTILE, itl_p99_ms=Figure(value=900.0), requests=30, invalid="late"),
        Probe(rate_per_s=0.3, holds=False, why="3 requests were not answered in time", itl_p99_ms=Figure(value=None)),
    ]
    found = Capacity(
        name="toy",
        objective_ms=500,
        complete=True,
        arms=[
            ArmCapacity(arm=arms[0], holds_per_s=0.2, fails_per_s=0.3, probes=tried),
            ArmCapacity(arm=arms[1].model_copy(update={"reason": HOSTILE})),
            ArmCapacity(arm=arms[2]),
        ],
    )
    write_json(tmp_path / "capacity.json", found)
    shown = Results(tmp_path, results.experiment, [] if alone else results.blocks)
    page = _Page(render(shown, summarise(shown, resamples=20) if alone else summary))
    assert ("a: 0.200 camera requests a second hold, 0.300 do not" in page.text) == alone
    assert "How it was measured" in page.text
    assert "3 requests were not answered in time" in page.text
    assert "1 with a client that lagged" in page.text
    (curve,) = [figure for figure in page.figures if "requests a second" in str(figure["layout"]["xaxis"].get("title"))]
    (line,) = curve["data"]
    assert (line["x"], line["y"]) == ([0.2, 0.4], [210.0, 900.0])
    assert line["marker"]["symbol"] == ["circle", "circle-open"]
    assert (len(page.figures) == 1) == alone


def test_a_damaged_capacity_file_is_an_error_with_its_mend(results: Results, summary: Summary, tmp_path: Path) -> None:
    (tmp_path / "capacity.json").write_text("{")
    with pytest.raises(ComparisonError, match=r"capacity\.json cannot be read; remove it"):
        render(Results(tmp_path, results.experiment, results.blocks), summary)


def test_every_text_is_escaped(tmp_path: Path) -> None:
    made = comparison(tmp_path, budgets=(64, 256), rounds=1, block_s=20, name=HOSTILE, command=("framechat", HOSTILE))
    arms = [
        made.experiment.arms[0],
        made.experiment.arms[1].model_copy(update={"name": "step 256"}),
        Arm(name=HOSTILE, kind="variant", reason=HOSTILE),
    ]
    machine = {"cpu": HOSTILE}
    experiment = made.experiment.model_copy(
        update={"arms": arms, "machine": machine, "versions": {"vllm": HOSTILE}, "notes": [HOSTILE]}
    )
    changed = Results(tmp_path, experiment, made.blocks)
    html = render(changed, summarise(changed, resamples=20))
    page = _Page(html)
    assert "<img" not in html.replace("<image", "")
    assert "alert(1)</script>" not in html
    assert {tag for tag, _ in page.elements if tag in ("img", "iframe", "a")} == set()
    assert page.text.count(HOSTILE.split(" & ", maxsplit=1)[0]) >= 4


def test_no_data_can_end_the_script_that_holds_it(tmp_path: Path) -> None:
    made = comparison(tmp_path, budgets=(2048,), rounds=1, block_s=30)
    html = render(made, summarise(made, resamples=20))
    figures = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert figures is not None
    assert "<" not in figures.group(1)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        pytest.param({"steps": False}, "steps were not recorded", id="no steps"),
        pytest.param({"steps": False}, "none attributed", id="no attribution"),
        pytest.param({"refused": ("step 2048",)}, "the server refused it", id="an arm was refused"),
        pytest.param({"rate_per_s": 0.001, "block_s": 10}, "There are no samples", id="nobody came"),
        pytest.param({"budgets": (16,), "rate_per_s": 0.02}, "No stream stood still", id="no stall"),
        pytest.param({"budgets": (256,)}, "With step 256", id="one arm"),
    ],
)
def test_it_is_readable_when_something_is_missing(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    found = comparison(tmp_path, **({"rounds": 1, "block_s": 30} | made))
    page = _Page(render(found, summarise(found, resamples=20)))
    assert says in page.text


def test_before_any_block_has_ended(tmp_path: Path) -> None:
    made = comparison(tmp_path, rounds=1, block_s=10)
    empty = Results(tmp_path, made.experiment, [])
    page = _Page(render(empty, summarise(empty, resamples=20)))
    assert "Nothing was measured: no block has ended yet." in page.text


def test_blocks_that_were_left_out_are_named_with_their_reason(tmp_path: Path) -> None:
    made = comparison(tmp_path, budgets=(256,), rounds=1, block_s=20)
    infos = [block.info.model_copy(update={"invalid": "the client lagged by 80 ms"}) for block in made.blocks]
    blocks = [replace(block, info=info) for block, info in zip(made.blocks, infos, strict=True)]
    results = Results(tmp_path, made.experiment, blocks)
    page = _Page(render(results, summarise(results, resamples=20)))
    assert "Nothing was measured: its only block is left out (the client lagged by 80 ms)" in page.text
    assert "block 0: the client lagged by 80 ms" in page.text


def test_thousands_of_gaps_stay_small_and_the_reader_is_told(tmp_path: Path) -> None:
    made = comparison(tmp_path, budgets=(128, 2048), rounds=4, block_s=120, rate_per_s=0.5)
    gaps = sum(len(row.gap_duration_s) for row in made.requests)
    assert gaps > 20_000
    path = write_report(made, summarise(made, resamples=20))
    page = _Page(path.read_text(encoding="utf-8"))
    drawn = sum(len(trace.get("x") or []) for figure in page.figures for trace in figure["data"])
    assert path.stat().st_size < MOST_BYTES
    assert drawn < 20_000
    assert any("are left out, the longest times are all there" in title for title in titles(page))
    assert any("steps: the longest of each kind" in title for title in titles(page))


def test_what_lies_on_disk_draws_the_same(tmp_path: Path) -> None:
    made = comparison(tmp_path, budgets=(128, 2048), rounds=1, block_s=20)
    read = read_results(tmp_path)
    summary = summarise(made, resamples=20)
    assert render(read, summary) == render(made, summary)
