"""The open loop: due times that the server cannot move, conversations, the cap, the drain, the server's own counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from serving.client import ModelClient
from serving.config import ClassConfig, Timeouts
from serving.enginemetrics import EngineMetrics
from serving.load.contents import Contents
from serving.load.run import DRAIN_REASON, LoadRun, run_load
from serving.load.words import Words
from serving.records import Outcome
from serving.workload import PlannedRequest
from tests.scripted_server import DONE, ROLE, Received, Script, ScriptedServer, Send, Wait, chunk, problem, usage

CLASSES = {"chat": ClassConfig(ttft_p95_ms=100, itl_p99_ms=100, max_tokens=8)}
WORDS = Words(("one", "two", "three", "four"), exact=True)
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 1
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
"""


def answer(text: str = "yes", wait_s: float = 0.0) -> Script:
    return Script(
        [Send(ROLE), Wait(wait_s), Send(chunk(text, running=1)), Send(chunk(finish="stop", running=1)),
         Send(usage(9, 1)), Send(DONE)]
    )  # fmt: skip


def planned(*due_s: float, conversation: str | None = None) -> list[PlannedRequest]:
    return [
        PlannedRequest(number, "chat", due, 5 + number, 8, conversation=conversation)
        for number, due in enumerate(due_s)
    ]


async def run(
    server: ScriptedServer,
    requests: Sequence[PlannedRequest],
    *,
    load_s: float = 0.1,
    drain_s: float = 5.0,
    max_in_flight: int | None = None,
    metrics: EngineMetrics | None = None,
    contents: Contents | None = None,
) -> LoadRun:
    client = ModelClient(server.endpoint, model="scripted", timeouts=Timeouts())
    try:
        return await run_load(
            client, contents or Contents(WORDS, CLASSES, {}), requests,
            load_s=load_s, drain_s=drain_s, max_in_flight=max_in_flight, metrics=metrics,
        )  # fmt: skip
    finally:
        await client.close()


async def test_requests_are_due_at_their_time_however_slow_the_server_is() -> None:
    due = [0.0, 0.05, 0.1, 0.15]
    with ScriptedServer(answer(wait_s=0.4)) as server:
        done = await run(server, planned(*due))
    assert [sent.record.due_s - done.start_s for sent in done.requests] == pytest.approx(due)
    sent_s = [sent.record.sent_s or 0 for sent in done.requests]
    first_s = min(sent.record.first_token_s or 0 for sent in done.requests)
    assert max(sent_s) < first_s  # all were on their way before the first was answered
    assert all((sent.record.ttft_s or 0) >= 0.4 for sent in done.requests)
    assert {sent.record.outcome for sent in done.requests} == {Outcome.DONE}


async def test_a_load_lasts_as_long_as_it_says() -> None:
    with ScriptedServer(answer()) as server:
        done = await run(server, planned(0.0), load_s=0.5)
    assert done.end_s - done.start_s >= 0.5


async def test_a_turn_waits_for_the_answer_before_and_carries_it() -> None:
    with ScriptedServer(lambda request: answer(f"answer {len(request.body['messages'])}", wait_s=0.3)) as server:
        done = await run(server, planned(0.0, 0.05, 0.1, conversation="chat/0"))
        said = [request.body["messages"] for request in server.received]
    assert [len(messages) for messages in said] == [1, 3, 5]
    assert said[2][:2] == [said[0][0], {"role": "assistant", "content": "answer 1"}]
    assert said[2][3] == {"role": "assistant", "content": "answer 3"}
    second = done.requests[1]
    assert second.behind_turn_s == pytest.approx(0.25, abs=0.1)
    assert (second.record.ttft_s or 0) > 0.5  # waiting for the answer before counts
    assert (second.lag_s or 0) < 0.1  # and is not the client's lag


async def test_a_conversation_goes_on_after_a_failed_turn() -> None:
    def pick(request: Received) -> Script:
        return answer() if len(request.body["messages"]) > 1 else problem(500, {"error": {"message": "no"}})

    with ScriptedServer(pick) as server:
        done = await run(server, planned(0.0, 0.05, conversation="chat/0"))
        last = server.received[-1].body["messages"]
    assert [sent.record.outcome for sent in done.requests] == [Outcome.FAILED, Outcome.DONE]
    assert [message["role"] for message in last] == ["user", "user"]


async def test_time_behind_a_cap_counts_and_is_told_apart() -> None:
    with ScriptedServer(answer(wait_s=0.2)) as server:
        done = await run(server, planned(0.0, 0.0, 0.0, 0.0), max_in_flight=2)
    waits = sorted(sent.behind_cap_s for sent in done.requests)
    assert waits[:2] == [0.0, 0.0]
    assert all(wait >= 0.19 for wait in waits[2:])
    assert all((sent.record.ttft_s or 0) >= 0.19 + sent.behind_cap_s for sent in done.requests)
    assert all((sent.lag_s or 0) < 0.15 for sent in done.requests)


async def test_what_the_drain_does_not_see_end_is_cancelled_and_what_waits_is_not_sent() -> None:
    never = Script([Send(ROLE), Send(chunk("a", running=1)), Wait(60)])
    with ScriptedServer(never) as server:
        began = time.monotonic()
        done = await run(server, planned(0.0, 0.05, 0.1, conversation="chat/0"), drain_s=0.3)
        assert time.monotonic() - began < 10
        asked = len(server.received)
    assert asked == 1
    assert {sent.record.outcome for sent in done.requests} == {Outcome.CANCELLED}
    assert {sent.record.reason for sent in done.requests} == {DRAIN_REASON}
    assert [sent.record.sent_s is None for sent in done.requests] == [False, True, True]
    assert done.requests[0].record.first_token_s is not None


async def test_a_stopped_load_closes_its_requests() -> None:
    came = threading.Event()

    def pick(_request: Received) -> Script:
        came.set()
        return Script([Send(ROLE), Wait(60)])

    with ScriptedServer(pick) as server:
        task = asyncio.ensure_future(run(server, planned(0.0), load_s=60))
        assert await asyncio.to_thread(came.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.received[0].gone.wait, 5)


async def test_the_servers_counts_are_read_and_its_hit_rate_is_of_the_load() -> None:
    pages = Counter[str]()

    def pick(request: Received) -> Script:
        if request.path != "/metrics":
            return answer(wait_s=0.2)
        pages["read"] += 1
        page = METRICS.format(running=3, queries=1000 + 100 * pages["read"], hits=900 + 25 * pages["read"])
        return Script([Send(page.encode())], headers={"content-type": "text/plain"})

    metrics = EngineMetrics(window_s=1e9)
    with ScriptedServer(pick) as server:
        done = await run(server, planned(0.0), load_s=2.3, metrics=metrics)
    await metrics.close()
    assert [(reading.figures.running, reading.figures.waiting) for reading in done.readings] == [(3, 1)] * 3
    assert done.final.prefix_cache_hit_rate == pytest.approx(0.25)


async def test_the_clients_own_lag_is_seen() -> None:
    with ScriptedServer(answer()) as server:
        client = ModelClient(server.endpoint, model="scripted", timeouts=Timeouts())
        lags: list[float] = []
        stop = client.measure_lag(0.01, lags.append)
        try:
            await asyncio.sleep(0.1)
            loop = client._loop
            assert loop is not None
            loop.call_soon_threadsafe(time.sleep, 0.2)  # somebody blocks the loop that times the tokens
            await asyncio.sleep(0.4)
        finally:
            stop()
            await client.close()
    assert len(lags) > 5
    assert max(lags) > 0.15
