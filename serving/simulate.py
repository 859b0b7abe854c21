"""Predict TTFT and ITL of a load for an engine's settings, before running it.

The scheduler is simulated step by step (serving/simkernel.py); how long a step takes comes from serving/steptime.py. A
request is due when the load says so, reaches the engine after the front end has read it (and decoded its pictures), and
its tokens reach the client after the front end has written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from serving.config import Device, ImageTokens, ServerConfig
from serving.latency import Percentiles, percentiles
from serving.records import Gap, Outcome, RequestRecord
from serving.simkernel import DECODE_FIRST, FIXED_SPLITS, PREFILL_FIRST, VLLM
from serving.simrun import FULL, STEP_COLUMNS, STUCK, advance
from serving.simstate import LOGGED, NOTED, STATE, Rules, Sim, SimImage, SimRequest, new_sim
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import PlannedRequest

Floats = npt.NDArray[np.float64]
# A load that is not done after four times its own length (ten minutes at least) is cut off, and says so.
DEFAULT_HORIZON = 4.0
LEAST_HORIZON_S = 600.0


class SimulationError(ValueError):
    """The load cannot be simulated with these settings; the message is one line."""


class Policy(StrEnum):
    """Who gets a step's tokens."""

    VLLM = "vllm"  # running requests in admission order, then waiting ones
    PREFILL_FIRST = "prefill-first"  # whole prompts before any decode; no chunks
    DECODE_FIRST = "decode-first"  # Sarathi-Serve: every decode, then prompts share the rest
    FIXED_SPLITS = "fixed-splits"  # Dynamic SplitFuse: every decode, then prompts in splits of one size


