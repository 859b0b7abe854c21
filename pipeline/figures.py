"""The figures of both classes: for the page, out of the ledger, and for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.api import ClassLatency, LatencyView, Percentiles, StatusView, TimelinePoint
from pipeline.config import Config
from serving.latency import ClassSummary, Ledger
from serving.records import Outcome, RequestRecord, now_s

_TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120)
_ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)
_CLASS = "traffic_class"


class Figures(Collector):
    """Latency of every class, and counters of everything, without a clock of its own."""

    def __init__(self, config: Config) -> None:
        self._classes = config.serving.classes
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
        self._status: Callable[[], StatusView] | None = None
        self._ledger: Ledger | None = None

    def attach(self, ledger: Ledger, status: Callable[[], StatusView]) -> None:
        """Read the present from these from now on."""
        self._ledger, self._status = ledger, status
        self._registry.register(self)

    def observe(self, record: RequestRecord) -> None:
        """Count an ended request. From one thread."""
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
