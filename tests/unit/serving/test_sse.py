from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.sse import MAX_EVENT_BYTES, EventDecoder, EventTooLargeError, ServerEvent

CASES = [
    pytest.param(b"data: a\n\n", [ServerEvent("a")], id="lf"),
    pytest.param(b"data: a\r\n\r\n", [ServerEvent("a")], id="crlf"),
    pytest.param(b"data: a\r\r", [ServerEvent("a")], id="cr"),
    pytest.param(b"data:a\n\n", [ServerEvent("a")], id="no-space"),
    pytest.param(b"data:  a\n\n", [ServerEvent(" a")], id="one-space-only"),
    pytest.param(b"data: a\ndata: b\n\n", [ServerEvent("a\nb")], id="two-data-lines"),
    pytest.param(b": keep-alive\n\n", [], id="comment"),
    pytest.param(b": x\ndata: a\n\n", [ServerEvent("a")], id="comment-before-data"),
    pytest.param(b"event: ping\n\n", [], id="event-without-data"),
    pytest.param(b"retry: 5\nid: 3\n\n", [], id="retry-and-id-without-data"),
    pytest.param(b"event: ping\ndata: {}\n\n", [ServerEvent("{}", "ping")], id="named"),
    pytest.param(b"event: ping\n\ndata: a\n\n", [ServerEvent("a")], id="name-does-not-carry-over"),
    pytest.param(
        b"id: 7\ndata: a\n\ndata: b\n\n", [ServerEvent("a", "", "7"), ServerEvent("b", "", "7")], id="id-stays"
    ),
    pytest.param(b"colour: red\ndata: a\n\n", [ServerEvent("a")], id="unknown-field"),
    pytest.param("\ufeffdata: a\n\n".encode(), [ServerEvent("a")], id="byte-order-mark"),
    pytest.param("data: für 猫\n\n".encode(), [ServerEvent("für 猫")], id="utf-8"),
    pytest.param(b"data: \xff\n\n", [ServerEvent("\ufffd")], id="not-utf-8"),
    pytest.param(b"data: a\n", [], id="cut-before-the-blank-line"),
    pytest.param(b"data: a\n\ndata: b", [ServerEvent("a")], id="cut-in-the-line"),
]


@pytest.mark.parametrize(("stream", "expected"), CASES)
def test_whole(stream: bytes, expected: list[ServerEvent]) -> None:
    assert EventDecoder().feed(stream) == expected


@pytest.mark.parametrize(("stream", "expected"), CASES)
def test_byte_by_byte(stream: bytes, expected: list[ServerEvent]) -> None:
    decoder = EventDecoder()
    assert [event for byte in stream for event in decoder.feed(bytes([byte]))] == expected


@given(st.lists(st.sampled_from([b"data: x", b"data: y", b"\n", b"\r\n", b"\r", b": c", b"event: e", b""])), st.data())
def test_split_anywhere_is_the_same(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    at = data.draw(st.integers(0, len(stream)))
    split = EventDecoder()
    assert split.feed(stream[:at]) + split.feed(stream[at:]) == EventDecoder().feed(stream)


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1024 + b"\n", b"x" * 1024], ids=["many-lines", "one-endless-line"])
def test_an_endless_event_is_refused(line: bytes) -> None:
    decoder = EventDecoder()
    with pytest.raises(EventTooLargeError, match=str(MAX_EVENT_BYTES)):
        for _ in range(2 * MAX_EVENT_BYTES // 1024):
            decoder.feed(line)
