"""The server's keeper, against a stand-in that starts in no time. The real vLLM is in tests/integration."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from serving.command import ServerError
from serving.config import ServerConfig
from serving.server import ModelServer, check_port
from serving.status import ServerStatus
from tests.answering import answering, free_port, pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups as Linux has them")

# Takes vLLM's command line as if it were the server environment's Python. A file named `behaviour` beside it says what
# it does: `die` (an error in the log, exit 1), `mute` (never answers), else it serves.
STAND_IN = """#!{python}
import http.server, json, os, pathlib, sys, time
behaviour = pathlib.Path(__file__).with_name("behaviour")
what = behaviour.read_text() if behaviour.exists() else ""
port = int(sys.argv[sys.argv.index("--port") + 1])
print("INFO version 0.0.1", flush=True)
if what == "die":
    sys.exit("ValueError: not enough memory for the weights")
if what == "mute":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sick = pathlib.Path(__file__).with_name("sick").exists()
        pages = {{"/health": "", "/version": {{"version": "0.0.1"}},
                 "/v1/models": {{"data": [{{"id": "stand-in", "max_model_len": 4096}}]}}}}
        found = pages.get(self.path)
        self.send_response(404 if found is None else 503 if sick else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *arguments):
        pass
print("Loading safetensors checkpoint shards:  50% Completed", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the server; the times that tests are about are in their settings."""
    monkeypatch.setattr("serving.server._POLL_S", 0.02)
    monkeypatch.setattr("serving.server._TICK_S", 0.05)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    return python


def settings(stand_in: Path, **more: object) -> ServerConfig:
    values = {"python": stand_in, "port": free_port(), "model": "stand-in", "restart_backoff_s": 0.1} | more
    return ServerConfig.model_validate(values)


@asynccontextmanager
async def keeper(
    config: ServerConfig, folder: Path, **more: object
) -> AsyncIterator[tuple[ModelServer, list[ServerStatus]]]:
    said: list[ServerStatus] = []
    server = ModelServer(config, log_path=folder / "log", on_state=said.append, **more)  # type: ignore[arg-type]
    try:
        yield server, said
    finally:
        await server.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within {timeout_s} s")


def is_ready_again(server: ModelServer, restarts: int) -> bool:
    return (server.status.state, server.status.restarts) == ("ready", restarts)


def command_of(server: ModelServer) -> psutil.Process:
    """The guarded command; the guard may not have started it yet."""
    assert server.status.pid is not None
    guard = psutil.Process(server.status.pid)
    for _ in range(500):
        if children := guard.children():
            return children[0]
        time.sleep(0.02)
    pytest.fail("the guard started nothing")


@pytest.mark.parametrize(
    ("release", "plugin", "said"),
    [
        pytest.param("0.32.0", True, None, id="the release that the plugin knows"),
        pytest.param("0.77.0", True, "not recorded: the plugin knows vLLM 0.32, and this is 0.77.0", id="another"),
        pytest.param("0.32.0", False, None, id="switched off"),
    ],
)
async def test_the_scheduler_plugin_goes_where_it_fits(
    stand_in: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, release: str, plugin: bool, said: str | None
) -> None:
    info = stand_in.parents[1] / "lib" / "python3.11" / "site-packages" / f"vllm-{release}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    async with keeper(settings(stand_in, scheduler_plugin=plugin), tmp_path) as (server, _):
        await server.start()
        await server.wait_ready()
        command, environment = command_of(server).cmdline(), command_of(server).environ()
        inside = plugin and said is None
        assert ("framechat_scheduler.make_scheduler" in command) == inside
        assert environment.get("FRAMECHAT_CONTROL_SOCKET") == (str(tmp_path / "scheduler.sock") if inside else None)
        assert (server.no_plugin is None) == inside
        assert said is None or (said in server.status.detail and "not be recorded" in caplog.text)
        assert said is not None or "recorded" not in server.status.detail


async def test_start_ready_stop(stand_in: Path, tmp_path: Path) -> None:
    config = settings(stand_in, max_num_batched_tokens=512, long_prefill_token_threshold=100)
    async with keeper(config, tmp_path) as (server, said):
        await server.start()
        ready = await server.wait_ready()
        assert (ready.state, ready.model, ready.version, ready.max_model_len) == ("ready", "stand-in", "0.0.1", 4096)
        assert (ready.max_num_batched_tokens, ready.long_prefill_token_threshold) == (512, 100)
        assert "step budget 512" in ready.detail
        assert not ready.attached
        process = command_of(server)
        await server.stop()
        assert not process.is_running()
        assert server.status.state == "down"
    states = [status.state for status in said]
    assert states == sorted(states, key=["starting", "ready", "down"].index)
    assert any(status.detail.startswith(("vLLM 0.0.1", "loading weights: 50%")) for status in said)


async def test_a_server_that_dies_at_once_is_told_with_its_cause(stand_in: Path, tmp_path: Path) -> None:
    (stand_in.parent / "behaviour").write_text("die")
    async with keeper(settings(stand_in), tmp_path) as (server, _):
        await server.start()
        with pytest.raises(ServerError, match=r"exit code 1: ValueError: not enough memory for the weights"):
            await server.wait_ready()
        assert server.status.state == "down"
        assert "not enough memory" in server.log_tail()[-1]


async def test_a_server_that_never_answers_is_stopped_at_the_deadline(stand_in: Path, tmp_path: Path) -> None:
    (stand_in.parent / "behaviour").write_text("mute")
    async with keeper(settings(stand_in, startup_timeout_s=0.5), tmp_path) as (server, _):
        await server.start()
        process = command_of(server)
        with pytest.raises(ServerError, match=r"did not answer within .* s.*startup_timeout_s"):
            await server.wait_ready()
        assert not process.is_running()


async def test_a_dead_server_is_started_again(stand_in: Path, tmp_path: Path) -> None:
    async with keeper(settings(stand_in), tmp_path) as (server, said):
        await server.start()
        await server.wait_ready()
        watching = asyncio.create_task(server.watch())
        for restarts in (1, 2):
            before = server.status.pid
            os.kill(command_of(server).pid, signal.SIGKILL)
            await until(partial(is_ready_again, server, restarts))
            assert server.status.pid != before
        causes = [status.detail for status in said if "next start" in status.detail]
        assert len(causes) == 2
        assert all("ended by SIGKILL" in cause for cause in causes)
        await server.stop()
        await asyncio.wait_for(watching, 5)


async def test_back_off_doubles_up_to_its_cap(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(stand_in, restart_backoff_s=1, restart_backoff_max_s=4)
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds >= 1:
            slept.append(seconds)
        await real_sleep(0.01)

    async with keeper(config, tmp_path) as (server, _):
        await server.start()
        await server.wait_ready()
        monkeypatch.setattr("serving.server.asyncio.sleep", sleep)
        watching = asyncio.create_task(server.watch())
        (stand_in.parent / "behaviour").write_text("die")
        os.kill(command_of(server).pid, signal.SIGKILL)
        while len(slept) < 5:
            await real_sleep(0.02)
        (stand_in.parent / "behaviour").unlink()
        while server.status.state != "ready":
            await real_sleep(0.02)
        assert slept[:5] == [1, 2, 4, 4, 4]
        await server.stop()
        await asyncio.wait_for(watching, 5)


async def test_a_server_that_stops_answering_is_started_again(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.server._HEALTH_INTERVAL_S", 0.05)
    sick = stand_in.parent / "sick"
    async with keeper(settings(stand_in), tmp_path) as (server, said):
        await server.start()
        await server.wait_ready()
        watching = asyncio.create_task(server.watch())
        process = command_of(server)
        sick.touch()
        await until(lambda: server.status.state == "restarting")
        assert not process.is_running()
        sick.unlink()
        await until(lambda: server.status.state == "ready")
        assert any("failed 3 health checks (HTTP 503)" in status.detail for status in said)
        await server.stop()
        await asyncio.wait_for(watching, 5)


async def test_stop_while_starting(stand_in: Path, tmp_path: Path) -> None:
    (stand_in.parent / "behaviour").write_text("mute")
    async with keeper(settings(stand_in), tmp_path) as (server, _):
        await server.start()
        process = command_of(server)
        waiting = asyncio.create_task(server.wait_ready())
        await asyncio.sleep(0.1)
        await server.stop()
        assert not process.is_running()
        with pytest.raises(ServerError):
            await waiting


async def test_attached_comes_late_goes_and_comes_back(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.server._ATTACHED_INTERVAL_S", 0.05)
    config = settings(stand_in)
    attached = ServerConfig(base_url=config.endpoint)
    async with keeper(config, tmp_path) as (theirs, _), keeper(attached, tmp_path / "b") as (ours, said):
        await ours.start()
        waiting = asyncio.create_task(ours.wait_ready())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await theirs.start()
        ready = await asyncio.wait_for(waiting, 10)
        assert (ready.attached, ready.model, ready.pid) == (True, "stand-in", None)
        assert ready.max_num_batched_tokens is None, "its budget is not ours to claim"
        watching = asyncio.create_task(ours.watch())
        sick = stand_in.parent / "sick"
        sick.touch()
        await until(lambda: ours.status.state == "down")
        sick.unlink()
        await until(lambda: ours.status.state == "ready")
        await ours.stop()
        watching.cancel()
        assert command_of(theirs).is_running(), "somebody else's server is left alone"
    assert any(status.detail.startswith("found vLLM 0.0.1 with stand-in") for status in said)


async def test_attached_says_what_it_found_of_the_model_that_is_asked_for(tmp_path: Path) -> None:
    scheduler = {"scheduler_config": {"max_num_batched_tokens": 2048}}
    found = {
        "/v1/models": {"data": [{"id": "first"}, {"id": "mine", "max_model_len": 8192}]},
        "/version": {"version": "0.0.1"},
        "/server_info?config_format=json": {"vllm_config": scheduler},
    }
    with answering(pages(found)) as url:
        config = ServerConfig(base_url=f"{url}/v1", served_model_name="mine")
        async with keeper(config, tmp_path) as (server, _):
            await server.start()
            ready = await server.wait_ready()
    assert ready.detail == "found vLLM 0.0.1 with mine, 8192 tokens of context, step budget 2048"
    assert (ready.model, ready.max_num_batched_tokens) == ("mine", 2048)


async def test_the_sample_models_builder_has_the_log_that_tells(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    monkeypatch.setattr("serving.server.sample_checkpoint", lambda: built[-1] if built else None)
    build = "import sys, time; print('reading the parts', flush=True); time.sleep(0.3); sys.exit('no room left')"
    monkeypatch.setattr("serving.server.sample_builder", lambda _python: [sys.executable, "-c", build])
    async with keeper(settings(stand_in, model="sample"), tmp_path) as (server, said):
        log = tmp_path / "sample-model.log"
        with pytest.raises(ServerError) as caught:
            await server.start()
        assert str(caught.value) == f"building the sample model ended with exit code 1: no room left; see {log}"
        assert any(status.detail == "reading the parts" for status in said)
        assert server.current_log == log
        assert server.log_tail() == ["reading the parts", "no room left"]
        built.append(tmp_path)
        await server.start()
        await server.wait_ready()
        assert server.current_log == server.log_path


async def test_attached_that_never_comes(tmp_path: Path) -> None:
    config = ServerConfig(base_url=f"http://127.0.0.1:{free_port()}/v1", startup_timeout_s=0.2)
    async with keeper(config, tmp_path) as (server, _):
        await server.start()
        with pytest.raises(ServerError, match="does not answer"):
            await server.wait_ready()


async def test_a_missing_environment_is_told(tmp_path: Path) -> None:
    config = ServerConfig(python=tmp_path / "none", port=free_port())
    async with keeper(config, tmp_path) as (server, _):
        with pytest.raises(ServerError, match="make setup"):
            await server.start()
        assert server.status.state == "down"


def test_check_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} on 127.0.0.1 .*in use.*set ui\.port"):
            check_port("127.0.0.1", port, "ui.port")
    check_port("127.0.0.1", port, "ui.port")
    with pytest.raises(ServerError, match=r"203\.0\.113\.1"):
        check_port("203.0.113.1", port, "ui.port")
