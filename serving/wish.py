"""What another process wishes of the model server's keeper: run with another token budget, or stand still for a while.

Two small files beside the status file, in a folder that only its owner can write: the wish, and the keeper's reply. A
wish says how the server is wanted, not what to do, so reading one twice does no harm. A wish that the server stands
still must be renewed: when whoever wished it is gone, the server comes back.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.config import ServerConfig
from serving.records import now_s

RENEW_S = 5.0
FORGOTTEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Wish:
    """How the server is wanted.

    Attributes:
        running: Whether it is to run at all. False holds only while the wish is renewed.
        max_num_batched_tokens: Its budget; None for the configuration's.
        reason: For the user, why it is stopped or restarted.
        at_s: When this was written, on the clock of :func:`serving.records.now_s`.
    """

    wish_id: str
    running: bool
    max_num_batched_tokens: int | None
    reason: str
    at_s: float

    @property
    def forgotten(self) -> bool:
        """It wants the server stopped, and nobody renews it any more."""
        return not self.running and now_s() - self.at_s > FORGOTTEN_S


@dataclass(frozen=True, slots=True)
class Reply:
    """How far the keeper is with a wish; `detail` is one line."""

    wish_id: str
    state: Literal["working", "done", "failed"]
    detail: str = ""


def wish_path(status_path: Path) -> Path:
    """Where the wish for the server of this status file lies."""
    return status_path.with_name("server-wish.json")


def reply_path(status_path: Path) -> Path:
    """Where its keeper answers."""
    return status_path.with_name("server-reply.json")


def write(path: Path, item: Wish | Reply) -> None:
    """Write it so that a reader sees the old file or the new one, never half of one.

    Raises:
        OSError: The folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(item)), encoding="utf-8")
    temporary.replace(path)


def read_wish(path: Path) -> Wish | None:
    """The wish; None while there is none that can be read."""
    try:
        return Wish(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_reply(path: Path) -> Reply | None:
    """The keeper's reply; None while there is none that can be read."""
    try:
        return Reply(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def with_budget(config: ServerConfig, max_num_batched_tokens: int | None) -> ServerConfig:
    """The settings with another budget; smaller limits that would exceed it are lowered to it.

    Raises:
        ValueError: The server would refuse this budget.
    """
    if max_num_batched_tokens is None:
        return config
    changes: dict[str, int | None] = {"max_num_batched_tokens": max_num_batched_tokens}
    if config.max_num_scheduled_tokens is not None:
        changes["max_num_scheduled_tokens"] = min(config.max_num_scheduled_tokens, max_num_batched_tokens)
    changes["long_prefill_token_threshold"] = min(config.long_prefill_token_threshold, max_num_batched_tokens)
    return ServerConfig.model_validate(config.model_dump() | changes)
