"""The client against a scripted server: known gaps in, the same figures out, and every way to fail."""

from __future__ import annotations

import asyncio
import base64
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from serving.client import ActiveRequest, ModelClient, ModelRequest, ModelServerError, picture_part, text_part
from serving.config import Timeouts
from serving.records import ErrorKind, Outcome, RequestRecord, TokenEvent, now_s
from tests.answering import free_port
from tests.scripted_server import (
    DONE,
    KEEP_ALIVE,
    ROLE,
    Action,
    Cut,
    Received,
    Script,
    ScriptedServer,
    Send,
    Wait,
    chunk,
    event,
    models,
    problem,
    usage,
)

pytestmark = pytest.mark.timeout(30)
PATIENT = Timeouts(connect_s=5, first_token_s=10, gap_s=10)
ANSWER: list[Action] = [
    Send(ROLE),
    Send(chunk("Hel", running=1)),
    Send(chunk("lo", running=2)),
    Send(chunk("", running=3, finish="stop")),
    Send(usage(7, 3, cached=4)),
    Send(DONE),
]


def request(**changes: Any) -> ModelRequest:
    settings: dict[str, Any] = {
        "traffic_class": "chat",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 50,
        "due_s": now_s(),
    }
    return ModelRequest(**(settings | changes))


@asynccontextmanager
async def client_of(
    server: ScriptedServer | str,
    *,
    timeouts: Timeouts = PATIENT,
    model: str | None = "scripted",
    key: str | None = None,
) -> AsyncIterator[ModelClient]:
    client = ModelClient(
        server if isinstance(server, str) else server.endpoint, model=model, timeouts=timeouts, api_key=key
    )
    try:
        yield client
    finally:
        await client.close()


async def ask(
    script: Script | Callable[[Received], Script], *, timeouts: Timeouts = PATIENT, **changes: Any
) -> tuple[RequestRecord, list[TokenEvent], ScriptedServer]:
    tokens: list[TokenEvent] = []
    with ScriptedServer(script) as server:
        async with client_of(server, timeouts=timeouts) as client:
            record = await client.start(request(**changes), tokens.append).result()
    return record, tokens, server


