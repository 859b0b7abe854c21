"""A comparison's report: one HTML file that needs nothing but itself."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from serving.compare import report_tables as tables
from serving.compare.attribution import Attribution, attribute_stalls, in_words, totals_s
from serving.compare.capacity import Capacity, capacity_lines, read_capacity
from serving.compare.capacity_report import capacity_figure, capacity_table
from serving.compare.figures import distribution_figure, steps_figure, tradeoff_figure
from serving.compare.report_tables import text
from serving.compare.samples import MS, counted_requests
from serving.compare.summary import Summary
from serving.compare.tables import BlockData, Results
from serving.compare.timeline import stalls_of, timeline_figure
from serving.compare.tradeoff import tradeoff_points
from serving.compare.words import CAMERA, CHAT, class_names, duration, listed, measured, run_time, verdict

_TEMPLATE = Path(__file__).with_name("report.html")
_MOST_CAUSES = 12
_WARNED = 0.05  # a share of unexplained time from which the reader is told


def write_report(results: Results, summary: Summary) -> Path:
    """Write `report.html` into the comparison's folder, whole or not at all.

    Raises:
        OSError: The folder cannot be written.
    """
    path = results.folder / "report.html"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(render(results, summary), encoding="utf-8")
    temporary.replace(path)
    return path


def render(results: Results, summary: Summary) -> str:
    """The report as HTML: verdict, trade-off, distributions, time lines, steps, tables, and how it was measured.

    What a capacity search in the same folder found stands after the overview; where nothing else was measured, alone.

    Raises:
        ComparisonError: That search's file cannot be read.
    """
    page = _Page()
    capacity = read_capacity(results.folder)
    if capacity is not None and not results.blocks:
        page.add(f"<h1>{text(summary.name)}</h1><p class=verdict>{text('. '.join(capacity_lines(capacity)))}.</p>")
        if not capacity.complete:
            page.add("<p class=soft>The search is not complete.</p>")
        _capacity(page, capacity)
        _how(page, results, summary)
        return page.html(summary.name)
    objectives_s = {name: item.itl_p99_ms / MS for name, item in summary.objectives.items()}
    lags_s = {block.info.number: block.info.lag.loop_p99_s or 0.0 for block in results.blocks}
    stalls = attribute_stalls(
        [row for block in results.blocks for row in counted_requests(block)], results.steps, objectives_s, lags_s
    )
    page.add(f"<h1>{text(summary.name)}</h1><p class=verdict>{text(verdict(summary))}</p>{_so_far(results, summary)}")
    page.add(tables.overview(summary))
    if capacity is not None:
        _capacity(page, capacity)
    _tradeoff(page, summary)
    _distributions(page, results, summary)
    _timelines(page, results, stalls)
    _causes(page, results, stalls)
    _steps(page, results)
    _figures_in_full(page, summary)
    _how(page, results, summary)
    return page.html(summary.name)


class _Page:
    """Sections of HTML, and the figures in them: as data, drawn when they come into view."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._figures: list[dict[str, Any]] = []

    def add(self, html: str) -> None:
        self._parts.append(html)

    def figure(self, figure: go.Figure, *, label: str) -> str:
        """The place of a figure."""
        height_px = figure.layout.height
        self._figures.append(json.loads(figure.to_json(engine="json")))
        number = len(self._figures) - 1
        size = f'style="height:{height_px}px"'
        return f'<div class=figure role=img aria-label="{text(label)}" data-figure={number} {size}></div>'

    def html(self, title: str) -> str:
        # In a script element only `<` could end it; JSON may write it as an escape.
        figures = json.dumps(self._figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        page = _TEMPLATE.read_text(encoding="utf-8")
        for place, content in (
            ("<!--TITLE-->", text(title)),
            ("/*PLOTLY*/", get_plotlyjs()),
            ("/*FIGURES*/", figures),
            ("<!--BODY-->", "\n".join(self._parts)),
        ):
            before, found, after = page.partition(place)
            if not found:
                raise RuntimeError(f"{_TEMPLATE.name} lacks {place}")
            page = before + content + after
        return page


def _so_far(results: Results, summary: Summary) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(results.experiment.created_s))
    words = f"{summary.blocks_done} of {summary.blocks_planned} blocks, started {when}."
    if not summary.complete:
        words += " It is not complete: the figures are of what has ended so far."
    notes = "".join(f"<li>{text(note)}" for note in summary.notes)
    return f"<p class=soft>{text(words)}</p>" + (f"<ul class=soft>{notes}</ul>" if notes else "")


