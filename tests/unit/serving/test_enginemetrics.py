from __future__ import annotations

import pytest

from serving.enginemetrics import EngineFigures, EngineMetrics, parse_page
from tests.answering import answering, pages


def page(**counters: float) -> str:
    """A page in vLLM 0.32's wording, with lines that nobody wants among the wanted ones."""
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="a {b} c"} 2.0',
        'vllm:num_requests_running{engine="1",model_name="a {b} c"} 1.0',
        'vllm:num_requests_waiting{engine="0",model_name="a {b} c"} 4.0',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0',
        'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        'vllm:kv_cache_usage_perc{engine="1"} 0.5',
        'vllm:iteration_tokens_total_bucket{le="8.0"} 3.0',
        'vllm:prefix_cache_hits_created{engine="0"} 1.7e+09',
        "not prometheus at all {",
    ]
    return "\n".join([*lines, *(f'{name}{{engine="0"}} {value}' for name, value in counters.items())]) + "\n"


BUSY = {
    "vllm:prefix_cache_queries_total": 1000.0,
    "vllm:prefix_cache_hits_total": 250.0,
    "vllm:mm_cache_queries_total": 10.0,
    "vllm:mm_cache_hits_total": 5.0,
    "vllm:num_preemptions_total": 3.0,
    "vllm:prompt_tokens_total": 1000.0,
    "vllm:generation_tokens_total": 100.0,
    "vllm:iteration_tokens_total_sum": 1100.0,
    "vllm:iteration_tokens_total_count": 110.0,
}


async def test_gauges_and_totals_of_a_first_reading() -> None:
    figures = EngineMetrics().take(parse_page(page(**BUSY)), at_s=100.0)
    assert (figures.running, figures.waiting, figures.kv_cache_usage) == (3, 4, 0.5)
    assert (figures.prefix_cache_hit_rate, figures.multimodal_cache_hit_rate) == (0.25, 0.5)
    assert (figures.preemptions, figures.tokens_per_step) == (3, 10.0)
    assert figures.prompt_tokens_per_s is None, "one reading has no rate in time"


async def test_rates_are_taken_between_readings() -> None:
    metrics = EngineMetrics(window_s=60)
    metrics.take(parse_page(page(**BUSY)), at_s=100.0)
    later = BUSY | {
        "vllm:prefix_cache_queries_total": 1100.0,
        "vllm:prefix_cache_hits_total": 340.0,
        "vllm:prompt_tokens_total": 1500.0,
        "vllm:iteration_tokens_total_sum": 1700.0,
        "vllm:iteration_tokens_total_count": 113.0,
    }
    figures = metrics.take(parse_page(page(**later)), at_s=110.0)
    assert figures.prefix_cache_hit_rate == pytest.approx(0.9)
    assert figures.multimodal_cache_hit_rate is None, "no picture came in between"
    assert figures.tokens_per_step == pytest.approx(200.0)
    assert figures.prompt_tokens_per_s == pytest.approx(50.0)
    assert figures.generation_tokens_per_s == 0.0


async def test_the_window_moves_on() -> None:
    metrics = EngineMetrics(window_s=10)
    for second in range(100):
        tokens = 10.0 * second if second < 80 else 790.0 + 100.0 * (second - 79)
        figures = metrics.take({"prompt_tokens": [tokens]}, at_s=float(second))
    assert figures.prompt_tokens_per_s == pytest.approx(100.0)


async def test_a_restarted_server_starts_a_new_window() -> None:
    metrics = EngineMetrics()
    metrics.take(parse_page(page(**BUSY)), at_s=100.0)
    fresh = dict.fromkeys(BUSY, 0.0) | {"vllm:prefix_cache_queries_total": 10.0, "vllm:prefix_cache_hits_total": 5.0}
    figures = metrics.take(parse_page(page(**fresh)), at_s=110.0)
    assert figures.prefix_cache_hit_rate == 0.5
    assert figures.preemptions == 0


async def test_what_is_not_reported_is_none() -> None:
    assert EngineMetrics().take(parse_page("another_metric 1\n"), at_s=1.0) == EngineFigures()


def test_older_names_are_known() -> None:
    assert parse_page("vllm:gpu_cache_usage_perc 0.75\n") == {"kv_cache_usage": [0.75]}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_read_finds_the_page_beside_the_api(suffix: str) -> None:
    metrics = EngineMetrics()
    with answering(pages({"/metrics": page()})) as url:
        assert (await metrics.read(url + suffix)).running == 3
    await metrics.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(404, "", id="no such page"),
        pytest.param(200, "<html>not metrics</html>", id="another page"),
        pytest.param(200, "vllm:num_requests_running{engine= 2\n", id="broken line"),
    ],
)
async def test_a_page_without_figures(status: int, body: str) -> None:
    metrics = EngineMetrics()
    with answering(pages({"/metrics": body}, status=status)) as url:
        assert await metrics.read(url) == EngineFigures()
    await metrics.close()


async def test_nobody_answers() -> None:
    metrics = EngineMetrics(timeout_s=1)
    with answering(pages({"/metrics": page()})) as url:
        pass
    assert await metrics.read(url) == EngineFigures()
    assert await metrics.read("http://") == EngineFigures()
    await metrics.close()
