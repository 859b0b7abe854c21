"""What a starting vLLM's log says, in one line a person can read: progress, and the cause when it fails."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_MAX_DETAIL_CHARS = 300
_MAX_READ_BYTES = 256 * 1024
# In the order in which they come. The first group, where there is one, becomes part of the line.
_PROGRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"version (\d+\.\d+\S*)"), "vLLM {0}: reading the settings"),
    (re.compile(r"Resolved architecture: (\w+)"), "reading the model's description ({0})"),
    (re.compile(r"Multi-modal warmup completed"), "starting the engine's process"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the worker's process"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"Loading safetensors checkpoint shards: +(\d+%)"), "loading weights: {0}"),
    (re.compile(r"Loading weights took (\S+) seconds"), "weights loaded in {0} s; preparing the KV cache"),
    (re.compile(r"[Ww]arming up model|torch\.compile takes|Compiling a graph"), "compiling and warming up"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache of {0} tokens; finishing"),
    (re.compile(r"[Cc]apturing CUDA graphs?[^:]*: +(\d+%)"), "capturing CUDA graphs: {0}"),
    (re.compile(r"init engine .* took (\S+) s"), "engine ready; starting the HTTP server"),
    (re.compile(r"Application startup complete"), "answering"),
)
_VERSION = re.compile(r"version (\d+\.\d+\S*)")
_ERROR = re.compile(r"(?:^|[\s:])((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)): +(\S.*)$|(error: .+)$")
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) *(?:(?:INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] *)?")
# True, but not the cause: the cause was logged before.
_CONSEQUENCES = ("See root cause above", "Engine core initialization failed", "Engine core proc", "WorkerProc init")
_ENGINE_DIED = "EngineDeadError"


def progress_of(line: str) -> str | None:
    """The progress that one log line reports; None for most lines."""
    for pattern, text in _PROGRESS:
        found = pattern.search(line)
        if found:
            return text.format(*found.groups())
    return None


def version_of(line: str) -> str | None:
    """vLLM's version, where the line is its banner."""
    found = _VERSION.search(line) if "INFO" in line else None
    return found.group(1) if found else None


def cause_of(lines: Iterable[str]) -> str | None:
    """The first error in the lines that is not the consequence of another one; None where there is none."""
    consequence = None
    for line in lines:
        found = _ERROR.search(_PREFIX.sub("", line))
        if not found:
            continue
        text = (f"{found.group(1)}: {found.group(2)}" if found.group(1) else found.group(3))[:_MAX_DETAIL_CHARS]
        if _ENGINE_DIED in text:
            consequence = "its engine process died"
        elif any(mark in text for mark in _CONSEQUENCES):
            consequence = text
        else:
            return text
    return consequence


class LogFollower:
    """Reads what was added to a growing log file, whole lines only, from where the file ends now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """The lines added since the last call. tqdm's carriage returns count as line ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except OSError:
            return []
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0 and len(data) == _MAX_READ_BYTES:
            end = len(data)  # one endless line: take it as it is
        self._offset += end
        return [line for line in data[:end].decode("utf-8", errors="replace").splitlines() if line.strip()]
