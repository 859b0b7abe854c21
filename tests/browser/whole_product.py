"""Starting and stopping the whole product for a test, the way a user does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.served import device_setting
from ui.supervisor import EXIT_INTERRUPTED

ROOT = Path(__file__).parents[2]
START_S = 420  # the model server's start on a small machine, and building the sample model where it was never built
STOP_S = 60
GONE_S = 5


@dataclass(frozen=True, slots=True)
class Product:
    """A running FrameChat."""

    page_url: str
    service_url: str


@contextmanager
def running_product(folder: Path) -> Iterator[Product]:
    """`framechat up` with the sample deployment, on ports of its own."""
    model_port, service_port, page_port = free_ports(3)
    settings = {
        "serving.server.port": model_port,
        "service.port": service_port,
        "ui.port": page_port,
        "store.folder": folder / "data",
        "run_folder": folder / "runs",
        "comparisons.folder": folder / "comparisons",
    }
    command = [sys.executable, "-m", "ui.cli", "up", "--config", str(ROOT / "configs" / "sample.yaml")]
    command += ["--set", device_setting()]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    product = Product(f"http://127.0.0.1:{page_port}", f"http://127.0.0.1:{service_port}")
    try:
        wait_ready(product, process, output)
        yield product
    finally:
        stop(process, output)


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


def wait_ready(product: Product, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + START_S
    seen = "nothing answered"
    while time.monotonic() < deadline:
        assert process.poll() is None, f"framechat up ended with {process.returncode}:\n{tail(output)}"
        try:
            server = httpx.get(f"{product.service_url}/status", trust_env=False).json()["server"]
            seen = f"model server {server['state']}: {server['detail']}"
            page = httpx.get(f"{product.page_url}/_stcore/health", trust_env=False)
            if server["state"] == "ready" and page.is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    pytest.fail(f"not ready after {START_S} s ({seen}):\n{tail(output)}")


def stop(process: subprocess.Popen[bytes], output: Path) -> None:
    """Ctrl-C, as a user would: it says so in its exit code, and nothing of it is left."""
    assert process.poll() is None, f"framechat ended by itself with {process.returncode}:\n{tail(output)}"
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        pytest.fail(f"framechat did not stop within {STOP_S} s of Ctrl-C:\n{tail(output)}")
    _, left = psutil.wait_procs(started, timeout=GONE_S)
    assert left == [], f"left behind by framechat: {left}"
    assert code == EXIT_INTERRUPTED, tail(output)


def tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-30:])
