"""What the reader and detector processes have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Ours, with this package found wherever the process starts, and nothing imported from the working folder."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def start_child(module: str, frames_fd: int) -> subprocess.Popen[bytes]:
    """Run one of our modules as a process that shares the frames behind `frames_fd` and talks over unbuffered pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", module, str(frames_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=(frames_fd,),
        env=child_environment(),
    )


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
