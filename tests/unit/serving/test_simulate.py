from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from serving.config import ImageTokens, ServerConfig
from serving.latency import percentiles
from serving.records import Outcome
from serving.simulate import (
    STEP_NAMES,
    EngineSettings,
    FrontEnd,
    Policy,
    Simulation,
    SimulationError,
    simulate,
)
from serving.steptime import FEATURE_NAMES, Band, StepTime
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, PlannedRequest, Workload, draw

PICTURE = Pictures(count=1, width_px=512, height_px=1024)  # 9 tiles of 64 by the default rule: 576 tokens


def step_time(**seconds: float) -> StepTime:
    return StepTime(linear=tuple(seconds.get(name, 0.0) for name in FEATURE_NAMES), source="test")


TEN_MS = step_time(fixed=0.01)
PER_TOKEN = step_time(fixed=0.005, decode_tokens=1e-4, prefill_tokens=1e-3)


def request(number: int, due_s: float, text: int, output: int, **more: Any) -> PlannedRequest:
    return PlannedRequest(number, more.pop("traffic_class", "chat"), due_s, text, output, **more)


def engine(budget: int = 256, **more: Any) -> EngineSettings:
    return EngineSettings(**{"budget_tokens": budget, "cache_blocks": 4000, **more})


def times_of(result: Simulation, number: int) -> list[float]:
    first = int(result.token_first[number])
    return [float(value) for value in result.token_s[first : first + result.planned[number].output_tokens]]


def steps_of(result: Simulation, number: int) -> list[int]:
    return [int(tokens) for _, request, tokens, _ in result.schedule if request == number]


def mixed_load(seed: int = 1, duration_s: float = 30) -> list[PlannedRequest]:
    return draw(
        Workload(
            duration_s=duration_s,
            seed=seed,
            classes={
                "camera": ClassLoad(
                    arrivals=Arrivals(rate_per_s=1),
                    prompt=Lengths(mean=120),
                    output=Lengths(mean=20),
                    pictures=PICTURE,
                    prefix_tokens=100,
                ),
                "chat": ClassLoad(
                    arrivals=Arrivals(rate_per_s=2),
                    prompt=Lengths(kind="lognormal", mean=60, spread=60),
                    output=Lengths(kind="uniform", minimum=5, maximum=60),
                ),
            },
        )
    )


@pytest.mark.parametrize(
    ("prompt", "budget", "steps"),
    [
        pytest.param(100, 256, 1, id="fits one step"),
        pytest.param(256, 256, 1, id="exactly one step"),
        pytest.param(1000, 256, 4, id="1,000 tokens in steps of 256"),
        pytest.param(1000, 64, 16, id="small steps"),
    ],
)
def test_a_lone_request(prompt: int, budget: int, steps: int) -> None:
    result = simulate([request(0, 1.0, prompt, 5)], engine(budget), TEN_MS)
    expected = [1.0 + 0.01 * (steps + token) for token in range(5)]
    assert times_of(result, 0) == pytest.approx(expected)
    assert len(result.steps) == steps + 4
    assert not result.cut_off


def test_a_step_costs_the_sum_of_its_terms() -> None:
    model = StepTime(
        linear=(0.5, 0, 0, 0, 0, 0, 0.01, 0.25),
        compute=(0, 1e-3, 1e-3, 0, 1e-6, 0, 0, 0),
        memory=(0.2, 0, 0, 1e-3, 0, 1e-3, 0, 0),
        source="test",
    )
    result = simulate([request(0, 0, 100, 2, pictures=PICTURE)], engine(2048), model)
    prefill, decode = result.steps
    tokens, pairs = 676, 676 * 677 / 2
    assert list(prefill[:8]) == [1, 0, tokens, 0, pairs, tokens, 576, 1]
    linear = 0.5 + 0.01 * 576 + 0.25
    assert prefill[STEP_NAMES.index("duration_s")] == pytest.approx(
        linear + max(1e-3 * tokens + 1e-6 * pairs, 0.2 + 1e-3 * tokens)
    )
    assert list(decode[:8]) == [1, 1, 0, 677, 0, 0, 0, 0]
    assert decode[STEP_NAMES.index("duration_s")] == pytest.approx(0.5 + max(1e-3, 0.2 + 0.677))


