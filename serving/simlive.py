"""The simulated engine with requests that come, are cancelled and are answered while it runs.

The scheduler is the simulator's own (serving/simrun.py), taken on from one moment to the next; nothing here knows a
clock: the caller says what time it is. Requests lie in a fixed number of slots, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.simrun import FULL, IDLE, STEP_COLUMNS, STUCK, advance
from serving.simstate import (
    ARRIVED,
    CANCELLED,
    DUE,
    ENDS,
    FREE,
    IN_FLIGHT,
    NOTED,
    RUNNING,
    SLOT,
    STATE,
    STEPS,
    WAITING,
    Ints,
    Records,
    SimRequest,
    check_requests,
    empty_sim,
)
from serving.simulate import EngineSettings, Policy, SimulationError
from serving.steptime import StepTime

_STEP_ROWS = 256


class EngineFullError(Exception):
    """Every slot is taken: as many requests run and wait as the engine was made for."""


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that one request got: when each was ready, seconds; `ended` with its last."""

    slot: int
    times_s: tuple[float, ...]
    ended: bool


@dataclass(slots=True)
class Totals:
    """What the engine did since it started, counted as vLLM's metrics count."""

    steps: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class _Numbers:
    """Numbers for contents: the same content has the same number as long as anything refers to it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[Hashable, int] = {}
        self._what: list[Hashable] = [None] * count
        self.users = np.zeros(count, dtype=np.int64)

    def take(self, content: Hashable, kept: Callable[[], npt.NDArray[np.bool_]]) -> int:
        """The content's number, with one user more. `kept` tells which numbers the engine still holds something of."""
        number = self._of.get(content)
        if number is None:
            if not self._free:
                self._forget(kept())
            number = self._free.pop()
            self._of[content], self._what[number] = number, content
        self.users[number] += 1
        return number

    def _forget(self, kept: npt.NDArray[np.bool_]) -> None:
        for number in np.flatnonzero((self.users == 0) & ~kept).tolist():
            if self._of.pop(self._what[number], None) is not None:
                self._free.append(number)