async def until(condition: Callable[[], object], timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


def assert_measured(found_s: Sequence[float], sent_s: Sequence[float]) -> None:
    """What the client measured is what the server did. How exact the figures are is shown without a clock, in
    test_stream; here the machine may be busy, so single readings may be late, but not most of them and not by much.
    """
    assert len(found_s) == len(sent_s)
    errors_s = [abs(found - sent) for found, sent in zip(found_s, sent_s, strict=True)]
    assert statistics.median(errors_s) < 0.02, errors_s
    assert max(errors_s) < 0.15, errors_s


# --- timing


async def test_known_gaps_come_out_again() -> None:
    """Against the server's own send times: on a busy machine a wait may be longer than asked, never the measuring."""
    gaps_s = [0.08, 0.02, 0.5, 0.05]  # the third one is a stall
    actions: list[Action] = [Send(ROLE), Wait(0.15), Send(chunk("a", running=1))]
    for number, gap_s in enumerate(gaps_s, start=2):
        actions += [Wait(gap_s), Send(chunk("b", running=number))]
    actions += [Send(chunk("", running=len(gaps_s) + 1, finish="stop")), Send(usage(7, 5)), Send(DONE)]
    record, tokens, server = await ask(Script(actions), due_s=now_s() - 2)
    assert record.outcome is Outcome.DONE, record.error
    sent_s = server.received[0].sent_s[1:6]  # the token-bearing chunks
    assert_measured([token.at_s for token in tokens], sent_s)
    assert record.first_token_s == tokens[0].at_s
    assert record.last_token_s == tokens[-1].at_s
    assert [gap.tokens for gap in record.gaps] == [1, 1, 1, 1]
    assert_measured([gap.duration_s for gap in record.gaps], [later - earlier for earlier, later in pairwise(sent_s)])
    assert max(record.gaps, key=lambda gap: gap.duration_s) is record.gaps[2]
    assert record.ttft_s == tokens[0].at_s - record.due_s
    assert record.tpot_s == (tokens[-1].at_s - tokens[0].at_s) / 4


async def test_due_and_sent_are_apart_when_the_request_waited() -> None:
    sent: list[float] = []
    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            before = now_s()
            record = await client.start(request(due_s=before - 5), on_sent=sent.append).result()
    assert record.sent_s == sent[0]
    assert record.sent_s is not None
    assert before <= record.sent_s < before + 1
    assert record.ttft_s is not None
    assert record.ttft_s > 5


async def test_chunks_of_one_read_arrive_together() -> None:
    both = chunk("a", running=1) + chunk("b", running=2)
    record, tokens, _ = await ask(Script([Send(both), Send(chunk(running=2, finish="stop")), Send(DONE)]))
    assert [token.text for token in tokens] == ["a", "b"]
    assert [gap.duration_s for gap in record.gaps] == [0.0]


async def test_an_event_counts_when_it_is_whole() -> None:
    whole = chunk("a", running=1)
    _, tokens, server = await ask(
        Script([Send(whole[:30]), Wait(0.1), Send(whole[30:]), Send(chunk(running=1, finish="stop")), Send(DONE)])
    )
    assert tokens[0].at_s >= server.received[0].sent_s[1]


# --- successes


@pytest.mark.parametrize(
    ("actions", "text", "completion", "tokens"),
    [
        pytest.param(ANSWER, "Hello", 3, [1, 1, 1], id="vllm"),
        pytest.param(
            [Send(ROLE), Send(chunk("abc", running=4)), Send(chunk("d", running=5, finish="length")), Send(DONE)],
            "abcd",
            5,
            [4, 1],
            id="several-tokens-in-a-chunk",
        ),
        pytest.param(
            [Send(chunk("", role="assistant")), Send(chunk("a")), Send(chunk("b", finish="stop")), Send(DONE)],
            "ab",
            None,
            [1, 1],
            id="no-usage-at-all",
        ),
        pytest.param([*ANSWER[:-1]], "Hello", 3, [1, 1, 1], id="ends-without-done"),
        pytest.param(
            [Send(KEEP_ALIVE), *ANSWER[:2], Send(KEEP_ALIVE), *ANSWER[2:]], "Hello", 3, [1, 1, 1], id="keep-alives"
        ),
        pytest.param(
            [Send(b"event: ping\n\n"), Send(b"retry: 99\n\n"), Send(event({"type": "x"}, name="x")), *ANSWER],
            "Hello",
            3,
            [1, 1, 1],
            id="unknown-events",
        ),
        pytest.param([Send(event({"id": "x"})), *ANSWER], "Hello", 3, [1, 1, 1], id="chunk-without-choices"),
        pytest.param(
            [Send(chunk(reasoning="hm", running=1)), Send(chunk("a", running=2, finish="stop")), Send(DONE)],
            "a",
            2,
            [1, 1],
            id="reasoning-first",
        ),
        pytest.param([*ANSWER, Wait(0.1), Send(KEEP_ALIVE)], "Hello", 3, [1, 1, 1], id="goes-on-after-done"),
        pytest.param([*ANSWER, Wait(5)], "Hello", 3, [1, 1, 1], id="hangs-after-done"),
        pytest.param([*ANSWER, Cut()], "Hello", 3, [1, 1, 1], id="cut-after-done"),
    ],
)
async def test_success(actions: list[Action], text: str, completion: int | None, tokens: list[int]) -> None:
    record, events, _ = await ask(Script(actions))
    assert (record.outcome, record.error) == (Outcome.DONE, None)
    assert record.text == text
    assert record.completion_tokens == completion
    assert [item.tokens for item in events] == tokens
    assert record.finish_reason in ("stop", "length")


async def test_usage_and_identity_are_in_the_record() -> None:
    record, _, server = await ask(Script(ANSWER), request_id="r1", traffic_class="camera")
    assert (record.request_id, record.traffic_class, record.model) == ("r1", "camera", "scripted")
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (7, 4, 3)
    assert server.received[0].headers["x-request-id"] == "r1"


# --- failures


async def assert_fails(script: Script, timeouts: Timeouts, kind: ErrorKind, status: int | None, says: str) -> None:
    record, tokens, server = await ask(script, timeouts=timeouts)
    assert record.outcome is Outcome.FAILED
    assert record.error is not None
    assert (record.error.kind, record.error.status) == (kind, status), record.error
    assert says in record.error.message
    assert "\n" not in record.error.message
    assert len(server.received) == 1, "a retry would hide in the timing"
    assert sum(token.tokens for token in tokens) == (1 + len(record.gaps) if tokens else 0)


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        pytest.param(problem(400, {"error": {"message": "too long"}}), ErrorKind.REJECTED, "too long", id="400"),
        pytest.param(problem(401, {"error": "Unauthorized"}), ErrorKind.REJECTED, "Unauthorized", id="401"),
        pytest.param(problem(404, {"detail": "Not Found"}), ErrorKind.REJECTED, "Not Found", id="404"),
        pytest.param(problem(429, {"message": "slow"}), ErrorKind.OVERLOADED, "slow", id="429"),
        pytest.param(problem(500, {"error": {"message": "boom"}}), ErrorKind.SERVER, "boom", id="500"),
        pytest.param(problem(503, {"error": {"message": "full"}}), ErrorKind.OVERLOADED, "full", id="503"),
        pytest.param(Script([Send(b"<p>gate\nway")], 502, {}), ErrorKind.SERVER, "<p>gate way", id="502-html"),
        pytest.param(Script((), 307, {"location": "http://x/"}), ErrorKind.REJECTED, "http://x/", id="redirect"),
    ],
)
async def test_http_errors(script: Script, kind: ErrorKind, says: str) -> None:
    await assert_fails(script, PATIENT, kind, script.status, says)


