"""The one stream of a browser tab: pictures, descriptions, status and latency over one WebSocket.

Everything that several tabs want is made once. What a tab cannot take in time it does not get: of pictures, status and
latency there is only ever the newest, and sending waits until the connection has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator

from fastapi import WebSocket, WebSocketDisconnect

from pipeline.feed import Feed, FeedEvent, Subscription
from pipeline.pictures import PictureFeed, Pictures, shared_width

_log = logging.getLogger(__name__)
PULSE_S = 1.0
MAX_TABS = 64
MAX_WISH_BYTES = 16 * 1024
_SEND_TIMEOUT_S = 20.0
_DEFAULT_WIDTH_PX = 640
_POLICY_VIOLATION = 1008
_TRY_LATER = 1013
_GOING_AWAY = 1001
_LEFT = (WebSocketDisconnect, RuntimeError, TimeoutError, OSError)  # how a tab that is gone shows itself


class Pulse:
    """Status and latency as JSON, made once a second for all tabs, while there is one.

    Args:
        status: The status message's body.
        latency: The latency message's body: the figures and the time line's newest samples, or all of it.
    """

    def __init__(self, status: Callable[[], Awaitable[str]], latency: Callable[[bool], Awaitable[str]]) -> None:
        self._status = status
        self._latency = latency
        self._ears: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self.number = 0
        self.messages: list[str] = []

    @contextlib.contextmanager
    def heard(self, ear: asyncio.Event) -> Iterator[None]:
        """Set `ear` at every beat for as long as the block lasts."""
        self._ears.add(ear)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._beat())
        try:
            yield
        finally:
            self._ears.discard(ear)
            if not self._ears and self._task is not None:
                self._task.cancel()
                self._task = None

    async def first(self) -> list[str]:
        """What a new tab is told, the whole time line included."""
        return [_typed("status", await self._status()), _typed("latency", await self._latency(True))]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            try:
                self.messages = [_typed("status", await self._status()), _typed("latency", await self._latency(False))]
            except Exception:
                _log.exception("status could not be made")
                continue
            self.number += 1
            for ear in self._ears:
                ear.set()


def _typed(kind: str, body: str) -> str:
    """A JSON object with its type put first."""
    return f'{{"type":"{kind}",{body[1:]}' if len(body) > 2 else f'{{"type":"{kind}"}}'


class Live:
    """Serves tabs."""

    def __init__(
        self, feed: Feed, pictures: Pictures, pulse: Pulse, cameras: Callable[[], list[str]], most_width_px: int
    ) -> None:
        self._feed = feed
        self._pictures = pictures
        self._pulse = pulse
        self._cameras = cameras
        self._most_width_px = most_width_px
        self._tabs = 0

    async def serve(self, socket: WebSocket) -> None:
        """Serve one tab until it leaves."""
        await socket.accept()
        if self._tabs >= MAX_TABS:
            await socket.close(_TRY_LATER, f"{MAX_TABS} pages are open; close one")
            return
        self._tabs += 1
        ear = asyncio.Event()
        try:
            with self._feed.listen(ear) as subscription, self._pulse.heard(ear):
                tab = _Tab(socket, self._feed, self._pictures, self._pulse, self._cameras, subscription, ear)
                tab.width_px = shared_width(_DEFAULT_WIDTH_PX, self._most_width_px)
                try:
                    await self._both_ways(tab)
                finally:
                    tab.look_at([])
        finally:
            self._tabs -= 1

    async def _both_ways(self, tab: _Tab) -> None:
        """Hear what the tab wants and send it, until one of the two ends."""
        sending = asyncio.create_task(tab.send_all())
        hearing = asyncio.create_task(self._hear(tab))
        try:
            await asyncio.wait({sending, hearing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            hearing.cancel()
            for ended in await asyncio.gather(sending, hearing, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, _LEFT):
                    _log.error("a page's live stream ended", exc_info=ended)
        with contextlib.suppress(*_LEFT):
            await tab.socket.close(_POLICY_VIOLATION if tab.problem else _GOING_AWAY, tab.problem)

    async def _hear(self, tab: _Tab) -> None:
        while not tab.problem:
            message = await tab.socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            tab.problem = self._take_wish(tab, message)

    def _take_wish(self, tab: _Tab, message: object) -> str:
        """Apply what the tab asks for; returns what is wrong with it."""
        text = message.get("text") if isinstance(message, dict) else None
        if not isinstance(text, str) or len(text) > MAX_WISH_BYTES:
            return "expected a short JSON text"
        try:
            wish = json.loads(text)
            cameras, width_px = wish.get("cameras", "all"), wish.get("max_width_px", _DEFAULT_WIDTH_PX)
        except (ValueError, AttributeError):
            return "expected a JSON object"
        if cameras != "all" and not (isinstance(cameras, list) and all(isinstance(item, str) for item in cameras)):
            return 'cameras: allowed: "all" or a list of ids'
        if not isinstance(width_px, int) or width_px < 1:
            return "max_width_px: allowed: a whole number above 0"
        tab.wanted = None if cameras == "all" else cameras
        tab.width_px = shared_width(width_px, self._most_width_px)
        tab.look_at(self._cameras())
        return ""


class _Tab:
    """One connection: what it looks at and what it was last sent."""

    def __init__(
        self,
        socket: WebSocket,
        feed: Feed,
        pictures: Pictures,
        pulse: Pulse,
        cameras: Callable[[], list[str]],
        subscription: Subscription,
        ear: asyncio.Event,
    ) -> None:
        self.socket = socket
        self.problem = ""  # what is wrong with its last wish
        self.wanted: list[str] | None = []  # None: all; nothing until the tab says what it wants
        self.width_px = _DEFAULT_WIDTH_PX
        self._feed = feed
        self._pictures = pictures
        self._pulse = pulse
        self._cameras = cameras
        self._subscription = subscription
        self._ear = ear
        self._looking: dict[str, tuple[int, PictureFeed]] = {}  # width and feed, by camera
        self._sent: dict[PictureFeed, int] = {}

    def look_at(self, existing: list[str]) -> None:
        """Join and leave picture feeds until they are the wanted ones among `existing`."""
        wanted = set(existing if self.wanted is None else [name for name in self.wanted if name in existing])
        for camera_id, (width_px, feed) in list(self._looking.items()):
            if camera_id not in wanted or width_px != self.width_px or not self._pictures.current(feed):
                self._pictures.leave(feed, self._ear)
                del self._looking[camera_id]
                self._sent.pop(feed, None)
        for camera_id in wanted - set(self._looking):
            joined = self._pictures.join(camera_id, self.width_px, self._ear)
            if joined is not None:
                self._looking[camera_id] = (self.width_px, joined)
        self._ear.set()

    async def send_all(self) -> None:
        """Send what there is, newest first of everything that has a newest, until the service stops."""
        for text in await self._pulse.first():
            await self._send_text(text)
        await self._send_text(self._recent())
        pulse = self._pulse.number
        while True:
            await self._ear.wait()
            self._ear.clear()
            for item in self._subscription.take():
                if item.kind == "end":
                    return
                await self._send_text(self._text_of(item))
            if self._pulse.number != pulse:
                pulse = self._pulse.number
                self.look_at(self._cameras())
                for text in self._pulse.messages:
                    await self._send_text(text)
            for _, feed in list(self._looking.values()):
                newest = feed.newest
                if newest is not None and newest.number != self._sent.get(feed):
                    self._sent[feed] = newest.number
                    async with asyncio.timeout(_SEND_TIMEOUT_S):
                        await self.socket.send_bytes(newest.message)

    async def _send_text(self, text: str) -> None:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await self.socket.send_text(text)

    def _recent(self) -> str:
        items = ",".join(view.model_dump_json() for view in self._feed.recent())
        return f'{{"type":"descriptions","items":[{items}]}}'

    def _text_of(self, item: FeedEvent) -> str:
        return self._recent() if item.kind == "resync" else _typed(item.kind, item.json)
