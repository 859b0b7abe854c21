"""What the reader and detector processes have in common."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """Ours, with this package found wherever the process starts, and nothing imported from the working folder."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