BOOM = event({"error": {"message": "engine died"}})


@pytest.mark.parametrize(
    ("script", "kind", "says"),
    [
        pytest.param(Script([*ANSWER[:3], Send(BOOM), Send(DONE)]), ErrorKind.SERVER, "died", id="error-in-mid-stream"),
        pytest.param(Script([Send(BOOM)]), ErrorKind.SERVER, "died", id="error-at-once"),
        pytest.param(Script([*ANSWER[:3], Cut()]), ErrorKind.CUT, "mid-stream", id="cut"),
        pytest.param(Script([*ANSWER[:4], Cut()]), ErrorKind.CUT, "mid-stream", id="cut-after-finish-reason"),
        pytest.param(Script(ANSWER[:3]), ErrorKind.CUT, "without a finish", id="ends-early"),
        pytest.param(Script([*ANSWER[:3], Send(DONE)]), ErrorKind.CUT, "without a finish", id="done-without-finish"),
        pytest.param(Script([Send(b"<html></html>")]), ErrorKind.PROTOCOL, "no chat", id="html"),
        pytest.param(Script([Send(b"data: {oops\n\n")]), ErrorKind.PROTOCOL, "not JSON", id="not-json"),
        pytest.param(Script(()), ErrorKind.PROTOCOL, "no chat", id="empty"),
    ],
)
async def test_broken_streams(script: Script, kind: ErrorKind, says: str) -> None:
    await assert_fails(script, PATIENT, kind, None, says)


ALIVE = [Wait(0.1), Send(KEEP_ALIVE)] * 20


@pytest.mark.parametrize(
    ("actions", "kind"),
    [
        pytest.param([Wait(9)], ErrorKind.TIMEOUT_FIRST_TOKEN, id="headers-then-nothing"),
        pytest.param([Send(ROLE), Wait(9)], ErrorKind.TIMEOUT_FIRST_TOKEN, id="role-then-nothing"),
        pytest.param(ALIVE, ErrorKind.TIMEOUT_FIRST_TOKEN, id="keep-alives-only"),
        pytest.param([*ANSWER[:3], Wait(9)], ErrorKind.TIMEOUT_GAP, id="gap-too-long"),
        pytest.param([*ANSWER[:3], *ALIVE], ErrorKind.TIMEOUT_GAP, id="gap-of-keep-alives"),
        pytest.param([*ANSWER[:4], Wait(9)], ErrorKind.TIMEOUT_GAP, id="hangs-after-finish-reason"),
    ],
)
async def test_timeouts(actions: list[Action], kind: ErrorKind) -> None:
    first_token_s, gap_s = (0.3, 10) if kind is ErrorKind.TIMEOUT_FIRST_TOKEN else (10, 0.3)
    await assert_fails(Script(actions), Timeouts(first_token_s=first_token_s, gap_s=gap_s), kind, None, "0.3 s")


