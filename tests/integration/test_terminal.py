"""`framechat chat` in a terminal of its own, and Ctrl-C there; the model server is scripted."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.answering import free_port
from tests.component.ui.test_terminal_chat import HELLO, asked, model_server
from tests.scripted_server import Received, Script, ScriptedServer, Wait

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]


class Terminal:
    """What a user at a terminal sees and types."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 30) -> None:
        """Read on until `text` has come; what came before it is forgotten."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come, only {self.seen!r}"
            try:
                more = os.read(self._descriptor, 4096)
            except OSError:  # the other side has gone
                more = b""
            assert more, f"ended before {text!r}: {self.seen!r}"
            self.seen += more.decode(errors="replace")
        self.seen = self.seen.partition(text)[2]


def command(server: ScriptedServer, folder: Path, *more: str) -> list[str]:
    file = folder / "deployment.yaml"
    file.write_text(f"serving: {{server: {{base_url: {server.endpoint}}}}}\nservice: {{port: {free_port()}}}\n")
    return [sys.executable, "-m", "ui.cli", "chat", "--config", str(file), *more]


@contextmanager
def terminal(server: ScriptedServer, folder: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    # setsid makes the pseudo-terminal the controlling one, so that typing ^C interrupts.
    process = subprocess.Popen(
        ["setsid", "--ctty", *command(server, folder)], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        os.close(ours)


SLOW = Script([*HELLO[:2], Wait(50)])


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(tmp_path: Path) -> None:
    def answer(received: Received) -> Script:
        return SLOW if received.body["messages"][-1]["content"] == "slow" else Script(HELLO)

    with ScriptedServer(model_server(answer)) as server, terminal(server, tmp_path) as (user, process):
        user.wait_for("> ")
        user.type("slow\n")
        user.wait_for("Hel")
        user.type("\x03")
        user.wait_for("stopped")
        assert asked(server)[0].gone.wait(5), "the server must see the request go"
        user.wait_for("> ")
        user.type("quick\n")
        user.wait_for("Hello")
        user.wait_for("3 tokens")
        user.wait_for("> ")
        user.type("\x04")
        assert process.wait(20) == 0


def test_ctrl_c_with_one_message_leaves(tmp_path: Path) -> None:
    with ScriptedServer(model_server(SLOW)) as server:
        with subprocess.Popen(
            command(server, tmp_path, "-m", "hello"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(3) == b"Hel"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert b"Traceback" not in err
        assert asked(server)[0].gone.wait(5)
