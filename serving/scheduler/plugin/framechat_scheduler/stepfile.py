"""Steps to files, beside the engine: a bounded queue, a thread that writes, a bounded number of bounded files.

Files are named steps-000001.jsonl and so on. Each begins with a line {"format": 1, "names": {"3": "request id", ...}},
which gives requests a number; a line {"names": {...}} adds more; every other line is one step, a list in the order of
`_line`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

from .recorder import Step

FORMAT = 1
_QUEUE_STEPS = 4096
_FILE_BYTES = 64 * 2**20
_FILES_KEPT = 4
_PAUSE_S = 0.05  # a waking thread takes the interpreter from the engine: rather seldom and for several steps
_CLOSE_S = 5.0
_PART = re.compile(r"steps-(\d{6})\.jsonl")
# vLLM's id of a chat request: chatcmpl-, what X-Request-Id said (or a random id), -, eight random characters. With
# n > 1 each answer has its number and _ in front.
_INTERNAL = re.compile(r"(?:\d+_)?(?:chatcmpl|cmpl)-(?P<ours>.+?)(?:-[0-9a-f]{8})?")


def client_request_id(internal: str) -> str:
    """The id that the client sent as X-Request-Id, from vLLM's internal one; another id as it is."""
    found = _INTERNAL.fullmatch(internal)
    return internal if found is None else found["ours"]


class StepWriter:
    """Takes steps from the engine's thread without keeping it; what does not fit is counted in `dropped`.

    Raises:
        OSError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        queue_steps: int = _QUEUE_STEPS,
        file_bytes: int = _FILE_BYTES,
        files_kept: int = _FILES_KEPT,
    ) -> None:
        self.written = 0
        self.dropped = 0
        self._folder = folder
        self._queue_steps = queue_steps
        self._file_bytes = file_bytes
        self._files_kept = files_kept
        self._queue: deque[Step] = deque()
        self._wake = threading.Event()
        self._idle = False
        self._closing = threading.Event()
        self._names: dict[str, int] = {}
        self._next_name = 0
        self._size_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = None
        self._file = self._next_file()
        self._thread = threading.Thread(target=self._run, name="framechat-steps", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        """Called by the engine's thread only."""
        if len(self._queue) >= self._queue_steps:
            self.dropped += 1
            return
        self._queue.append(step)
        if self._idle:
            self._wake.set()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._closing.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            self._idle = True
            if not self._queue:
                self._wake.wait()
            self._idle = False
            self._wake.clear()
            last = self._closing.wait(_PAUSE_S)
            self._drain()
            if last and not self._queue:
                break
        if self._file is not None:
            self._file.close()

    def _drain(self) -> None:
        steps = [self._queue.popleft() for _ in range(len(self._queue))]
        if not steps:
            return
        try:
            if self._file is None or self._size_bytes >= self._file_bytes:
                self._file = self._next_file()
            data = b"".join(self._encode(step) for step in steps)
            self._file.write(data)
            self._file.flush()
            self._size_bytes += len(data)
        except OSError:  # the disk is full, say: try a new file with the next steps
            self.dropped += len(steps)
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file = None
        else:
            self.written += len(steps)

    def _encode(self, step: Step) -> bytes:
        lines = []
        new = {}
        for name in [part[0] for part in step.requests] + [part[0] for part in step.encoded]:
            if name not in self._names:
                self._next_name += 1
                self._names[name] = self._next_name
                new[self._next_name] = client_request_id(name)
        if new:
            lines.append(_json({"names": new}))
        lines.append(_json(self._line(step)))
        for name in step.finished:
            self._names.pop(name, None)
        return b"".join(lines)

    def _line(self, step: Step) -> list[Any]:
        names = self._names
        return [
            round(step.start_s, 6),
            round(step.end_s, 6),
            round(step.duration_s, 6),
            step.budget,
            list(step.features),
            [step.running, step.waiting, step.preempted],
            round(step.kv_cache_usage, 4),
            [[names[name], tokens, int(prefill), out] for name, tokens, prefill, out in step.requests],
            [[names[name], tokens, images] for name, tokens, images in step.encoded],
            self.dropped,
        ]

    def _next_file(self) -> IO[bytes]:
        if self._file is not None:
            self._file.close()
        parts = sorted(path for path in self._folder.iterdir() if _PART.fullmatch(path.name))
        for old in parts[: max(0, len(parts) - self._files_kept + 1)]:
            old.unlink(missing_ok=True)
        number = 1 + (int(parts[-1].stem.rpartition("-")[2]) if parts else 0)
        path = self._folder / f"steps-{number:06d}.jsonl"
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        live = {known: client_request_id(name) for name, known in self._names.items()}
        file.write(_json({"format": FORMAT, "names": live}))
        self._size_bytes = 0
        return file


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