async def test_what_came_before_a_failure_is_kept() -> None:
    record, _, _ = await ask(Script([*ANSWER[:3], Cut()]))
    assert record.text == "Hello"
    assert len(record.gaps) == 1
    assert record.completion_tokens == 2


async def test_a_gap_within_the_limit_is_no_timeout() -> None:
    slow: list[Action] = [Send(ROLE)]
    for number in range(1, 6):
        slow += [Wait(0.15), Send(chunk("x", running=number))]
    record, _, _ = await ask(
        Script([*slow, Send(chunk(running=5, finish="stop")), Send(DONE)]),
        timeouts=Timeouts(first_token_s=0.4, gap_s=0.4),
    )
    assert record.outcome is Outcome.DONE, record.error  # 0.75 s in all: each token gets its own patience


async def test_nobody_listens() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1"
    async with client_of(endpoint) as client:
        record = await client.start(request()).result()
    assert record.error is not None
    assert record.error.kind is ErrorKind.CONNECT
    assert endpoint in record.error.message


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port whose accept queue is full: connecting neither works nor fails."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])


async def test_connecting_takes_too_long(deaf_port: int) -> None:
    async with client_of(f"http://127.0.0.1:{deaf_port}/v1", timeouts=Timeouts(connect_s=0.3)) as client:
        record = await client.start(request()).result()
    assert record.error is not None
    assert record.error.kind is ErrorKind.TIMEOUT_CONNECT


async def test_the_connection_breaks_before_an_answer() -> None:
    def hang_up(connection: socket.socket) -> None:
        connection.settimeout(5)
        peer, _ = connection.accept()
        peer.close()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with client_of(f"http://127.0.0.1:{listener.getsockname()[1]}/v1") as client:
            active = client.start(request())
            await asyncio.to_thread(hang_up, listener)
            record = await active.result()
    assert record.error is not None
    assert record.error.kind is ErrorKind.CONNECT


# --- cancel


async def test_cancel_closes_the_connection() -> None:
    with ScriptedServer(Script([*ANSWER[:3], Wait(20)])) as server:
        async with client_of(server) as client:
            tokens: list[TokenEvent] = []
            active = client.start(request(), tokens.append)
            await until(lambda: len(tokens) == 2)
            active.cancel("person left")
            active.cancel("again")  # harmless, and the first reason stays
            record = await active.result()
            assert active.done()
            assert await asyncio.to_thread(server.received[0].gone.wait, 5)
    assert (record.outcome, record.reason, record.error) == (Outcome.CANCELLED, "person left", None)
    assert record.text == "Hello"
    assert len(record.gaps) == 1


@pytest.mark.parametrize("actions", [[Wait(20)], [Send(ROLE), Wait(20)]], ids=["before-the-answer", "before-a-token"])
async def test_cancel_before_the_first_token(actions: list[Action]) -> None:
    with ScriptedServer(Script(actions)) as server:
        async with client_of(server) as client:
            active = client.start(request())
            await until(lambda: server.received)
            active.cancel("stopped")
            record = await active.result()
            assert await asyncio.to_thread(server.received[0].gone.wait, 5)
    assert record.outcome is Outcome.CANCELLED
    assert record.first_token_s is None
    assert record.sent_s is not None


async def test_cancel_at_once_and_after_the_end() -> None:
    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            early = client.start(request())
            early.cancel("changed my mind")
            assert (await early.result()).outcome is Outcome.CANCELLED
            late = client.start(request())
            record = await late.result()
            late.cancel("too late")
            assert record is await late.result()
    assert record.outcome is Outcome.DONE


async def test_giving_up_waiting_for_the_result_does_not_cancel_the_request() -> None:
    with ScriptedServer(Script([*ANSWER[:3], Wait(0.3), *ANSWER[3:]])) as server:
        async with client_of(server) as client:
            active = client.start(request())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(active.result(), 0.1)
            assert (await active.result()).outcome is Outcome.DONE


