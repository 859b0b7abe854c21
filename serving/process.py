"""One child process that cannot outlive us: own process group, log file, certain end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_GUARD_MARGIN_S = 15.0
_TAIL_BYTES = 64 * 1024


def tail(path: Path, lines: int = 15) -> list[str]:
    """The last non-empty `lines` of a text file; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def describe_exit(code: int) -> str:
    """An exit code in words: `ended by SIGKILL`, `ended with exit code 2`."""
    number = code - 128 if code > 128 else -code if code < 0 else 0
    if number:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


class GuardedProcess:
    """A command under its guard (see :mod:`serving.guard`).

    Its output, and nothing else, goes to `log_path` (appended). Not for reuse: make a new one for every start.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self.command = list(command)
        self.log_path = log_path
        self._env = dict(os.environ if env is None else env)
        self._cwd = cwd
        self._grace_s = grace_s
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None

    @property
    def pid(self) -> int | None:
        """The guard's pid, which is the process group's id as well; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the command.

        Raises:
            OSError: The log file cannot be written.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    # -P: the guard's folder must not be where its imports come from.
                    *(sys.executable, "-P", str(_GUARD), str(read_end), str(self._grace_s), *self.command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    cwd=self._cwd,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        finally:
            os.close(read_end)

    async def wait(self) -> int:
        """Wait for the end; the exit code, 128 + signal for a command that a signal ended."""
        if self._process is None:
            raise RuntimeError("not started")
        code = await self._process.wait()
        if code < 0:  # the guard itself was killed: its group may still be there
            self._kill_group()
        self._close_lifeline()
        return code

    async def stop(self) -> None:
        """End it and every descendant; returns when they are gone. Harmless when it is not running."""
        if self._process is None:
            return
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(self.wait()), self._grace_s + _GUARD_MARGIN_S)
            except TimeoutError:
                self._kill_group()
        await self.wait()

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
