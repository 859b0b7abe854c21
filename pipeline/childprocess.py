"""What the reader and detector processes have in common."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from pipeline.addresses import mask_source
from serving.startup import cause_of

#: Set by whoever has a run folder for the logs of this process's children.
LOG_FOLDER_VARIABLE = "FRAMECHAT_LOG_FOLDER"
_MAX_LOG_BYTES = 256 * 1024
_LAST_LINES = 40
_MAX_CAUSE_CHARS = 200


@contextlib.contextmanager
def logs_in(folder: Path) -> Iterator[None]:
    """The logs of children that are made meanwhile lie in `folder`."""
    before = os.environ.get(LOG_FOLDER_VARIABLE)
    os.environ[LOG_FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[LOG_FOLDER_VARIABLE]
        else:
            os.environ[LOG_FOLDER_VARIABLE] = before


class ChildLog:
    """Where a child's standard error goes: a small file in the run folder; nowhere where there is no run folder.

    One child after another appends to it. No child may write credentials there.
    """

    def __init__(self, name: str) -> None:
        folder = os.environ.get(LOG_FOLDER_VARIABLE)
        self.path = Path(folder) / f"{name}.log" if folder else None
        self._begin: int | None = None  # of the present child's lines

    def open(self) -> FileIO:
        """For a new child, whose lines follow one that says when it started."""
        self.keep_small()
        self._begin = None
        if self.path is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep a camera from being watched
                file = FileIO(self.path, "ab")
                with contextlib.suppress(OSError):
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} started\n".encode())
                self._begin = file.tell()
                return file
        return FileIO(os.devnull, "wb")

    def keep_small(self) -> None:
        """Begin it anew once it is too long; a child that runs goes on writing at its end."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                if self.path.stat().st_size > _MAX_LOG_BYTES:
                    os.truncate(self.path, 0)
                    self._begin = None if self._begin is None else 0

    def ending(self, code: int) -> str:
        """How the child ended, in words, with the line of its log that tells why."""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = self._said()
        return f"{how}: {mask_source(cause_of(said) or said[-1].strip())[:_MAX_CAUSE_CHARS]}" if said else how

    def _said(self) -> list[str]:
        if self.path is None or self._begin is None:
            return []
        try:
            data = self.path.read_bytes()[self._begin :]
        except OSError:
            return []
        return [line for line in data.decode(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]


def child_environment() -> dict[str, str]:
    """Ours, with this package found wherever the process starts, and nothing imported from the working folder."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def start_child(module: str, frames_fd: int, log: ChildLog) -> subprocess.Popen[bytes]:
    """Run one of our modules as a process that shares the frames behind `frames_fd` and talks over unbuffered pipes."""
    with log.open() as errors:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(frames_fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            pass_fds=(frames_fd,),
            env=child_environment(),
        )
