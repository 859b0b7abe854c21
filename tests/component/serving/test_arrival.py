"""Arrival is when the socket was read, whatever the loop does with other streams' bytes first."""

from __future__ import annotations

import asyncio
import time

from serving.arrival import ArrivalLoop, descriptor_of
from serving.client import ModelClient
from serving.config import Timeouts
from serving.records import TokenEvent, now_s
from tests.component.serving.test_client import request
from tests.scripted_server import DONE, ROLE, Received, Script, ScriptedServer, Send, Wait, chunk

_BUSY_S = 0.15


async def test_a_stream_is_not_late_by_the_work_for_another() -> None:
    """Eight answers' last tokens come at the same moment, and handling one takes long."""
    together_s = now_s() + 1.5
    begun: list[float] = []
    handled: list[float] = []

    def answer(_received: Received) -> Script:
        wait = Wait(together_s - now_s())
        return Script([Send(ROLE + chunk("a", running=1)), wait, Send(chunk("b", running=2, finish="stop") + DONE)])

    def slow(event: TokenEvent) -> None:
        if event.text == "a":
            begun.append(now_s())
            if len(begun) == 8:  # the loop is busy when the last tokens come, so that it finds all of them at once
                time.sleep(max(0.0, together_s + _BUSY_S - now_s()))
        if event.text == "b":
            handled.append(now_s())
            time.sleep(_BUSY_S)

    with ScriptedServer(answer) as server:
        client = ModelClient(server.endpoint, model="m", timeouts=Timeouts())
        started = [client.start(request(), slow) for _ in range(8)]
        records = [await one.result() for one in started]
        await client.close()
    arrivals = [record.last_token_s or 0.0 for record in records]
    assert max(handled) - min(handled) > 6 * _BUSY_S, "the handling was one after another"
    # All are read before any of them is handled.
    assert max(arrivals) - min(arrivals) < 4 * _BUSY_S


def test_a_connection_that_is_not_known_arrives_now() -> None:
    loop = ArrivalLoop()
    try:
        before = now_s()
        assert before <= loop.arrival_s(None) <= loop.arrival_s(999) <= now_s()
    finally:
        loop.close()


def test_a_connection_is_forgotten_when_it_ends() -> None:
    loop = ArrivalLoop()

    async def talk() -> None:
        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        before = now_s()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        descriptor = writer.get_extra_info("socket").fileno()
        assert await reader.readexactly(5) == b"hello"
        arrived = loop.arrival_s(descriptor)
        assert before <= arrived <= now_s()
        await asyncio.sleep(0.01)
        assert loop.arrival_s(descriptor) == arrived
        writer.close()
        await writer.wait_closed()
        assert loop.arrival_s(descriptor) > arrived
        server.close()

    try:
        loop.run_until_complete(talk())
    finally:
        loop.close()


def test_a_response_without_a_connection() -> None:
    assert descriptor_of({}) is None
