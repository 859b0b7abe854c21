"""One server under load: gets an arm's server ready and warm, and sends it a load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from serving.client import ModelClient
from serving.compare.arms import ArmError, server_of
from serving.compare.hosts import Host, HostError
from serving.compare.measure import image_tokens
from serving.compare.plan import Arm, Experiment
from serving.compare.tables import StepRow
from serving.config import ServerConfig, ServingConfig
from serving.enginemetrics import EngineMetrics
from serving.load.contents import Contents, PictureSource
from serving.load.run import LoadRun, run_load
from serving.load.trace import Trace
from serving.load.words import Words, find_words
from serving.records import ErrorKind, Outcome, now_s
from serving.scheduler.steps import StepFileError
from serving.status import ServerStatus
from serving.workload import PlannedRequest, draw

_WARM_UP_BLOCK = 90_000  # above the numbers of blocks, so that nothing said here is said again
_WARM_UP_REQUESTS = 2  # a class
_WARM_UP_TOKENS = 4
_WARM_UP_S = 120.0
_PEAK_TOKENS = 16
_PEAK_S = 300.0
_IDLE_S = 15.0
_LAST_STEPS_S = 0.3
# Settings that only the load's peak can prove.
_MEMORY_SETTINGS = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})

Say = Callable[[str], None]


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
class Ready:
    """A server that is up and warm, and our client to it.

    `exact_output` is False where the server does not let answers be made of the planned length.
    """

    config: ServerConfig
    status: ServerStatus
    client: ModelClient
    words: Words
    exact_output: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """A load that was sent, and the steps that the server recorded meanwhile."""

    run: LoadRun
    ready: Ready
    steps: list[StepRow] = field(default_factory=list)
    steps_lost: int = 0
    wall_s: float = 0.0


class Bench:
    """The server under an experiment's loads, one arm after the other. `start_s` holds how long each start took."""

    def __init__(self, experiment: Experiment, means: Means) -> None:
        self.means = means
        self.start_s: list[float] = []
        self._experiment = experiment
        self._ready: Ready | None = None
        self._moved = False  # the step budget of the server that is up
        # Another run of the same comparison, perhaps on a server that is still warm, must not say the same again.
        self._nonce = int(now_s()) & 0xFFFFFFFF

    @property
    def running(self) -> ServerConfig | None:
        """The server that is up."""
        return None if self._ready is None else self._ready.config

    async def measure(
        self, arm: Arm, planned: Sequence[PlannedRequest], *, block: int, say: Say, on_start: Callable[[], None]
    ) -> Measured | None:
        """Send a load to an arm's server; None when the server died under it.

        Args:
            arm: Whose server and step budget.
            planned: The load, drawn.
            block: Its number, which makes its contents its own.
            say: Told what is done until the load begins.
            on_start: Called when it begins.

        Raises:
            HostError: There is no such server to be had.
        """
        host = self.means.host
        ready = await self._server(arm, say)
        if arm.kind == "step_budget":
            host.set_step_budget(arm.budget)
            self._moved = True
        elif self._moved:  # the same server may serve an arm that has its own budget
            host.set_step_budget(None)
            self._moved = False
        began_s = now_s()
        await self._wait_idle(ready)
        deaths, reader = host.deaths, host.step_reader()
        on_start()
        metrics = EngineMetrics(window_s=1e9, api_key=self.means.api_key)
        experiment = self._experiment
        try:
            run = await run_load(
                ready.client,
                self._contents(ready, block),
                planned,
                load_s=experiment.block_s,
                drain_s=experiment.drain_s,
                max_in_flight=experiment.max_in_flight,
                metrics=metrics,
            )
        finally:
            await metrics.close()
        if host.deaths > deaths or _nobody_answers(run):
            await self.close()
            return None
        steps: list[StepRow] = []
        if reader is not None:
            await asyncio.sleep(_LAST_STEPS_S)
            try:
                steps = await asyncio.to_thread(reader.read, block=block, arm=arm.name)
            except StepFileError as error:  # the figures stand without them; only causes are missing
                say(f"the steps are not known: {error}")
        return Measured(run, ready, steps, 0 if reader is None else reader.dropped, now_s() - began_s)

    def _contents(self, ready: Ready, block: int) -> Contents:
        return Contents(
            words=ready.words,
            classes=self.means.serving.classes,
            loads=self._experiment.workload.classes,
            pictures=self.means.pictures,
            block=block,
            nonce=self._nonce,
            cache_friendly=self._experiment.cache_friendly,
            picture_first=self.means.picture_first,
            use_priority=ready.config.scheduling_policy == "priority",
            exact_output=ready.exact_output,
        )

    async def _server(self, arm: Arm, say: Say) -> Ready:
        """The arm's server, ready and warm."""
        try:
            config = server_of(arm, self.means.serving)
        except ArmError as error:
            raise HostError(str(error)) from error
        if self._ready is not None and self._ready.config == config:
            self._ready.status = await self.means.host.use(config, say)
            return self._ready
        await self._close_client()
        began_s = now_s()
        status = await self.means.host.use(config, say)
        client = ModelClient(
            status.endpoint,
            model=config.served_model_name or status.model,
            timeouts=self.means.serving.timeouts,
            api_key=self.means.api_key,
        )
        try:
            words = await find_words(status.endpoint, status.model or "", self.means.api_key)
            ready = Ready(config, status, client, words)
            await self._warm_up(ready, arm, say)
        except BaseException:
            await client.close()
            raise
        self.start_s.append(now_s() - began_s)
        self._ready, self._moved = ready, False
        return ready

    async def _warm_up(self, ready: Ready, arm: Arm, say: Say) -> None:
        """A few requests of every class, so that nothing is done for the first time in a block; none is counted."""
        say("warming the server up")
        load = self._experiment.workload
        coming = [request for request in draw(load) if request.history_tokens == 0]
        first = [
            replace(request, output_tokens=min(request.output_tokens, _WARM_UP_TOKENS))
            for name in load.classes
            for request in [item for item in coming if item.traffic_class == name][:_WARM_UP_REQUESTS]
        ]
        number = _WARM_UP_BLOCK + len(self.start_s)
        problem = await self._at_once(ready, first, number, _WARM_UP_S)
        if problem is not None and "ignore_eos" in problem:
            ready.exact_output = False
            problem = await self._at_once(ready, first, number, _WARM_UP_S)
        if problem is not None:
            raise HostError(f"a request to warm the server up failed: {problem}")
        if _MEMORY_SETTINGS & set(arm.settings) and coming:
            say("checking the memory at the load's peak")
            rule = ready.config.image_tokens
            largest = max(coming, key=lambda item: item.text_tokens + image_tokens(item, rule))
            peak = [
                replace(largest, number=1000 + index, output_tokens=min(largest.output_tokens, _PEAK_TOKENS))
                for index in range(ready.config.max_num_seqs)
            ]
            problem = await self._at_once(ready, peak, number, _PEAK_S)
            if problem is not None:
                raise HostError(f"it does not hold {len(peak)} of the largest requests at once: {problem}")

    async def _at_once(
        self, ready: Ready, requests: Sequence[PlannedRequest], block: int, limit_s: float
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

    async def _wait_idle(self, ready: Ready) -> None:
        """Until the server has nothing to do, at most some seconds; a server that does not say is taken as idle."""
        metrics = EngineMetrics(api_key=self.means.api_key)
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

    async def close(self) -> None:
        """End our client, and leave the server as it was found: stopped, if it is ours."""
        await self._close_client()
        await self.means.host.stop()


def _nobody_answers(run: LoadRun) -> bool:
    """Whether the server was gone: the last requests found nobody."""
    last = [sent.record for sent in run.requests][-3:]
    gone = (ErrorKind.CONNECT, ErrorKind.TIMEOUT_CONNECT)
    return bool(last) and all(record.error is not None and record.error.kind in gone for record in last)
