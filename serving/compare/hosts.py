"""The server that an arm runs on: started, restarted and watched by us, or a running one that is only used."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from serving.attach import describe_running
from serving.command import ServerError
from serving.config import ServerConfig
from serving.records import now_s
from serving.scheduler.control import SchedulerControl, SchedulerControlError
from serving.scheduler.steps import StepReader
from serving.scheduler.wiring import STEPS_NAME
from serving.server import ModelServer
from serving.status import ServerStatus

_TICK_S = 0.2
Say = Callable[[str], None]


class HostError(Exception):
    """The server cannot be used for an arm; the message is one line."""


class Host(Protocol):
    """Gives arms their server."""

    async def use(self, server: ServerConfig, say: Say) -> ServerStatus:
        """Have a ready server with these settings, started first where it is not the one that runs.

        Raises:
            HostError: It does not start, or nobody answers.
        """

    def set_step_budget(self, tokens: int | None) -> None:
        """Move the tokens of one step; None: as the server was started.

        Raises:
            HostError: It cannot be moved.
        """

    def step_reader(self) -> StepReader | None:
        """Reads the steps from now on; None where the server does not record them."""

    @property
    def deaths(self) -> int:
        """How often a server died after it had been ready."""

    @property
    def trouble(self) -> str:
        """Why it died the last time."""

    async def stop(self) -> None:
        """Leave everything as it was found."""


class OwnServer:
    """Servers of ours, one at a time. Their logs lie in `folder`, a folder for each start."""

    def __init__(self, folder: Path, *, environ: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environ = environ
        self._server: ModelServer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._starts = len(list(folder.glob("server-*")))  # of a comparison that is resumed
        self._restarts = 0
        self._say: Say = lambda _line: None
        self.deaths = 0
        self.trouble = ""

    async def use(self, server: ServerConfig, say: Say) -> ServerStatus:
        """See :class:`Host`."""
        self._say = say
        if self._server is None or self._server.config != server:
            await self.stop()
            await self._start(server)
        return await self._ready(server.startup_timeout_s)

    async def _start(self, server: ServerConfig) -> None:
        self._starts += 1
        self._restarts = 0
        log_path = self._folder / f"server-{self._starts:03d}" / "server.log"
        self._server = ModelServer(server, log_path=log_path, on_state=self._told, environ=self._environ)
        try:
            await self._server.start()
            await self._server.wait_ready()
        except ServerError as error:
            await self.stop()
            raise HostError(str(error)) from error
        self._watching = asyncio.create_task(self._server.watch())

    async def _ready(self, timeout_s: float) -> ServerStatus:
        """It may be coming back after its death."""
        until_s = now_s() + timeout_s
        while self._server is not None:
            if self._server.status.state == "ready":
                return self._server.status
            if now_s() > until_s:
                break
            await asyncio.sleep(_TICK_S)
        detail = self._server.status.detail if self._server is not None else "it is stopped"
        await self.stop()
        raise HostError(detail)

    def _told(self, status: ServerStatus) -> None:
        if status.state != "ready":
            self._say(status.detail)
        if status.restarts > self._restarts:
            self.deaths += 1
            self.trouble = status.detail.partition("; next start in")[0]
        self._restarts = status.restarts

    def _control(self) -> SchedulerControl | None:
        server = self._server
        if server is None or server.no_plugin is not None:
            return None
        return SchedulerControl(server.log_path.parent.absolute())

    def set_step_budget(self, tokens: int | None) -> None:
        """See :class:`Host`."""
        control = self._control()
        if control is None:
            why = "there is no server" if self._server is None else self._server.no_plugin
            raise HostError(f"step budgets need the scheduler plugin, which this server lacks: {why}")
        _set(control, tokens)

    def step_reader(self) -> StepReader | None:
        """See :class:`Host`."""
        if self._server is None or self._control() is None:
            return None
        return StepReader(self._server.log_path.parent.absolute(), from_now=True)

    async def stop(self) -> None:
        """See :class:`Host`."""
        self._say = lambda _line: None
        watching, self._watching = self._watching, None
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
            # What counts of them is in the blocks; they are much larger.
            shutil.rmtree(server.log_path.parent / STEPS_NAME, ignore_errors=True)
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


class RunningServer:
    """Somebody else's server. With `folder`, the run folder of a server of ours, step budgets can be moved and steps
    are recorded; at the end the step budget is what it was.
    """

    deaths = 0
    trouble = ""

    def __init__(self, server: ServerConfig, *, api_key: str | None, folder: Path | None = None) -> None:
        self._server = server
        self._api_key = api_key
        self._folder = folder
        self._before: int | None = None

    async def use(self, server: ServerConfig, say: Say) -> ServerStatus:
        """See :class:`Host`."""
        try:
            running = await describe_running(server.endpoint, self._api_key, model=server.served_model_name)
        except ServerError as error:
            raise HostError(str(error)) from error
        return ServerStatus(
            state="ready",
            detail=f"found {running.model}",
            endpoint=server.endpoint,
            attached=True,
            since_s=now_s(),
            model=running.model,
            version=running.version,
            max_model_len=running.max_model_len,
            max_num_batched_tokens=running.max_num_batched_tokens,
            max_num_scheduled_tokens=running.max_num_scheduled_tokens,
            long_prefill_token_threshold=running.long_prefill_token_threshold,
        )

    def set_step_budget(self, tokens: int | None) -> None:
        """See :class:`Host`."""
        if self._folder is None:
            raise HostError(
                "step budgets move through the scheduler plugin of a server of ours; name its run folder with "
                "--server-folder, or leave out --server-url"
            )
        control = SchedulerControl(self._folder)
        if self._before is None:
            try:
                self._before = control.state().step_budget
            except SchedulerControlError as error:
                raise HostError(str(error)) from error
        _set(control, self._before if tokens is None else tokens)

    def step_reader(self) -> StepReader | None:
        """See :class:`Host`."""
        if self._folder is None:
            return None
        try:
            SchedulerControl(self._folder).state()
        except SchedulerControlError:
            return None
        return StepReader(self._folder, from_now=True)

    async def stop(self) -> None:
        """See :class:`Host`."""
        if self._before is not None and self._folder is not None:
            with contextlib.suppress(HostError):  # it may be gone
                _set(SchedulerControl(self._folder), self._before)


def _set(control: SchedulerControl, tokens: int | None) -> None:
    try:
        control.set_step_budget(tokens)
    except SchedulerControlError as error:
        raise HostError(str(error)) from error