async def test_close_cancels_what_runs_and_refuses_what_comes() -> None:
    with ScriptedServer(Script([*ANSWER[:3], Wait(20)])) as server:
        client = ModelClient(server.endpoint, model="m", timeouts=PATIENT)
        active = client.start(request())
        await until(lambda: server.received)
        await client.close()
        await client.close()
        assert active.done()
        record = await active.result()
        assert (record.outcome, record.reason) == (Outcome.CANCELLED, "the client was closed")
        with pytest.raises(RuntimeError, match="closed"):
            client.start(request())


# --- threads and callbacks


async def test_use_from_a_thread_without_a_loop() -> None:
    def work(client: ModelClient, active: list[ActiveRequest]) -> RequestRecord:
        active.append(client.start(request()))
        return active[0].wait(10)

    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            record = await asyncio.to_thread(work, client, [])
    assert record.outcome is Outcome.DONE


async def test_a_blocked_caller_does_not_spoil_the_timing() -> None:
    actions: list[Action] = [Send(chunk("x", running=1))]
    for number in range(2, 12):
        actions += [Wait(0.05), Send(chunk("x", running=number))]
    with ScriptedServer(Script([*actions, Send(chunk(running=11, finish="stop")), Send(DONE)])) as server:
        async with client_of(server) as client:
            active = client.start(request())
            await until(lambda: server.received)
            time.sleep(0.5)  # noqa: ASYNC251 - the point: the caller's event loop stands still
            record = await active.result()
    sent_s = server.received[0].sent_s[:11]
    assert_measured([gap.duration_s for gap in record.gaps], [later - earlier for earlier, later in pairwise(sent_s)])


async def test_a_failing_callback_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def bad(_: object) -> None:
        raise ZeroDivisionError

    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            record = await client.start(request(), bad, bad, bad).result()
    assert record.outcome is Outcome.DONE
    assert "a callback of request" in caplog.text


async def test_on_end_has_the_record() -> None:
    ended: list[RequestRecord] = []
    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            record = await client.start(request(), on_end=ended.append).result()
    assert ended == [record]


async def test_a_request_that_is_no_json_is_the_callers_error() -> None:
    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            with pytest.raises(TypeError):
                await client.start(request(extra_body={"x": object()})).result()


# --- what is sent


async def test_the_request_as_sent() -> None:
    schema = {"type": "object", "properties": {"coat": {"type": "string"}}}
    _, _, server = await ask(Script(ANSWER), json_schema=schema, priority=3, temperature=0.5, extra_body={"seed": 1})
    body = server.received[0].body
    assert server.received[0].path == "/v1/chat/completions"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("scripted", 50, 0.5, 1)
    assert body["priority"] == 3
    assert body["response_format"]["json_schema"]["schema"] == schema


async def test_what_is_not_asked_for_is_not_sent() -> None:
    _, _, server = await ask(Script(ANSWER))
    assert {"priority", "response_format"}.isdisjoint(server.received[0].body)


def test_parts() -> None:
    assert text_part("x") == {"type": "text", "text": "x"}
    url = picture_part(b"\xff\xd8jpeg")["image_url"]["url"]
    head, _, data = url.partition(",")
    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(data) == b"\xff\xd8jpeg"


@pytest.mark.parametrize("refused", ["continuous_usage_stats", "include_usage"])
async def test_a_server_that_refuses_stream_options_is_asked_with_less_and_remembered(refused: str) -> None:
    def picky(received: Received) -> Script:
        if refused in received.body.get("stream_options", {}):
            return problem(400, {"error": {"message": f"Unknown parameter: 'stream_options.{refused}'"}})
        return Script([Send(chunk("a")), Send(chunk(finish="stop")), Send(DONE)])

    with ScriptedServer(picky) as server:
        async with client_of(server) as client:
            first = await client.start(request()).result()
            tries = len(server.received)
            second = await client.start(request()).result()
    assert (first.outcome, second.outcome) == (Outcome.DONE, Outcome.DONE)
    assert tries == {"continuous_usage_stats": 2, "include_usage": 3}[refused]
    assert len(server.received) == tries + 1
    assert first.tokens_counted is False


async def test_the_model_is_asked_for_once() -> None:
    def answer(received: Received) -> Script:
        return models("first", "second") if received.path == "/v1/models" else Script(ANSWER)

    with ScriptedServer(answer) as server:
        async with client_of(server, model=None) as client:
            assert await client.served_model() == "first"
            record = await client.start(request()).result()
    assert record.model == "first"
    assert [received.path for received in server.received] == ["/v1/models", "/v1/chat/completions"]


