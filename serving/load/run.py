"""Open-loop load on one server: every request is due at its time, whatever the server does.

What delays a request in the client counts, for its times are taken from when it was due; it is also told apart:
behind the turn before (a conversation cannot go on before its answer is there), behind a cap on requests at once where
one is set, and the client's own lag, which is everything else between due and sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from serving.client import ActiveRequest, ModelClient
from serving.enginemetrics import EngineFigures, EngineMetrics
from serving.load.contents import Contents, Prepared, Turn
from serving.records import Outcome, RequestRecord, now_s
from serving.request import ModelRequest
from serving.workload import PlannedRequest

DRAIN_REASON = "the block's drain ended"
_LEAD_S = 0.25
_AHEAD = 64  # requests prepared before they are due
_LAG_INTERVAL_S = 0.05
_READ_INTERVAL_S = 2.0
_CANCEL_S = 10.0


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request of the load and how it went; the waits are parts of sent - due, seconds."""

    planned: PlannedRequest
    record: RequestRecord
    behind_cap_s: float = 0.0
    behind_turn_s: float = 0.0

    @property
    def lag_s(self) -> float | None:
        """The client's own delay between due and sent; None when it was never sent."""
        sent_s = self.record.sent_s
        return None if sent_s is None else sent_s - self.record.due_s - self.behind_cap_s - self.behind_turn_s


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The server's own counts at one moment, and how many requests we had open then."""

    at_s: float
    ours: int
    figures: EngineFigures


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What a load did.

    Attributes:
        start_s: The load's second 0 on `now_s()`'s clock.
        end_s: When the last request had ended.
        loop_lags_s: How late timers of the client's event loop fired, sampled all along.
        readings: The server's counts, every 2 s. final: its figures over the whole block.
    """

    start_s: float
    end_s: float
    requests: list[SentRequest]
    loop_lags_s: list[float]
    readings: list[ServerReading]
    final: EngineFigures = field(default_factory=EngineFigures)


async def run_load(
    client: ModelClient,
    contents: Contents,
    planned: Sequence[PlannedRequest],
    *,
    load_s: float,
    drain_s: float,
    max_in_flight: int | None = None,
    metrics: EngineMetrics | None = None,
) -> LoadRun:
    """Send every planned request when it is due, and wait for the answers.

    Args:
        client: Talks to the server.
        contents: What the requests say.
        planned: In the order in which they are due.
        load_s: Length of the load; it lasts so long even when the last request ends before.
        drain_s: What is open so long after the load is cancelled.
        max_in_flight: A cap on requests at once. Time behind it counts and is reported.
        metrics: Reads the server's own counts; must be new, for its figures are of this load.
    """
    load = _Load(client, contents, load_s=load_s, drain_s=drain_s, max_in_flight=max_in_flight, metrics=metrics)
    return await load.run(planned)


class _Load:
    def __init__(
        self,
        client: ModelClient,
        contents: Contents,
        *,
        load_s: float,
        drain_s: float,
        max_in_flight: int | None,
        metrics: EngineMetrics | None,
    ) -> None:
        self._client = client
        self._contents = contents
        self._load_s = load_s
        self._drain_s = drain_s
        self._cap = asyncio.Semaphore(max_in_flight) if max_in_flight is not None else None
        self._metrics = metrics
        self._active: set[ActiveRequest] = set()
        self._ended: list[SentRequest] = []
        self._turns: dict[str, asyncio.Task[list[Turn]]] = {}
        self._readings: list[ServerReading] = []
        self._closing = False

    async def run(self, planned: Sequence[PlannedRequest]) -> LoadRun:
        lags: list[float] = []
        tasks: set[asyncio.Task[list[Turn]]] = set()
        with ThreadPoolExecutor(1, thread_name_prefix="load-contents") as pool:
            rest = iter(planned)
            ahead = deque(pool.submit(self._contents.prepare, request) for request in islice(rest, _AHEAD))
            # The load begins with its first requests ready, so that making them delays none.
            await asyncio.gather(*(asyncio.wrap_future(making) for making in ahead))
            await self._read()  # where the counters start
            stop_lag = self._client.measure_lag(_LAG_INTERVAL_S, lags.append)
            reader = asyncio.create_task(self._keep_reading())
            start_s = now_s() + _LEAD_S
            try:
                while ahead:
                    prepared = await asyncio.wrap_future(ahead.popleft())
                    ahead.extend(pool.submit(self._contents.prepare, request) for request in islice(rest, 1))
                    due_s = start_s + prepared.planned.due_s
                    await _sleep_until(due_s)
                    tasks.add(self._begin(prepared, due_s))
                await _sleep_until(start_s + self._load_s)
                await self._drain(tasks, until_s=start_s + self._load_s + self._drain_s)
            finally:
                stop_lag()
                reader.cancel()
                for making in ahead:
                    making.cancel()
                for active in list(self._active):
                    active.cancel("the load was stopped")
                for task in tasks:
                    task.cancel()
                await asyncio.gather(reader, *tasks, return_exceptions=True)
        for task in tasks:
            if task.cancelled():
                raise RuntimeError(f"a request did not end within {_CANCEL_S:.0f} s of being cancelled")
            task.result()  # a bug must not pass as a request that is missing
        end_s = now_s()
        final = await self._read()
        self._ended.sort(key=lambda request: request.planned.number)
        return LoadRun(start_s, end_s, self._ended, lags, self._readings, final)

    def _begin(self, prepared: Prepared, due_s: float) -> asyncio.Task[list[Turn]]:
        conversation = prepared.planned.conversation
        before = self._turns.get(conversation) if conversation is not None else None
        task = asyncio.create_task(self._serve(prepared, due_s, before))
        if conversation is not None:
            self._turns[conversation] = task
        return task

    async def _serve(self, prepared: Prepared, due_s: float, before: asyncio.Task[list[Turn]] | None) -> list[Turn]:
        """One request to its end; what was said in its conversation by then."""
        history: list[Turn] = []
        behind_turn_s = behind_cap_s = 0.0
        if before is not None:
            if not before.done():
                await asyncio.wait({before})
                behind_turn_s = now_s() - due_s
            history = before.result()
        if self._cap is not None and self._cap.locked():
            asked_s = now_s()
            await self._cap.acquire()
            behind_cap_s = now_s() - asked_s
        elif self._cap is not None:
            await self._cap.acquire()
        try:
            record = await self._ask(self._contents.request(prepared, due_s, history))
        finally:
            if self._cap is not None:
                self._cap.release()
        self._ended.append(SentRequest(prepared.planned, record, behind_cap_s, behind_turn_s))
        said = [Turn("user", prepared.text)]
        if record.text:
            said.append(Turn("assistant", record.text))
        return [*history, *said]

    async def _ask(self, request: ModelRequest) -> RequestRecord:
        if self._closing:
            return _never_sent(request)
        active = self._client.start(request)
        self._active.add(active)
        try:
            return await active.result()
        finally:
            self._active.discard(active)

    async def _drain(self, tasks: set[asyncio.Task[list[Turn]]], *, until_s: float) -> None:
        """Wait for the answers; then end what is open. Those under way keep what they measured."""
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=max(0.0, until_s - now_s()))
        self._closing = True  # what still waits for a turn or the cap is not sent any more
        for active in list(self._active):
            active.cancel(DRAIN_REASON)
        await asyncio.wait(tasks, timeout=_CANCEL_S)

    async def _keep_reading(self) -> None:
        while self._metrics is not None:
            await asyncio.sleep(_READ_INTERVAL_S)
            await self._read()

    async def _read(self) -> EngineFigures:
        if self._metrics is None:
            return EngineFigures()
        before = len(self._active)
        figures = await self._metrics.read(self._client.endpoint)
        self._readings.append(ServerReading(now_s(), (before + len(self._active)) // 2, figures))
        return figures


def _never_sent(request: ModelRequest) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        traffic_class=request.traffic_class,
        model="",
        due_s=request.due_s,
        finished_s=now_s(),
        outcome=Outcome.CANCELLED,
        reason=DRAIN_REASON,
    )


async def _sleep_until(at_s: float) -> None:
    wait_s = at_s - now_s()
    if wait_s > 0:
        await asyncio.sleep(wait_s)
