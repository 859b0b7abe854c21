"""Latency for the page and counters for Prometheus, from requests that are known to the millisecond."""

from __future__ import annotations

import pytest

from pipeline.api import CameraView, EngineView, ServerView, StatusView
from pipeline.config import Config
from pipeline.figures import Figures
from pipeline.stallcauses import StallCauses
from serving.latency import Ledger
from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord, now_s


def status(*cameras: CameraView, ready: bool = True) -> StatusView:
    server = ServerView(state="ready" if ready else "down", endpoint="http://server/v1", attached=True)
    return StatusView(
        version="0", started_s=0, now_s=0, server=server, engine=EngineView(), cameras=list(cameras), detector="",
        warnings=[],
    )  # fmt: skip


def figures_of(state: StatusView) -> tuple[Figures, Ledger]:
    config = Config()
    ledger = Ledger(config.serving.classes, 300)
    return Figures(config, ledger, StallCauses(config, ledger, None), lambda: state), ledger


def record(outcome: Outcome = Outcome.DONE, **more: object) -> RequestRecord:
    at_s = now_s()
    fields: dict[str, object] = {"due_s": at_s - 2, "finished_s": at_s, "model": "m", "traffic_class": "chat"}
    return RequestRecord(request_id="r", outcome=outcome, **{**fields, **more})  # type: ignore[arg-type]


def lines(figures: Figures) -> dict[str, float]:
    text = figures.prometheus().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_finished_request_is_in_every_figure_of_its_class() -> None:
    figures, ledger = figures_of(status())
    at_s = now_s()
    done = record(
        due_s=at_s - 2, first_token_s=at_s - 1.5, last_token_s=at_s - 1.1, prompt_tokens=600, cached_tokens=512,
        completion_tokens=5, gaps=(Gap(at_s - 1.4, 0.1, 1), Gap(at_s - 1.1, 0.3, 3)),
    )  # fmt: skip
    ledger.finish(done)
    figures.observe(done)
    view = figures.latency(None, 60)
    assert view.window_s == 300
    chat = {item.traffic_class: item for item in view.classes}["chat"]
    assert (chat.done, chat.ttft.count, chat.itl.count, chat.tpot.count) == (1, 1, 2, 1)
    assert (chat.ttft.p50_ms, chat.itl.max_ms, chat.tpot.p99_ms) == pytest.approx((500, 300, 100), abs=0.01)
    assert chat.ttft_slo_p95_ms == Config().serving.classes["chat"].ttft_p95_ms
    assert sorted((point.kind, round(point.value_ms)) for point in view.timeline) == [
        ("itl", 100), ("itl", 300), ("ttft", 500)
    ]  # fmt: skip
    found = lines(figures)
    chat_only = 'traffic_class="chat"'
    assert found[f"framechat_ttft_seconds_sum{{{chat_only}}}"] == pytest.approx(0.5, abs=1e-3)
    assert found[f'framechat_itl_seconds_bucket{{le="0.15",{chat_only}}}'] == 1
    assert found[f"framechat_itl_seconds_count{{{chat_only}}}"] == 2
    assert found[f"framechat_tpot_seconds_sum{{{chat_only}}}"] == pytest.approx(0.1, abs=1e-3)
    tokens = [found[f"framechat_{name}_tokens_total{{{chat_only}}}"] for name in ("prompt", "cached", "completion")]
    assert tokens == [600, 512, 5]
    assert not any('traffic_class="document"' in name and "_total" in name for name in found)


def test_failed_and_skipped_ones_are_counted_by_cause() -> None:
    figures, _ = figures_of(status())
    figures.observe(record(Outcome.FAILED, error=RequestError(ErrorKind.CUT, "cut")))
    figures.observe(record(Outcome.SKIPPED, reason="queue full"))
    figures.observe(record(Outcome.CANCELLED, reason="camera removed"))
    found = lines(figures)
    assert found['framechat_request_errors_total{kind="cut",traffic_class="chat"}'] == 1
    assert found['framechat_requests_skipped_total{reason="queue full",traffic_class="chat"}'] == 1
    for outcome in ("failed", "skipped", "cancelled"):
        assert found[f'framechat_requests_total{{outcome="{outcome}",traffic_class="chat"}}'] == 1
    assert not any("ttft" in name and "chat" in name for name in found)  # no sample is no sample, not 0


@pytest.mark.parametrize("ready", [True, False])
def test_gauges_of_the_present_leave_out_what_nobody_knows(ready: bool) -> None:
    live = CameraView(
        camera_id="yard", name="Yard", source="0", state="live", frames=7, frame_age_p95_ms=120, people_seen=2
    )
    lost = CameraView(camera_id="gate", name="Gate", source="1", state="lost")
    figures, ledger = figures_of(status(live, lost, ready=ready))
    ledger.begin("a", "camera", now_s())
    ledger.begin("b", "camera", now_s())
    ledger.sent("a", now_s())
    found = lines(figures)
    assert found["framechat_model_server_ready"] == float(ready)
    assert found['framechat_requests_waiting{traffic_class="camera"}'] == 1
    assert found['framechat_requests_in_flight{traffic_class="camera"}'] == 1
    assert [found[f'framechat_camera_live{{camera="{name}"}}'] for name in ("yard", "gate")] == [1, 0]
    assert found['framechat_camera_frame_age_p95_seconds{camera="yard"}'] == 0.12
    assert 'framechat_camera_frame_age_p95_seconds{camera="gate"}' not in found
    assert "framechat_engine_kv_cache_usage" not in found
