"""The simulated server over HTTP: the product's own client against it, and its times against the simulator's."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

from serving.attach import SIMULATED_HEADER, describe_running
from serving.client import ModelClient
from serving.config import Timeouts
from serving.enginemetrics import EngineMetrics
from serving.load.words import find_words
from serving.mock.api import MockSettings, create_app
from serving.mock.prompt import read_prompt
from serving.records import Outcome, RequestRecord, now_s
from serving.request import ModelRequest, text_part
from serving.simulate import EngineSettings, simulate
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import PlannedRequest
from tests.unit.serving.mock.test_prompt import RULE, jpeg, picture_part

COSTS = {"fixed": 0.03, "decode_tokens": 1e-3, "prefill_tokens": 5e-4}
STEP = StepTime(linear=tuple(COSTS.get(name, 0.0) for name in FEATURE_NAMES), source="a test")
ENGINE = EngineSettings(budget_tokens=256, cache_blocks=1000, max_num_seqs=8, max_model_len=4096)
SETTINGS = MockSettings(model="toy", engine=ENGINE, step_time=STEP, image_tokens=RULE)
# What HTTP, two event loops and a busy machine may add to a time that is simulated. Who comes that much later may also
# miss a step, and waits for the next.
TOLERANCE_S = 0.025


@contextmanager
def serving(settings: MockSettings = SETTINGS) -> Iterator[str]:
    """The server on a free loopback port; its base URL with /v1."""
    config = uvicorn.Config(create_app(settings), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving() as url:
        yield url


@asynccontextmanager
async def client(endpoint: str) -> AsyncIterator[ModelClient]:
    made = ModelClient(endpoint, model=None, timeouts=Timeouts())
    try:
        yield made
    finally:
        await made.close()


def request(words: int, output: int, *, start: str = "", pictures: int = 0, **more: Any) -> ModelRequest:
    text = " ".join([start, *["word"] * (words - (1 if start else 0))]).strip()
    content = [text_part(text), *(picture_part(jpeg(512, 1024, shade)) for shade in range(pictures))]
    return ModelRequest(
        traffic_class="chat",
        messages=[{"role": "user", "content": content}],
        max_tokens=output,
        due_s=more.pop("due_s", now_s()),
        **more,
    )


async def test_the_client_reads_an_answer_to_its_end(endpoint: str) -> None:
    async with client(endpoint) as made:
        record = await made.start(request(60, 12, pictures=1)).result()
    assert (record.outcome, record.finish_reason) == (Outcome.DONE, "length")
    assert record.model == "toy-simulated"
    assert record.prompt_tokens == 8 + 60 + RULE.count(512, 1024)
    assert (record.completion_tokens, len(record.gaps), record.tokens_counted) == (12, 11, True)


async def test_times_are_those_that_the_simulator_predicts(endpoint: str) -> None:
    """Six chats, and a long prompt among them: TTFT and the median gap of each, and the stall that all of them see."""
    shapes = [(0.0, 40, 25), (0.1, 60, 25), (0.25, 1500, 6), (0.3, 50, 20), (0.6, 30, 15), (0.9, 45, 10)]
    async with client(endpoint) as made:
        await made.start(request(5, 1, start="first")).result()  # opens the connection
        begin = now_s() + 0.05

        async def one(number: int, due: float, words: int, output: int) -> RequestRecord:
            await asyncio.sleep(begin + due - now_s())
            return await made.start(request(words, output, start=f"q{number}", due_s=begin + due)).result()

        measured = await asyncio.gather(*(one(number, *shape) for number, shape in enumerate(shapes)))
    # The simulator is told when each request was really sent: a late one may miss a step.
    sent = [(record.sent_s or 0) - begin for record in measured]
    assert sent == sorted(sent)
    planned = [
        PlannedRequest(number, "chat", sent[number], 8 + words, output)
        for number, (_, words, output) in enumerate(shapes)
    ]
    expected = simulate(planned, ENGINE, STEP).records("expected")
    off_ttft = [
        abs((ours.first_token_s or 0) - (ours.sent_s or 0) - (theirs.ttft_s or 0))
        for ours, theirs in zip(measured, expected, strict=True)
    ]
    longest_s = STEP.seconds([1, 8, 256, 0, 0, 0, 0, 0])
    assert max(off_ttft) < longest_s + TOLERANCE_S
    ours, theirs = ([gap.duration_s for record in records for gap in record.gaps] for records in (measured, expected))
    assert len(ours) == len(theirs)
    assert abs(statistics.median(ours) - statistics.median(theirs)) < TOLERANCE_S
    # A step with a chunk of the long prompt takes five times as long as one of decodes.
    stalled = [sum(duration > 0.12 for duration in gaps) for gaps in (ours, theirs)]
    assert stalled[1] > 5
    assert stalled[0] >= 0.7 * stalled[1]


async def test_everything_says_that_it_is_simulated(endpoint: str) -> None:
    running = await describe_running(endpoint)
    assert running.model == "toy-simulated"
    assert running.simulated is not None
    assert "budget 256" in running.simulated
    assert (running.max_num_scheduled_tokens, running.max_model_len) == (256, 4096)
    root = endpoint.removesuffix("/v1")
    async with httpx.AsyncClient(trust_env=False) as http:
        for path in ("/health", "/version", "/v1/models", "/metrics", "/v1/none"):
            assert "simulated" in (await http.get(root + path)).headers[SIMULATED_HEADER]
        assert "framechat:simulated{" in (await http.get(root + "/metrics")).text
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
        answer = (await http.post(endpoint + "/chat/completions", json=body)).json()
    assert answer["model"] == "toy-simulated"
    assert answer["usage"]["completion_tokens"] == 9
    assert "simulated" in answer["choices"][0]["message"]["content"]


async def test_its_figures_are_read_as_a_real_servers(endpoint: str) -> None:
    metrics = EngineMetrics()
    async with client(endpoint) as made:
        before = await metrics.read(endpoint)
        await made.start(request(500, 20, start="figures")).result()
        after = await metrics.read(endpoint)
    await metrics.close()
    assert (after.running, after.waiting, after.preemptions) == (0, 0, 0)
    assert before.kv_cache_usage == after.kv_cache_usage == 0
    assert after.tokens_per_step is not None
    assert after.tokens_per_step > 1
    assert after.generation_tokens_per_s is not None
    assert after.generation_tokens_per_s > 0


async def test_a_second_turn_finds_the_first_in_the_cache(endpoint: str) -> None:
    said = {"role": "user", "content": "tell me " * 40}
    body = {"messages": [said], "max_tokens": 30}
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = (await http.post(endpoint + "/chat/completions", json=body)).json()
        told = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        more = {"messages": [said, told, {"role": "user", "content": "and then?"}], "max_tokens": 3}
        usage = (await http.post(endpoint + "/chat/completions", json=more)).json()["usage"]
    prompt = len(read_prompt([said], RULE).tokens)
    # All of the first prompt, and of the answer all but its last token, in whole blocks.
    assert usage["prompt_tokens_details"]["cached_tokens"] == (prompt + 29) // 16 * 16


async def test_words_of_a_load_are_one_token_each(endpoint: str) -> None:
    words = await find_words(endpoint, "toy-simulated")
    assert words.exact
    assert len(words.words) > 150


async def until_running(metrics: EngineMetrics, endpoint: str, number: int) -> None:
    for _ in range(250):
        if (await metrics.read(endpoint)).running == number:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"never {number} requests running")


async def test_a_client_that_leaves_frees_the_engine(endpoint: str) -> None:
    metrics = EngineMetrics()
    async with client(endpoint) as made:
        active = made.start(request(30, 2000, start="leaving"))
        await until_running(metrics, endpoint, 1)
        active.cancel("the test leaves")
        assert (await active.result()).outcome is Outcome.CANCELLED
        await until_running(metrics, endpoint, 0)
    await metrics.close()


async def test_a_full_queue_is_503_and_bounded() -> None:
    settings = replace(SETTINGS, engine=replace(ENGINE, max_num_seqs=1), most_waiting=2)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    with serving(settings) as endpoint:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            answers = await asyncio.gather(*(http.post(endpoint + "/chat/completions", json=body) for _ in range(8)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * 3 + [503] * 5
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert "2 requests wait already" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        pytest.param({"messages": []}, 400, "messages", id="no messages"),
        pytest.param(
            {"messages": [{"role": "user", "content": "x"}], "n": 2}, 400, "n is 2, allowed: 1", id="two answers"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x"}], "model": "gpt"}, 404, "not here", id="other model"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "4096 in all", id="too long a prompt"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000},
            400,
            "4096 in all",
            id="too long an answer",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x"}], "priority": 1}, 400, "order of arrival", id="a priority"
        ),
        pytest.param([1], 400, "the request", id="no object"),
    ],
)
async def test_bad_requests_are_refused_in_one_line(endpoint: str, body: Any, status: int, message: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(endpoint + "/chat/completions", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_an_engine_that_fails_is_said_and_never_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
    with serving() as endpoint:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
            waiting = asyncio.create_task(http.post(endpoint + "/chat/completions", json=body))
            metrics = EngineMetrics()
            await until_running(metrics, endpoint, 1)
            await metrics.close()
            monkeypatch.setattr("serving.simlive.LiveSimulation.advance", broken)
            assert (await waiting).status_code == 500
            later = await http.post(endpoint + "/chat/completions", json=body)
            assert "engine failed" in later.json()["error"]["message"]
            assert (await http.get(endpoint.removesuffix("/v1") + "/health")).status_code == 503
