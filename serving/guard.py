"""Runs one command and sees to it that nothing of the command outlives whoever started it.

Started as a script by :mod:`serving.process`, one guard a command::

    python guard.py LIFELINE_FD GRACE_S COMMAND...

The starter holds the other end of the lifeline pipe. When that closes, for whatever reason (kill -9 included), or when
the guard gets SIGTERM, the command is asked to end (SIGTERM) and after `GRACE_S` seconds every descendant is killed.
The guard is a subreaper, so a descendant whose parent died comes to the guard and is found, whichever process group it
chose. Exit code: the command's, 128 + the signal that ended it, or 127 when it could not be run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVER_GRACE_S = 2.0
_KILL_DEADLINE_S = 10.0


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the lifeline and the process group do what they can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class _Guard:
    def __init__(self, lifeline: int, grace_s: float, command: list[str]) -> None:
        self._lifeline = lifeline
        self._grace_s = grace_s
        self._stop_asked = False
        self._code: int | None = None
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # The guard has one thread, so running code between fork and exec is safe here.
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)  # noqa: PLW1509

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True

    def _reap(self) -> None:
        """Collect the ended, adopted ones too; remember how the command itself ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child.pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code

    def _sleep(self, seconds: float, *, lifeline: bool) -> None:
        """Until a signal, a child's end or (with `lifeline`) the starter's death; at most `seconds`."""
        watched = [self._wake, self._lifeline] if lifeline else [self._wake]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 512)
        if self._lifeline in ready and not os.read(self._lifeline, 1):
            self._stop_asked = True

    def run(self) -> int:
        """Wait for the command or for the order to stop; leave nothing behind."""
        while self._code is None and not self._stop_asked:
            self._sleep(3600, lifeline=True)
            self._reap()
        if self._code is None:
            self._child.send_signal(signal.SIGTERM)
            self._wait(self._grace_s, lambda: self._code is not None)
        if self._code is not None:  # what it left behind gets a moment of its own
            for process in _descendants():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
            self._wait(min(_LEFTOVER_GRACE_S, self._grace_s), lambda: not _descendants())
        self._kill_all()
        return self._code if self._code is not None else 128 + signal.SIGKILL

    def _wait(self, seconds: float, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not done() and (left := deadline - time.monotonic()) > 0:
            self._sleep(min(left, 0.1), lifeline=False)
            self._reap()

    def _kill_all(self) -> None:
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while (rest := _descendants()) and time.monotonic() < deadline:
            for process in rest:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._sleep(0.05, lifeline=False)
            self._reap()
        self._reap()


def main(arguments: list[str]) -> int:
    """Guard the command in `arguments` (see the module)."""
    lifeline, grace_s, *command = arguments
    try:
        guard = _Guard(int(lifeline), float(grace_s), command)
    except OSError as error:
        print(f"{command[0]}: cannot be run ({error.strerror})", file=sys.stderr, flush=True)
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
