"""The control channel: a Unix socket that only its owner may use; one JSON object a line each way.

    {"op": "state"}                            the state
    {"op": "set_step_budget", "tokens": 128}   from the next step on; null: back to what the server was started with

The answer is {"state": {...}} or {"error": "one line"}. The engine only ever reads one integer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VERSION = 1
_LINE_BYTES = 4096
_PATIENCE_S = 5.0
_PATH_BYTES = 100  # the kernel's limit is 107


class ControlChannel:
    """Serves one connection after another in a thread of its own. `budget` is the tokens that a step may process now.

    Args:
        path: Of the socket; an old one there is replaced.
        configured: The budget that the server was started with.
        least, most: What may be set.
        figures: More for the state.

    Raises:
        OSError: The socket cannot be made.
    """

    def __init__(
        self, path: Path, *, configured: int, least: int, most: int, figures: Callable[[], dict[str, Any]]
    ) -> None:
        self.budget = configured
        self._configured, self._least, self._most = configured, least, most
        self._figures = figures
        self._path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with reachable(path) as address:
                self._socket.bind(address)
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise
        finally:
            os.umask(mask)
        threading.Thread(target=self._serve, name="framechat-control", daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE_S)
                with connection.makefile("rb") as lines:
                    while line := lines.readline(_LINE_BYTES):
                        connection.sendall(json.dumps(self.answer(line)).encode() + b"\n")

    def answer(self, line: bytes) -> dict[str, Any]:
        """Do what one line asks for."""
        try:
            asked = json.loads(line)
        except ValueError:
            return {"error": "no JSON"}
        if not isinstance(asked, dict) or asked.get("op") not in ("state", "set_step_budget"):
            return {"error": "op must be state or set_step_budget"}
        if asked["op"] == "set_step_budget":
            tokens = asked.get("tokens")
            if tokens is None:
                tokens = self._configured
            elif not isinstance(tokens, int) or isinstance(tokens, bool) or not self._least <= tokens <= self._most:
                return {"error": f"the step budget is {tokens!r}, allowed: {self._least} to {self._most} tokens"}
            self.budget = tokens
        return {"state": self._state()}

    def _state(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "step_budget": self.budget,
            "configured": self._configured,
            "least": self._least,
            "most": self._most,
            **self._figures(),
        }


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """A name for the socket at `path` that is short enough for the kernel, by way of its open folder if need be."""
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
