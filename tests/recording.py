"""Record what the client reads: the events of each stream with our time stamps, and when the kernel had their bytes."""

from __future__ import annotations

import itertools
import re
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from serving.compare.fidelity import RecordedStream
from serving.records import RequestRecord, TokenEvent, now_s
from serving.sse import ServerEvent
from serving.stream import StreamReader

_SO_TIMESTAMPNS = 35  # Linux; Python has no name for it
_STAMP = struct.Struct("qq")
_ID = re.compile(rb'"id": ?"chatcmpl-([^"]+)"')


@dataclass
class Recording:
    """What was read while it was on.

    Attributes:
        events: By request id: (our time stamp, the event's data).
        reads: By socket: (kernel's time, when it was read), one for each read. Of bytes that came in several packets
            and were read at once, the last packet's time.
        sockets: By request id: the socket that its chunks came from.
    """

    events: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    sockets: dict[str, int] = field(default_factory=dict)

    def stream(self, record: RequestRecord, max_tokens: int) -> RecordedStream:
        """One request's recording."""
        assert record.sent_s is not None
        chunks = tuple((at_s, f"data: {data}\n\n".encode()) for at_s, data in self.events[record.request_id])
        return RecordedStream(record.request_id, record.due_s, record.sent_s, max_tokens, chunks)

    def socket_times(self) -> dict[tuple[str, float], float]:
        """By request id and our time stamp: when the kernel had the bytes."""
        found = {}
        for name, events in self.events.items():
            reads = self.reads[self.sockets[name]]
            for stamp_s in {at_s for at_s, _ in events}:
                before = [had_s for had_s, read_s in reads if read_s <= stamp_s]
                if before:
                    found[name, stamp_s] = before[-1]
        return found


@contextmanager
def recording() -> Iterator[Recording]:
    """Record every stream that this process reads meanwhile: the client of serving/client.py, and its sockets."""
    recorded = Recording()
    plain_recv = socket.socket.recv
    numbers: WeakKeyDictionary[socket.socket, int] = WeakKeyDictionary()
    count = itertools.count()

    def recv(self: socket.socket, size: int, *more: Any) -> bytes:
        if self.family not in (socket.AF_INET, socket.AF_INET6) or self.type != socket.SOCK_STREAM:
            return plain_recv(self, size, *more)
        if self not in numbers:
            self.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            numbers[self] = next(count)
        data, notes, _, _ = self.recvmsg(size, 128)
        read_s = now_s()
        wall_to_ours_s = read_s - time.time()
        for match in _ID.findall(data):
            recorded.sockets[match.decode()] = numbers[self]
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = _STAMP.unpack(note)
                recorded.reads[numbers[self]].append((seconds + nanoseconds / 1e9 + wall_to_ours_s, read_s))
        return data

    class RecordingReader(StreamReader):
        def feed(self, at_s: float, event: ServerEvent) -> list[TokenEvent]:
            found = _ID.search(event.data.encode())
            if found is not None:
                self.name = found[1].decode()
            recorded.events[self.name].append((at_s, event.data))
            return super().feed(at_s, event)

    with mock.patch("serving.client.StreamReader", RecordingReader), mock.patch.object(socket.socket, "recv", recv):
        yield recorded
