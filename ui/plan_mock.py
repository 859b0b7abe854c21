"""What `framechat mock` runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import uvicorn
from rich.console import Console

from serving.address import reachable_host
from serving.compiled import is_compiled
from serving.config import ServerConfig
from serving.mock.api import MockSettings, create_app
from serving.simulate import FrontEnd, Policy
from ui.plan_engine import EngineOptions, make_engine

_STOP_S = 5


def mock_settings(
    options: EngineOptions,
    server: ServerConfig,
    *,
    budget: int | None,
    policy: str,
    front_end_ms: float,
    picture_ms: float,
    most_waiting: int,
) -> MockSettings:
    """What is simulated, from the command line and a deployment.

    Raises:
        ValueError: The options do not suffice or contradict one another; the message is one line.
    """
    tokens = budget if budget is not None else server.max_num_scheduled_tokens or server.max_num_batched_tokens
    engine = make_engine(options, server, largest_budget=tokens)
    chosen = replace(engine.settings, budget_tokens=tokens, policy=Policy(policy))
    if budget is not None:
        chosen = replace(chosen, buffer_tokens=budget)
    chosen.rules(0)  # raises when the settings contradict one another
    return MockSettings(
        model=Path(server.served_model_name or options.model or server.model).name,
        engine=chosen,
        step_time=engine.step_time,
        image_tokens=engine.image_tokens,
        front_end=FrontEnd(request_s=front_end_ms / 1e3, picture_s=picture_ms / 1e3),
        most_waiting=most_waiting,
    )


def serve_mock(settings: MockSettings, host: str, port: int) -> None:
    """Serve until Ctrl-C."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not is_compiled():
        console.print("Compiling the simulator once, some 20 seconds...")
    app = create_app(settings)
    url = f"http://{reachable_host(host)}:{port}/v1"
    console.print(f"Simulated {settings.served_name}: the API is at {url}. Ctrl-C stops it.")
    console.print(f"Step times: {settings.step_time.source}.")
    console.print(f"Try: framechat up --server-url {url}")
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=_STOP_S)
