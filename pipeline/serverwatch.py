"""What state the model server is in: its start-up progress where we own it, and whether it answers.

Two sources, kept apart by what each can know. The file named by FRAMECHAT_SERVER_STATUS is written by whoever started
the server: progress, restarts, causes of death. The endpoint itself says whether it answers, what it serves and its
own figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import httpx

from pipeline.api import EngineView, ServerState, ServerView
from pipeline.config import Config
from serving.attach import RunningServer, describe_running
from serving.command import ServerError
from serving.config import ServerConfig
from serving.enginemetrics import EngineFigures, EngineMetrics
from serving.records import now_s
from serving.scheduler.control import SchedulerControl, SchedulerControlError
from serving.status import ServerStatus, read_status
from serving.tls import certificates

STATUS_FILE_VARIABLE = "FRAMECHAT_SERVER_STATUS"
_POLL_S = 1.0
_PATIENCE_S = 3.0
_SLOW_POLLS = 5  # a busy front end may answer late; a refused connection is believed at once
_DESCRIBE_EVERY_S = 30.0


def api_headers(config: Config) -> tuple[str | None, dict[str, str]]:
    """The API key from the environment, if there is one, and the headers that carry it."""
    key = (os.environ.get(config.serving.server.api_key_env) or "").strip() or None
    return key, {"Authorization": f"Bearer {key}"} if key else {}


class ServerWatch:
    """Polls the model server. Belongs to one event loop.

    Args:
        on_ready: Called when the server becomes usable (True) and when it stops being so (False).
    """

    def __init__(self, config: Config, on_ready: Callable[[bool], None]) -> None:
        server = config.serving.server
        self._config = server
        self._endpoint = server.endpoint
        self._root = self._endpoint.removesuffix("/v1")
        self._on_ready = on_ready
        self._api_key, headers = api_headers(config)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=_PATIENCE_S, trust_env=server.base_url is not None, verify=certificates()
        )
        file = os.environ.get(STATUS_FILE_VARIABLE)
        self._file = Path(file) if file else None
        self._control = SchedulerControl(self._file.parent, timeout_s=_POLL_S) if self._file is not None else None
        self._step_budget: int | None = None
        self._metrics = EngineMetrics(api_key=self._api_key)
        self._engine = EngineFigures()
        self._engine_at_s: float | None = None
        self._facts: RunningServer | None = None
        self._facts_at_s = 0.0
        self._failures = 0
        self._since_s = now_s()
        self.view = ServerView(
            state="starting",
            detail="looking for the model server",
            endpoint=self._endpoint,
            attached=server.base_url is not None,
        )

    @property
    def ready(self) -> bool:
        """The server can be used."""
        return self.view.state == "ready"

    def why_not(self) -> str:
        """Why it cannot be used, for a user; empty when it can."""
        if self.ready:
            return ""
        detail = f" ({self.view.detail})" if self.view.detail else ""
        words = {"starting": "is starting", "restarting": "is being restarted"}.get(self.view.state, "is down")
        return f"the model server at {self._endpoint} {words}{detail}; try again when the status shows it ready"

    @property
    def max_model_len(self) -> int | None:
        """The model's length: what the server says, else what our configuration says."""
        return self.view.max_model_len or (None if self.view.attached else self._config.max_model_len)

    def engine_view(self) -> EngineView:
        """The server's own figures, and how old they are."""
        age_s = None if self._engine_at_s is None else now_s() - self._engine_at_s
        return EngineView(**asdict(self._engine), age_s=age_s)

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await self._poll()
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        await self._metrics.close()

    # --- one poll --------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        told = await asyncio.to_thread(read_status, self._file) if self._file is not None else None
        answered, problem = await self._health()
        if answered:
            await self._describe()
            await self._read_engine()
            self._step_budget = await asyncio.to_thread(self._moved_budget)
        state, detail = self._judge(told, answered, problem)
        was_ready = self.ready
        if state != self.view.state:
            self._since_s = now_s()
        facts = self._facts
        budgets: RunningServer | ServerStatus | ServerConfig | None = facts
        if told is not None:
            budgets = told
        elif self._config.base_url is None:
            budgets = self._config
        self.view = ServerView(
            state=state,
            detail=detail,
            elapsed_s=now_s() - (told.since_s if told is not None and told.state == state else self._since_s),
            endpoint=self._endpoint,
            attached=self._config.base_url is not None,
            model=(facts and facts.model) or (told and told.model) or None,
            version=(facts and facts.version) or (told and told.version) or None,
            max_model_len=(facts and facts.max_model_len) or (told and told.max_model_len) or None,
            max_num_batched_tokens=budgets.max_num_batched_tokens if budgets is not None else None,
            max_num_scheduled_tokens=self._step_budget or (budgets.max_num_scheduled_tokens if budgets else None),
            long_prefill_token_threshold=budgets.long_prefill_token_threshold if budgets is not None else None,
            simulated=facts.simulated if facts is not None else None,
        )
        if self.ready != was_ready:
            self._facts_at_s = 0.0
            self._on_ready(self.ready)

    def _judge(self, told: ServerStatus | None, answered: bool, problem: str) -> tuple[ServerState, str]:
        """State and detail from what was told and what was seen."""
        if answered:
            return "ready", ""
        if told is not None and told.state != "ready":
            return told.state, told.detail
        if self.ready and self._failures < _SLOW_POLLS and "refused" not in problem:
            return "ready", f"slow to answer: {problem}"
        return "down", problem

    async def _health(self) -> tuple[bool, str]:
        """Whether the server answers, and what is wrong when not. /health where there is one, else its models."""
        problem = ""
        for url in (f"{self._root}/health", f"{self._endpoint}/models"):
            try:
                answer = await self._http.get(url)
            except httpx.ConnectError:
                problem = f"connection to {self._endpoint} refused"
            except httpx.HTTPError as error:
                problem = f"no answer from {self._endpoint} ({type(error).__name__})"
            else:
                if answer.status_code == 200:
                    self._failures = 0
                    return True, ""
                problem = f"{url} answered {answer.status_code}"
                if answer.status_code in (401, 403):
                    problem += f"; set the API key in {self._config.api_key_env}"
                if answer.status_code in (404, 405):
                    continue
            break
        self._failures += 1
        return False, problem

    async def _describe(self) -> None:
        """Model, length and version, now and then."""
        if now_s() - self._facts_at_s < _DESCRIBE_EVERY_S:
            return
        with contextlib.suppress(ServerError):  # it answers; what it is will be known at the next try
            self._facts = await describe_running(self._endpoint, self._api_key, model=self._config.served_model_name)
            self._facts_at_s = now_s()

    def _moved_budget(self) -> int | None:
        """The step budget where it was moved since the server started; None otherwise, or not known. Blocks."""
        if self._control is None or not self._control.path.exists():
            return None
        try:
            state = self._control.state()
        except SchedulerControlError:
            return None
        return None if state.step_budget == state.configured else state.step_budget

    async def _read_engine(self) -> None:
        figures = await self._metrics.read(self._root)
        if figures != EngineFigures():  # an unanswered read leaves the last figures, and their age tells
            self._engine = figures
            self._engine_at_s = now_s()
