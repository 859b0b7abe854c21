"""The page's calls to the service, against a scripted transport."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from pipeline.api import AddCamera, ChatAsk
from ui.service_client import ServiceClient, ServiceError, ServiceUnreachableError

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> ServiceClient:
    return ServiceClient("http://127.0.0.1:8600/", transport=httpx.MockTransport(handler))


def sse(*events: tuple[str, object]) -> bytes:
    return b"".join(f"event: {name}\r\ndata: {json.dumps(data)}\r\n\r\n".encode() for name, data in events)


def test_a_refusal_is_told_in_the_services_words() -> None:
    given = client(lambda _: httpx.Response(422, json={"detail": "camera 'door' exists already; choose another name"}))
    with pytest.raises(ServiceError, match="camera 'door' exists already") as caught:
        given.add_camera(AddCamera(source="0", name="door"))
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b"<html>oops</html>", "/status answered 502 Bad Gateway", id="not-json"),
        pytest.param(b'{"detail": [{"loc": ["source"]}]}', "/status answered 502 Bad Gateway", id="detail-not-text"),
    ],
)
def test_a_refusal_without_words_names_the_call(body: bytes, expected: str) -> None:
    with pytest.raises(ServiceError, match=expected):
        client(lambda _: httpx.Response(502, content=body)).status()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(httpx.ConnectError("refused"), "cannot be reached", id="refused"),
        pytest.param(httpx.ReadTimeout("slow"), "did not answer in time", id="hangs"),
        pytest.param(httpx.RemoteProtocolError("cut"), "cannot be reached", id="cut"),
    ],
)
def test_an_absent_service_is_named_with_the_mend(error: httpx.HTTPError, expected: str) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(ServiceUnreachableError, match=f"127.0.0.1:8600 {expected}; is `framechat up` running"):
        client(fail).status()


def test_another_versions_answer_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(ServiceError, match="same version"):
        client(lambda _: httpx.Response(200, json={"cameras": "none"})).status()


def test_a_forgotten_session_is_none() -> None:
    assert client(lambda _: httpx.Response(404, json={"detail": "no such session"})).session("s1") is None


def test_asking_returns_at_the_answers_name_and_sends_the_due_time() -> None:
    sent: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        stream = b": hello\n\n" + sse(("answer", {"answer_id": "a1"}), ("token", {"text": "never read"}))
        return httpx.Response(200, content=stream, headers={"content-type": "text/event-stream"})

    ask = ChatAsk(session_id="s1", text="hello", due_s=12.5)
    assert client(answer).ask(ask) == "a1"
    assert sent[0]["due_s"] == 12.5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"", "before it named the answer", id="empty"),
        pytest.param(sse(("token", {"text": "a"})), "before it named the answer", id="no-answer-event"),
        pytest.param(sse(("answer", {"id": "a1"})), "same version", id="other-key"),
        pytest.param(b"event: answer\ndata: {\n\n", "same version", id="not-json"),
    ],
)
def test_an_answer_without_a_name_is_an_error(content: bytes, expected: str) -> None:
    with pytest.raises(ServiceError, match=expected):
        client(lambda _: httpx.Response(200, content=content)).ask(ChatAsk(session_id="s1", text="hello"))


def test_a_refused_question_is_told_in_the_services_words() -> None:
    given = client(lambda _: httpx.Response(503, json={"detail": "8 answers are in flight; wait for one to end"}))
    with pytest.raises(ServiceError, match="8 answers are in flight"):
        given.ask(ChatAsk(session_id="s1", text="hello"))
