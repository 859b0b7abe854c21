"""The app's end of the control channel: move the tokens of one step in a running server."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.scheduler.plugin.framechat_scheduler.channel import VERSION, reachable
from serving.scheduler.wiring import SOCKET_NAME

_TIMEOUT_S = 5.0


class SchedulerControlError(Exception):
    """The step budget could not be read or set; the message is one line."""


class SchedulerUnavailableError(SchedulerControlError):
    """Nobody answers on the control channel: no server of ours, not started yet, or without the plugin."""


class BudgetRefusedError(SchedulerControlError):
    """The running server cannot have this step budget."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """What the plugin says.

    Attributes:
        step_budget: Tokens that a step may process now.
        configured: What the server was started with.
        least, most: What may be set.
        asynchronous: vLLM schedules a step while the one before it runs.
        steps, dropped: Steps written to the step file since the start, and steps that were lost on the way.
    """

    step_budget: int
    configured: int
    least: int
    most: int
    asynchronous: bool
    steps: int
    dropped: int


class SchedulerControl:
    """The control channel of the server whose run folder is `folder`. Calls take about a millisecond and block."""

    def __init__(self, folder: Path, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.path = folder / SOCKET_NAME
        self._timeout_s = timeout_s

    def state(self) -> SchedulerState:
        """Ask for the state.

        Raises:
            SchedulerUnavailableError: Nobody answers.
        """
        return self._ask({"op": "state"})

    def set_step_budget(self, tokens: int | None) -> SchedulerState:
        """From the next step on no step processes more than `tokens`; None: as the server was started.

        Raises:
            SchedulerUnavailableError: Nobody answers.
            BudgetRefusedError: The server cannot have this budget; the message says what is allowed.
        """
        return self._ask({"op": "set_step_budget", "tokens": tokens})

    def _ask(self, question: Mapping[str, Any]) -> SchedulerState:
        try:
            with reachable(self.path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout_s)
                connection.connect(address)
                connection.sendall(json.dumps(question).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    answer = json.loads(lines.readline())
        except OSError as error:
            raise SchedulerUnavailableError(
                f"the scheduler of the model server does not answer on {self.path} ({error.strerror or error}); "
                "it must be a server of ours, running, with scheduler_plugin: true"
            ) from error
        except ValueError as error:
            raise SchedulerUnavailableError(f"{self.path} ended before it had answered") from error
        if "error" in answer:
            raise BudgetRefusedError(str(answer["error"]))
        state = dict(answer["state"])
        if state.pop("version") != VERSION:
            raise SchedulerUnavailableError(f"{self.path} speaks another version; restart the model server")
        return SchedulerState(**state)
