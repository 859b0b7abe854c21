"""The figures of both classes: for the page, out of the ledger, and for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.api import CameraView, ClassLatency, LatencyView, Percentiles, StatusView, TimelinePoint
from pipeline.config import Config
from pipeline.stallcauses import StallCauses
from serving.latency import ClassSummary, Ledger
from serving.latency import Percentiles as Pool
from serving.records import Outcome, RequestRecord, now_s

_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120)
_ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)
_CLASS = "traffic_class"
_CAMERA_GAUGES: tuple[tuple[str, str, Callable[[CameraView], float | None]], ...] = (
    ("live", "1 while pictures come", lambda camera: float(camera.state == "live")),
    ("frames", "Frames read", lambda camera: camera.frames),
    ("frames_dropped", "Frames replaced by a newer one before use", lambda camera: camera.frames_dropped),
    ("frames_damaged", "Frames skipped as damaged", lambda camera: camera.frames_damaged),
    ("source_fps", "Measured frames a second", lambda camera: camera.source_fps),
    ("detect_fps", "Measured detections a second", lambda camera: camera.detect_fps),
    ("frame_age_p95_seconds", "Age of frames when used", lambda camera: _seconds(camera.frame_age_p95_ms)),
    ("people_seen", "People seen", lambda camera: camera.people_seen),
    ("people_described", "People described", lambda camera: camera.people_described),
)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


class Figures(Collector):
    """Latency of every class, and counters of everything.

    Args:
        ledger: Where latency comes from.
        stalls: Knows the causes of the newest stalls.
        status: The present state; called at every scrape.
    """

    def __init__(self, config: Config, ledger: Ledger, stalls: StallCauses, status: Callable[[], StatusView]) -> None:
        self._ledger = ledger
        self._stalls = stalls
        self._status = status
        self._window_s = config.service.latency_window_s
        self._registry = CollectorRegistry()
        names: dict[str, Any] = {"registry": self._registry}
        self._ttft = Histogram(
            "framechat_ttft_seconds", "From due to the first token", [_CLASS], buckets=_TTFT_BUCKETS_S, **names
        )
        self._itl = Histogram(
            "framechat_itl_seconds", "Gaps between token-bearing chunks", [_CLASS], buckets=_ITL_BUCKETS_S, **names
        )
        self._tpot = Histogram(
            "framechat_tpot_seconds", "Time per output token of a request", [_CLASS], buckets=_ITL_BUCKETS_S, **names
        )
        self._ended = Counter("framechat_requests", "Requests that ended, by outcome", [_CLASS, "outcome"], **names)
        self._failed = Counter("framechat_request_errors", "Failed requests, by kind", [_CLASS, "kind"], **names)
        self._skipped = Counter("framechat_requests_skipped", "Never sent, by reason", [_CLASS, "reason"], **names)
        self._prompt = Counter("framechat_prompt_tokens", "Prompt tokens", [_CLASS], **names)
        self._cached = Counter("framechat_cached_tokens", "Prompt tokens found in the prefix cache", [_CLASS], **names)
        self._output = Counter("framechat_completion_tokens", "Generated tokens", [_CLASS], **names)
        self._registry.register(self)

    def observe(self, record: RequestRecord) -> None:
        """Count an ended request. From one thread."""
        self._stalls.observe(record)
        name = record.traffic_class
        self._ended.labels(name, record.outcome.value).inc()
        if record.error is not None:
            self._failed.labels(name, record.error.kind.value).inc()
        if record.outcome is Outcome.SKIPPED:
            self._skipped.labels(name, record.reason or "").inc()
        if record.ttft_s is not None:
            self._ttft.labels(name).observe(record.ttft_s)
        if record.tpot_s is not None:
            self._tpot.labels(name).observe(record.tpot_s)
        gaps = self._itl.labels(name)
        for gap in record.gaps:
            gaps.observe(gap.duration_s)
        self._prompt.labels(name).inc(record.prompt_tokens or 0)
        self._cached.labels(name).inc(record.cached_tokens or 0)
        self._output.labels(name).inc(record.completion_tokens or 0)

    def prometheus(self) -> bytes:
        """Everything in Prometheus' text format. Blocks."""
        return generate_latest(self._registry)

    def latency(self, window_s: float | None, timeline_s: float) -> LatencyView:
        """Every class over the window (None: the configured one) and the samples of the last `timeline_s`. Blocks."""
        at_s = now_s()
        window_s = self._window_s if window_s is None else window_s
        return LatencyView(
            window_s=window_s,
            now_s=at_s,
            stalls=list(self._stalls.newest),
            classes=[_class_view(summary) for summary in self._ledger.summaries(at_s, window_s)],
            timeline=[
                TimelinePoint(
                    at_s=round(sample.at_s, 4),
                    traffic_class=sample.traffic_class,
                    kind=sample.kind,
                    value_ms=round(sample.value_s * 1000, 3),
                    stall=sample.stall,
                )
                for sample in self._ledger.timeline(timeline_s, at_s)
            ],
        )

    def describe(self) -> list[Metric]:
        """Nothing: keeps registration from asking for the state before there is one."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Gauges of the present, for `prometheus_client`."""
        status = self._status()
        flight = GaugeMetricFamily("framechat_requests_in_flight", "Sent and not ended", labels=[_CLASS])
        waiting = GaugeMetricFamily("framechat_requests_waiting", "Due and not sent", labels=[_CLASS])
        for summary in self._ledger.summaries():
            flight.add_metric([summary.traffic_class], summary.in_flight)
            waiting.add_metric([summary.traffic_class], summary.waiting)
        yield flight
        yield waiting
        up = GaugeMetricFamily("framechat_model_server_ready", "1 while the model server can be used")
        up.add_metric([], float(status.server.state == "ready"))
        yield up
        usage = GaugeMetricFamily("framechat_engine_kv_cache_usage", "Share of the KV cache in use, by the server")
        if status.engine.kv_cache_usage is not None:
            usage.add_metric([], status.engine.kv_cache_usage)
        yield usage
        for name, words, value in _CAMERA_GAUGES:
            family = GaugeMetricFamily(f"framechat_camera_{name}", words, labels=["camera"])
            for camera in status.cameras:
                figure = value(camera)
                if figure is not None:
                    family.add_metric([camera.camera_id], figure)
            yield family


def _class_view(summary: ClassSummary) -> ClassLatency:
    return ClassLatency(
        traffic_class=summary.traffic_class,
        ttft=_milliseconds(summary.ttft),
        itl=_milliseconds(summary.itl),
        tpot=_milliseconds(summary.tpot),
        ttft_slo_p95_ms=summary.ttft_slo_p95_s * 1000,
        itl_slo_p99_ms=summary.itl_slo_p99_s * 1000,
        stalls=summary.stalls,
        waiting=summary.waiting,
        in_flight=summary.in_flight,
        done=summary.done,
        failed=summary.failed,
        cancelled=summary.cancelled,
        failures=summary.failures,
        skipped=summary.skipped,
    )


def _milliseconds(pool: Pool) -> Percentiles:
    def ms(value_s: float | None) -> float | None:
        return None if value_s is None else round(value_s * 1000, 3)

    return Percentiles(
        count=pool.count, p50_ms=ms(pool.p50_s), p95_ms=ms(pool.p95_s), p99_ms=ms(pool.p99_s), max_ms=ms(pool.max_s)
    )
