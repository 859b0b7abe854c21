"""The model server's state as its keeper sees it, carried to other processes in a small file."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["starting", "ready", "down", "restarting"]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server as its keeper sees it.

    Attributes:
        detail: One line: how far the start is, or why the server is down.
        since_s: When it entered this state, on the clock of :func:`serving.records.now_s`.
        elapsed_s: How long it had been in this state when this was written; of `ready`: how long the start took.
        restarts: How often it was started again after it had been ready.
    """

    state: State
    detail: str
    endpoint: str
    attached: bool
    since_s: float
    elapsed_s: float = 0.0
    pid: int | None = None
    restarts: int = 0
    model: str | None = None
    version: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int | None = None


def write_status(path: Path, status: ServerStatus) -> None:
    """Write `status` as JSON, so that a reader sees the old file or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(status)), encoding="utf-8")
    temporary.replace(path)


def read_status(path: Path) -> ServerStatus | None:
    """What :func:`write_status` wrote; None while there is nothing readable."""
    try:
        return ServerStatus(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
