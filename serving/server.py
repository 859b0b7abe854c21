"""The model server's life: start vLLM, wait for its health, notice its death, restart it, stop it for certain.

With `base_url` in the settings the server is somebody else's: it is only watched. A :class:`ModelServer` says at every
change what state the server is in (:class:`serving.status.ServerStatus`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from serving.attach import RunningServer, UnreachableError, describe_running, reason_of
from serving.command import (
    PROJECT,
    ServerError,
    build_command,
    build_environment,
    model_argument,
    sample_builder,
    sample_checkpoint,
    server_python,
)
from serving.config import SAMPLE_MODEL, ServerConfig
from serving.process import GuardedProcess, describe_exit, tail
from serving.records import now_s
from serving.scheduler.wiring import Wiring, why_not
from serving.startup import LogFollower, cause_of, progress_of
from serving.status import ServerStatus, State
from serving.tls import certificates

_log = logging.getLogger(__name__)
_POLL_S = 0.25
_TICK_S = 1.0
_HEALTH_INTERVAL_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
# So many failed health checks in a row, and the server is taken for dead. One that does not answer in time may be busy,
# with every core at work on pictures: it gets longer than one that refuses or answers that it is sick.
_HEALTH_MISSES = 3
_SILENT_MISSES = 6
_ATTACHED_INTERVAL_S = 5.0
_KEPT_LINES = 400
_LAST_LINES = 80
_BUILDER_GRACE_S = 2.0


class ModelServer:
    """Keeps one vLLM server alive, or watches somebody else's.

    Use: `await start()`, `await wait_ready()`, then `await watch()` for ever in a task of its own; `await stop()` at
    the end, always. `on_state` is called at every change, and every second while the server is starting.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        log_path: Path,
        on_state: Callable[[ServerStatus], None] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.log_path = log_path
        #: The log that tells most now: the builder's while the sample model is built, and where that failed.
        self.current_log = log_path
        self._on_state = on_state or (lambda _status: None)
        self._environ = os.environ if environ is None else environ
        self._process: GuardedProcess | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._started_s = now_s()
        self._was_ready = False
        self._stopping = False
        #: Why the server has no scheduler plugin; None where it has (or nothing was started yet).
        self.no_plugin: str | None = None if config.base_url is None else "the server is not ours"
        self.status = ServerStatus(
            state="starting",
            detail="not started yet",
            endpoint=config.endpoint,
            attached=config.base_url is not None,
            since_s=self._started_s,
        )

    @property
    def api_key(self) -> str | None:
        """The key for this server, from the environment variable that the settings name."""
        return self._environ.get(self.config.api_key_env) or None

    def _say(self, state: State, detail: str, **changes: Any) -> None:
        moment = now_s()
        since = self.status.since_s if state == self.status.state else moment
        if state == "ready" and self.status.state != "ready":
            changes.setdefault("elapsed_s", moment - self._started_s)
        elif state != "ready":
            changes.setdefault("elapsed_s", moment - since)
        self.status = dataclasses.replace(
            self.status, state=state, detail=" ".join(detail.split()), since_s=since, **changes
        )
        self._on_state(self.status)

    # -- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Launch the server; returns as soon as its process runs. Nothing to do for an attached one.

        Raises:
            ServerError: The port is taken, the server environment is missing, or the sample model cannot be built.
        """
        self._started_s = now_s()
        if self.config.base_url is not None:
            self._say("starting", f"looking for {self.config.endpoint}")
            return
        if self._process is not None and self._process.running:
            raise RuntimeError("already running")
        state: State = "restarting" if self._was_ready else "starting"
        try:
            check_port(self.config.host, self.config.port, "serving.server.port")
            python = server_python(self.config)
            model = await self._model_argument(python, state)
            if self._stopping:
                return
            self._say(state, "starting vLLM")
            self._lines.clear()
            self.current_log = self.log_path
            self._follower = LogFollower(self.log_path)
            plugin = self._scheduler_plugin(python)
            self._process = GuardedProcess(
                build_command(self.config, python=python, model=model, plugin=plugin),
                log_path=self.log_path,
                env=build_environment(self.config, python=python, environ=self._environ, plugin=plugin),
                grace_s=self.config.shutdown_timeout_s,
            )
            await self._process.start()
            if self._stopping:  # while it was starting
                await self._process.stop()
        except (ServerError, OSError) as error:
            self._say("down", str(error))
            raise ServerError(str(error)) from error
        self._say(state, "starting vLLM", pid=self._process.pid)

    def _scheduler_plugin(self, python: Path) -> Wiring | None:
        """The plugin's wiring; None where it is switched off, or cannot go into this vLLM, which starts without it."""
        self.no_plugin = why_not(python, self.config.extra_args) if self.config.scheduler_plugin else "switched off"
        if self.no_plugin is None:
            return Wiring(self.log_path.parent.absolute())
        if self.config.scheduler_plugin:
            _log.warning("the engine's steps will not be recorded: %s", self.no_plugin)
        return None

    async def _model_argument(self, python: Path, state: State) -> str:
        """What vLLM loads. The sample model is built first where it is missing, with its progress as ours."""
        if self.config.model != SAMPLE_MODEL:
            return model_argument(self.config.model)
        folder = sample_checkpoint()
        if folder is None:
            await self._build_sample(python, state)
            folder = sample_checkpoint()
        if folder is None:
            raise ServerError("the sample model is not complete after it was built; run `python -m samples.vlm`")
        return str(folder)

    async def _build_sample(self, python: Path, state: State) -> None:
        """In a process of its own, so that Ctrl-C ends it at once."""
        self.current_log = log_path = self.log_path.with_name("sample-model.log")
        follower = LogFollower(log_path)
        self._process = builder = GuardedProcess(
            sample_builder(python),
            log_path=log_path,
            env={**self._environ, "PYTHONUNBUFFERED": "1"},
            cwd=PROJECT,
            grace_s=_BUILDER_GRACE_S,
        )
        await builder.start()
        ended = asyncio.ensure_future(builder.wait())
        line = ""
        while not ended.done():
            line = ([line, *follower.lines()])[-1]
            self._say(state, line or "building the sample model")
            await asyncio.wait({ended}, timeout=_TICK_S)
        if (code := ended.result()) != 0:
            line = ([line, *follower.lines()])[-1]
            failed = f"building the sample model {describe_exit(code)}{line and f': {line}'}; see {log_path}"
            raise ServerError(failed if not self._stopping else "stopped")

    # -- ready ---------------------------------------------------------------------------------------------------

    async def wait_ready(self) -> ServerStatus:
        """Wait until the server answers, at most `startup_timeout_s`.

        Raises:
            ServerError: It ended, did not answer in time, or (attached) refuses us. The server is stopped then.
        """
        deadline = self._started_s + self.config.startup_timeout_s
        try:
            if self.config.base_url is not None:
                await self._wait_attached(deadline)
            else:
                await self._wait_health(deadline)
            running = await self._describe()
        except ServerError as error:
            if self._process is not None:
                await self._process.stop()
            self._say("down", str(error), pid=None)
            raise
        self._was_ready = True
        self._say_ready(running)
        return self.status

    async def _wait_health(self, deadline: float) -> None:
        process = self._process
        if process is None:
            raise RuntimeError("start() first")
        root = self.config.endpoint.removesuffix("/v1")
        said = now_s()
        async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False, verify=certificates()) as client:
            while True:
                progress = self._read_log()
                if progress or now_s() - said >= _TICK_S:
                    said = now_s()
                    self._say(self.status.state, progress or self.status.detail)
                if not process.running:
                    raise ServerError(self._cause_of_death(await process.wait()))
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{root}/health")).status_code == httpx.codes.OK:
                        return
                if now_s() > deadline:
                    raise ServerError(
                        f"the model server did not answer within {self.config.startup_timeout_s:.0f} s "
                        f"(last: {self.status.detail}); raise serving.server.startup_timeout_s or see {self.log_path}"
                    )
                await asyncio.sleep(_POLL_S)

    async def _wait_attached(self, deadline: float) -> None:
        while True:
            try:
                await describe_running(self.config.endpoint, self.api_key)
            except UnreachableError as error:
                if now_s() > deadline:
                    raise
                self._say("starting", f"waiting: {error}")
                await asyncio.sleep(_TICK_S)
            except ServerError as error:
                if "API key" in str(error):
                    raise ServerError(f"{error}; set {self.config.api_key_env}") from error
                raise
            else:
                return

    def _read_log(self) -> str | None:
        """The newest progress in the log since the last look."""
        newest = None
        for line in self._follower.lines():
            self._lines.append(line)
            newest = progress_of(line) or newest
        return newest

    def _cause_of_death(self, code: int) -> str:
        self._read_log()
        how = describe_exit(code)
        # A server that ran may have logged errors of single requests long before.
        cause = cause_of(list(self._lines)[-_LAST_LINES:] if self._was_ready else self._lines)
        return f"the model server {how}: {cause}" if cause else f"the model server {how}; see {self.log_path}"

    def _budgets(self, running: RunningServer) -> dict[str, Any]:
        ours = None if self.config.base_url is not None else self.config
        return {
            "model": running.model,
            "version": running.version,
            "max_model_len": running.max_model_len,
            "max_num_batched_tokens": ours.max_num_batched_tokens if ours else running.max_num_batched_tokens,
            "max_num_scheduled_tokens": ours.max_num_scheduled_tokens if ours else running.max_num_scheduled_tokens,
            "long_prefill_token_threshold": (
                ours.long_prefill_token_threshold if ours else running.long_prefill_token_threshold
            ),
        }

    def _say_ready(self, running: RunningServer) -> None:
        known = self._budgets(running)
        found = "found " if self.config.base_url is not None else ""
        unrecorded = self.no_plugin if self.config.base_url is None and self.config.scheduler_plugin else None
        without = f"; its steps are not recorded: {unrecorded}" if unrecorded else ""
        self._say("ready", f"{found}{dataclasses.replace(running, **known).in_words()}{without}", **known)

    async def _describe(self) -> RunningServer:
        return await describe_running(
            self.config.endpoint, self.api_key, model=self.config.served_model_name, timeout_s=_HEALTH_TIMEOUT_S
        )

    # -- watch ---------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Keep it alive until :meth:`stop`: notice death or silence, restart with doubling, capped back-off."""
        if self.config.base_url is not None:
            await self._watch_attached()
            return
        backoff_s = self.config.restart_backoff_s
        while not self._stopping:
            cause = await self._wait_death()
            if self._stopping:
                return
            if now_s() - self.status.since_s > self.config.restart_backoff_max_s:
                backoff_s = self.config.restart_backoff_s  # it ran well for a while: start patient again
            restarted = False
            while not restarted and not self._stopping:
                self._say(
                    "restarting", f"{cause}; next start in {backoff_s:.0f} s", pid=None,
                    restarts=self.status.restarts + 1,
                )  # fmt: skip
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self.config.restart_backoff_max_s)
                try:
                    await self.start()
                    await self.wait_ready()
                    restarted = True
                except ServerError as error:
                    cause = str(error)

    async def _wait_death(self) -> str:
        """Returns the cause when the process ended or stopped answering (it is stopped for certain then)."""
        process = self._process
        if process is None:
            raise RuntimeError("start() first")
        ended = asyncio.ensure_future(process.wait())
        try:
            return await self._watch_health(process, ended)
        finally:
            ended.cancel()

    async def _watch_health(self, process: GuardedProcess, ended: asyncio.Future[int]) -> str:
        root = self.config.endpoint.removesuffix("/v1")
        misses = 0
        async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False, verify=certificates()) as client:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=_HEALTH_INTERVAL_S)
                self._read_log()
                if done:
                    return self._cause_of_death(ended.result())
                try:
                    answer = await client.get(f"{root}/health")
                except httpx.HTTPError as error:
                    misses += 1
                    patience = _SILENT_MISSES if isinstance(error, httpx.TimeoutException) else _HEALTH_MISSES
                    problem = reason_of(error)
                else:
                    misses = 0 if answer.status_code == httpx.codes.OK else misses + 1
                    patience = _HEALTH_MISSES
                    problem = f"HTTP {answer.status_code}"
                if misses >= patience:
                    await process.stop()
                    await ended
                    self._read_log()
                    cause = cause_of(list(self._lines)[-_LAST_LINES:])
                    return f"the model server failed {misses} health checks ({cause or problem})"

    async def _watch_attached(self) -> None:
        while not self._stopping:
            await asyncio.sleep(_ATTACHED_INTERVAL_S)
            try:
                running = await self._describe()
            except ServerError as error:
                self._say("down", str(error))
            else:
                if self.status.state != "ready":
                    self._say_ready(running)

    async def stop(self) -> None:
        """Stop the server and everything it started; returns when they are gone. An attached one is left alone."""
        self._stopping = True
        if self._process is not None:
            await self._process.stop()
        if self.config.base_url is None:
            self._say("down", "stopped", pid=None)

    def log_tail(self, lines: int = 15) -> list[str]:
        """The last lines of `current_log`."""
        return tail(self.current_log, lines)


def check_port(host: str, port: int, setting: str) -> None:
    """Make sure that `port` can be bound.

    Raises:
        ServerError: It is taken, or `host` is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ServerError(
            f"port {port} on {host} cannot be used ({error.strerror or error}); stop what uses it or set {setting}"
        ) from error
