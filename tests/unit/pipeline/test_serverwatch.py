"""What state the model server is said to be in, from what it answers and from what its keeper tells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline import serverwatch
from pipeline.config import Config
from pipeline.serverwatch import STATUS_FILE_VARIABLE, ServerWatch, api_headers
from serving.command import ServerError
from serving.enginemetrics import EngineFigures
from serving.records import now_s
from serving.status import ServerStatus, State, write_status

ATTACHED = {"base_url": "http://server/v1"}


class Server:
    """Answers by path; a path that is not in `pages` is 404, an exception is raised."""

    def __init__(self, **pages: int | Exception) -> None:
        self.pages = pages
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rsplit("/", 1)[-1]
        self.asked.append(name)
        found = self.pages.get(name, 404)
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerWatch]:
    """Watches of a server that tells nothing of itself beyond its health."""

    async def nothing(*_: object, **__: object) -> Any:
        raise ServerError("does not say")

    async def no_figures(*_: object) -> EngineFigures:
        return EngineFigures()

    monkeypatch.setattr(serverwatch, "describe_running", nothing)
    monkeypatch.setattr(serverwatch.EngineMetrics, "read", no_figures)

    def make(answers: Server, heard: list[bool] | None = None, **server: Any) -> ServerWatch:
        config = Config.model_validate({"serving": {"server": server or ATTACHED}})
        found = ServerWatch(config, (heard if heard is not None else []).append)
        found._http = httpx.AsyncClient(transport=httpx.MockTransport(answers))
        return found

    return make


Watch = Callable[..., ServerWatch]
SLOW, GONE = httpx.ReadTimeout("slow"), httpx.ConnectError("refused")


async def test_readiness_is_told_once_a_change(watch: Watch) -> None:
    server, heard = Server(health=200), []
    found = watch(server, heard)
    assert found.view.state == "starting"
    for _ in range(2):
        await found._poll()
    assert (found.view.state, found.why_not(), heard) == ("ready", "", [True])
    server.pages["health"] = GONE
    await found._poll()
    assert (found.view.state, heard) == ("down", [True, False])
    assert found.why_not() == (
        "the model server at http://server/v1 is down (connection to http://server/v1 refused); "
        "try again when the status shows it ready"
    )


async def test_a_busy_server_may_answer_late_a_few_times(watch: Watch) -> None:
    server = Server(health=200)
    found = watch(server)
    await found._poll()
    server.pages["health"] = SLOW
    states = []
    for _ in range(5):
        await found._poll()
        states.append(found.view.state)
    assert states == ["ready"] * 4 + ["down"]
    server.pages["health"] = 200
    await found._poll()
    server.pages["health"] = SLOW
    await found._poll()
    assert (found.view.state, found.view.detail) == (
        "ready",
        "slow to answer: no answer from http://server/v1 (ReadTimeout)",
    )


@pytest.mark.parametrize(
    ("pages", "state", "words", "asked"),
    [
        pytest.param({"models": 200}, "ready", "", ["health", "models"], id="a server without /health"),
        pytest.param({}, "down", "/v1/models answered 404", ["health", "models"], id="neither"),
        pytest.param({"health": 503, "models": 200}, "down", "/health answered 503", ["health"], id="not well"),
        pytest.param({"models": 401}, "down", "set the API key in ", ["health", "models"], id="a key is missing"),
    ],
)
async def test_health(watch: Watch, pages: dict[str, int], state: str, words: str, asked: list[str]) -> None:
    server = Server(**pages)
    found = watch(server)
    await found._poll()
    assert (found.view.state, server.asked) == (state, asked)
    assert words in found.view.detail


@pytest.mark.parametrize(
    ("told", "health", "state", "words"),
    [
        pytest.param("starting", GONE, "starting", "is starting (loading weights)", id="on its way"),
        pytest.param("restarting", GONE, "restarting", "is being restarted (loading weights)", id="again"),
        pytest.param("down", GONE, "down", "is down (loading weights)", id="given up"),
        pytest.param("starting", 200, "ready", "", id="it answers: that counts"),
        pytest.param("ready", GONE, "down", "is down (connection to", id="it does not: that counts, too"),
    ],
)
async def test_the_keeper_knows_why_it_does_not_answer(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: State, health: Any, state: str, words: str
) -> None:
    file = tmp_path / "server.json"
    monkeypatch.setenv(STATUS_FILE_VARIABLE, str(file))
    write_status(
        file,
        ServerStatus(
            state=told, detail="loading weights", endpoint="http://server/v1", attached=False, since_s=now_s()
        ),
    )
    found = watch(Server(health=health))
    await found._poll()
    assert found.view.state == state
    assert words in found.why_not()


async def test_the_models_length_is_ours_to_say_only_of_our_server(watch: Watch) -> None:
    assert watch(Server(), max_model_len=2048).max_model_len == 2048
    assert watch(Server(), **ATTACHED).max_model_len is None


@pytest.mark.parametrize(
    ("value", "key", "headers"),
    [
        (None, None, {}),
        ("  ", None, {}),
        (" abc\n", "abc", {"Authorization": "Bearer abc"}),  # as a file of secrets gives it
    ],
)
def test_the_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, key: str | None, headers: dict[str, str]
) -> None:
    config = Config()
    name = config.serving.server.api_key_env
    monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert api_headers(config) == (key, headers)
