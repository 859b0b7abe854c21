"""The server's own figures, from its Prometheus page; shown beside the client's, never mixed with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving.address import STRAIGHT_TO_LOOPBACK
from serving.records import now_s
from serving.tls import certificates

# Our name -> vLLM's sample names, newest first.
_GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
_COUNTERS = {
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "multimodal_queries": ("vllm:mm_cache_queries_total",),
    "multimodal_hits": ("vllm:mm_cache_hits_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "step_tokens": ("vllm:iteration_tokens_total_sum",),
    "steps": ("vllm:iteration_tokens_total_count",),
}
_WANTED = frozenset(name for group in (_GAUGES, _COUNTERS) for names in group.values() for name in names)
_MAX_PAGE_BYTES = 8 * 2**20
_MAX_READS = 1000


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One reading. None: the server does not report it, did not answer, or nothing happened to take a rate of.

    Attributes:
        running, waiting: Requests in the engine's batch, and in its queue.
        kv_cache_usage: 0..1, of the fullest engine.
        prefix_cache_hit_rate: Prompt tokens found in the prefix cache, of all asked for, in the window.
        multimodal_cache_hit_rate: Pictures whose preprocessing was reused, of all, in the window.
        preemptions: Since the server's start.
        tokens_per_step: Mean of the window, prefill and decode together.
        prompt_tokens_per_s, generation_tokens_per_s: Mean of the window.
    """

    running: int | None = None
    waiting: int | None = None
    kv_cache_usage: float | None = None
    prefix_cache_hit_rate: float | None = None
    multimodal_cache_hit_rate: float | None = None
    preemptions: int | None = None
    tokens_per_step: float | None = None
    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None


def parse_page(text: str) -> dict[str, list[float]]:
    """The wanted samples of a Prometheus page: our name -> one value an engine.

    Raises:
        ValueError: A wanted line is not in Prometheus' text format.
    """
    # The page holds some hundred histogram lines that nobody asks for; parsing them would cost the caller's event
    # loop more than everything else here.
    kept = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED]
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families("\n".join(kept) + "\n"):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(float(sample.value))
    found: dict[str, list[float]] = {}
    for group in (_GAUGES, _COUNTERS):
        for ours, names in group.items():
            for name in names:
                if name in values:
                    found[ours] = values[name]
                    break
    return found


@dataclass(frozen=True, slots=True)
class _Counters:
    at_s: float
    values: dict[str, float]


class EngineMetrics:
    """Reads one server's page again and again; rates are taken over the last `window_s` seconds.

    A server that was restarted starts its counters at 0: the window starts anew then. Not thread-safe.
    """

    def __init__(self, *, window_s: float = 60.0, timeout_s: float = 3.0, api_key: str | None = None) -> None:
        self._window_s = window_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            timeout=timeout_s, headers=headers, mounts=STRAIGHT_TO_LOOPBACK, verify=certificates()
        )
        self._reads: deque[_Counters] = deque(maxlen=_MAX_READS)

    async def read(self, base_url: str) -> EngineFigures:
        """Read the page of the server at `base_url` (with or without /v1).

        A server that does not answer, or has no such page, gives figures that are all None.
        """
        url = f"{base_url.rstrip('/').removesuffix('/v1')}/metrics"
        try:
            answer = await self._http.get(url)
            if answer.status_code != httpx.codes.OK or len(answer.content) > _MAX_PAGE_BYTES:
                return EngineFigures()
            page = parse_page(answer.text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return EngineFigures()
        return self.take(page, now_s())

    def take(self, page: dict[str, list[float]], at_s: float) -> EngineFigures:
        """The figures of a parsed page that was read at `at_s`."""
        counters = {name: sum(values) for name, values in page.items() if name in _COUNTERS}
        if self._reads and any(counters.get(name, 0.0) < old for name, old in self._reads[-1].values.items()):
            self._reads.clear()
        self._reads.append(_Counters(at_s, counters))
        while len(self._reads) > 2 and self._reads[1].at_s <= at_s - self._window_s:
            self._reads.popleft()
        first = self._reads[0]
        passed_s = at_s - first.at_s

        def grown(name: str) -> float | None:
            if name not in counters:
                return None
            # The first reading stands for everything since the server's start.
            return counters[name] - (first.values.get(name, 0.0) if len(self._reads) > 1 else 0.0)

        def ratio(part: str, whole: str) -> float | None:
            above, below = grown(part), grown(whole)
            return above / below if above is not None and below else None

        def rate(name: str) -> float | None:
            more = grown(name)
            return more / passed_s if more is not None and passed_s > 0 else None

        preemptions = counters.get("preemptions")
        return EngineFigures(
            running=_whole(page.get("running")),
            waiting=_whole(page.get("waiting")),
            kv_cache_usage=max(page["kv_cache_usage"], default=None) if "kv_cache_usage" in page else None,
            prefix_cache_hit_rate=ratio("prefix_hits", "prefix_queries"),
            multimodal_cache_hit_rate=ratio("multimodal_hits", "multimodal_queries"),
            preemptions=None if preemptions is None else int(preemptions),
            tokens_per_step=ratio("step_tokens", "steps"),
            prompt_tokens_per_s=rate("prompt_tokens"),
            generation_tokens_per_s=rate("generation_tokens"),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _whole(values: Iterable[float] | None) -> int | None:
    return None if values is None else int(sum(values))
