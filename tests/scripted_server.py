"""A scripted OpenAI-compatible streaming server: it plays back exactly what a test says, when the test says it.

Only for exact tests of the measuring code. It runs no model and is never part of the product.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from serving.records import now_s


@dataclass(frozen=True)
class Send:
    """Write these bytes, as one HTTP chunk."""

    data: bytes


@dataclass(frozen=True)
class Wait:
    """Stay silent so long."""

    duration_s: float


@dataclass(frozen=True)
class Cut:
    """Drop the connection without ending the body."""


Action = Send | Wait | Cut


@dataclass(frozen=True)
class Script:
    """One answer. Without a Cut the body is ended properly after the last action."""

    actions: Sequence[Action] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream; charset=utf-8"})


@dataclass
class Received:
    """A request as it came, and what was done about it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    sent_s: list[float] = field(default_factory=list)  # one entry a Send, taken just before the write
    gone: threading.Event = field(default_factory=threading.Event)  # the client closed the connection in mid-answer


def event(payload: object, *, name: str | None = None) -> bytes:
    """One server-sent event."""
    data = payload if isinstance(payload, str) else json.dumps(payload)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


def chunk(
    content: str | None = None,
    *,
    role: str | None = None,
    reasoning: str | None = None,
    running: int | None = None,
    finish: str | None = None,
    prompt: int = 7,
    **delta: Any,
) -> bytes:
    """One chat-completions chunk; `running` is the count that vLLM reports with continuous_usage_stats."""
    fields = {"role": role, "content": content, "reasoning": reasoning, **delta}
    payload: dict[str, Any] = {
        "id": "chatcmpl-x",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "delta": {k: v for k, v in fields.items() if v is not None}, "finish_reason": finish}],
    }
    if running is not None:
        payload["usage"] = {"prompt_tokens": prompt, "completion_tokens": running, "total_tokens": prompt + running}
    return event(payload)


def usage(prompt: int, completion: int, *, cached: int | None = None) -> bytes:
    """The last chunk of a stream with include_usage: no choices."""
    figures: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        figures["prompt_tokens_details"] = {"cached_tokens": cached}
    return event({"id": "chatcmpl-x", "object": "chat.completion.chunk", "choices": [], "usage": figures})


ROLE = chunk("", role="assistant", running=0)
DONE = event("[DONE]")
KEEP_ALIVE = b": keep-alive\n\n"


def problem(status: int, body: object) -> Script:
    """A JSON error answer."""
    return Script([Send(json.dumps(body).encode())], status=status, headers={"content-type": "application/json"})


def models(*names: str) -> Script:
    """The answer to GET /v1/models."""
    listed = [{"id": name, "object": "model", "created": 1, "owned_by": "test"} for name in names]
    return Script(
        [Send(json.dumps({"object": "list", "data": listed}).encode())], headers={"content-type": "application/json"}
    )


class ScriptedServer:
    """Serves on a free loopback port, in a thread of its own, for the length of a `with` block.

    Args:
        script: The answer to every request, or a function that picks one.
    """

    def __init__(self, script: Script | Callable[[Received], Script]) -> None:
        self._pick = script if callable(script) else lambda _request: script
        self.received: list[Received] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            while True:
                request = await self._parse(head, reader)
                self.received.append(request)
                answer = asyncio.ensure_future(self._answer(self._pick(request), request, writer))
                following = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
                try:
                    await asyncio.wait((answer, following), return_when=asyncio.FIRST_COMPLETED)
                    # A client may also be gone before the answer's first bytes: then it is the writing that fails.
                    if not answer.done() or isinstance(answer.exception(), ConnectionError):
                        request.gone.set()  # clients do not send the next request before the answer's end
                        break
                    if not answer.result():
                        break
                    head = await following
                finally:
                    answer.cancel()
                    following.cancel()
                    await asyncio.gather(answer, following, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _parse(self, head: bytes, reader: asyncio.StreamReader) -> Received:
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(method, path, headers, json.loads(raw) if raw else None)

    async def _answer(self, script: Script, request: Received, writer: asyncio.StreamWriter) -> bool:
        """Play the script; True when the connection may be used again."""
        fields = "".join(f"{name}: {value}\r\n" for name, value in script.headers.items())
        writer.write(f"HTTP/1.1 {script.status} Scripted\r\n{fields}transfer-encoding: chunked\r\n\r\n".encode())
        for action in script.actions:
            match action:
                case Wait(duration_s):
                    await asyncio.sleep(duration_s)
                case Send(data):
                    request.sent_s.append(now_s())
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await writer.drain()
                case Cut():
                    writer.transport.abort()
                    return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