async def test_another_model_is_found_after_a_404() -> None:
    names = ["old"]

    def answer(received: Received) -> Script:
        if received.path == "/v1/models":
            return models(*names)
        return Script(ANSWER) if received.body["model"] == names[0] else problem(404, {"message": "no such model"})

    with ScriptedServer(answer) as server:
        async with client_of(server, model=None) as client:
            assert (await client.start(request()).result()).outcome is Outcome.DONE
            names[0] = "new"
            assert (await client.start(request()).result()).outcome is Outcome.FAILED
            record = await client.start(request()).result()
    assert (record.outcome, record.model) == (Outcome.DONE, "new")


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        pytest.param(models(), ErrorKind.PROTOCOL, id="no-model"),
        pytest.param(Script([Send(b"hello")]), ErrorKind.PROTOCOL, id="not-a-list"),
        pytest.param(problem(401, {"error": "key"}), ErrorKind.REJECTED, id="401"),
    ],
)
async def test_no_model_to_be_had(script: Script, kind: ErrorKind) -> None:
    with ScriptedServer(script) as server:
        async with client_of(server, model=None) as client:
            with pytest.raises(ModelServerError) as caught:
                await client.served_model()
            record = await client.start(request()).result()
    assert caught.value.error.kind is kind
    assert record.error is not None
    assert record.error.kind is kind
    assert record.sent_s is None


# --- environment and secrets


async def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, "sk-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    record, _, server = await ask(Script(ANSWER))
    assert record.outcome is Outcome.DONE, record.error
    headers = server.received[0].headers
    assert "authorization" not in headers
    assert "sk-environment" not in str(headers)


async def test_a_proxy_is_used_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(Script(ANSWER)) as proxy:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        async with client_of("http://model.example/v1") as client:
            record = await client.start(request()).result()
    assert record.outcome is Outcome.DONE, record.error
    assert proxy.received[0].path == "http://model.example/v1/chat/completions"


async def test_the_key_is_sent_and_never_shown() -> None:
    with ScriptedServer(problem(401, {"error": {"message": "Incorrect API key provided: sk-secret"}})) as server:
        async with client_of(server, key=" sk-secret\n") as client:
            record = await client.start(request()).result()
    assert server.received[0].headers["authorization"] == "Bearer sk-secret"
    assert record.error is not None
    assert "sk-secret" not in str(record)
    assert "***" in record.error.message


async def test_a_password_in_the_endpoint_is_never_shown() -> None:
    async with client_of(f"http://me:hunter2@127.0.0.1:{free_port()}/v1") as client:
        record = await client.start(request()).result()
    assert "hunter2" not in str(record)


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [
        pytest.param("http://127.0.0.1/v1", "sk-\u2013x", id="key-no-header-can-carry"),
        pytest.param("http://127.0.0.1/v1", "sk-\nx", id="key-with-a-line-end"),
        pytest.param("ftp://127.0.0.1/v1", None, id="not-http"),
        pytest.param("127.0.0.1:8000", None, id="no-scheme"),
    ],
)
def test_unusable_settings(endpoint: str, key: str | None) -> None:
    with pytest.raises(ValueError, match=r"API key|endpoint") as caught:
        ModelClient(endpoint, model=None, timeouts=PATIENT, api_key=key)
    assert "sk-" not in str(caught.value)


async def test_a_connection_is_reused_while_surely_open() -> None:
    with ScriptedServer(Script(ANSWER)) as server:
        async with client_of(server) as client:
            for _ in range(3):
                assert (await client.start(request()).result()).outcome is Outcome.DONE
    assert server.connections == 1


async def test_requests_run_side_by_side() -> None:
    with ScriptedServer(Script([*ANSWER[:3], Wait(0.3), *ANSWER[3:]])) as server:
        async with client_of(server) as client:
            begun = time.monotonic()
            records = await asyncio.gather(*(client.start(request()).result() for _ in range(20)))
    assert {record.outcome for record in records} == {Outcome.DONE}
    assert time.monotonic() - begun < 4  # one after the other: 6 s
