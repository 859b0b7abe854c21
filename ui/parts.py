"""The parts that one supervisor keeps alive: the model server, and the processes of our own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import httpx

from pipeline.config import ENV_PREFIX
from serving.command import ServerError
from serving.config import ServerConfig
from serving.process import GuardedProcess, describe_exit
from serving.records import now_s
from serving.server import ModelServer
from serving.status import ServerStatus, State, write_status
from serving.tls import certificates
from serving.wish import Reply, Wish, read_wish, reply_path, wish_path, with_budget, write

_POLL_S = 0.2
_START_DEADLINE_S = 120.0
_BACKOFF_S = 1.0
_BACKOFF_MAX_S = 60.0
_GRACE_S = 10.0
_WISH_POLL_S = 0.5
_START_PAUSES_S = (1.0, 4.0, 15.0, 40.0)


class PartFailedError(RuntimeError):
    """A part ended before it was ever ready: starting it again would not help. One line."""

    def __init__(self, message: str, *, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


@dataclass(frozen=True, slots=True)
class PartState:
    """What one part is doing."""

    name: str
    state: State
    detail: str
    since_s: float


class Part(Protocol):
    """Something that is started, kept alive and stopped."""

    name: str

    @property
    def log_path(self) -> Path | None:
        """The log that tells most about it now; None where it has none."""
        ...

    @property
    def now(self) -> PartState:
        """Its state."""
        ...

    async def run(self) -> None:
        """Start it and keep it alive, until cancelled.

        Raises:
            PartFailedError: It never came up.
        """
        ...

    async def stop(self) -> None:
        """Stop it for certain."""
        ...


OnChange = Callable[[PartState], None]


class ModelServerPart:
    """The model server, its state written to `status_path` for the service, whose wishes are read beside it."""

    name = "model server"

    def __init__(self, config: ServerConfig, *, log_path: Path, status_path: Path | None, on_change: OnChange) -> None:
        self._log_path = log_path
        self._status_path = status_path
        self._on_change = on_change
        self._attached = config.base_url is not None
        self._config = self._asked = config
        self._wish_id: str | None = None
        self._stopping = False
        self._server = ModelServer(config, log_path=log_path, on_state=self._on_state)
        self._on_state(self._server.status)

    @property
    def log_path(self) -> Path | None:
        """The server's, or that of the sample model's builder; None of somebody else's server."""
        return None if self._attached else self._server.current_log

    @property
    def now(self) -> PartState:
        """Its state."""
        status = self._server.status
        return PartState(self.name, status.state, status.detail, status.since_s)

    def _on_state(self, status: ServerStatus) -> None:
        if self._status_path is not None:
            with contextlib.suppress(OSError):  # a full disk must not take the server down with it
                write_status(self._status_path, status)
        self._on_change(PartState(self.name, status.state, status.detail, status.since_s))

    async def run(self) -> None:
        """Start, wait for health, watch and restart; stop it or give it another budget when the service wishes so."""
        try:
            await self._server.start()
            await self._server.wait_ready()
        except ServerError as error:
            raise PartFailedError(str(error), unreachable=self._attached) from error
        while not self._stopping:
            watching = asyncio.create_task(self._server.watch())
            wish = await self._next_wish(watching)
            if wish is None:
                return await watching
            # What is asked for is different from what runs, so the present server ends in either case.
            await self._server.stop()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._server.stop()  # the watcher may have been starting it just now
            if not wish.running:
                wish = await self._stand_still(wish)
            if not self._stopping:
                await self._run_as(wish)
        return None

    async def _next_wish(self, watching: asyncio.Task[None]) -> Wish | None:
        """The next wish that asks for something else than what runs; None when the server's watch ended."""
        while not watching.done():
            wish = self._read_wish()
            if wish is not None and wish.wish_id != self._wish_id and not wish.forgotten:
                self._wish_id = wish.wish_id
                try:
                    wanted = with_budget(self._asked, wish.max_num_batched_tokens)
                except ValueError as error:
                    self._reply(wish.wish_id, "failed", str(error))
                    continue
                if not wish.running or wanted != self._config:
                    return wish
                self._reply(wish.wish_id, "done", "it runs so already")
            await asyncio.wait({watching}, timeout=_WISH_POLL_S)
        return None

    async def _stand_still(self, wish: Wish) -> Wish:
        """Leave the server stopped until another wish comes, or this one is no longer renewed; how to run it then."""
        self._on_state(dataclasses.replace(self._server.status, state="down", detail=wish.reason, pid=None))
        self._reply(wish.wish_id, "done", wish.reason)
        while not self._stopping:
            latest = self._read_wish()
            if latest is None or latest.forgotten:
                break
            if latest.running:
                return latest
            await asyncio.sleep(_WISH_POLL_S)
        return dataclasses.replace(wish, running=True, max_num_batched_tokens=self._config.max_num_batched_tokens)

    async def _run_as(self, wish: Wish) -> None:
        """Start the server as wished; where that fails, as it was before, with a few tries.

        Raises:
            PartFailedError: It does not start as before either.
        """
        self._wish_id = wish.wish_id
        self._reply(wish.wish_id, "working", wish.reason)
        problem = ""
        try:
            wanted = with_budget(self._asked, wish.max_num_batched_tokens)
            if wanted != self._config:
                await self._start_fresh(wanted)
                self._config = wanted
        except (ServerError, ValueError) as error:
            problem = " ".join(str(error).split())
            self._reply(wish.wish_id, "working", f"going back to what ran before: {problem}")
        if problem or self._server.status.state != "ready":
            await self._start_again()
        if problem:
            self._reply(wish.wish_id, "failed", f"{problem}; the server runs as before")
        elif not self._stopping:
            self._reply(wish.wish_id, "done", f"ready after {self._server.status.elapsed_s:.0f} s")

    async def _start_again(self) -> None:
        """Start as before. Its port or memory may be held for a moment longer by what stood in for it."""
        for pause_s in (*_START_PAUSES_S, None):
            if self._stopping:
                return None
            try:
                return await self._start_fresh(self._config)
            except ServerError as error:
                if pause_s is None:
                    raise PartFailedError(str(error)) from error
            await asyncio.sleep(pause_s)
        return None

    async def _start_fresh(self, config: ServerConfig) -> None:
        self._server = ModelServer(config, log_path=self._log_path, on_state=self._on_state)
        if self._stopping:
            raise ServerError("stopped")
        await self._server.start()
        await self._server.wait_ready()

    def _read_wish(self) -> Wish | None:
        if self._status_path is None or self._attached:
            return None
        return read_wish(wish_path(self._status_path))

    def _reply(self, wish_id: str, state: Literal["working", "done", "failed"], detail: str) -> None:
        if self._status_path is not None:
            with contextlib.suppress(OSError):
                write(reply_path(self._status_path), Reply(wish_id, state, " ".join(detail.split())[:400]))

    async def stop(self) -> None:
        """Stop the server; an attached one is left alone."""
        self._stopping = True
        await self._server.stop()