def _capacity(page: _Page, found: Capacity) -> None:
    page.add(f"<h2>How many {text(found.raised)} requests a budget carries</h2>")
    page.add(
        f"<p>The highest rate at which {text(found.watched)}'s ITL p99 stays within {duration(found.objective_ms)} and "
        f"every request is answered, found by halving until two rates are within a factor of {found.precision:g}; each "
        "rate was tried with one block of the same seed.</p>"
    )
    page.add(capacity_table(found))
    figure = capacity_figure(found)
    if figure is not None:
        page.add(page.figure(figure, label=f"{found.watched} ITL p99 at each rate of {found.raised}"))


def _tradeoff(page: _Page, summary: Summary) -> None:
    points = tradeoff_points(summary)
    objectives = summary.objectives
    figure = tradeoff_figure(
        points,
        ttft_slo_ms=objectives[CAMERA].ttft_p95_ms if CAMERA in objectives else None,
        itl_slo_ms=objectives[CHAT].itl_p99_ms if CHAT in objectives else None,
    )
    page.add("<h2>What a budget costs whom</h2>")
    if figure is None:
        page.add("<p class=soft>No arm has samples of both classes, camera and chat, so there is no curve to draw.</p>")
        return
    page.add(
        "<p>To the left the camera's first token comes sooner, further down chat stands still for less. Bars are 95 % "
        "intervals; where an upper end is missing there are too few samples to bound it.</p>"
    )
    page.add(page.figure(figure, label="Camera TTFT p95 against chat ITL p99"))


def _distributions(page: _Page, results: Results, summary: Summary) -> None:
    page.add("<h2>Distributions</h2>")
    rows = {
        arm.arm.name: [
            row for block in results.blocks if block.info.arm == arm.arm.name for row in counted_requests(block)
        ]
        for arm in measured(summary)
    }
    drawn = False
    for name in class_names(summary):
        objectives = summary.objectives[name]
        figure = distribution_figure(rows, name, ttft_slo_ms=objectives.ttft_p95_ms, itl_slo_ms=objectives.itl_p99_ms)
        if figure is not None:
            drawn = True
            page.add(page.figure(figure, label=f"Distributions of {name}"))
    if not drawn:
        page.add("<p class=soft>There are no samples.</p>")


def _timelines(page: _Page, results: Results, stalls: Sequence[Attribution]) -> None:
    page.add("<h2>A minute of it</h2>")
    blocks = _shown_blocks(results, stalls)
    if not blocks:
        page.add("<p class=soft>No block has ended.</p>")
        return
    if not results.steps:
        page.add(
            "<p class=soft>The engine's steps were not recorded (a server that is not ours, or without the scheduler "
            "plugin): waiting and prefill cannot be told apart, and stalls have no cause.</p>"
        )
    page.add(
        "<p>Each row is a request. Red: a stream stood still for longer than its objective; dotted lines lead to the "
        "requests whose prefill or pictures took a good part of that time.</p>"
    )
    for place, block in enumerate(blocks):
        mine = stalls_of([gap for gap in stalls if gap.block == block.info.number])
        figure = timeline_figure(block, mine)
        if figure is None:
            continue
        drawn = page.figure(figure, label=f"Time line of block {block.info.number}")
        title = text(f"{block.info.arm}: {len(mine)} stalls in block {block.info.number}")
        page.add(drawn if place == 0 else f"<details><summary>{title}</summary>{drawn}</details>")


