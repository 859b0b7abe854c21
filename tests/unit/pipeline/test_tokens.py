"""Counting tokens: the server's word, and what is assumed where it has none."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from pipeline.tokens import TokenCounter, estimate_tokens, most_tokens

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.mark.parametrize(
    ("text", "estimate", "most"),
    [
        pytest.param("", 0, 0, id="nothing"),
        pytest.param("abc", 1, 3, id="three letters"),
        pytest.param("abcd", 2, 4, id="rounded up"),
        pytest.param("日本", 2, 6, id="bytes, not letters"),
        pytest.param("\ud800", 1, 1, id="half a letter"),
    ],
)
def test_estimates(text: str, estimate: int, most: int) -> None:
    assert (estimate_tokens(text), most_tokens(text)) == (estimate, most)


class Server:
    """Answers /tokenize, and keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._answer(request)


def counter_of(answer: Answer) -> tuple[TokenCounter, Server]:
    server = Server(answer)
    counter = TokenCounter("http://server/v1", {})
    counter._http = httpx.AsyncClient(transport=httpx.MockTransport(server))
    return counter, server


async def test_the_servers_count_is_exact_and_of_the_text_alone() -> None:
    counter, server = counter_of(lambda _: httpx.Response(200, json={"count": 7}))
    assert await counter.count("some words", "m") == (7, True)
    assert await counter.count("some words", None) == (7, True)
    assert str(server.asked[0].url) == "http://server/tokenize"
    bodies = [json.loads(request.content) for request in server.asked]
    assert bodies[0] == {"prompt": "some words", "add_special_tokens": False, "model": "m"}
    assert "model" not in bodies[1]


def refused(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        pytest.param(lambda _: httpx.Response(404), False, id="not offered"),
        pytest.param(lambda _: httpx.Response(405), False, id="offered otherwise"),
        pytest.param(lambda _: httpx.Response(500), True, id="failed this time"),
        pytest.param(refused, True, id="not there"),
        pytest.param(lambda _: httpx.Response(200, text="no JSON"), True, id="no JSON"),
        pytest.param(lambda _: httpx.Response(200, json=[7]), True, id="no object"),
        pytest.param(lambda _: httpx.Response(200, json={"count": "7"}), True, id="no number"),
    ],
)
async def test_without_a_count_the_estimate_does(answer: Answer, again: bool) -> None:
    counter, server = counter_of(answer)
    for _ in range(2):
        assert await counter.count("abcd", "m") == (2, False)
    assert len(server.asked) == (2 if again else 1)


@pytest.mark.parametrize(
    "text", [pytest.param("x" * 1_000_001, id="too long"), pytest.param("\ud800", id="half a letter")]
)
async def test_what_cannot_be_sent_is_estimated(text: str) -> None:
    counter, server = counter_of(lambda _: httpx.Response(200, json={"count": 7}))
    assert await counter.count(text, "m") == (estimate_tokens(text), False)
    assert server.asked == []
