"""The parts that one supervisor keeps alive: the model server, and the processes of our own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from pipeline.config import ENV_PREFIX
from serving.command import ServerError
from serving.config import ServerConfig
from serving.process import GuardedProcess, describe_exit
from serving.records import now_s
from serving.server import ModelServer
from serving.status import ServerStatus, State, write_status

_POLL_S = 0.2
_START_DEADLINE_S = 120.0
_BACKOFF_S = 1.0
_BACKOFF_MAX_S = 60.0
_GRACE_S = 10.0


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
    log_path: Path | None

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
    """The model server, its state written to `status_path` for the service."""

    name = "model server"

    def __init__(self, config: ServerConfig, *, log_path: Path, status_path: Path | None, on_change: OnChange) -> None:
        self.log_path: Path | None = None if config.base_url is not None else log_path
        self._status_path = status_path
        self._on_change = on_change
        self._attached = config.base_url is not None
        self._server = ModelServer(config, log_path=log_path, on_state=self._on_state)
        self._on_state(self._server.status)

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
        """Start, wait for health, watch and restart."""
        try:
            await self._server.start()
            await self._server.wait_ready()
        except ServerError as error:
            raise PartFailedError(str(error), unreachable=self._attached) from error
        await self._server.watch()

    async def stop(self) -> None:
        """Stop the server; an attached one is left alone."""
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
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
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


def reachable_host(host: str) -> str:
    """The address under which this machine reaches a server that listens on `host`, ready for a URL."""
    if host in ("0.0.0.0", ""):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def child_environment(**more: str) -> dict[str, str]:
    """Our environment for a child that reads the written configuration.

    Overrides from the environment are in that file already; applied again they would win over `--set`.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return kept | {"PYTHONUNBUFFERED": "1"} | more