def _shown_blocks(results: Results, stalls: Sequence[Attribution]) -> list[BlockData]:
    """Of each arm the block with its longest stall, or else its first; the arm with the longest stall first."""
    by_number = {block.info.number: block for block in results.blocks}
    chosen: dict[str, BlockData] = {}
    for number in [*(gap.block for gap in stalls), *by_number]:
        block = by_number[number]
        if block.requests:
            chosen.setdefault(block.info.arm, block)
    return list(chosen.values())


def _causes(page: _Page, results: Results, stalls: Sequence[Attribution]) -> None:
    page.add("<h2>What the stalls went to</h2>")
    if not stalls:
        page.add("<p class=soft>No stream stood still for longer than its objective.</p>")
        return
    known = [gap for gap in stalls if gap.missing is None]
    if not known:
        page.add(f"<p class=soft>{len(stalls):,} stalls, none attributed: {text(stalls[0].missing)}.</p>")
        return
    arms = [arm.name for arm in results.experiment.arms if any(gap.arm == arm.name for gap in known)]
    shares = {arm: totals_s([gap for gap in known if gap.arm == arm]) for arm in arms}
    total = totals_s(known)
    causes = sorted(total, key=lambda cause: -abs(total[cause]))
    rows = []
    for cause in causes:
        name, whose = cause
        link = "behind" if name == "waiting" else "of"
        label = name.replace("_", " ") + (f" {link} {whose}" if whose else "")
        rows.append([text(label), *(_part(shares[arm].get(cause, 0.0), sum(shares[arm].values())) for arm in arms)])
    counts = ["stalls", *(f"{sum(gap.arm == arm for gap in known):,}" for arm in arms)]
    page.add(tables.table(["share of the time", *arms], [counts, *rows], name="Causes"))
    unexplained_s, all_s = sum(gap.unexplained_s for gap in known), sum(gap.duration_s for gap in known)
    if unexplained_s > _WARNED * all_s:
        page.add(f"<p class=soft>{unexplained_s / all_s:.0%} of the time is unexplained.</p>")
    if len(known) < len(stalls):
        page.add(f"<p class=soft>{len(stalls) - len(known):,} more stalls could not be attributed.</p>")
    page.add("<h3>Who caused the longest</h3>" + _events(known))


def _events(stalls: Sequence[Attribution]) -> str:
    """One row for each request (or other cause) that took most of a stall, and how many streams it held up."""
    events: dict[tuple[int, str, str], list[Attribution]] = {}
    for gap in stalls:
        main = gap.main
        if main is not None:
            events.setdefault((gap.block, main.cause, main.request_id or ""), []).append(gap)
    rows = []
    for gaps in list(events.values())[:_MOST_CAUSES]:
        main = gaps[0].main
        if main is None:
            continue
        streams = Counter(name for name, _ in {(gap.traffic_class, gap.request_id) for gap in gaps})
        held = listed([f"{number} {name}" for name, number in sorted(streams.items(), reverse=True)])
        parts = "<br>".join(text(in_words(part)) for part in gaps[0].parts[:4])
        rows.append(
            [
                f"<span class=wrapped>{text(in_words(main).rpartition(':')[0])}</span>", text(gaps[0].arm),
                text(f"{held} {_streams(streams)}"), duration(gaps[0].duration_s * MS),
                f"<small class=wide>{parts}</small>",
            ]
        )  # fmt: skip
    return tables.table(
        ["most of the time", "arm", "held up", "the longest", "which went to"], rows, name="Causes of the longest"
    )


def _streams(streams: Counter[str]) -> str:
    return "stream" if streams.total() == 1 else "streams"


def _part(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.0%}".replace("-0%", "0%") if whole > 0 else "–"


