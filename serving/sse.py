"""Server-sent events out of raw bytes, by the WHATWG rules and nothing more.

Needed beneath `openai`'s own decoder because that one fails a whole stream on an event without data (a heartbeat that
carries only `event:`, `id:` or `retry:`), where the specification says that such an event is not dispatched.
Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")
MAX_EVENT_BYTES = 8 * 2**20


class EventTooLargeError(ValueError):
    """One event outgrew :data:`MAX_EVENT_BYTES`; whatever this is, it is not a stream of tokens."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event. `name` is empty for a plain message."""

    data: str
    name: str = ""
    event_id: str | None = None


class EventDecoder:
    """Feed it bytes as they arrive; it returns the events that those bytes completed.

    An event that the stream's end cuts off is never returned, as the specification asks.
    """

    def __init__(self) -> None:
        self._partial = bytearray()
        self._after_cr = False
        self._first_line = True
        self._name = ""
        self._data: list[str] = []
        self._size_bytes = 0
        self._event_id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Decode `chunk`.

        Raises:
            EventTooLargeError: One event is larger than `MAX_EVENT_BYTES`.
        """
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        first, *rest = _LINE_END.split(chunk)
        self._partial += first
        events = []
        for following in rest:
            event = self._line(self._partial.decode("utf-8", errors="replace"))
            if event is not None:
                events.append(event)
            self._partial = bytearray(following)
        if self._size_bytes + len(self._partial) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        return events

    def _line(self, line: str) -> ServerEvent | None:
        if self._first_line:
            line = line.removeprefix("\ufeff")
            self._first_line = False
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._size_bytes += len(value)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._event_id = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        event = ServerEvent("\n".join(self._data), self._name, self._event_id) if self._data else None
        self._name, self._data, self._size_bytes = "", [], 0
        return event