def test_a_long_prompt_stalls_decodes_as_far_as_the_budget_lets_it() -> None:
    load = [request(0, 0, 10, 60), request(1, 0.1, 2000, 5, traffic_class="camera")]
    worst = {}
    for budget in (2048, 512, 128):
        chat = simulate(load, engine(budget), PER_TOKEN).classes()[1]
        assert chat.traffic_class == "chat"
        worst[budget] = chat.itl.max_s
    assert worst[2048] == pytest.approx(0.005 + 1e-4 + 2.0)
    assert worst[512] == pytest.approx(0.005 + 1e-4 + 0.511)
    assert worst[128] == pytest.approx(0.005 + 1e-4 + 0.127)


def test_a_new_chat_waits_behind_a_running_prefill_whatever_the_policy_of_its_tokens() -> None:
    load = [request(0, 0, 2000, 5, traffic_class="camera"), request(1, 0.02, 40, 5)]
    alone = simulate(load[1:], engine(256), PER_TOKEN).classes()[0].ttft.p50_s
    behind = simulate(load, engine(256), PER_TOKEN).classes()[1].ttft.p50_s
    assert alone is not None and behind is not None
    assert behind > 30 * alone


def test_the_long_prefill_threshold_lets_it_in() -> None:
    load = [request(0, 0, 2000, 5, traffic_class="camera"), request(1, 0.02, 40, 5)]
    free = simulate(load, engine(256, long_prefill_threshold=128), PER_TOKEN, log_limit=10_000)
    chat = free.classes()[1].ttft.p50_s
    assert chat is not None and chat < 0.5
    # Alone, the long prompt has the whole budget; with company, only the threshold.
    assert steps_of(free, 0)[:2] == [256, 128]


def test_urgent_requests_are_admitted_first_only_with_the_priority_policy() -> None:
    load = [request(0, 0, 500, 5), *(request(n, 0.01, 500, 5, priority=9 - n) for n in range(1, 6))]
    for by_priority, order in ((False, [1, 2, 3, 4, 5]), (True, [5, 4, 3, 2, 1])):
        result = simulate(load, engine(256, by_priority=by_priority), PER_TOKEN)
        first = sorted(range(1, 6), key=lambda number: times_of(result, number)[0])
        assert first == order


@pytest.mark.parametrize("policy", list(Policy))
def test_every_policy_serves_everything_within_its_limits(policy: Policy) -> None:
    load = mixed_load()
    settings = engine(256, policy=policy, max_num_seqs=8, cache_blocks=400)
    result = simulate(load, settings, PER_TOKEN, log_limit=1_000_000)
    assert all(item.finished == item.requests for item in result.classes())
    decode, prefill = result.steps[:, 1], result.steps[:, 2]
    assert result.steps[:, STEP_NAMES.index("running")].max() <= 8
    if policy is not Policy.PREFILL_FIRST:
        assert (decode + prefill).max() <= 256
    # Every prompt token is computed once, but for those in the prefix cache and those lost to preemption.
    assert int(result.preemptions.sum()) > 0 or prefill.sum() == result.prompt_tokens.sum() - result.cached_tokens.sum()


def test_prefill_first_never_mixes() -> None:
    result = simulate(mixed_load(), engine(256, policy=Policy.PREFILL_FIRST), PER_TOKEN)
    decode, prefill = result.steps[:, 1], result.steps[:, 2]
    assert not ((decode > 0) & (prefill > 0)).any()
    assert prefill.max() > 256  # a whole prompt, whatever the budget


