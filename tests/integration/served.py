"""A real vLLM server with the sample model, for tests: started the way the product starts it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config, load_config
from serving.server import ModelServer
from serving.status import ServerStatus
from tests.answering import free_port

_ROOT = Path(__file__).parents[2]
SAMPLE_CONFIG = _ROOT / "configs" / "sample.yaml"
START_S = 500


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A running server. `config` is the whole deployment it was started with."""

    endpoint: str
    log_path: Path
    config: Config
    server: ModelServer


def device_setting(environment: Path = _ROOT / ".venv-vllm") -> str:
    """The override that asks for the device of the vLLM build that is there; set-up notes it beside the build."""
    stamp = environment / "framechat.json"
    device = json.loads(stamp.read_text(encoding="utf-8"))["device"] if stamp.is_file() else "cpu"
    return f"serving.server.device={device}"


def deployment(folder: Path, *overrides: str) -> Config:
    """configs/sample.yaml on a free port, with the engine's step log on."""
    settings = [f"serving.server.port={free_port()}", "serving.server.log_steps=true", f"run_folder={folder}"]
    settings.append(device_setting())
    return load_config(SAMPLE_CONFIG, overrides=[*settings, *overrides])


@contextmanager
def served(folder: Path, *overrides: str) -> Iterator[ServedModel]:
    """A server of one's own; ready inside the block, gone after it."""
    config = deployment(folder, *overrides)
    log_path = folder / "model-server.log"
    said: list[ServerStatus] = []
    server = ModelServer(config.serving.server, log_path=log_path, on_state=said.append)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="model-server", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(_start(server), loop).result(START_S)
        yield ServedModel(config.serving.server.endpoint, log_path, config, server)
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


async def _start(server: ModelServer) -> None:
    await server.start()
    await server.wait_ready()
