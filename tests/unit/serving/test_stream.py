from __future__ import annotations

import json

import pytest

from serving.records import ErrorKind, Gap, TokenEvent
from serving.sse import EventDecoder, ServerEvent
from serving.stream import MESSAGE_CHARS, StreamError, StreamReader, error_text, one_line
from tests.scripted_server import DONE, ROLE, chunk, event, usage


def play(*timed: tuple[float, bytes], max_tokens: int = 100) -> tuple[StreamReader, list[TokenEvent]]:
    """Feed events with their arrival times, no clock involved."""
    reader, decoder = StreamReader(max_tokens), EventDecoder()
    tokens = [token for at_s, data in timed for item in decoder.feed(data) for token in reader.feed(at_s, item)]
    return reader, tokens


def test_known_arrivals_give_exactly_those_figures() -> None:
    reader, tokens = play(
        (10.0, ROLE),
        (10.5, chunk("Hel", running=1)),
        (10.625, chunk("lo ", running=2)),
        (11.625, chunk("my friends", running=5)),
        (11.75, chunk("", running=6, finish="stop")),
        (11.875, usage(12, 6, cached=8)),
        (11.875, DONE),
    )
    assert reader.first_token_s == 10.5
    assert reader.last_token_s == 11.75
    assert reader.gaps == [Gap(10.625, 0.125, 1), Gap(11.625, 1.0, 3), Gap(11.75, 0.125, 1)]
    assert [token.tokens for token in tokens] == [1, 1, 3, 1]
    assert (reader.prompt_tokens, reader.cached_tokens, reader.completion_tokens) == (12, 8, 6)
    assert (reader.finish_reason, reader.ended, reader.tokens_counted) == ("stop", True, True)
    assert reader.text == "Hello my friends"


@pytest.mark.parametrize(
    ("chunks", "tokens", "text", "counted"),
    [
        pytest.param([ROLE], [], "", None, id="role-only-is-no-token"),
        pytest.param([chunk("", role="assistant")], [], "", None, id="role-only-without-usage-is-no-token"),
        pytest.param([chunk("a", role="assistant", running=1)], [1], "a", True, id="role-and-token-in-one"),
        pytest.param([ROLE, chunk("", running=1), chunk("猫", running=2)], [1, 1], "猫", True, id="token-without-text"),
        pytest.param([ROLE, chunk("abc", running=4)], [4], "abc", True, id="several-tokens-in-a-chunk"),
        pytest.param([chunk("a", running=1), chunk(running=1, finish="stop")], [1], "a", True, id="bare-finish"),
        pytest.param([chunk("a"), chunk("b"), usage(3, 2)], [1, 1], "ab", False, id="no-running-usage"),
        pytest.param(
            [chunk("a"), chunk("b", running=40, finish="length")], [1, 1], "ab", False, id="total-only-at-end"
        ),
        pytest.param(
            [chunk("a", running=0), chunk("b", running=0)], [1, 1], "ab", False, id="running-usage-stuck-at-0"
        ),
        pytest.param([chunk("a", running=1), chunk("b", running=1)], [1, 0], "ab", True, id="held-back-text"),
        pytest.param(
            [chunk("a", running=1), chunk("b"), chunk("c", running=3)], [1, 0, 2], "abc", True, id="usage-gap"
        ),
        pytest.param([chunk(reasoning="hm", running=1)], [1], "", True, id="reasoning"),
        pytest.param([chunk(reasoning_content="hm")], [1], "", False, id="reasoning-older-name"),
        pytest.param([chunk("a", reasoning="hm", running=2)], [0, 2], "a", True, id="reasoning-and-answer-in-one"),
        pytest.param([chunk(tool_calls=[{"index": 0}])], [1], "", False, id="tool-call"),
        pytest.param([event({"object": "x"})], [], "", None, id="no-choices-key"),
        pytest.param([event({"choices": []})], [], "", None, id="no-choice"),
        pytest.param([event({"choices": [{"index": 0}]})], [], "", None, id="no-delta"),
        pytest.param([event({"choices": [{"delta": None}], "usage": None})], [], "", None, id="nulls"),
        pytest.param([event({"type": "ping"}, name="ping")], [], "", None, id="unknown-event"),
        pytest.param([event("tick", name="heartbeat")], [], "", None, id="unknown-event-not-json"),
        pytest.param([DONE, chunk("late")], [], "", None, id="nothing-counts-after-done"),
    ],
)
def test_what_a_chunk_carries(chunks: list[bytes], tokens: list[int], text: str, counted: bool | None) -> None:
    reader, events = play(*((float(at), data) for at, data in enumerate(chunks)))
    assert [item.tokens for item in events if item.tokens or item.text] == tokens
    assert reader.text == text
    assert reader.tokens_counted is counted
    assert len(reader.gaps) == max(0, sum(1 for count in tokens if count) - 1)


def test_reasoning_is_marked_and_kept_out_of_the_answer() -> None:
    _, events = play((1.0, chunk(reasoning="hm", running=1)), (2.0, chunk("yes", reasoning="so", running=3)))
    assert [(item.text, item.reasoning, item.tokens) for item in events] == [
        ("hm", True, 1),
        ("so", True, 0),
        ("yes", False, 2),
    ]


@pytest.mark.parametrize(
    ("data", "kind", "status", "says"),
    [
        pytest.param(
            {"error": {"message": "out of\nmemory", "code": 500}}, ErrorKind.SERVER, 500, "out of memory", id="error"
        ),
        pytest.param(
            {"error": {"message": "no", "code": "bad"}}, ErrorKind.SERVER, None, "no", id="error-code-in-words"
        ),
        pytest.param({"error": "boom"}, ErrorKind.SERVER, None, "boom", id="error-as-text"),
        pytest.param("{not json", ErrorKind.PROTOCOL, None, "not JSON", id="not-json"),
        pytest.param("[1]", ErrorKind.PROTOCOL, None, "no chunk", id="not-an-object"),
        pytest.param(
            {"choices": [{"delta": {}, "finish_reason": "abort"}]}, ErrorKind.SERVER, None, "abort", id="abort"
        ),
    ],
)
def test_failures(data: object, kind: ErrorKind, status: int | None, says: str) -> None:
    with pytest.raises(StreamError) as caught:
        play((1.0, event(data)))
    assert caught.value.error.kind is kind
    assert caught.value.error.status == status
    assert says in caught.value.error.message
    assert "\n" not in caught.value.error.message


def test_error_event_by_name() -> None:
    with pytest.raises(StreamError, match="worker died"):
        StreamReader(10).feed(1.0, ServerEvent(json.dumps({"message": "worker died"}), "error"))


def test_a_runaway_answer_is_stopped() -> None:
    with pytest.raises(StreamError, match="does not stop at max_tokens") as caught:
        play(*((float(n), chunk("x", running=n)) for n in range(1, 200)), max_tokens=4)
    assert caught.value.error.kind is ErrorKind.PROTOCOL


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param({"error": {"message": "a"}}, "a", id="openai"),
        pytest.param({"message": "a"}, "a", id="message"),
        pytest.param({"detail": "a"}, "a", id="fastapi"),
        pytest.param({"detail": [{"loc": ["body", "x"], "msg": "missing"}]}, "body.x: missing", id="validation"),
        pytest.param("<p>\n a</p>", "<p> a</p>", id="text"),
        pytest.param({"code": 3}, '{"code": 3}', id="other"),
    ],
)
def test_error_text(body: object, text: str) -> None:
    assert error_text(body) == text


def test_one_line_is_bounded() -> None:
    assert len(one_line("x" * 1000)) == MESSAGE_CHARS