def test_decode_first_leaves_no_decode_out() -> None:
    result = simulate(mixed_load(), engine(64, policy=Policy.DECODE_FIRST), PER_TOKEN, log_limit=1_000_000)
    for number in range(len(result.planned)):
        steps = [int(step) for step, request, _, _ in result.schedule if request == number]
        last = len(steps) - result.planned[number].output_tokens
        decoding = steps[last:]
        assert decoding == list(range(decoding[0], decoding[0] + len(decoding)))


def test_fixed_splits_cut_prompts_in_one_size_and_a_tail() -> None:
    settings = engine(256, policy=Policy.FIXED_SPLITS, split_tokens=100, prefix_caching=False)
    load = [request(n, 0.4 * n, 30 + 97 * n, 20) for n in range(12)]
    result = simulate(load, settings, PER_TOKEN, log_limit=1_000_000)
    for number, planned in enumerate(result.planned):
        chunks = steps_of(result, number)[: -planned.output_tokens + 1 or None]
        assert set(chunks[:-1]) <= {100}
        assert sum(chunks) == result.prompt_tokens[number]


def test_a_picture_is_encoded_whole_in_the_step_that_first_needs_it() -> None:
    result = simulate([request(0, 0, 100, 3, pictures=PICTURE)], engine(128), TEN_MS, log_limit=100)
    assert [int(images) for _, _, _, images in result.schedule] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert steps_of(result, 0) == [128, 128, 128, 128, 128, 36, 1, 1]
    assert result.steps[0, FEATURE_NAMES.index("encoder_tokens")] == 576


def test_pictures_wait_for_the_encoders_budget() -> None:
    """Two pictures of 576 tokens with a budget of 600: the second waits for the next step, and its prompt before it."""
    load = [request(n, 0, 20, 3, pictures=PICTURE) for n in range(2)]
    result = simulate(load, engine(5000, buffer_tokens=600), TEN_MS, log_limit=100)
    first = [entry for entry in result.schedule.tolist() if entry[0] == 0]
    assert first == [[0, 0, 596, 1], [0, 1, 20, 0]]
    assert [0, 1, 20, 0] in first and [1, 1, 576, 1] in result.schedule.tolist()


def test_asynchronous_scheduling_decides_one_step_ahead() -> None:
    """A request that arrives while a step runs waits for the step after the one already decided."""
    load = [request(0, 0, 100, 50), request(1, 0.105, 20, 3)]
    wait = {}
    for asynchronous in (False, True):
        result = simulate(load, engine(asynchronous=asynchronous), TEN_MS)
        wait[asynchronous] = times_of(result, 1)[0] - 0.105
        assert np.diff(times_of(result, 0)) == pytest.approx(0.01)
        assert len(times_of(result, 0)) == 50
    assert wait[False] == pytest.approx(0.015)
    assert wait[True] == pytest.approx(0.025)


def test_a_shared_prefix_is_computed_once() -> None:
    load = [request(n, 0.5 * n, 200, 3, prefix="system", prefix_tokens=100) for n in range(3)]
    result = simulate(load, engine(), TEN_MS)
    assert result.cached_tokens.tolist() == [0, 96, 96]  # whole blocks of 16
    without = simulate(load, engine(prefix_caching=False), TEN_MS)
    assert without.cached_tokens.tolist() == [0, 0, 0]


def test_later_turns_find_the_earlier_ones_in_the_cache() -> None:
    load = [
        request(0, 0, 100, 20, conversation="a"),
        request(1, 5, 100 + 20 + 30, 20, conversation="a", history_tokens=120),
        request(2, 6, 150, 20, conversation="b"),
    ]
    result = simulate(load, engine(), TEN_MS)
    # The last written token's key and value were never computed: 119 tokens of the first turn, 112 in whole blocks.
    assert result.cached_tokens.tolist() == [0, 112, 0]


def test_a_small_cache_preempts_the_last_admitted_and_recomputes_it() -> None:
    load = [request(n, 0.001 * n, 60, 100) for n in range(4)]
    result = simulate(load, engine(cache_blocks=25), TEN_MS)
    assert result.preemptions[0] == 0
    assert result.preemptions.sum() > 0
    assert all(item.finished == item.requests for item in result.classes())
    roomy = simulate(load, engine(cache_blocks=1000), TEN_MS)
    assert roomy.preemptions.sum() == 0
    assert result.span_s > roomy.span_s


