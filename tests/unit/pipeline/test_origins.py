"""Which hosts and origins are ours, and how large a request may be."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.origins import Gate, Origins, too_large

Sent = list[dict[str, Any]]


def origins(**service: Any) -> Origins:
    return Origins(Config.model_validate({"service": service}))


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        pytest.param("LOCALHOST:8600", True, id="this machine"),
        pytest.param("192.168.1.5:8600", True, id="an address"),
        pytest.param("[fe80::1]:8600", True, id="an address of six"),
        pytest.param("Cameras.Example", True, id="the public name"),
        pytest.param("watcher", True, id="the configured name"),
        pytest.param("evil.example:8600", False, id="another name"),
        pytest.param("localhost.evil.example", False, id="a name that begins alike"),
        pytest.param("", False, id="none"),
        pytest.param("[::1", False, id="broken"),
    ],
)
def test_hosts(header: str, allowed: bool) -> None:
    ours = origins(host="Watcher", public_url="https://cameras.example/api")
    assert ours.host_allowed(header) == allowed


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        pytest.param("http://127.0.0.1:8501", "localhost:8600", True, id="the page by another name"),
        pytest.param("http://[::1]:8501", "127.0.0.1:8600", True, id="the page over IPv6"),
        pytest.param("http://10.0.0.5:8501", "10.0.0.5:8600", True, id="the page in the network"),
        pytest.param("http://10.0.0.5:8600", "10.0.0.5:8600", True, id="our own port"),
        pytest.param("http://10.0.0.6:8501", "10.0.0.5:8600", False, id="another machine"),
        pytest.param("http://127.0.0.1:8501", "10.0.0.5:8600", False, id="a page of the visitor's own machine"),
        pytest.param("http://10.0.0.5", "10.0.0.5:8600", False, id="port 80"),
        pytest.param("https://cameras.example", "10.0.0.5:8600", True, id="the public page"),
        pytest.param("http://cameras.example:9999", "cameras.example", True, id="the public name, any port"),
        pytest.param("ftp://cameras.example", "cameras.example", False, id="no page"),
        pytest.param("http://10.0.0.5:99999", "10.0.0.5:8600", False, id="no port"),
        pytest.param("null", "10.0.0.5:8600", False, id="sandboxed"),
        pytest.param("http://", "10.0.0.5:8600", False, id="nobody"),
    ],
)
def test_pages(origin: str, host: str, allowed: bool) -> None:
    assert origins(public_url="https://cameras.example").origin_allowed(origin, host) == allowed


def test_a_page_at_a_schemes_usual_port() -> None:
    ours = Origins(Config.model_validate({"ui": {"port": 80}, "service": {"port": 443}}))
    assert ours.origin_allowed("http://10.0.0.5", "10.0.0.5:443")
    assert ours.origin_allowed("https://10.0.0.5", "10.0.0.5:443")
    assert not ours.origin_allowed("https://10.0.0.5:8501", "10.0.0.5:443")


async def through(path: str, chunks: Iterable[bytes], *, kind: str = "http", **headers: str) -> tuple[Sent, int]:
    """What the gate answers, and how many bytes the application behind it received."""
    received = 0
    parts = list(chunks)
    sent: Sent = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal received
        more = True
        while more:
            message = await receive()
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0) if parts else b"", "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    config = Config.model_validate({"service": {"max_upload_bytes": 100}, "chat": {"max_document_bytes": 50}})
    given = {"host": "localhost:8600", **headers}
    scope = {
        "type": kind,
        "path": path,
        "method": "POST",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
    }
    await Gate(app, config)(scope, receive, send)
    return sent, received


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        pytest.param("/uploads", 100 + 65536, 200, id="a video"),
        pytest.param("/uploads/", 101 + 65536, 413, id="too large a video"),
        pytest.param("/documents", 50 + 65536, 200, id="a document"),
        pytest.param("/documents", 51 + 65536, 413, id="too large a document"),
        pytest.param("/chat", 2**20, 200, id="anything else"),
        pytest.param("/chat", 2**20 + 1, 413, id="too large"),
    ],
)
async def test_a_declared_size_is_refused_unread(path: str, size: int, status: int) -> None:
    sent, received = await through(path, [b"x"], content_length=str(size))
    assert sent[0]["status"] == status
    assert received == (1 if status == 200 else 0)


@pytest.mark.parametrize("declared", ["-1", "1e3", "", "many"])
async def test_a_size_that_is_no_number_is_refused(declared: str) -> None:
    sent, _ = await through("/chat", [b"x"], content_length=declared)
    assert sent[0]["status"] == 413


async def test_no_header_but_one_of_the_page_opens_the_answer_to_it() -> None:
    sent, _ = await through("/chat", [b"x"], origin="http://localhost:8501")
    headers = dict(sent[0]["headers"])
    assert headers[b"access-control-allow-origin"] == b"http://localhost:8501"
    assert headers[b"cross-origin-resource-policy"] == b"same-site"
    sent, received = await through("/chat", [b"x"], origin="http://evil.example")
    assert (sent[0]["status"], received) == (403, 0)
    assert "origin 'http://evil.example' may not use" in json.loads(sent[1]["body"])["detail"]


async def test_what_is_no_request_passes() -> None:
    _, received = await through("/", [b"xyz"], kind="lifespan", host="evil.example")
    assert received == 3


def test_sizes_in_words() -> None:
    assert too_large(3 * 2**29) == "the request is too large, allowed: 1,536.0 MB"
