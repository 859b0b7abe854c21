"""The simulated engine's Prometheus page, under vLLM's names as far as serving/enginemetrics.py reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from serving.mock.engine import MockEngine


def metrics_page(engine: MockEngine, model: str, description: str) -> str:
    """The page as text. `framechat:simulated` marks it; vLLM has no such metric."""
    registry = CollectorRegistry()
    registry.register(_Reading(engine, model, description))
    return generate_latest(registry).decode()


class _Reading(Collector):
    def __init__(self, engine: MockEngine, model: str, description: str) -> None:
        self._engine, self._model, self._description = engine, model, description

    def collect(self) -> Iterator[Metric]:
        """The page's families, read now."""
        live, totals = self._engine.live, self._engine.live.totals
        marked = GaugeMetricFamily("framechat:simulated", "No model runs here: times are simulated.", labels=["what"])
        marked.add_metric([self._description], 1)
        yield marked
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the simulated batch.", live.running),
            ("vllm:num_requests_waiting", "Requests waiting for the simulated engine.", live.waiting),
            ("vllm:kv_cache_usage_perc", "Part of the simulated KV cache in use, 0..1.", live.cache_usage),
            ("framechat:simulation_lag_seconds", "How late the last step's end was noticed.", self._engine.lag_s),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the simulated cache.", totals.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in it.", totals.prefix_hits),
            ("vllm:num_preemptions", "Simulated preemptions.", totals.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of answered requests.", totals.prompt_tokens),
            ("vllm:generation_tokens", "Tokens written.", totals.generation_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        steps = SummaryMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=["model_name"])
        steps.add_metric([self._model], count_value=totals.steps, sum_value=totals.step_tokens)
        yield steps
