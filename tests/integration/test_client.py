"""The client against a real vLLM server: counts, order, cancel, and errors as that server words them."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator

import pytest
from PIL import Image

from serving.client import ModelClient, ModelRequest, picture_part, text_part
from serving.config import ClassConfig, Timeouts
from serving.enginemetrics import EngineMetrics
from serving.latency import Ledger
from serving.records import ErrorKind, Outcome, RequestRecord, TokenEvent, now_s

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
TIMEOUTS = Timeouts(connect_s=10, first_token_s=120, gap_s=60)


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[ModelClient]:
    client = ModelClient(endpoint, model=None, timeouts=TIMEOUTS)
    try:
        yield client
    finally:
        await client.close()


def chat(text: str, *, max_tokens: int = 24, **more: object) -> ModelRequest:
    messages = [{"role": "user", "content": text}]
    return ModelRequest(traffic_class="chat", messages=messages, max_tokens=max_tokens, due_s=now_s(), **more)  # type: ignore[arg-type]


def picture(colour: str, *, max_tokens: int = 12) -> ModelRequest:
    jpeg = io.BytesIO()
    Image.new("RGB", (512, 1024), colour).save(jpeg, "JPEG")
    content = [text_part("Describe the picture."), picture_part(jpeg.getvalue())]
    messages = [{"role": "user", "content": content}]
    return ModelRequest(traffic_class="camera", messages=messages, max_tokens=max_tokens, due_s=now_s())


def assert_consistent(record: RequestRecord, tokens: list[TokenEvent]) -> None:
    """What must hold for any successful request."""
    assert (record.outcome, record.error) == (Outcome.DONE, None)
    assert record.finish_reason in ("stop", "length")
    assert record.tokens_counted, "vLLM reports the running count"
    assert record.sent_s is not None
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    moments = [record.due_s, record.sent_s, record.first_token_s, record.last_token_s, record.finished_s]
    assert moments == sorted(moments)
    bearing = [token for token in tokens if token.tokens]
    assert sum(token.tokens for token in bearing) == record.completion_tokens
    assert len(record.gaps) == len(bearing) - 1
    assert [gap.end_s for gap in record.gaps] == [token.at_s for token in bearing[1:]]
    assert sum(gap.duration_s for gap in record.gaps) == pytest.approx(record.last_token_s - record.first_token_s)
    assert "".join(token.text for token in tokens if not token.reasoning) == record.text


async def test_a_chat_answer(client: ModelClient) -> None:
    tokens: list[TokenEvent] = []
    record = await client.start(chat("What is the capital of France?"), tokens.append).result()
    assert_consistent(record, tokens)
    assert record.prompt_tokens is not None
    assert 5 < record.prompt_tokens < 100
    assert record.text.strip()


async def test_a_picture_and_its_cache(client: ModelClient) -> None:
    tokens: list[TokenEvent] = []
    first = await client.start(picture("teal"), tokens.append).result()
    assert_consistent(first, tokens)
    assert first.prompt_tokens is not None
    assert first.prompt_tokens > 500
    again = await client.start(picture("teal")).result()
    assert again.outcome is Outcome.DONE
    assert again.prompt_tokens == first.prompt_tokens
    assert again.cached_tokens is not None, "the server must be started with --enable-prompt-tokens-details"
    assert again.cached_tokens > 500


async def test_the_length_cap(client: ModelClient) -> None:
    record = await client.start(chat("Count to a thousand.", max_tokens=7, extra_body={"ignore_eos": True})).result()
    assert (record.finish_reason, record.completion_tokens) == ("length", 7)
    assert record.tpot_s is not None


async def test_structured_output(client: ModelClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    record = await client.start(chat("Name a city.", max_tokens=64, json_schema=schema)).result()
    assert record.outcome is Outcome.DONE, record.error
    assert set(json.loads(record.text)) == {"city"}


async def test_both_classes_share_the_server_and_not_the_figures(client: ModelClient) -> None:
    objectives = ClassConfig(ttft_p95_ms=60_000, itl_p99_ms=60_000, max_tokens=48)
    ledger = Ledger({"camera": objectives, "chat": objectives}, 600)
    requests = [
        chat("Tell me a story.", max_tokens=48, extra_body={"ignore_eos": True}),
        picture("navy"),
        picture("red"),
    ]
    running = []
    for request in requests:
        request_id = request.request_id
        ledger.begin(request_id, request.traffic_class, request.due_s)
        running.append(
            client.start(
                request,
                lambda token, request_id=request_id: ledger.token(request_id, token),  # type: ignore[misc]
                lambda at_s, request_id=request_id: ledger.sent(request_id, at_s),  # type: ignore[misc]
                ledger.finish,
            )
        )
    records = await asyncio.gather(*(active.result() for active in running))
    assert {record.outcome for record in records} == {Outcome.DONE}
    camera, chats = ledger.summaries()
    assert (camera.done, camera.ttft.count, chats.done, chats.ttft.count) == (2, 2, 1, 1)
    assert chats.itl.count == len(records[0].gaps)
    assert camera.itl.count == len(records[1].gaps) + len(records[2].gaps)
    assert (camera.in_flight, chats.in_flight, camera.waiting, chats.waiting) == (0, 0, 0, 0)


async def engine_runs(metrics: EngineMetrics, endpoint: str, wanted: int, timeout_s: float = 20) -> None:
    """Wait until the engine says that it runs so many requests and none waits."""
    deadline = time.monotonic() + timeout_s
    while True:
        figures = await metrics.read(endpoint)
        if (figures.running, figures.waiting) == (wanted, 0):
            return
        assert time.monotonic() < deadline, f"the engine runs {figures.running}, waiting {figures.waiting}"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("when", ["decoding", "prefilling"])
async def test_cancel_frees_the_servers_request(client: ModelClient, endpoint: str, when: str) -> None:
    metrics = EngineMetrics()
    try:
        await engine_runs(metrics, endpoint, 0)
        tokens: list[TokenEvent] = []
        sent: list[float] = []
        if when == "decoding":
            request = chat("Tell me a story.", max_tokens=2000, extra_body={"ignore_eos": True})
            active = client.start(request, tokens.append, sent.append)
            while len(tokens) < 5:
                assert not active.done(), await active.result()
                await asyncio.sleep(0.02)
            await engine_runs(metrics, endpoint, 1)
        else:
            active = client.start(chat("word " * 3000, max_tokens=500), tokens.append, sent.append)
            await engine_runs(metrics, endpoint, 1)
        active.cancel("enough")
        record = await active.result()
        await engine_runs(metrics, endpoint, 0)
    finally:
        await metrics.close()
    assert (record.outcome, record.reason) == (Outcome.CANCELLED, "enough")
    assert sent == [record.sent_s]
    assert record.finish_reason is None


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        pytest.param(chat("word " * 20_000), "maximum", id="prompt-too-long"),
        pytest.param(chat("Hi", temperature=-1), "temperature", id="impossible-setting"),
    ],
)
async def test_refusals(client: ModelClient, request_: ModelRequest, says: str) -> None:
    record = await client.start(request_).result()
    assert record.error is not None
    assert (record.error.kind, record.error.status) == (ErrorKind.REJECTED, 400)
    assert says in record.error.message


async def test_an_unknown_model(endpoint: str) -> None:
    client = ModelClient(endpoint, model="no-such-model", timeouts=TIMEOUTS)
    try:
        record = await client.start(chat("Hi")).result()
    finally:
        await client.close()
    assert record.error is not None
    assert (record.error.kind, record.error.status) == (ErrorKind.REJECTED, 404)
    assert "no-such-model" in record.error.message