class LiveSimulation:
    """One simulated engine.

    Args:
        slots: Most requests at once, running and waiting.
        most_images: Most images of one request.
        largest_image_tokens: The largest picture that the model takes, which the encoder has room for.

    Raises:
        SimulationError: The settings contradict one another.
    """

    def __init__(
        self,
        settings: EngineSettings,
        step_time: StepTime,
        *,
        slots: int,
        most_images: int = 16,
        largest_image_tokens: int = 0,
    ) -> None:
        self.settings = settings
        self.rule = settings.rules(largest_image_tokens)
        self.totals = Totals()
        self._most_images = most_images
        self._sim = empty_sim(self.rule, slots=slots, most_images=most_images)
        self._req: Records = self._sim.req[:-2]
        self._cost, self._spread = step_time.coefficients(), step_time.spread()
        self._token_s = np.full(slots * self.rule.max_model_len, np.nan)
        self._rows = np.empty((_STEP_ROWS, STEP_COLUMNS))
        self._log = np.empty((0, 4), dtype=np.int64)
        self._seen = self._req["known"].copy()
        self._free = list(range(slots - 1, -1, -1))
        self._leaving: list[tuple[int, int]] = []  # cancelled slots, and the step that must have ended
        self._named: Ints = np.zeros(slots, dtype=np.int64)
        self._contents = _Numbers(len(self._sim.key))
        self._pictures = _Numbers(len(self._sim.img) - 2)

    @property
    def running(self) -> int:
        """Requests that run."""
        return int(self._sim.counts[RUNNING])

    @property
    def waiting(self) -> int:
        """Requests that wait, those included that the engine has not looked at yet."""
        return int(self._sim.counts[WAITING] + self._sim.counts[DUE] - self._sim.counts[ARRIVED])

    @property
    def cache_usage(self) -> float:
        """Part of the KV cache's blocks that requests hold, 0..1."""
        return 1.0 - float(self._sim.counts[FREE]) / (self.rule.blocks - 1)

    @property
    def next_s(self) -> float | None:
        """When the oldest step ends; None when none runs."""
        if self._sim.counts[IN_FLIGHT] == 0:
            return None
        return float(self._sim.clock[ENDS + self._sim.counts[SLOT]])

    def cached_tokens(self, slot: int) -> int:
        """Prompt tokens that the request found in the prefix cache."""
        return int(self._req["hits"][slot])

    def submit(self, request: SimRequest, blocks: Sequence[Hashable]) -> int:
        """Queue a request at its `arrival_s`, no earlier than those before it; returns its slot.

        `blocks` says what each full block of prompt and output holds: equal contents are the same keys and values (the
        request's `prefix` and `stream` are not looked at).

        Raises:
            ValueError: `blocks` does not name every full block.
            SimulationError: It can never run.
            EngineFullError: Every slot is taken.
        """
        full = (request.prompt_tokens + request.output_tokens) // self.rule.block_tokens
        if len(blocks) != full:
            raise ValueError(f"{len(blocks)} contents for {full} full blocks")
        try:
            check_requests(self.rule, [request])
        except ValueError as error:
            raise SimulationError(str(error).replace("request 0 ", "the request ")) from None
        if len(request.images) > self._most_images:
            raise SimulationError(f"the request has {len(request.images)} images, allowed: {self._most_images}")
        whole = not self.rule.chunked and self.settings.policy is not Policy.PREFILL_FIRST
        if whole and request.prompt_tokens > self.rule.budget:
            raise SimulationError(
                f"the prompt has {request.prompt_tokens} tokens, allowed without chunks: {self.rule.budget}, the budget"
            )
        if not self._free:
            raise EngineFullError
        slot = self._free.pop()
        self._fill(slot, request, blocks)
        ring, due = self._sim.arrivals, self._sim.counts[DUE]
        ring[due % len(ring)] = slot
        self._sim.counts[DUE] += 1
        return slot

    def _fill(self, slot: int, request: SimRequest, blocks: Sequence[Hashable]) -> None:
        record = self._req[slot]
        for name in ("computed", "promised", "active", "held", "cached", "stepped", "stepped_items", "stepped_images"):
            record[name] = 0
        record["hits"] = record["preemptions"] = 0
        record["arrival_s"], record["priority"] = request.arrival_s, request.priority
        record["prompt"] = record["known"] = self._seen[slot] = request.prompt_tokens
        record["output"] = request.output_tokens
        first = int(record["table_first"])
        for index, content in enumerate(blocks):
            self._sim.content[first + index] = self._contents.take(content, lambda: self._sim.key["head"] >= 0)
        record["item_end"] = record["item_first"] + len(request.images)
        images = self._sim.img[:-2]
        for index, image in enumerate(request.images):
            number = self._pictures.take(
                (image.content, image.tokens), lambda: (images["cached"] > 0) | (images["refs"] > 0)
            )
            images["size"][number] = image.tokens
            item = self._sim.item[int(record["item_first"]) + index]
            item["offset"], item["tokens"], item["image"], item["held"] = image.offset, image.tokens, number, 0
        self._named[slot] = len(blocks)

    def cancel(self, slot: int) -> None:
        """Let a request go: it gets nothing more, and its blocks are free when the step that runs has ended."""
        if self._seen[slot] < 0:
            return
        if self._is_coming(slot):
            self._req["known"][slot] = -1
        else:
            self._sim.cancelled[self._sim.counts[CANCELLED]] = slot
            self._sim.counts[CANCELLED] += 1
        self._seen[slot] = -1
        self._leaving.append((slot, -1))

    def _is_coming(self, slot: int) -> bool:
        """Whether the engine has not looked at the request yet."""
        counts, ring = self._sim.counts, self._sim.arrivals
        return any(ring[place % len(ring)] == slot for place in range(counts[ARRIVED], counts[DUE]))

    def advance(self, until_s: float) -> list[Written]:
        """Go on until `until_s`; returns what was written meanwhile.

        Raises:
            SimulationError: The engine hangs: requests wait that it can never run.
        """
        while True:
            self._sim.counts[NOTED] = 0
            advance(self._sim, self._cost, self._spread, until_s, self._rows, self._log, self._token_s)
            self._count(self._rows[: self._sim.counts[NOTED]])
            if self._sim.counts[STATE] != FULL:
                break
        written = self._written()
        self._let_go()
        if self._sim.counts[STATE] == STUCK:
            raise SimulationError("the engine hangs: a request needs more than budget, encoder or cache can give it")
        return written

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return bool(self._sim.counts[STATE] == IDLE) and self.waiting == 0

    def _count(self, rows: npt.NDArray[np.float64]) -> None:
        self.totals.steps += len(rows)
        self.totals.step_tokens += int(rows[:, 1].sum() + rows[:, 2].sum())
        self.totals.preemptions += int(rows[:, -1].sum())

    def _written(self) -> list[Written]:
        known, found = self._req["known"], []
        for slot in np.flatnonzero((known != self._seen) & (self._seen >= 0)).tolist():
            record = self._req[slot]
            prompt, output = int(record["prompt"]), int(record["output"])
            before = int(self._seen[slot]) - prompt
            ended = bool(known[slot] < 0)
            now = output if ended else int(known[slot]) - prompt
            first = int(record["token_first"])
            found.append(Written(slot, tuple(self._token_s[first + before : first + now].tolist()), ended))
            self._seen[slot] = known[slot]
            self.totals.generation_tokens += now - before
            if before == 0:
                self.totals.prompt_tokens += prompt
                self.totals.prefix_queries += prompt
                self.totals.prefix_hits += int(record["hits"])
            if ended:
                self._free_slot(slot)
        return found

    def _let_go(self) -> None:
        """Cancelled slots are used again once no step in flight knows them."""
        counts, staying = self._sim.counts, []
        for slot, after in self._leaving:
            if self._req["known"][slot] >= 0 or self._is_coming(slot):
                staying.append((slot, after))
            elif after < 0 and counts[IN_FLIGHT] > 0:
                staying.append((slot, int(counts[STEPS])))
            elif after >= 0 and counts[STEPS] - counts[IN_FLIGHT] < after:
                staying.append((slot, after))
            else:
                self._free_slot(slot)
        self._leaving = staying

    def _free_slot(self, slot: int) -> None:
        record = self._req[slot]
        first = int(record["table_first"])
        np.subtract.at(self._contents.users, self._sim.content[first : first + self._named[slot]], 1)
        items = self._sim.item[int(record["item_first"]) : int(record["item_end"])]
        np.subtract.at(self._pictures.users, items["image"], 1)
        self._free.append(slot)
