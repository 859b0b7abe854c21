"""Descriptions as they happen, for any number of listeners: every change of state, and tokens as they come.

Belongs to one event loop. An event is written as JSON once, whoever listens. A listener that does not keep up loses
its queue, not its place: it is told to read the present state afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.api import DescriptionView

_QUEUE_EVENTS = 1000
_RECENT = 60
ACTIVE_STATES = ("waiting", "streaming")


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """`description` (a `DescriptionView`), `token` ({description_id, text}), `resync` (events were lost) or `end`."""

    kind: Literal["description", "token", "resync", "end"]
    json: str


class Subscription:
    """One listener's queue, bounded.

    Args:
        ear: Set whenever something is queued; a listener with several things to wait for brings its own.
    """

    def __init__(self, ear: asyncio.Event | None = None) -> None:
        self._queue: deque[FeedEvent] = deque()
        self._arrived = ear or asyncio.Event()

    def put(self, item: FeedEvent) -> None:
        """Queue an event; when the listener is too far behind, all it gets is a `resync`."""
        if len(self._queue) >= _QUEUE_EVENTS:
            self._queue.clear()
            self._queue.append(FeedEvent("resync", "{}"))
        self._queue.append(item)
        self._arrived.set()

    def take(self) -> list[FeedEvent]:
        """Everything queued, without waiting."""
        items = list(self._queue)
        self._queue.clear()
        return items

    async def wait(self) -> list[FeedEvent]:
        """Everything queued, once there is something."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        return self.take()


class Feed:
    """The newest descriptions, and whoever listens to them."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, DescriptionView] = OrderedDict()
        self._listeners: set[Subscription] = set()

    def seed(self, views: Sequence[DescriptionView]) -> None:
        """Start with stored descriptions, oldest first; nobody is told."""
        for view in views:
            self._remember(view)

    def publish(self, view: DescriptionView) -> None:
        """Tell every listener that a description is new or has changed."""
        self._remember(view)
        self._send(FeedEvent("description", view.model_dump_json()))

    def token(self, view: DescriptionView, text: str) -> None:
        """Tell every listener that `text` was added to a streaming description, which is `view` now."""
        self._remember(view)
        self._send(FeedEvent("token", json.dumps({"description_id": view.description_id, "text": text})))

    def recent(self) -> list[DescriptionView]:
        """The newest descriptions, newest first, running ones among them."""
        return list(reversed(self._recent.values()))

    def active(self) -> list[DescriptionView]:
        """Those waiting or streaming, newest first."""
        return [view for view in self.recent() if view.state in ACTIVE_STATES]

    @contextlib.contextmanager
    def listen(self, ear: asyncio.Event | None = None) -> Iterator[Subscription]:
        """A subscription for as long as the block lasts."""
        subscription = Subscription(ear)
        self._listeners.add(subscription)
        try:
            yield subscription
        finally:
            self._listeners.discard(subscription)

    def end(self) -> None:
        """Tell every listener that nothing more will come."""
        self._send(FeedEvent("end", "{}"))

    def _send(self, item: FeedEvent) -> None:
        for listener in self._listeners:
            listener.put(item)

    def _remember(self, view: DescriptionView) -> None:
        self._recent[view.description_id] = view  # a changed one keeps its place
        if len(self._recent) > _RECENT:
            ended = next((key for key, old in self._recent.items() if old.state not in ACTIVE_STATES), None)
            if ended is not None:
                del self._recent[ended]
