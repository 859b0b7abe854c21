"""What the plots hold: numbers to the digit, bounds, and what is kept where points are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serving.compare.attribution import attribute_stalls
from serving.compare.figures import (
    MOST_CURVE_POINTS,
    MOST_STEPS,
    TradeOff,
    distribution_figure,
    steps_figure,
    thinned_curve,
    tradeoff_figure,
)
from serving.compare.plan import Arm
from serving.compare.summary import Figure
from serving.compare.tables import BlockData
from serving.compare.timeline import MOST_ROWS, phases, stalls_of, timeline_figure
from tests.comparison_data import CLASSES, block, comparison, workload

OBJECTIVES_S = {name: item.itl_p99_ms / 1000 for name, item in CLASSES.items()}


def busy_block(rate_per_s: float = 0.3) -> BlockData:
    return block(0, Arm(name="step 2048", kind="step_budget", budget=2048), workload(60, rate_per_s))


def test_a_small_ecdf_is_exact() -> None:
    values, share = thinned_curve([30.0, 10.0, 20.0, 40.0])
    assert values.tolist() == [10, 20, 30, 40]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_a_large_ecdf_is_bounded_keeps_the_longest_and_stays_true() -> None:
    given = np.random.default_rng(1).lognormal(3, 1, 50_000)
    values, share = thinned_curve(given)
    ordered = np.sort(given)
    assert len(values) <= MOST_CURVE_POINTS
    assert values[-60:].tolist() == ordered[-60:].tolist()
    for value, part in zip(values, share, strict=True):
        assert (ordered <= value).mean() == pytest.approx(part, abs=1e-9)


def test_intervals_are_drawn_from_the_point_and_open_ends_are_not() -> None:
    points = [
        TradeOff("a", Figure(value=500, low=400, high=700), Figure(value=50, low=45, high=60)),
        TradeOff("b", Figure(value=300, low=250), Figure(value=80)),
    ]
    figure = tradeoff_figure(points, ttft_slo_ms=1000, itl_slo_ms=100)
    assert figure is not None
    curve = figure.data[1]
    assert (list(curve.error_x.array), list(curve.error_x.arrayminus)) == ([200, 0], [100, 50])
    assert (list(curve.error_y.array), list(curve.error_y.arrayminus)) == ([10, 0], [5, 0])


def test_variants_are_points_of_their_own_and_groups_curves_of_their_own() -> None:
    def point(name: str, **more: object) -> TradeOff:
        return TradeOff(name, Figure(value=500), Figure(value=50), **more)  # type: ignore[arg-type]

    figure = tradeoff_figure(
        [point("1", group="x"), point("no chunks", ordered=False, group="x"), point("1", group="y")],
        ttft_slo_ms=None, itl_slo_ms=None,
    )  # fmt: skip
    assert figure is not None
    assert [(trace.mode, trace.name.split(":")[0]) for trace in figure.data] == [
        ("lines+markers+text", "x"), ("markers+text", "x"), ("lines+markers+text", "y"),
    ]  # fmt: skip


def test_names_are_shown_as_they_are() -> None:
    hostile = TradeOff("<a href='x'>b</a>", Figure(value=500), Figure(value=50), group="<b>g</b>")
    figure = tradeoff_figure([hostile], ttft_slo_ms=None, itl_slo_ms=None)
    assert figure is not None
    assert list(figure.data[0].text) == ["&lt;a href=&#x27;x&#x27;&gt;b&lt;/a&gt;"]
    assert figure.data[0].name.startswith("&lt;b&gt;g&lt;/b&gt;")


def test_without_a_value_there_is_no_curve() -> None:
    nothing = TradeOff("a", Figure(value=None), Figure(value=50))
    assert tradeoff_figure([nothing], ttft_slo_ms=1, itl_slo_ms=1) is None
    assert distribution_figure({"a": []}, "chat", ttft_slo_ms=1, itl_slo_ms=1) is None
    assert steps_figure([]) is None


def test_steps_are_bounded_and_the_longest_are_kept(tmp_path: Path) -> None:
    made = comparison(tmp_path, rounds=2, block_s=120)
    steps = made.steps
    assert len(steps) > MOST_STEPS
    figure = steps_figure(steps)
    assert figure is not None
    drawn = [value for trace in figure.data for value in trace.y]
    assert len(drawn) <= MOST_STEPS
    assert max(drawn) == pytest.approx(max(step.duration_s for step in steps) * 1000, rel=1e-4)


def test_phases_are_in_order_and_prefill_begins_with_the_first_step_that_has_it() -> None:
    data = busy_block()
    known = phases(data)
    for row in data.requests:
        (waiting, _, begin), (prefill, _, first), (decode, _, end) = known[row.request_id].spans()
        assert (waiting, prefill, decode) == ("waiting", "prefill", "decode")
        assert row.due_s <= begin <= first <= end
        own = [step.start_s for step in data.steps if row.request_id in step.request_ids]
        assert begin == pytest.approx(max(row.due_s, own[0]))
        assert (first, end) == (row.first_token_s, row.last_token_s)


def test_without_steps_waiting_and_prefill_are_one() -> None:
    data = busy_block()
    known = phases(BlockData(data.info, data.requests))
    assert {span[0] for item in known.values() for span in item.spans()} == {"waiting and prefill", "decode"}


def test_a_stall_is_joined_to_the_request_that_caused_it() -> None:
    data = busy_block()
    attributed = attribute_stalls(data.requests, data.steps, OBJECTIVES_S)
    stalls = stalls_of(attributed)
    assert stalls
    classes = {row.request_id: row.traffic_class for row in data.requests}
    longest = stalls[0]
    assert {classes[cause] for cause in longest.causes} <= {"camera", "chat"}
    assert "camera" in {classes[cause] for cause in longest.causes}
    assert any("prefill of camera request" in words for words in longest.words)
    figure = timeline_figure(data, stalls)
    assert figure is not None
    joined = next(trace for trace in figure.data if trace.name == "caused by")
    assert len([value for value in joined.x if value is not None]) >= 2


def test_a_crowded_time_line_shows_a_part_and_says_which() -> None:
    data = block(0, Arm(name="step 256", kind="step_budget", budget=256), workload(60, 3.0), most_at_once=200)
    figure = timeline_figure(data, stalls_of(attribute_stalls(data.requests, data.steps, OBJECTIVES_S)))
    assert figure is not None
    rows = {value for trace in figure.data if trace.type == "bar" for value in trace.y}
    assert len(data.requests) > MOST_ROWS
    assert len(rows) <= MOST_ROWS
    assert f"of {len(data.requests):,} requests" in figure.layout.title.text
