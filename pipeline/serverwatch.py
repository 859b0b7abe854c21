"""What state the model server is in: its start-up progress where we own it, and whether it answers.

Two sources, kept apart by what each can know. The file named by FRAMECHAT_SERVER_STATUS is written by whoever started
the server: progress, restarts, causes of death. The endpoint itself says whether it answers, what it serves and its
own figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pipeline.api import EngineView, ServerView
from pipeline.config import Config
from serving.enginemetrics import EngineMetrics
from serving.records import now_s

STATUS_FILE_VARIABLE = "FRAMECHAT_SERVER_STATUS"
_POLL_S = 1.0
_PATIENCE_S = 3.0
_SLOW_POLLS = 5  # a busy front end may answer late; a refused connection is believed at once
_DESCRIBE_EVERY_S = 30.0
_ENGINE_EVERY_S = 1.0


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
        _, headers = api_headers(config)
        self._http = httpx.AsyncClient(headers=headers, timeout=_PATIENCE_S, trust_env=server.base_url is not None)
        file = os.environ.get(STATUS_FILE_VARIABLE)
        self._file = Path(file) if file and server.base_url is None else None
        self._metrics = EngineMetrics()
        self._engine: dict[str, Any] = {}
        self._engine_at_s: float | None = None
        self._facts: dict[str, Any] = {}
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
        return EngineView(**self._engine, age_s=age_s)

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await self._poll()
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # --- one poll --------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        told = await asyncio.to_thread(self._read_file) if self._file is not None else {}
        answered, problem = await self._health()
        if answered:
            await self._describe()
            await self._read_engine()
        state, detail = self._judge(told, answered, problem)
        was_ready = self.ready
        if state != self.view.state:
            self._since_s = now_s()
        elapsed_s = told.get("elapsed_s")
        self.view = ServerView(
            state=state,  # type: ignore[arg-type]  # checked by pydantic
            detail=detail,
            elapsed_s=elapsed_s if isinstance(elapsed_s, int | float) else now_s() - self._since_s,
            endpoint=self._endpoint,
            attached=self._config.base_url is not None,
            model=self._facts.get("model") or told.get("model"),
            version=self._facts.get("version") or told.get("version"),
            max_model_len=self._facts.get("max_model_len"),
            **self._budgets(),
        )
        if self.ready != was_ready:
            self._facts_at_s = 0.0
            self._on_ready(self.ready)

    def _judge(self, told: dict[str, Any], answered: bool, problem: str) -> tuple[str, str]:
        """State and detail from what was told and what was seen."""
        if answered:
            return "ready", ""
        said = told.get("state")
        if said in ("starting", "restarting", "down"):
            return str(said), str(told.get("detail") or "")
        if self.ready and self._failures < _SLOW_POLLS and "refused" not in problem:
            return "ready", f"slow to answer: {problem}"
        return "down", problem

    def _budgets(self) -> dict[str, int | None]:
        """The budgets in force; unknown for somebody else's server."""
        if self._config.base_url is not None:
            return {}
        return {
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
            "max_num_scheduled_tokens": self._config.max_num_scheduled_tokens,
            "long_prefill_token_threshold": self._config.long_prefill_token_threshold,
        }

    def _read_file(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self._file.read_text(encoding="utf-8"))
            return told if isinstance(told, dict) else {}
        return {}

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
        facts: dict[str, Any] = {}
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            first = (await self._http.get(f"{self._endpoint}/models")).json()["data"][0]
            facts["model"] = str(first["id"])
            length = first.get("max_model_len")
            facts["max_model_len"] = length if isinstance(length, int) and length > 0 else None
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            facts["version"] = str((await self._http.get(f"{self._root}/version")).json()["version"])
        if facts:
            self._facts = facts
            self._facts_at_s = now_s()

    async def _read_engine(self) -> None:
        if self._engine_at_s is not None and now_s() - self._engine_at_s < _ENGINE_EVERY_S:
            return
        figures = await self._metrics.read(self._root)
        self._engine = figures
        self._engine_at_s = now_s()
