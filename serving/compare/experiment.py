"""Runs a comparison: block after block in the planned order, each written when it ends, so that nothing is lost.

An arm that its server refuses, or under which the server dies twice, is a row with its reason; the others go on. An
interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serving.client import ModelClient
from serving.compare.arms import ArmError, block_workload, server_of
from serving.compare.hosts import Host, HostError
from serving.compare.measure import block_of, image_tokens
from serving.compare.plan import Arm, Experiment, PlannedBlock, Progress, ProgressState
from serving.compare.report import write_report
from serving.compare.statistics import RESAMPLES
from serving.compare.summary import Summary, summarise
from serving.compare.tables import BlockData, Results, read_results, write_block, write_joined, write_json
from serving.config import ServerConfig, ServingConfig
from serving.enginemetrics import EngineMetrics
from serving.load.contents import Contents, PictureSource
from serving.load.run import LoadRun, run_load
from serving.load.trace import Trace
from serving.load.words import Words, find_words
from serving.records import ErrorKind, Outcome, now_s
from serving.status import ServerStatus
from serving.workload import PlannedRequest, Workload, draw

WARM_UP_BLOCK = 9_000
START_GUESS_S = 60.0
BETWEEN_S = 3.0
_WARM_UP_REQUESTS = 2  # a class
_WARM_UP_TOKENS = 4
_WARM_UP_S = 120.0
_PEAK_TOKENS = 16
_PEAK_S = 300.0
_IDLE_S = 15.0
_LAST_STEPS_S = 0.3
_QUICK_RESAMPLES = 400
_DEATHS_ALLOWED = 1
# Settings that only the load's peak can prove.
_MEMORY_SETTINGS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})


@dataclass(frozen=True, slots=True)
class Means:
    """What a comparison needs besides its description.

    Attributes:
        pictures: For classes with pictures. picture_first: In a message, before the text.
        trace: Replayed arrivals. api_key: For the model server.
    """

    serving: ServingConfig
    host: Host
    pictures: PictureSource | None = None
    picture_first: bool = False
    trace: Trace | None = None
    api_key: str | None = None


@dataclass(slots=True)
class _Ready:
    """The server that is up, and our client to it."""

    config: ServerConfig
    status: ServerStatus
    client: ModelClient
    words: Words
    exact_output: bool = True


class Comparison:
    """One comparison in `folder`, described by `experiment`; blocks that are there already are kept.

    `on_progress` is called at every change.
    """

    def __init__(
        self, folder: Path, experiment: Experiment, means: Means, *, on_progress: Callable[[Progress], None]
    ) -> None:
        self.folder = folder
        self.experiment = experiment
        self._means = means
        self._on_progress = on_progress
        self._arms = {arm.name: arm for arm in experiment.arms}
        self._blocks: list[BlockData] = []
        self._ready: _Ready | None = None
        self._started_s = now_s()
        self._block_s: list[float] = []  # of wall clock
        self._start_s: list[float] = []
        self._deaths: dict[str, int] = {}
        self._nonce = int(self._started_s) & 0xFFFFFFFF

    @property
    def results(self) -> Results:
        """What there is so far."""
        return Results(self.folder, self.experiment, self._blocks)

    async def run(self) -> Summary:
        """Do what is left of the plan. However it ends, the blocks that ended are written and summed up.

        Raises:
            ComparisonError: Blocks that are there cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "experiment.json", self.experiment)
        self._blocks = read_results(self.folder).blocks
        state: ProgressState = "failed"
        try:
            for planned in self._left():
                await self._do(planned)
            state = "done"
        except asyncio.CancelledError:
            state = "interrupted"
            raise
        finally:
            await self._leave()
            summary = self._sum_up(RESAMPLES)
            self._say(state, f"{len(self._blocks)} of {len(self.experiment.plan)} blocks")
        return summary

    def _left(self) -> Sequence[PlannedBlock]:
        done = {block.info.number for block in self._blocks}
        return [planned for planned in self.experiment.plan if planned.number not in done]

    async def _do(self, planned: PlannedBlock) -> None:
        """One block, tried again after a death of its server; or its arm refused."""
        while (arm := self._arms[planned.arm]).reason is None:
            try:
                block = await self._block(planned, arm)
            except HostError as error:
                self._refuse(arm, str(error))
                return
            if block is not None:
                write_block(self.folder, block)
                self._blocks.append(block)
                self._blocks.sort(key=lambda item: item.info.number)
                self._sum_up(_QUICK_RESAMPLES)
                return
            self._deaths[arm.name] = self._deaths.get(arm.name, 0) + 1
            await self._leave()
            if self._deaths[arm.name] > _DEATHS_ALLOWED:
                self._refuse(arm, f"the server died under this load again: {self._means.host.trouble}")

    async def _block(self, planned: PlannedBlock, arm: Arm) -> BlockData | None:
        """One block; None when the server died in it."""
        experiment, host = self.experiment, self._means.host
        self._say("starting", "getting the server ready", planned)
        ready = await self._server(arm, planned)
        if arm.kind == "step_budget":
            host.set_step_budget(arm.budget)
        began_s = now_s()
        await self._wait_idle(ready)
        deaths, steps = host.deaths, host.step_reader()
        self._say("running", "", planned)
        load = block_workload(experiment.workload, round_=planned.round, seed=planned.seed, trace=self._means.trace)
        run = await self._load(ready, draw(load), block=planned.number)
        if host.deaths > deaths or _nobody_answers(run):
            return None
        rows = []
        if steps is not None:
            await asyncio.sleep(_LAST_STEPS_S)
            rows = await asyncio.to_thread(steps.read, block=planned.number, arm=planned.arm)
        status = ready.status
        self._block_s.append(now_s() - began_s)
        return block_of(
            run,
            planned,
            load_s=experiment.block_s,
            warm_up_s=experiment.warm_up_s,
            image_rule=ready.config.image_tokens,
            steps=rows,
            steps_lost=0 if steps is None else steps.dropped,
            server={
                "model": status.model,
                "version": status.version,
                "max_num_batched_tokens": status.max_num_batched_tokens,
                "max_num_scheduled_tokens": arm.budget
                if arm.kind == "step_budget"
                else status.max_num_scheduled_tokens,
                "long_prefill_token_threshold": status.long_prefill_token_threshold,
                "exact_texts": ready.words.exact,
                "exact_outputs": ready.exact_output,
            },
        )

    async def _load(self, ready: _Ready, planned: Sequence[PlannedRequest], *, block: int) -> LoadRun:
        metrics = EngineMetrics(window_s=1e9, api_key=self._means.api_key)
        try:
            return await run_load(
                ready.client,
                self._contents(ready, block),
                planned,
                load_s=self.experiment.block_s,
                drain_s=self.experiment.drain_s,
                max_in_flight=self.experiment.max_in_flight,
                metrics=metrics,
            )
        finally:
            await metrics.close()

    def _contents(self, ready: _Ready, block: int) -> Contents:
        return Contents(
            words=ready.words,
            classes=self._means.serving.classes,
            loads=self.experiment.workload.classes,
            pictures=self._means.pictures,
            block=block,
            nonce=self._nonce,
            cache_friendly=self.experiment.cache_friendly,
            picture_first=self._means.picture_first,
            use_priority=ready.config.scheduling_policy == "priority",
            exact_output=ready.exact_output,
        )

    # -- the server ----------------------------------------------------------------------------------------------

    async def _server(self, arm: Arm, planned: PlannedBlock) -> _Ready:
        """The arm's server, ready and warm.

        Raises:
            HostError: It cannot be had.
        """
        try:
            config = server_of(arm, self._means.serving)
        except ArmError as error:
            raise HostError(str(error)) from error
        if self._ready is not None and self._ready.config == config:
            status = await self._means.host.use(config, lambda _line: None)
            self._ready.status = status
            return self._ready
        await self._close_client()
        began_s = now_s()
        status = await self._means.host.use(config, lambda line: self._say("starting", line, planned))
        client = ModelClient(
            status.endpoint,
            model=config.served_model_name or status.model,
            timeouts=self._means.serving.timeouts,
            api_key=self._means.api_key,
        )
        words = await find_words(status.endpoint, status.model or "", self._means.api_key)
        ready = _Ready(config, status, client, words)
        try:
            await self._warm_up(ready, arm, planned)
        except BaseException:
            await client.close()
            raise
        self._start_s.append(now_s() - began_s)
        self._ready = ready
        return ready

    async def _warm_up(self, ready: _Ready, arm: Arm, planned: PlannedBlock) -> None:
        """A few requests of every class, so that nothing is done for the first time in a block; none is counted."""
        self._say("starting", "warming the server up", planned)
        load = self.experiment.workload
        coming = [request for request in draw(load) if request.history_tokens == 0]
        first = [
            replace(request, output_tokens=min(request.output_tokens, _WARM_UP_TOKENS))
            for name in load.classes
            for request in [item for item in coming if item.traffic_class == name][:_WARM_UP_REQUESTS]
        ]
        problem = await self._at_once(ready, first, WARM_UP_BLOCK + planned.number, _WARM_UP_S)
        if problem is not None and "ignore_eos" in problem:
            ready.exact_output = False
            problem = await self._at_once(ready, first, WARM_UP_BLOCK + planned.number, _WARM_UP_S)
        if problem is not None:
            raise HostError(f"a request to warm the server up failed: {problem}")
        if _MEMORY_SETTINGS & set(arm.settings) and ready.config.base_url is None:
            self._say("starting", "checking the memory at the load's peak", planned)
            largest = sorted(coming, key=lambda item: -_size(item, ready.config))[:1] * ready.config.max_num_seqs
            peak = [
                replace(request, number=number, output_tokens=min(request.output_tokens, _PEAK_TOKENS))
                for number, request in enumerate(largest)
            ]
            problem = await self._at_once(ready, peak, WARM_UP_BLOCK + planned.number, _PEAK_S)
            if problem is not None:
                raise HostError(f"it does not hold {len(peak)} of the largest requests at once: {problem}")

    async def _at_once(
        self, ready: _Ready, requests: Sequence[PlannedRequest], block: int, limit_s: float
    ) -> str | None:
        """Send requests together; the first failure, or None."""
        now = [replace(request, due_s=0.0, conversation=None) for request in requests]
        run = await run_load(ready.client, self._contents(ready, block), now, load_s=0.0, drain_s=limit_s)
        for sent in run.requests:
            record = sent.record
            if record.outcome is not Outcome.DONE:
                why = record.error.message if record.error is not None else f"no answer within {limit_s:.0f} s"
                return f"{record.traffic_class}: {why}"
        return None

    async def _wait_idle(self, ready: _Ready) -> None:
        """Until the server has nothing to do, at most some seconds; a server that does not say is taken as idle."""
        metrics = EngineMetrics(api_key=self._means.api_key)
        until_s = now_s() + _IDLE_S
        try:
            while now_s() < until_s:
                figures = await metrics.read(ready.status.endpoint)
                if not (figures.running or 0) + (figures.waiting or 0):
                    return
                await asyncio.sleep(0.5)
        finally:
            await metrics.close()

    async def _close_client(self) -> None:
        if self._ready is not None:
            ready, self._ready = self._ready, None
            await ready.client.close()

    async def _leave(self) -> None:
        await self._close_client()
        await self._means.host.stop()

    # -- what is told --------------------------------------------------------------------------------------------

    def _refuse(self, arm: Arm, reason: str) -> None:
        self._arms[arm.name] = arm.model_copy(update={"reason": " ".join(reason.split())})
        self.experiment = self.experiment.model_copy(update={"arms": list(self._arms.values())})
        write_json(self.folder / "experiment.json", self.experiment)
        self._say("running", f"{arm.name} is refused: {reason}")

    def _sum_up(self, resamples: int) -> Summary:
        results = self.results
        write_joined(results)
        summary = summarise(results, resamples=resamples)
        write_json(self.folder / "summary.json", summary)
        write_report(results, summary)
        return summary

    def _say(self, state: ProgressState, message: str, planned: PlannedBlock | None = None) -> None:
        progress = Progress(
            state=state,
            message=message,
            at_s=now_s(),
            started_s=self._started_s,
            blocks_done=len(self._blocks),
            blocks_total=len(self._blocks) + len(self._to_come()),
            block=None if planned is None else planned.number,
            arm=None if planned is None else planned.arm,
            remaining_s=self._remaining_s(),
            pid=os.getpid(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end a measurement that can still be read off
            write_json(self.folder / "progress.json", progress)
        self._on_progress(progress)

    def _to_come(self) -> Sequence[PlannedBlock]:
        return [planned for planned in self._left() if self._arms[planned.arm].reason is None]

    def _remaining_s(self) -> float:
        """What is left, at the pace so far."""
        left = self._to_come()
        mean_s = sum(self._block_s) / len(self._block_s) if self._block_s else None
        return expected_s(
            left,
            self._arms,
            self._means.serving,
            block_s=mean_s or self.experiment.block_s + BETWEEN_S + min(self.experiment.drain_s, 10.0),
            start_s=sum(self._start_s) / len(self._start_s) if self._start_s else START_GUESS_S,
            running=None if self._ready is None else self._ready.config,
        )


def expected_s(
    plan: Sequence[PlannedBlock],
    arms: Mapping[str, Arm],
    serving: ServingConfig,
    *,
    block_s: float,
    start_s: float,
    running: ServerConfig | None = None,
) -> float:
    """How long blocks take with the starts between them, seconds; `block_s` is a block with its drain."""
    total = len(plan) * block_s
    before = running
    for planned in plan:
        server = server_of(arms[planned.arm], serving)
        if server != before and server.base_url is None:
            total += start_s
        before = server
    return total


def check_lengths(workload: Workload, seeds: Sequence[int], server: ServerConfig, max_model_len: int) -> str | None:
    """Whether every request fits the model; else which does not, in one line. Templates' own tokens are not known."""
    for seed in seeds:
        for request in draw(workload.model_copy(update={"seed": seed})):
            total = request.text_tokens + image_tokens(request, server.image_tokens) + request.output_tokens
            if total >= max_model_len:
                return (
                    f"a request of class {request.traffic_class} has {total} tokens (text, pictures and answer), "
                    f"allowed: below serving.server.max_model_len ({max_model_len}); shorten its prompt, output or "
                    "turns"
                )
    return None


def _size(request: PlannedRequest, server: ServerConfig) -> int:
    return request.text_tokens + image_tokens(request, server.image_tokens)


def _nobody_answers(run: LoadRun) -> bool:
    """Whether the server was gone: the last requests found nobody."""
    last = [sent.record for sent in run.requests][-3:]
    gone = (ErrorKind.CONNECT, ErrorKind.TIMEOUT_CONNECT)
    return bool(last) and all(record.error is not None and record.error.kind in gone for record in last)
