"""The simulated engine in real time: an event loop's task lets it go on, and hands out what it writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from serving.mock.prompt import block_contents
from serving.records import now_s
from serving.simlive import EngineFullError, LiveSimulation
from serving.simstate import SimRequest
from serving.simulate import SimulationError

__all__ = ["Answer", "EngineFullError", "MockEngine"]
_FAILED = "the simulated engine failed; its log says why"
_log = logging.getLogger(__name__)


class Answer:
    """One request in the engine. Iterate over it for the number of tokens that each step wrote; close it in the end."""

    def __init__(self, engine: MockEngine, slot: int) -> None:
        self._engine = engine
        self.slot = slot
        self.cached_tokens = 0
        self.ended = False
        self.news: asyncio.Queue[int | Exception] = asyncio.Queue()  # bounded by the tokens that were asked for

    async def steps(self) -> AsyncIterator[int]:
        """Tokens as they are written.

        Raises:
            SimulationError: The engine failed.
        """
        while not (self.ended and self.news.empty()):
            got = await self.news.get()
            if isinstance(got, Exception):
                raise got
            yield got

    def close(self) -> None:
        """Let the engine drop what it has not written yet."""
        self._engine.drop(self)


class MockEngine:
    """Paces one `LiveSimulation`.

    A step that the event loop notices late is followed by a step that ends when it would have ended, so lateness does
    not add up; `lag_s` is how late the last one was noticed.
    """

    def __init__(self, live: LiveSimulation, clock: Callable[[], float] = now_s) -> None:
        self.live = live
        self.lag_s = 0.0
        self.failed = False
        self._clock = clock
        self._start_s = clock()
        self._answers: dict[int, Answer] = {}
        self._wake = asyncio.Event()

    def submit(self, request: SimRequest, tokens: Sequence[str]) -> Answer:
        """Queue a request now; `tokens` are those of prompt and answer.

        Raises:
            SimulationError: It can never run.
            EngineFullError: The queue is full.
        """
        if self.failed:
            raise SimulationError(_FAILED)
        arrived = replace(request, arrival_s=self._clock() - self._start_s)
        answer = Answer(self, self.live.submit(arrived, list(block_contents(tokens, self.live.rule.block_tokens))))
        self._answers[answer.slot] = answer
        self._wake.set()
        return answer

    def drop(self, answer: Answer) -> None:
        """Cancel, unless it has ended."""
        if self._answers.get(answer.slot) is answer:
            del self._answers[answer.slot]
            self.live.cancel(answer.slot)
            self._wake.set()

    async def run(self) -> None:
        """Let the engine go on until cancelled. Should it fail, every request is told, now and later."""
        try:
            await self._pace()
        except Exception:
            _log.exception("the simulated engine failed")
            self.failed = True
            self._tell_all(SimulationError(_FAILED))

    async def _pace(self) -> None:
        while True:
            self._wake.clear()
            due = self.live.next_s
            now = self._clock() - self._start_s
            if due is not None and now >= due:
                self.lag_s = now - due
            self._go_on(now)
            due = self.live.next_s
            delay = None if due is None else max(0.0, due - (self._clock() - self._start_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), delay)

    def _tell_all(self, error: SimulationError) -> None:
        for answer in list(self._answers.values()):
            answer.news.put_nowait(error)
            answer.close()

    def _go_on(self, now: float) -> None:
        try:
            written = self.live.advance(now)
        except SimulationError as error:
            _log.error("%s", error)
            self._tell_all(error)
            return
        for item in written:
            answer = self._answers[item.slot]
            answer.cached_tokens = self.live.cached_tokens(item.slot)
            answer.ended = item.ended
            for _ in item.times_s:
                answer.news.put_nowait(1)
            if item.ended:
                del self._answers[item.slot]