def test_the_front_end_delays_what_is_due_not_what_is_counted() -> None:
    load = [request(0, 1.0, 100, 3, pictures=PICTURE)]
    plain = simulate(load, engine(), TEN_MS)
    slow = simulate(load, engine(), TEN_MS, front_end=FrontEnd(request_s=0.2, picture_s=0.3, reply_s=0.01))
    before, after = plain.classes()[0].ttft.p50_s, slow.classes()[0].ttft.p50_s
    assert before is not None and after is not None
    assert after - before == pytest.approx(0.51)
    assert slow.classes()[0].itl.p50_s == pytest.approx(0.01)


def test_records_hold_the_same_figures_as_the_forecast() -> None:
    result = simulate(mixed_load(), engine(), PER_TOKEN)
    records = result.records("simulated")
    assert {record.outcome for record in records} == {Outcome.DONE}
    for item in result.classes():
        own = [record for record in records if record.traffic_class == item.traffic_class]
        assert percentiles(record.ttft_s for record in own if record.ttft_s is not None) == item.ttft
        gaps = percentiles(gap.duration_s for record in own for gap in record.gaps)
        assert gaps.p99_s == pytest.approx(item.itl.p99_s)
        assert sum(record.prompt_tokens or 0 for record in own) >= item.cached_prompt_tokens


def test_an_overload_is_cut_off_and_says_so() -> None:
    load = [request(n, 0.1 * n, 1000, 10) for n in range(100)]
    result = simulate(load, engine(), step_time(fixed=1.0), until_s=20)
    assert result.cut_off
    item = result.classes()[0]
    assert 0 < item.finished < item.requests
    assert {record.outcome for record in result.records("m")} == {Outcome.DONE, Outcome.CANCELLED}


def test_the_order_of_the_load_survives_front_ends_that_reorder_it() -> None:
    load = [request(0, 0.0, 50, 3, pictures=PICTURE), request(1, 0.1, 50, 3)]
    result = simulate(load, engine(1024), TEN_MS, front_end=FrontEnd(picture_s=1.0), log_limit=10)
    assert times_of(result, 1)[0] == pytest.approx(0.11)
    assert times_of(result, 0)[0] == pytest.approx(1.01)
    assert result.schedule[0, 1] == 1