class ProcessPart:
    """A process of our own that answers a health check over HTTP."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        health_url: str,
        log_path: Path,
        env: Mapping[str, str],
        on_change: OnChange,
    ) -> None:
        self.name = name
        self.log_path: Path | None = log_path
        self._log_path = log_path
        self._command = list(command)
        self._health_url = health_url
        self._env = dict(env)
        self._on_change = on_change
        self._process: GuardedProcess | None = None
        self._stopping = False
        self.now = PartState(name, "starting", "starting", now_s())

    def _say(self, state: State, detail: str) -> None:
        since = self.now.since_s if state == self.now.state else now_s()
        self.now = PartState(self.name, state, detail, since)
        self._on_change(self.now)

    async def run(self) -> None:
        """Start it, wait until it answers, start it again when it ends (doubling, capped back-off)."""
        backoff_s = _BACKOFF_S
        was_ready = False
        while not self._stopping:
            started_s = now_s()
            self._say("restarting" if was_ready else "starting", "starting")
            self._process = process = GuardedProcess(
                self._command, log_path=self._log_path, env=self._env, grace_s=_GRACE_S
            )
            await process.start()
            if await self._answers(process):
                was_ready = True
                self._say("ready", "ready")
            code = await process.wait()
            if self._stopping:
                return
            cause = f"the {self.name} {describe_exit(code)}"
            if not was_ready:
                self._say("down", cause)
                raise PartFailedError(cause)
            if now_s() - started_s > _BACKOFF_MAX_S:
                backoff_s = _BACKOFF_S
            self._say("restarting", f"{cause}; next start in {backoff_s:.0f} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    async def _answers(self, process: GuardedProcess) -> bool:
        """Wait for its health check; False when it ended first. Stopped when it takes too long."""
        deadline = now_s() + _START_DEADLINE_S
        async with httpx.AsyncClient(timeout=5.0, trust_env=False, verify=certificates()) as client:
            while process.running:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self._health_url)).is_success:
                        return True
                if now_s() > deadline:
                    await process.stop()
                    return False
                await asyncio.sleep(_POLL_S)
        return False

    async def stop(self) -> None:
        """Stop it and its children."""
        self._stopping = True
        if self._process is not None:
            await self._process.stop()
        self._say("down", "stopped")


def child_environment(**more: str) -> dict[str, str]:
    """Our environment for a child that reads the written configuration.

    Overrides from the environment are in that file already; applied again they would win over `--set`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1"} | more
