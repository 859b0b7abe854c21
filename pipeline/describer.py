"""Description requests under way: a bounded number running, a bounded number waiting, and an end for each of them.

While the model server is not there, what comes due waits in the same bounded queue: when that is full the stalest is
skipped, and nothing waits longer than the client would wait for a first token. While it is held on purpose (a new
budget, a comparison) the queue is longer, nothing in it expires, and nobody in it is given up for having left. Every
end is stored with its reason.

One describer serves every camera of a service. It belongs to one event loop; `submit`, `cancel` and `has_room` may be
called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.api import DescriptionView
from pipeline.config import Config
from pipeline.describe import description_messages
from pipeline.feed import Feed
from pipeline.traffic import Traffic
from pipeline.writer import StoreWriter
from serving.client import ActiveRequest
from serving.records import ErrorKind, Outcome, RequestRecord, TokenEvent, now_s
from serving.request import ModelRequest

TRAFFIC_CLASS = "camera"
_SEND_AGAIN = frozenset({ErrorKind.CONNECT, ErrorKind.TIMEOUT_CONNECT, ErrorKind.OVERLOADED})
_MAX_ATTEMPTS = 3
_HOLD_S = 1.0  # after a server that did not take a request
_HELD_ROOM = 8  # so many times the usual queue while the server is held on purpose
_HELD_LOOK_S = 1.0


class Feedback(Protocol):
    """Who picked the person and wants to know what became of it (`pipeline.trigger.Trigger`)."""

    def waiting(self, person_id: str, reason: str = ...) -> None: ...  # noqa: D102
    def describing(self, person_id: str) -> None: ...  # noqa: D102
    def finished(self, person_id: str, now_s: float) -> None: ...  # noqa: D102
    def dropped(self, person_id: str, reason: str, now_s: float, *, retry: bool = ...) -> None: ...  # noqa: D102


@dataclass(slots=True, eq=False)
class Job:
    """One person to describe, and how far it has come.

    Attributes:
        view: The present state, as the page shows it.
        jpegs: What the model is shown.
        thumbnail: What people are shown.
    """

    view: DescriptionView
    jpegs: tuple[bytes, ...]
    thumbnail: bytes
    feedback: Feedback
    text: list[str] = field(default_factory=list)
    attempts: int = 0
    active: ActiveRequest | None = None
    cancelled: str | None = None
    expires_s: float = 0.0
    again: bool = False  # taken back from a server that is about to stop
    held: bool = False  # waited while the server was held: its person may have left by our fault

    @property
    def request_id(self) -> str:
        """The id of the present attempt; the first one's is the description's."""
        return self.view.description_id + (f"-{self.attempts + 1}" if self.attempts else "")


def new_description_id() -> str:
    """A unique id, letters and digits."""
    return uuid.uuid4().hex


class Describer:
    """Sends description requests, at most `trigger.max_in_flight` at a time, and stores what became of each."""

    def __init__(self, config: Config, traffic: Traffic, writer: StoreWriter, feed: Feed, *, ready: bool) -> None:
        self._describe = config.describe
        self._limits = config.trigger
        self._class = config.serving.classes[TRAFFIC_CLASS]
        self._patience_s = config.serving.timeouts.first_token_s
        self._traffic = traffic
        self._writer = writer
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._ready = ready
        self._held_until_s = 0.0
        self._held = ""
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._running: dict[str, Job] = {}
        self._storing: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._submitted = 0  # handed over by other threads, not yet queued
        self._lock = threading.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = False

    # --- from any thread -----------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; it is waiting from now on."""
        with self._lock:
            self._submitted += 1
        self._loop.call_soon_threadsafe(self._queue, job)

    def cancel(self, camera_id: str, person_id: str | None, reason: str) -> None:
        """Give up what is waiting or running for a person, or for a whole camera."""
        self._loop.call_soon_threadsafe(self._cancel, camera_id, person_id, reason)

    def takes(self) -> bool:
        """Whether the model server can be asked, or will be again soon: it is only held for a while."""
        return self._ready or bool(self._held)

    def has_room(self) -> bool:
        """Whether one more job could be sent, and would displace none that waits."""
        with self._lock:
            return self.takes() and len(self._waiting) + self._submitted < self._limits.max_waiting

    # --- on the loop ---------------------------------------------------------------------------------------------

    def set_ready(self, ready: bool) -> None:
        """The model server can (not) be used now."""
        self._ready = ready
        self._pump()

    def hold(self, reason: str) -> None:
        """Send nothing until `release`; what comes due waits, and shows the reason."""
        self._held = reason
        for job in self._waiting.values():
            self._wait(job, reason)

    def take_back(self) -> None:
        """The held server is about to stop: what still runs on it waits again, from its beginning."""
        for job in self._running.values():
            if job.active is not None and job.cancelled is None:
                job.again = True
                job.active.cancel(self._held)

    def release(self) -> None:
        """Go on. Time that was spent waiting while held does not count, nor does that for those held before it."""
        self._held = ""
        for place, job in enumerate(self._waiting.values(), 1):
            job.expires_s, job.held = now_s() + place * self._patience_s, True
        self._pump()

    @property
    def running(self) -> int:
        """Requests at the server."""
        return len(self._running)

    def thumbnail(self, description_id: str) -> bytes | None:
        """The picture of a job that is not stored yet."""
        for jobs in (self._waiting, self._running, self._storing):
            if description_id in jobs:
                return jobs[description_id].thumbnail
        return None

    def pending(self) -> int:
        """Jobs waiting, running and being stored."""
        with self._lock:
            return self._submitted + len(self._waiting) + len(self._running) + len(self._storing)

    async def drain(self) -> None:
        """Return when nothing waits or runs."""
        while self.pending():
            self._idle.clear()
            await self._idle.wait()

    async def close(self, reason: str) -> None:
        """Cancel everything; returns when all of it is stored."""
        self._closing = True
        for job in [*self._waiting.values(), *self._running.values()]:
            self._cancel_job(job, reason)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _queue(self, job: Job) -> None:
        with self._lock:
            self._submitted -= 1
            self._waiting[job.view.description_id] = job
        self._traffic.due(job.request_id, TRAFFIC_CLASS, job.view.due_s)
        if self._closing:
            self._cancel_job(job, "the service stops")
            return
        self._wait(job, self._held or ("" if self._ready else "waiting for the model server"))
        job.expires_s = now_s() + self._patience_s
        self._loop.call_later(self._patience_s, self._expire, job)
        # What waited while the server was held takes no room from what comes later, nor is it dropped for it.
        most = self._limits.max_waiting * (_HELD_ROOM if self._held else 1)
        counted = [item for item in self._waiting.values() if self._held or not item.held]
        for stalest in counted[: max(0, len(counted) - most)]:
            self._never(stalest, Outcome.SKIPPED, "queue full" if self._ready else "queue full, model server not ready")
        self._pump()

    def _wait(self, job: Job, reason: str) -> None:
        self._show(job, state="waiting", reason=reason)
        job.feedback.waiting(job.view.person_id, reason or "waiting for a free slot")

    def _show(self, job: Job, **changes: object) -> None:
        job.view = job.view.model_copy(update=changes)
        self._feed.publish(job.view)

    def _pump(self) -> None:
        held_s = self._held_until_s - now_s()
        if held_s > 0:
            self._loop.call_later(held_s + 0.01, self._pump)
            return
        while self._ready and not self._held and self._waiting and len(self._running) < self._limits.max_in_flight:
            with self._lock:
                description_id, job = self._waiting.popitem(last=False)
                self._running[description_id] = job
            self._spawn(self._run(job))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: Job) -> None:
        record = await self._ask(job)
        if job.again and record.outcome is not Outcome.DONE and job.cancelled is None and not self._closing:
            job.again, job.held = False, True
            job.text.clear()
            self._back(job, self._held, text="", first_token_s=None, ttft_ms=None, sent_s=None, waiting_ms=None)
            job.expires_s = now_s() + self._patience_s
            self._loop.call_later(self._patience_s, self._expire, job)
            return
        if record.error is not None and record.error.kind in _SEND_AGAIN and self._may_try_again(job):
            self._held_until_s = now_s() + _HOLD_S
            self._back(job, f"waiting: {record.error.message}")
            return
        await self._finish(job, record)

    def _back(self, job: Job, reason: str, **changes: object) -> None:
        """A running job waits again, before all others."""
        job.attempts += 1
        job.active = None
        self._traffic.due(job.request_id, TRAFFIC_CLASS, job.view.due_s)
        with self._lock:
            del self._running[job.view.description_id]
            self._waiting[job.view.description_id] = job
            self._waiting.move_to_end(job.view.description_id, last=False)
        job.view = job.view.model_copy(update=changes)
        self._wait(job, reason)
        self._pump()

    def _may_try_again(self, job: Job) -> bool:
        waited_s = now_s() - job.view.due_s
        return not (job.cancelled or self._closing) and job.attempts + 1 < _MAX_ATTEMPTS and waited_s < self._patience_s

    async def _ask(self, job: Job) -> RequestRecord:
        request = ModelRequest(
            traffic_class=TRAFFIC_CLASS,
            messages=description_messages(self._describe, job.jpegs),
            max_tokens=self._class.max_tokens,
            temperature=self._class.temperature,
            due_s=job.view.due_s,
            request_id=job.request_id,
            json_schema=self._describe.json_schema,
            priority=self._class.priority,
            extra_body=self._class.extra_body,
        )

        def token(event: TokenEvent) -> None:
            self._loop.call_soon_threadsafe(self._on_token, job, event)

        def sent(at_s: float) -> None:
            self._loop.call_soon_threadsafe(self._on_sent, job, at_s)

        job.active = self._traffic.start(request, token, sent)
        if job.cancelled is not None:  # between its turn and this moment
            job.active.cancel(job.cancelled)
        return await job.active.result()

    def _on_sent(self, job: Job, at_s: float) -> None:
        job.feedback.describing(job.view.person_id)
        waiting_ms = (at_s - job.view.due_s) * 1000
        self._show(job, state="streaming", reason="", sent_s=at_s, waiting_ms=waiting_ms)

    def _on_token(self, job: Job, event: TokenEvent) -> None:
        if job.view.first_token_s is None and event.tokens:
            ttft_ms = (event.at_s - job.view.due_s) * 1000
            self._show(job, first_token_s=event.at_s, ttft_ms=ttft_ms)
        if event.text and not event.reasoning:
            job.text.append(event.text)
            job.view = job.view.model_copy(update={"text": "".join(job.text)})
            self._feed.token(job.view, event.text)

    def _cancel(self, camera_id: str, person_id: str | None, reason: str) -> None:
        for job in [*self._waiting.values(), *self._running.values()]:
            if job.view.camera_id == camera_id and person_id in (None, job.view.person_id):
                if (self._held or job.held) and person_id is not None:
                    continue  # the person left while we, not the server, kept the request waiting
                self._cancel_job(job, reason)

    def _cancel_job(self, job: Job, reason: str) -> None:
        job.cancelled = reason
        if job.view.description_id in self._waiting:
            self._never(job, Outcome.CANCELLED, reason)
        elif job.active is not None:
            job.active.cancel(reason)

    def _expire(self, job: Job) -> None:
        if job.view.description_id not in self._waiting:
            return
        left_s = _HELD_LOOK_S if self._held else job.expires_s - now_s()
        if left_s > 0:
            self._loop.call_later(left_s, self._expire, job)
        else:
            reason = "waited too long" if self._ready else "waited too long for the model server"
            self._never(job, Outcome.SKIPPED, reason)

    def _never(self, job: Job, outcome: Outcome, reason: str) -> None:
        """End a waiting job."""
        with self._lock:
            del self._waiting[job.view.description_id]
            self._storing[job.view.description_id] = job
        self._traffic.never_sent(job.request_id, TRAFFIC_CLASS, job.view.due_s, outcome, reason)
        self._spawn(self._end(job, outcome, {"state": outcome.value, "reason": reason}))

    async def _finish(self, job: Job, record: RequestRecord) -> None:
        """The last attempt's outcome is the description's."""
        due_s = job.view.due_s
        changes: dict[str, object] = {
            "state": record.outcome.value,
            "reason": _reason(record),
            "sent_s": record.sent_s,
            "first_token_s": record.first_token_s,
            "last_token_s": record.last_token_s,
            "waiting_ms": None if record.sent_s is None else (record.sent_s - due_s) * 1000,
            "ttft_ms": None if record.ttft_s is None else record.ttft_s * 1000,
            "total_ms": None if record.last_token_s is None else (record.last_token_s - due_s) * 1000,
            "text": record.text.strip() or "".join(job.text).strip(),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reason": record.finish_reason,
            "model": record.model,
        }
        with self._lock:
            del self._running[job.view.description_id]
            self._storing[job.view.description_id] = job
        self._pump()
        await self._end(job, record.outcome, changes)

    async def _end(self, job: Job, outcome: Outcome, changes: dict[str, object]) -> None:
        """Store first, then tell: who hears `done` can rely on it."""
        ended = job.view.model_copy(update=changes)
        if not await self._writer.description(ended, job.thumbnail):
            told = [ended.reason, f"not stored: {self._writer.problem}"]
            ended = ended.model_copy(update={"reason": "; ".join(filter(None, told))})
        job.view = ended
        if outcome is Outcome.DONE:
            job.feedback.finished(ended.person_id, now_s())
        else:
            job.feedback.dropped(ended.person_id, ended.reason, now_s(), retry=outcome is not Outcome.CANCELLED)
        self._feed.publish(ended)
        with self._lock:
            self._storing.pop(ended.description_id, None)
        self._idle.set()


def _reason(record: RequestRecord) -> str:
    """Why a description is not what was hoped for, in words; empty when it is."""
    if record.error is not None:
        return record.error.message
    if record.reason:
        return record.reason
    if record.finish_reason == "length":
        return "cut at the longest allowed length"
    return "" if record.text.strip() else "the model answered with nothing"
