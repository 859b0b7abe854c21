"""A request on its way, as the one who asked sees it: its outcome, and how to stop it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from serving.records import RequestRecord, TokenEvent
from serving.request import ModelRequest

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

OnToken = Callable[[TokenEvent], None]
OnSent = Callable[[float], None]
OnEnd = Callable[[RequestRecord], None]


class ActiveRequest:
    """A request on its way. Every method may be called from any thread."""

    def __init__(
        self, request: ModelRequest, on_token: OnToken | None, on_sent: OnSent | None, on_end: OnEnd | None
    ) -> None:
        self.request = request
        self._on_token = on_token
        self._on_sent = on_sent
        self._on_end = on_end
        self._future: Future[RequestRecord] = Future()
        self._lock = threading.Lock()
        self._cancel_reason: str | None = None
        self._cancel_task: Callable[[], object] | None = None

    def cancel(self, reason: str) -> None:
        """Stop the request: its connection is closed, which makes the server drop it. Harmless when it has ended.

        Args:
            reason: Why, in the words that counters and the page show; the first call's counts.
        """
        with self._lock:
            if self._cancel_reason is not None or self._future.done():
                return
            self._cancel_reason = reason
            cancel_task = self._cancel_task
        if cancel_task is not None:
            cancel_task()

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    async def result(self) -> RequestRecord:
        """The outcome, whatever it is: failures of server and network are in the record, not raised."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    def wait(self, timeout_s: float | None = None) -> RequestRecord:
        """Block until the outcome is known, for callers without an event loop.

        Raises:
            TimeoutError: It is not known after `timeout_s`.
        """
        return self._future.result(timeout_s)

    # --- the client's side -------------------------------------------------------------------------------------------

    @property
    def cancel_reason(self) -> str | None:
        """Why it was cancelled; None when it was not."""
        return self._cancel_reason

    def started(self, cancel_task: Callable[[], object]) -> bool:
        """Tell how to cancel; False when that was already asked for."""
        with self._lock:
            self._cancel_task = cancel_task
            return self._cancel_reason is None

    def sent(self, at_s: float) -> None:
        """It has been handed to the HTTP client."""
        self._tell(self._on_sent, at_s)

    def token(self, event: TokenEvent) -> None:
        """Tokens have come."""
        self._tell(self._on_token, event)

    def end(self, record: RequestRecord) -> None:
        """The outcome is known."""
        self._tell(self._on_end, record)
        self._future.set_result(record)

    def break_off(self, bug: BaseException) -> None:
        """There is no outcome, because of a bug: whoever waits is told."""
        self._future.set_exception(bug)

    def _tell(self, callback: Callable[[_T], None] | None, value: _T) -> None:
        """Call back; a bug there must not end the request, for other people's gaps are timed by the same loop."""
        if callback is None:
            return
        try:
            callback(value)
        except Exception:
            _log.exception("a callback of request %s failed", self.request.request_id)
