"""`framechat up`, `serve` and `ui`: start the parts, show their readiness, keep them alive, stop them for certain.

The service and the page start at once with the model server, so that the page can show the server's progress. A part
that ends before it was ever ready ends the whole; one that was ready is started again with back-off while the others
stay. Every process runs under a guard (:mod:`serving.guard`), so not even kill -9 of this one leaves any behind.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from pipeline.config import Config, ConfigError
from pipeline.runfolder import MODEL_SERVER_LOG, make_run_folder, write_config
from serving.address import reachable_host
from serving.command import ServerError
from serving.process import tail
from serving.records import now_s
from serving.server import check_port
from ui.parts import (
    ModelServerPart,
    OnChange,
    Part,
    PartFailedError,
    PartState,
    ProcessPart,
    child_environment,
)
from ui.startscreen import StartScreen

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130
_TAIL_LINES = 12
_APP = Path(__file__).with_name("app.py")
MakeParts = Callable[[Path, Path, OnChange], list[Part]]


def run_everything(config: Config, *, with_ui: bool = True) -> int:
    """Start the model server, the service and the page; returns the exit code of `framechat up`."""

    def make(folder: Path, config_path: Path, on_change: OnChange) -> list[Part]:
        status_path = folder / "server.json"
        parts: list[Part] = [
            _model_server(config, folder, on_change, status_path),
            _service(config, folder, config_path, status_path, on_change),
        ]
        if with_ui:
            parts.append(_page(config, folder, config_path, on_change))
        return parts

    ports = [("service.port", config.service.host, config.service.port)]
    if with_ui:
        ports.append(("ui.port", config.ui.host, config.ui.port))
    open_line = f"Open {page_url(config)}" if with_ui else f"The service answers at {service_url(config)}"
    return _run(config, make, [*_server_port(config), *ports], announce=("page" if with_ui else "service", open_line))


def run_server(config: Config) -> int:
    """Start only the model server; returns the exit code of `framechat serve`."""
    server = config.serving.server
    if server.base_url is not None:
        print(f"framechat: serving.server.base_url is {server.base_url}: nothing to serve", file=sys.stderr)
        return EXIT_USAGE

    def make(folder: Path, _config_path: Path, on_change: OnChange) -> list[Part]:
        return [_model_server(config, folder, on_change, folder / "server.json")]

    return _run(config, make, _server_port(config), announce=("model server", f"The API is at {server.endpoint}"))


def run_page(config: Config) -> int:
    """Start only the page, for a service that runs already; returns the exit code of `framechat ui`."""

    def make(folder: Path, config_path: Path, on_change: OnChange) -> list[Part]:
        return [_page(config, folder, config_path, on_change)]

    ports = [("ui.port", config.ui.host, config.ui.port)]
    return _run(config, make, ports, announce=("page", f"Open {page_url(config)}"))


def service_url(config: Config) -> str:
    """Where processes of this machine reach the service."""
    return f"http://{reachable_host(config.service.host)}:{config.service.port}"


def page_url(config: Config) -> str:
    """Where a browser on this machine finds the page."""
    return f"http://{reachable_host(config.ui.host)}:{config.ui.port}"


def _server_port(config: Config) -> list[tuple[str, str, int]]:
    server = config.serving.server
    return [] if server.base_url is not None else [("serving.server.port", server.host, server.port)]


def _model_server(config: Config, folder: Path, on_change: OnChange, status_path: Path) -> ModelServerPart:
    log_path = folder / MODEL_SERVER_LOG
    return ModelServerPart(config.serving.server, log_path=log_path, status_path=status_path, on_change=on_change)


def _service(config: Config, folder: Path, config_path: Path, status_path: Path, on_change: OnChange) -> ProcessPart:
    return ProcessPart(
        "service",
        [sys.executable, "-m", "ui.cli", "service", "--config", str(config_path)],
        health_url=f"{service_url(config)}/health",
        log_path=folder / "service.log",
        env=child_environment(FRAMECHAT_SERVER_STATUS=str(status_path), FRAMECHAT_LOG_FOLDER=str(folder)),
        on_change=on_change,
    )


def _page(config: Config, folder: Path, config_path: Path, on_change: OnChange) -> ProcessPart:
    options = {
        "server.headless": "true",
        "server.address": config.ui.host,
        "server.port": str(config.ui.port),
        "server.fileWatcherType": "none",
        "server.runOnSave": "false",
        "browser.gatherUsageStats": "false",
        "server.maxUploadSize": str(-(-config.service.max_upload_bytes // 2**20)),  # Streamlit's own limit is 200 MB
    }
    arguments = [item for key, value in options.items() for item in (f"--{key}", value)]
    public = {"FRAMECHAT_PUBLIC_URL": config.service.public_url} if config.service.public_url else {}
    return ProcessPart(
        "page",
        [sys.executable, "-m", "streamlit", "run", str(_APP), *arguments],
        health_url=f"{page_url(config)}/_stcore/health",
        log_path=folder / "page.log",
        env=child_environment(FRAMECHAT_SERVICE_URL=service_url(config), FRAMECHAT_CONFIG=str(config_path), **public),
        on_change=on_change,
    )


def _run(config: Config, make: MakeParts, ports: Sequence[tuple[str, str, int]], *, announce: tuple[str, str]) -> int:
    """Check what can be checked before anything starts, then supervise."""
    try:
        for setting, host, port in ports:
            check_port(host, port, setting)
        folder = make_run_folder(config)
        config_path = write_config(config, folder)
    except (ServerError, ConfigError) as error:
        print(f"framechat: {error}", file=sys.stderr)
        return EXIT_FAILED
    console = Console(highlight=False)
    return asyncio.run(Supervisor(console, folder, announce).run(lambda say: make(folder, config_path, say)))


class Supervisor:
    """Runs the parts side by side until one fails for good or a signal comes."""

    def __init__(self, console: Console, folder: Path, announce: tuple[str, str]) -> None:
        self._folder = folder
        self._announced_part, self._open_line = announce
        self._screen = StartScreen(console)
        self._started_s = now_s()
        self._parts: list[Part] = []
        self._interrupted = asyncio.Event()
        self._was_ready: set[str] = set()

    async def run(self, make: Callable[[OnChange], list[Part]]) -> int:
        """The exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupted.set)
        with self._screen:
            self._screen.line(f"Logs: {self._folder}")
            self._parts = make(self._on_change)
            tasks = {asyncio.create_task(part.run()): part for part in self._parts}
            interrupted = asyncio.create_task(self._interrupted.wait())
            try:
                done, _ = await asyncio.wait({*tasks, interrupted}, return_when=asyncio.FIRST_COMPLETED)
                self._screen.settle()
                if interrupted in done:
                    self._screen.line("Stopping …")
                    return EXIT_INTERRUPTED
                return self._explain([tasks[task] for task in tasks if task in done], [t for t in tasks if t in done])
            finally:
                await self._stop([*tasks, interrupted])

    async def _stop(self, tasks: list[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
        stopped = await asyncio.gather(*(part.stop() for part in self._parts), return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for part, result in zip(self._parts, stopped, strict=True):
            if isinstance(result, Exception):
                self._screen.error(f"framechat: the {part.name} could not be stopped: {result}")

    def _on_change(self, state: PartState) -> None:
        if self._interrupted.is_set():
            return
        self._screen.update(state)
        if state.state == "restarting" and "next start in" in state.detail:
            self._show_tail(state.name)
        if state.state == "ready" and state.name not in self._was_ready:
            self._was_ready.add(state.name)
            if state.name == self._announced_part:
                self._screen.line(self._open_line)
            if self._parts and self._was_ready >= {part.name for part in self._parts}:
                self._screen.settle()
                took = now_s() - self._started_s
                self._screen.line(f"Everything is ready after {took:.0f} s. Ctrl-C stops it all.")

    def _explain(self, parts: list[Part], tasks: Sequence[asyncio.Task[None]]) -> int:
        code = EXIT_FAILED
        for part, task in zip(parts, tasks, strict=True):
            error = task.exception()
            self._screen.error(f"framechat: {error if error is not None else f'the {part.name} ended'}")
            self._show_tail(part.name)
            if isinstance(error, PartFailedError) and error.unreachable:
                code = EXIT_UNREACHABLE
        return code

    def _show_tail(self, name: str) -> None:
        for part in self._parts:
            if part.name == name and part.log_path is not None and (lines := tail(part.log_path, _TAIL_LINES)):
                self._screen.line(f"Last lines of {part.log_path}:")
                for line in lines:
                    self._screen.line(f"  {line}")
