"""The supervisor, with stand-ins for the parts: order, death, restart, signals. The real whole is in tests/browser."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pipeline.childprocess import LOG_FOLDER_VARIABLE
from pipeline.config import Config, load_config
from serving.address import reachable_host
from tests.answering import free_port
from ui.parts import OnChange, Part, ProcessPart, child_environment
from ui.supervisor import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Supervisor,
    _model_server,
    _service,
    page_url,
    run_everything,
    run_page,
    run_server,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups as Linux has them")

SERVE = """
import http.server, sys
print("serving", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIE = "import sys; print('what went wrong', flush=True); sys.exit(4)"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ui.parts._POLL_S", 0.02)


def settings(folder: Path, **more: object) -> Config:
    ports = {key: free_port() for key in ("serving.server.port", "service.port", "ui.port")}
    values = {"run_folder": folder / "runs", "store.folder": folder / "data"} | ports | more
    return load_config(None, overrides=[f"{key}={value}" for key, value in values.items()], environ={})


class Stage:
    """A supervisor with stand-in parts, and what it wrote to the terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = io.StringIO()
        self.parts: list[ProcessPart] = []

    def part(self, name: str, code: str, on_change: OnChange) -> ProcessPart:
        port = free_port()
        part = ProcessPart(
            name,
            [sys.executable, "-c", code, str(port)],
            health_url=f"http://127.0.0.1:{port}/",
            log_path=self.folder / f"{name}.log",
            env=child_environment(),
            on_change=on_change,
        )
        self.parts.append(part)
        return part

    async def run(self, **codes: str) -> int:
        console = Console(file=self.output, width=200)
        supervisor = Supervisor(console, self.folder, announce=("page", "Open the page"))

        def make(on_change: OnChange) -> list[Part]:
            return [self.part(name, code, on_change) for name, code in codes.items()]

        return await asyncio.wait_for(supervisor.run(make), 60)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1500):
            if condition():
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"did not happen:\n{self.output.getvalue()}")

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.output.getvalue()

    def guard(self, number: int) -> psutil.Process:
        process = self.parts[number]._process
        assert process is not None
        assert process.pid is not None
        return psutil.Process(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run(service=SERVE, page=SERVE))
    await stage.until(stage.says("Everything is ready"))
    processes = [process for index in (0, 1) for process in [stage.guard(index), *stage.guard(index).children()]]
    assert len(processes) == 4
    os.kill(os.getpid(), number)
    assert await running == EXIT_INTERRUPTED
    assert [process for process in processes if process.is_running()] == []
    assert "Open the page" in stage.output.getvalue()


async def test_a_part_that_never_comes_up_ends_it_all_with_its_last_lines(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert await stage.run(page=SERVE, service=DIE) == EXIT_FAILED
    output = stage.output.getvalue()
    assert "framechat: the service ended with exit code 4" in output
    assert f"Last lines of {tmp_path / 'service.log'}:\n  what went wrong" in output
    assert all(part._process is not None and not part._process.running for part in stage.parts)


async def test_a_part_that_dies_later_is_started_again_beside_the_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    running = asyncio.create_task(stage.run(service=SERVE, page=SERVE))
    await stage.until(stage.says("Everything is ready"))
    page = stage.guard(1).pid
    stage.guard(0).children()[0].kill()
    await stage.until(stage.says("the service ended by SIGKILL; next start in 1 s"))
    assert "  serving" in stage.output.getvalue(), "the last lines of the log that tells why"
    await stage.until(lambda: stage.parts[0].now.state == "ready")
    assert stage.guard(1).pid == page
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == EXIT_INTERRUPTED


async def test_a_sample_model_that_cannot_be_built_ends_it_with_the_builders_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.server.sample_checkpoint", lambda: None)
    monkeypatch.setattr("serving.server.sample_builder", lambda _python: [sys.executable, "-c", DIE])
    config = settings(tmp_path, **{"serving.server.python": sys.executable})
    stage = Stage(tmp_path)

    def make(on_change: OnChange) -> list[Part]:
        return [_model_server(config, tmp_path, on_change, tmp_path / "server.json")]

    supervisor = Supervisor(Console(file=stage.output, width=200), tmp_path, announce=("page", "Open the page"))
    assert await asyncio.wait_for(supervisor.run(make), 60) == EXIT_FAILED
    output = stage.output.getvalue()
    assert "framechat: building the sample model ended with exit code 4: what went wrong" in output
    assert f"Last lines of {tmp_path / 'sample-model.log'}:\n  what went wrong" in output


def test_the_service_is_told_where_its_children_log(tmp_path: Path) -> None:
    config = settings(tmp_path)
    part = _service(config, tmp_path, tmp_path / "config.yaml", tmp_path / "server.json", lambda _state: None)
    assert part._env[LOG_FOLDER_VARIABLE] == str(tmp_path)


@pytest.mark.parametrize(
    ("run", "key"),
    [
        pytest.param(run_everything, "serving.server.port", id="model server"),
        pytest.param(run_everything, "service.port", id="service"),
        pytest.param(run_everything, "ui.port", id="page"),
        pytest.param(run_server, "serving.server.port", id="serve alone"),
        pytest.param(run_page, "ui.port", id="page alone"),
    ],
)
def test_a_taken_port_is_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Callable[[Config], int], key: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(settings(tmp_path, **{key: port})) == EXIT_FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert f"port {port}" in captured.err
    assert f"set {key}" in captured.err
    assert not (tmp_path / "runs").exists()


def test_serve_with_somebody_elses_server_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(tmp_path, **{"serving.server.base_url": "http://127.0.0.1:9/v1"})
    assert run_server(config) == EXIT_USAGE
    assert "nothing to serve" in capsys.readouterr().err


def test_children_read_the_file_not_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMECHAT__UI__PORT", "1")
    monkeypatch.setenv("FRAMECHAT_API_KEY", "k")
    env = child_environment(FRAMECHAT_SERVICE_URL="http://127.0.0.1:8600")
    assert "FRAMECHAT__UI__PORT" not in env
    assert (env["FRAMECHAT_API_KEY"], env["FRAMECHAT_SERVICE_URL"]) == ("k", "http://127.0.0.1:8600")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="loopback"),
        pytest.param("0.0.0.0", "127.0.0.1", id="every address"),  # noqa: S104
        pytest.param("::", "[::1]", id="every address, IPv6"),
        pytest.param("::1", "[::1]", id="IPv6"),
        pytest.param("camera-box", "camera-box", id="a name"),
    ],
)
def test_reachable_host(host: str, expected: str) -> None:
    assert reachable_host(host) == expected
    assert page_url(load_config(None, overrides=[f"ui.host='{host}'"], environ={})) == f"http://{expected}:8501"