def _steps(page: _Page, results: Results) -> None:
    page.add("<h2>Steps of the engine</h2>")
    figure = steps_figure(results.steps, seed=results.experiment.seed)
    if figure is None:
        page.add("<p class=soft>No steps were recorded.</p>")
        return
    lost = sum(block.info.steps_lost for block in results.blocks)
    page.add(f"<p>{len(results.steps):,} steps{f'; {lost:,} more could not be recorded' if lost else ''}.</p>")
    page.add(page.figure(figure, label="Duration of steps by their tokens"))


def _figures_in_full(page: _Page, summary: Summary) -> None:
    page.add("<h2>All figures</h2>")
    for name in class_names(summary):
        page.add(f"<h3>{text(name)}</h3>" + tables.percentiles(summary, name))
    if measured(summary):
        page.add("<h3>Requests</h3>" + tables.counts(summary))
    if summary.ratios:
        first = [
            item
            for item in summary.ratios
            if (item.traffic_class, item.figure, item.percentile) in ((CHAT, "itl", "p99"), (CAMERA, "ttft", "p95"))
        ]
        page.add("<h3>Arms against each other</h3>" + tables.ratios(first, name="Ratios"))
        every = tables.ratios(summary.ratios, name="All ratios")
        page.add(f"<details><summary>All {len(summary.ratios)} ratios</summary>{every}</details>")
    page.add("<h3>The measuring itself</h3>" + tables.quality(summary))


def _how(page: _Page, results: Results, summary: Summary) -> None:
    """Everything that is needed to do it again."""
    experiment = results.experiment
    command = shlex.join(experiment.command)
    objectives = [
        [text(name), f"at most {duration(item.ttft_p95_ms)}", f"at most {duration(item.itl_p99_ms)}"]
        for name, item in summary.objectives.items()
    ]
    facts = [
        ("Command", f"<code>{text(command)}</code>"),
        ("Seed", text(experiment.seed)),
        ("Blocks", text(_blocks(results))),
        (
            "Load",
            text("cache-friendly, on purpose" if experiment.cache_friendly else "texts and pictures all different"),
        ),
        ("Requests at once", text(experiment.max_in_flight or "no cap")),
        ("Server", text("attached: it ran already" if experiment.attached else "ours, started for this")),
        ("Versions", text(listed([f"{name} {version}" for name, version in experiment.versions.items()]) or "unknown")),
        ("Machine", text(", ".join(_fact(key, value) for key, value in experiment.machine.items()) or "unknown")),
    ]
    definitions = "".join(f"<dt>{text(name)}<dd>{text(words)}" for name, words in summary.definitions.items())
    page.add("<h2>How it was measured</h2>" + tables.facts(facts))
    page.add("<h3>Objectives</h3>" + tables.table(["", "TTFT p95", "ITL p99"], objectives, name="Objectives"))
    page.add(f"<h3>Words</h3><dl>{definitions}</dl>")
    for title, tree in (
        ("The load", experiment.workload.model_dump(mode="json")),
        ("The configuration", experiment.config),
        ("The arms", [arm.model_dump(mode="json") for arm in experiment.arms]),
    ):
        page.add(
            f"<details><summary>{title}</summary><pre>{text(json.dumps(tree, indent=2, default=str))}</pre></details>"
        )


def _fact(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{key.removesuffix('_bytes')}: {value / 2**30:.1f} GiB"
    if isinstance(value, list | tuple):
        value = ", ".join(f"{item:.1f}" if isinstance(item, float) else str(item) for item in value)
    return f"{key.replace('_', ' ')}: {value}"


def _blocks(results: Results) -> str:
    experiment = results.experiment
    rounds = len({planned.round for planned in experiment.plan})
    return (
        f"{len(experiment.plan)} of {run_time(experiment.block_s)}, {rounds} of each arm, in turn; "
        f"the first {run_time(experiment.warm_up_s)} of each do not count"
    )