_CODES = {
    Policy.VLLM: VLLM,
    Policy.PREFILL_FIRST: PREFILL_FIRST,
    Policy.DECODE_FIRST: DECODE_FIRST,
    Policy.FIXED_SPLITS: FIXED_SPLITS,
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What decides the schedule. Defaults are vLLM 0.32's.

    Attributes:
        budget_tokens: Most tokens of one step (`max_num_scheduled_tokens`).
        buffer_tokens: `max_num_batched_tokens`, which sizes the encoder's budget and cache; None: the budget.
        cache_blocks: Blocks of the pool (`serving.kvcache.pool_size`), of `block_tokens` tokens each.
        asynchronous: Whether a step is decided while the one before runs, as vLLM does on a GPU and not on a CPU.
        split_tokens: Size of a split with `Policy.FIXED_SPLITS`; None: half the budget, so that decodes leave room.
    """

    budget_tokens: int
    cache_blocks: int
    block_tokens: int = 16
    buffer_tokens: int | None = None
    max_num_seqs: int = 128
    max_model_len: int = 8192
    long_prefill_threshold: int = 0
    adaptive_threshold: bool = False
    chunked_prefill: bool = True
    by_priority: bool = False
    prefix_caching: bool = True
    whole_images: bool = False
    watermark: float = 0.0
    asynchronous: bool = False
    reserve_prompt: bool = True
    policy: Policy = Policy.VLLM
    split_tokens: int | None = None

    @classmethod
    def of_server(cls, server: ServerConfig, *, cache_blocks: int, block_tokens: int) -> EngineSettings:
        """The settings of a server of ours."""
        return cls(
            budget_tokens=server.max_num_scheduled_tokens or server.max_num_batched_tokens,
            buffer_tokens=server.max_num_batched_tokens,
            cache_blocks=cache_blocks,
            block_tokens=block_tokens,
            max_num_seqs=server.max_num_seqs,
            max_model_len=server.max_model_len,
            long_prefill_threshold=server.long_prefill_token_threshold,
            chunked_prefill=server.enable_chunked_prefill,
            by_priority=server.scheduling_policy == "priority",
            prefix_caching=server.enable_prefix_caching,
            asynchronous=server.device is Device.GPU,
        )

    def rules(self, largest_image_tokens: int) -> Rules:
        """As the kernel reads them. The encoder holds at least one largest image, as the engine provides."""
        if self.budget_tokens < 1 or self.cache_blocks < 2 or self.max_num_seqs < 1 or self.block_tokens < 1:
            raise SimulationError("budget, blocks, block size and max_num_seqs must be 1 or more (blocks: 2)")
        if self.policy is Policy.FIXED_SPLITS and (self.split_tokens or 1) > self.budget_tokens:
            raise SimulationError(
                f"a split of {self.split_tokens} tokens, allowed: at most the budget ({self.budget_tokens})"
            )
        encoder = max(self.buffer_tokens or self.budget_tokens, largest_image_tokens)
        if self.policy is Policy.PREFILL_FIRST:  # whole prompts need all their images at once
            encoder = max(encoder, self.max_num_seqs * self.max_model_len)
        return Rules(
            policy=_CODES[self.policy],
            budget=self.budget_tokens,
            max_num_seqs=self.max_num_seqs,
            threshold=self.long_prefill_threshold,
            adaptive=self.adaptive_threshold,
            chunked=self.chunked_prefill and self.policy is not Policy.PREFILL_FIRST,
            by_priority=self.by_priority,
            block_tokens=self.block_tokens,
            blocks=self.cache_blocks,
            prefix_caching=self.prefix_caching,
            encoder_budget=encoder,
            encoder_cache=encoder,
            whole_items=self.whole_images,
            watermark_blocks=int(self.watermark * self.cache_blocks),
            reserve_prompt=self.reserve_prompt,
            max_model_len=self.max_model_len,
            split=self.split_tokens or max(1, self.budget_tokens // 2),
            depth=2 if self.asynchronous else 1,
        )


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Time outside the engine, seconds: per request and per picture on the way in, per token on the way out."""

    request_s: float = 0.0
    picture_s: float = 0.0
    reply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassForecast:
    """One class: pools of TTFT (from due), ITL (every gap) and TPOT, seconds."""

    traffic_class: str
    requests: int
    finished: int
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    preemptions: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened. `steps` has the columns of `STEP_NAMES`, one row per step."""

    planned: tuple[PlannedRequest, ...]
    token_s: Floats
    token_first: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    preemptions: npt.NDArray[np.int64]
    steps: Floats
    schedule: npt.NDArray[np.int64]
    span_s: float
    cut_off: bool

    def classes(self) -> list[ClassForecast]:
        """Figures per class, in order of name."""
        names = sorted({request.traffic_class for request in self.planned})
        return [self._forecast(name) for name in names]

    def records(self, model: str) -> list[RequestRecord]:
        """The same requests as records of the load generator, so that one report serves both."""
        return [self._record(number, model) for number in range(len(self.planned))]

    def _times(self, number: int) -> Floats:
        first = int(self.token_first[number])
        times = self.token_s[first : first + self.planned[number].output_tokens]
        return times[np.isfinite(times)]

    def _forecast(self, name: str) -> ClassForecast:
        members = [index for index, request in enumerate(self.planned) if request.traffic_class == name]
        ttft: list[float] = []
        gaps: list[Floats] = []
        tpot: list[float] = []
        finished = 0
        for index in members:
            times = self._times(index)
            finished += len(times) == self.planned[index].output_tokens
            if len(times):
                ttft.append(float(times[0]) - self.planned[index].due_s)
            if len(times) > 1:
                gaps.append(np.diff(times))
                tpot.append(float(times[-1] - times[0]) / (len(times) - 1))
        return ClassForecast(
            traffic_class=name,
            requests=len(members),
            finished=finished,
            ttft=percentiles(ttft),
            itl=percentiles(np.concatenate(gaps) if gaps else ()),
            tpot=percentiles(tpot),
            preemptions=int(self.preemptions[members].sum()),
            cached_prompt_tokens=int(self.cached_tokens[members].sum()),
        )

    def _record(self, number: int, model: str) -> RequestRecord:
        request, times = self.planned[number], self._times(number)
        done = len(times) == request.output_tokens
        return RequestRecord(
            request_id=f"simulated-{number}",
            traffic_class=request.traffic_class,
            model=model,
            due_s=request.due_s,
            finished_s=float(times[-1]) if len(times) else self.span_s,
            outcome=Outcome.DONE if done else Outcome.CANCELLED,
            sent_s=request.due_s,
            first_token_s=float(times[0]) if len(times) else None,
            last_token_s=float(times[-1]) if len(times) else None,
            gaps=tuple(
                Gap(end_s=float(end), duration_s=float(gap), tokens=1)
                for end, gap in zip(times[1:], np.diff(times), strict=True)
            ),
            prompt_tokens=int(self.prompt_tokens[number]),
            cached_tokens=int(self.cached_tokens[number]),
            completion_tokens=len(times),
            finish_reason="length" if done else None,
            reason=None if done else "the simulation ended",
        )


STEP_NAMES = (*FEATURE_NAMES, "start_s", "duration_s", "running", "waiting", "free_blocks", "preempted")
_STEP_ROWS = 16_384  # of the table that the kernel fills at a time


def simulate(
    planned: Sequence[PlannedRequest],
    settings: EngineSettings,
    step_time: StepTime,
    *,
    image_tokens: ImageTokens | None = None,
    front_end: FrontEnd | None = None,
    until_s: float | None = None,
    log_limit: int = 0,
    seed: int = 0,
) -> Simulation:
    """Run a drawn load through the engine.

    A turn of a conversation is sent once the answer before it is there; its TTFT counts from when it was due.

    `image_tokens` is the model's rule for pictures. `until_s` cuts the simulation off; by default at four times the
    load's last arrival and no less than ten minutes, so that an overload ends. `log_limit` keeps that many lines of
    (step, request, tokens, images). `seed` draws how step times scatter, where that is known.

    Raises:
        SimulationError: A request can never run with these settings, or the settings contradict one another.
    """
    if not planned:
        raise SimulationError("the load has no requests")
    front_end = front_end or FrontEnd()
    rule = image_tokens or ImageTokens()
    horizon = until_s if until_s is not None else max(LEAST_HORIZON_S, DEFAULT_HORIZON * planned[-1].due_s)
    requests = [as_engine_sees(request, rule, front_end) for request in planned]
    order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
    place = {index: number for number, index in enumerate(order)}
    for index, earlier in _turns_before(planned).items():
        wait_s = front_end.reply_s + requests[index].arrival_s - planned[index].due_s
        requests[index] = replace(requests[index], follows=place[earlier], wait_s=wait_s)
    largest = max((image.tokens for request in requests for image in request.images), default=0)
    try:
        sim = new_sim(settings.rules(largest), [requests[index] for index in order])
    except ValueError as error:
        raise SimulationError(str(error)) from None
    token_s, steps, schedule = run_to_end(sim, step_time, float(horizon), log_limit, seed)
    if sim.counts[STATE] == STUCK:
        raise SimulationError("the engine would hang: a request needs more than budget, encoder or cache can give it")
    return _result(planned, order, sim, token_s + front_end.reply_s, steps, schedule)


def _turns_before(planned: Sequence[PlannedRequest]) -> dict[int, int]:
    """For each request that continues a conversation the place of the one whose answer it needs."""
    latest: dict[str, int] = {}
    before: dict[int, int] = {}
    for index in sorted(range(len(planned)), key=lambda index: planned[index].due_s):
        conversation = planned[index].conversation
        if conversation is not None:
            if conversation in latest and planned[index].history_tokens:
                before[index] = latest[conversation]
            latest[conversation] = index
    return before


def run_to_end(
    sim: Sim, step_time: StepTime, until_s: float, log_limit: int, seed: int = 0
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Run a simulation until nothing is left to do, or nothing more happens before `until_s`.

    Returns the time of every token (NaN where there was none), the steps (rows of `STEP_NAMES`), and the first
    `log_limit` entries of (step, request, tokens, images encoded).
    """
    last = sim.req[-3]
    cost, spread = step_time.coefficients(), step_time.spread(seed)
    token_s = np.full(int(last["token_first"] + last["output"]), np.nan)
    log = np.empty((log_limit, 4), dtype=np.int64)
    rows = np.empty((_STEP_ROWS, STEP_COLUMNS))
    steps: list[Floats] = []
    while True:
        sim.counts[NOTED] = 0
        advance(sim, cost, spread, until_s, rows, log, token_s)
        steps.append(rows[: sim.counts[NOTED]].copy())
        if sim.counts[STATE] != FULL:
            return token_s, np.concatenate(steps), log[: sim.counts[LOGGED]]


def as_engine_sees(request: PlannedRequest, rule: ImageTokens, front_end: FrontEnd) -> SimRequest:
    """Text first, then pictures: the product's own message layout, so that the text can be a shared prefix."""
    images: list[SimImage] = []
    offset = request.text_tokens
    pictures = request.pictures
    count = pictures.count if pictures else 0
    if pictures is not None:
        tokens = pictures.tokens_each(rule)
        for index in range(count):
            images.append(SimImage(offset=offset, tokens=tokens, content=(request.number, index)))
            offset += tokens
    return SimRequest(
        arrival_s=request.due_s + front_end.request_s + count * front_end.picture_s,
        prompt_tokens=offset,
        output_tokens=request.output_tokens,
        priority=request.priority,
        prefix=request.prefix,
        prefix_tokens=request.prefix_tokens,
        stream=request.conversation,
        images=tuple(images),
    )


def _result(
    planned: Sequence[PlannedRequest],
    order: list[int],
    sim: Sim,
    token_s: Floats,
    steps: Floats,
    schedule: npt.NDArray[np.int64],
) -> Simulation:
    """Back to the order of the load."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    records = sim.req[:-2][place]
    schedule[:, 1] = np.asarray(order, dtype=np.int64)[schedule[:, 1]]
    span = float(steps[-1, len(FEATURE_NAMES)] + steps[-1, len(FEATURE_NAMES) + 1]) if len(steps) else 0.0
    return Simulation(
        planned=tuple(planned),
        token_s=token_s,
        token_first=records["token_first"].copy(),
        prompt_tokens=records["prompt"].copy(),
        cached_tokens=records["hits"].copy(),
        preemptions=records["preemptions"].copy(),
        steps=steps,
        schedule=schedule,
        span_s=span,
        cut_off=bool((records["known"] >= 0).any()),
    )
