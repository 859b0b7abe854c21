"""The life of a real vLLM server: start, health, death, restart, attach, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from serving.attach import describe_running
from serving.command import ServerError
from serving.config import ServerConfig
from serving.process import tail
from serving.server import ModelServer
from serving.status import ServerStatus
from tests.answering import free_port
from tests.integration.served import ServedModel, deployment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def family(pid: int) -> list[psutil.Process]:
    guard = psutil.Process(pid)
    return [guard, *guard.children(recursive=True)]


async def until(condition: object, timeout_s: float) -> None:
    assert callable(condition)
    for _ in range(int(timeout_s / 0.1)):
        if condition():
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not within {timeout_s} s")


async def test_start_kill_restart_stop(tmp_path: Path) -> None:
    """A killed engine is noticed, the server comes back by itself, and a stop leaves no process. With an API key."""
    config = deployment(tmp_path, "serving.server.restart_backoff_s=0.5").serving.server
    said: list[ServerStatus] = []
    key = "not-for-the-command-line"
    environ = {**os.environ, config.api_key_env: key}
    server = ModelServer(config, log_path=tmp_path / "server.log", on_state=said.append, environ=environ)
    try:
        await server.start()
        ready = await server.wait_ready()
        assert (ready.state, ready.model, ready.max_model_len) == ("ready", "sample", config.max_model_len)
        assert ready.version
        assert ready.elapsed_s > 0
        details = [status.detail for status in said if status.state == "starting"]
        assert any("weights" in detail for detail in details), "progress of the start, from the log"

        watching = asyncio.create_task(server.watch())
        assert ready.pid is not None
        first = family(ready.pid)
        with pytest.raises(ServerError, match="refuses the API key"):
            await describe_running(config.endpoint)
        assert not any(key in " ".join(process.cmdline()) for process in first)
        engine = [process for process in first if "EngineCore" in process.name()]
        assert len(engine) == 1
        engine[0].send_signal(signal.SIGKILL)
        await until(lambda: server.status.state == "restarting", 60)
        assert "engine" in server.status.detail
        await until(lambda: server.status.state == "ready", config.startup_timeout_s)
        assert alive(first) == [], "nothing of the dead server may be left beside the new one"
        assert server.status.restarts == 1
        assert (await describe_running(config.endpoint, key)).model == "sample"

        assert server.status.pid is not None
        second = family(server.status.pid)
        await server.stop()
        assert alive(second) == []
        await asyncio.wait_for(watching, 10)
    finally:
        await server.stop()


async def test_attach_says_what_it_found(model_server: ServedModel, tmp_path: Path) -> None:
    config = ServerConfig(base_url=model_server.endpoint)
    server = ModelServer(config, log_path=tmp_path / "none.log")
    await server.start()
    ready = await server.wait_ready()
    assert (ready.attached, ready.state, ready.model) == (True, "ready", "sample")
    assert ready.max_model_len == model_server.config.serving.server.max_model_len
    assert f"found vLLM {ready.version} with sample" in ready.detail
    assert ready.max_num_batched_tokens is None, "vLLM tells its budget in development mode only"
    await server.stop()
    assert (await describe_running(model_server.endpoint)).model == "sample", "somebody else's server is left alone"


async def test_the_running_server_describes_itself(model_server: ServedModel) -> None:
    found = await describe_running(model_server.endpoint)
    assert found.models == ("sample",)
    assert found.max_model_len == model_server.config.serving.server.max_model_len


async def test_a_taken_port_is_told_before_anything_starts(model_server: ServedModel, tmp_path: Path) -> None:
    config = model_server.config.serving.server
    server = ModelServer(config, log_path=tmp_path / "server.log")
    with pytest.raises(ServerError, match=rf"port {config.port} .*serving\.server\.port"):
        await server.start()
    assert not (tmp_path / "server.log").exists()


async def test_a_refused_flag_ends_with_its_cause(tmp_path: Path) -> None:
    config = ServerConfig(port=free_port(), extra_args=["--no-such-flag"])
    server = ModelServer(config, log_path=tmp_path / "server.log", environ=dict(os.environ))
    await server.start()
    with pytest.raises(ServerError, match="no-such-flag"):
        await server.wait_ready()
    assert server.status.state == "down"
    assert any("no-such-flag" in line for line in tail(tmp_path / "server.log"))
