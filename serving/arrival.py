"""When bytes arrive: noted as the event loop reads them from the socket, before anybody's turn to handle them.

Tokens of one step come on many connections at once. A loop first reads all sockets that have something and then lets
the streams handle it one after another, each for some tenths of a millisecond: a clock read there would make the last
of sixteen streams late by the work of fifteen others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from serving.records import now_s


class ArrivalLoop(asyncio.SelectorEventLoop):
    """An event loop that remembers of each TCP connection when it last read something."""

    def __init__(self) -> None:
        super().__init__()
        self._read_s: dict[int, float] = {}

    def arrival_s(self, descriptor: int | None) -> float:
        """When the connection with this file descriptor last got bytes (clock of `now_s`); now, where not known.

        Where more came before the earlier was handled this is the later time: never before the bytes arrived, and
        never after now.
        """
        at_s = now_s()
        return at_s if descriptor is None else self._read_s.get(descriptor, at_s)

    async def create_connection(  # type: ignore[override]  # its many overloads add nothing here
        self, protocol_factory: Callable[[], asyncio.BaseProtocol], *args: Any, **kwargs: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """As any loop's; the protocol's `data_received` is timed."""

        def timed() -> asyncio.BaseProtocol:
            protocol: Any = protocol_factory()
            receive, made, lost = protocol.data_received, protocol.connection_made, protocol.connection_lost
            descriptor = -1

            def connection_made(transport: asyncio.BaseTransport) -> None:
                nonlocal descriptor
                descriptor = transport.get_extra_info("socket").fileno()
                self._read_s.pop(descriptor, None)
                made(transport)

            def data_received(data: bytes) -> None:
                self._read_s[descriptor] = now_s()
                receive(data)

            def connection_lost(error: Exception | None) -> None:
                self._read_s.pop(descriptor, None)
                lost(error)

            protocol.connection_made, protocol.data_received = connection_made, data_received
            protocol.connection_lost = connection_lost
            result: asyncio.BaseProtocol = protocol
            return result

        transport, protocol = await super().create_connection(timed, *args, **kwargs)
        return transport, protocol


def descriptor_of(extensions: Any) -> int | None:
    """The file descriptor of the connection that an httpx response with these extensions comes from."""
    stream = extensions.get("network_stream")
    found = stream.get_extra_info("socket") if stream is not None else None
    number = found.fileno() if found is not None else -1
    return number if number >= 0 else None