@pytest.mark.parametrize(
    ("load", "settings", "message"),
    [
        pytest.param([], engine(), "no requests", id="empty load"),
        pytest.param([request(0, 0, 9000, 10)], engine(), "max_model_len", id="longer than the model takes"),
        pytest.param([request(0, 0, 500, 10)], engine(cache_blocks=20), "blocks hold", id="larger than the cache"),
        pytest.param([request(0, 0, 5, 5)], engine(0), "1 or more", id="no budget"),
        pytest.param(
            [request(0, 0, 5, 5)],
            engine(64, policy=Policy.FIXED_SPLITS, split_tokens=65),
            "at most the budget",
            id="split above the budget",
        ),
        pytest.param(
            [request(0, 0, 500, 5)], engine(256, chunked_prefill=False), "hang", id="whole prompts above the budget"
        ),
    ],
)
def test_what_cannot_run_is_refused(load: list[PlannedRequest], settings: EngineSettings, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        simulate(load, settings, TEN_MS)


def test_a_server_of_ours_as_settings() -> None:
    server = ServerConfig(max_num_batched_tokens=512, max_num_scheduled_tokens=128, scheduling_policy="priority")
    settings = EngineSettings.of_server(server, cache_blocks=100, block_tokens=128)
    assert (settings.budget_tokens, settings.buffer_tokens, settings.by_priority) == (128, 512, True)


def test_five_budgets_of_a_busy_ten_minutes_take_two_seconds() -> None:
    load = draw(
        Workload(
            duration_s=600,
            seed=3,
            classes={
                "camera": ClassLoad(
                    arrivals=Arrivals(rate_per_s=4), prompt=Lengths(mean=120), output=Lengths(mean=40), pictures=PICTURE
                ),
                "chat": ClassLoad(
                    arrivals=Arrivals(rate_per_s=10),
                    prompt=Lengths(kind="lognormal", mean=300, spread=300, maximum=4000),
                    output=Lengths(kind="uniform", minimum=50, maximum=350),
                ),
            },
        )
    )
    gpu = step_time(fixed=4e-3, decode_tokens=2e-5, prefill_tokens=3e-5, decode_context=2e-9, encoder_items=2e-3)
    simulate(load[:10], engine(), gpu)  # compiles, where nothing was compiled before
    begin = time.process_time()
    spans = [simulate(load, engine(budget, cache_blocks=30_000), gpu).steps for budget in (256, 512, 1024, 2048, 8192)]
    elapsed = time.process_time() - begin
    assert min(len(steps) for steps in spans) > 40_000
    assert float(np.mean([steps[:, STEP_NAMES.index("running")].mean() for steps in spans])) > 8
    assert elapsed < 2.0


def test_a_turn_is_sent_when_the_answer_before_it_is_there() -> None:
    """A question due while the answer before it still streams waits, and its TTFT counts from when it was due."""
    front_end = FrontEnd(request_s=0.003, reply_s=0.002)
    turns = [
        request(0, 0.0, 8, 50, conversation="a"),
        request(1, 0.1, 70, 5, conversation="a", history_tokens=58),
        request(2, 0.2, 8, 2),
        request(3, 2.0, 90, 2, conversation="a", history_tokens=75),
    ]
    result = simulate(turns, engine(), TEN_MS, front_end=front_end)
    first, second, alone, third = (times_of(result, number) for number in range(4))
    assert first[-1] == pytest.approx(0.003 + 50 * 0.01 + 0.002)
    # The answer was written at 0.503 s, reached the client after 2 ms; its next question the engine after 3 ms more.
    assert second[0] == pytest.approx(first[-1] + 0.003 + 0.01 + 0.002)
    assert alone[0] < 0.23, "others do not wait for it"
    assert third[0] == pytest.approx(2.0 + 0.003 + 0.01 + 0.002), "its answer was there long before"
    assert result.records("m")[1].ttft_s == pytest.approx(second[0] - 0.1)
    cached = result.cached_tokens.tolist()
    assert cached[1] == 48, "the blocks of 16 that question and answer have filled"


def test_a_turn_whose_answer_never_comes_is_not_sent() -> None:
    turns = [request(0, 0.0, 8, 500, conversation="a"), request(1, 0.1, 70, 5, conversation="a", history_tokens=58)]
    result = simulate(turns, engine(), TEN_MS, until_s=1.0)
    assert result.cut_off
    assert np.isnan(times_of(result, 1)).all()
    assert result.records("m")[1].ttft_s is None


def test_step_times_scatter_as_they_were_measured() -> None:
    band = Band(from_s=0.0, ratios=(0.5, 1.0, 1.5))
    scattered = StepTime(linear=TEN_MS.linear, source="test", bands=(band,))
    load = [request(0, 0.0, 8, 400)]
    gaps = [np.diff(times_of(simulate(load, engine(), scattered, seed=seed), 0)) for seed in (0, 0, 1)]
    assert np.array_equal(gaps[0], gaps[1]) and not np.array_equal(gaps[0], gaps[2])
    assert gaps[0].mean() == pytest.approx(0.01, rel=0.1)
    assert 0.005 <= gaps[0].min() < 0.006
    assert 0.014 < gaps[0].max() <= 0.015


def test_pictures_follow_the_models_rule() -> None:
    patches = ImageTokens(kind="patches", pixels_per_token=1024, min_tokens=64)
    result = simulate([request(0, 0, 10, 2, pictures=PICTURE)], engine(), TEN_MS, image_tokens=patches)
    assert result.prompt_tokens.tolist() == [10 + 16 * 32]
