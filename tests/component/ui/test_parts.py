"""The model server's keeper and the wishes of the service, with a stand-in for vLLM that starts in no time."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from serving import wish as wishes
from serving.config import ServerConfig
from serving.records import now_s
from serving.status import read_status
from serving.wish import Reply, Wish, read_reply, reply_path, wish_path, write
from tests.answering import free_port
from ui import parts
from ui.parts import ModelServerPart, PartFailedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups as Linux has them")

# Serves health and its model. The file `refuse` beside it holds a budget with which it ends at once.
STAND_IN = """#!{python}
import http.server, json, pathlib, sys
def option(name):
    return sys.argv[sys.argv.index(name) + 1]
refuse = pathlib.Path(__file__).with_name("refuse")
if refuse.exists() and option("--max-num-batched-tokens") in refuse.read_text().split():
    sys.exit("ValueError: not enough memory for the budget")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        pages = {{"/health": "", "/v1/models": {{"data": [{{"id": "stand-in"}}]}}}}
        found = pages.get(self.path)
        self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


class Keeper:
    """A keeper at work, and the service's side of the files."""

    def __init__(self, folder: Path) -> None:
        self.status_path = folder / "server.json"
        python = folder / "bin" / "python"
        python.parent.mkdir()
        python.write_text(STAND_IN.format(python=sys.executable))
        python.chmod(0o755)
        self.refuse = python.with_name("refuse")
        self.config = ServerConfig(python=python, port=free_port(), model="stand-in", max_num_batched_tokens=256)
        self.part = ModelServerPart(
            self.config, log_path=folder / "log", status_path=self.status_path, on_change=lambda _state: None
        )

    def wish(self, *, running: bool = True, budget: int | None = None, at_s: float | None = None) -> Wish:
        made = Wish(uuid.uuid4().hex, running, budget, "because", now_s() if at_s is None else at_s)
        write(wish_path(self.status_path), made)
        return made

    async def answer(self, wish: Wish) -> Reply:
        found: list[Reply] = []

        def answered() -> bool:
            reply = read_reply(reply_path(self.status_path))
            if reply is not None and reply.wish_id == wish.wish_id and reply.state != "working":
                found.append(reply)
            return bool(found)

        await until(answered)
        return found[0]

    def budget(self) -> int | None:
        status = read_status(self.status_path)
        assert status is not None
        return status.max_num_batched_tokens if status.state == "ready" else None

    def servers(self) -> list[psutil.Process]:
        """Processes of ours that hold the port."""
        mark = str(self.config.port)
        return [item for item in psutil.Process().children(recursive=True) if mark in item.cmdline()[3:]]


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within {timeout_s} s")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_WISH_POLL_S", 0.02)
    monkeypatch.setattr(parts, "_START_PAUSES_S", (0.05, 0.05))
    monkeypatch.setattr(wishes, "FORGOTTEN_S", 1.0)


@asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[tuple[Keeper, asyncio.Task[None]]]:
    keeper = Keeper(folder)
    task = asyncio.create_task(keeper.part.run())
    try:
        await until(lambda: keeper.budget() == 256)
        yield keeper, task
    finally:
        await keeper.part.stop()
        await asyncio.wait({task}, timeout=20)
        task.cancel()


async def test_another_budget_by_a_restart(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, task):
        before = keeper.part._server.status.pid
        reply = await keeper.answer(keeper.wish(budget=512))
        assert reply.state == "done"
        assert keeper.budget() == 512
        assert keeper.part._server.status.pid != before
        again = await keeper.answer(keeper.wish(budget=512))
        assert again.detail == "it runs so already"
        back = await keeper.answer(keeper.wish(budget=None))
        assert (back.state, keeper.budget()) == ("done", 256)
        assert not task.done()


async def test_a_budget_that_fails_brings_back_what_ran_before(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, task):
        keeper.refuse.write_text("512")
        reply = await keeper.answer(keeper.wish(budget=512))
        assert reply.state == "failed"
        assert "not enough memory for the budget" in reply.detail
        assert keeper.budget() == 256
        assert not task.done()


async def test_a_budget_that_the_settings_forbid_stops_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        before = keeper.part._server.status.pid
        reply = await keeper.answer(keeper.wish(budget=1))
        assert (reply.state, "max_num_seqs" in reply.detail) == ("failed", True)
        assert keeper.part._server.status.pid == before


async def test_it_stands_still_while_the_wish_is_renewed(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, task):
        wish = keeper.wish(running=False, budget=256)
        assert (await keeper.answer(wish)).state == "done"
        status = read_status(keeper.status_path)
        assert status is not None
        assert (status.state, status.detail) == ("down", "because")
        assert keeper.servers() == []
        assert (await keeper.answer(keeper.wish(budget=256))).state == "done"
        assert keeper.budget() == 256
        assert not task.done()


async def test_it_comes_back_by_itself_when_nobody_renews_the_wish(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        assert (await keeper.answer(keeper.wish(budget=512))).state == "done"
        wish = keeper.wish(running=False, budget=None)
        assert (await keeper.answer(wish)).state == "done"
        await until(lambda: keeper.budget() == 512)


async def test_a_wish_from_long_ago_stops_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        before = keeper.part._server.status.pid
        keeper.wish(running=False, at_s=now_s() - 60)
        reply = await keeper.answer(keeper.wish(budget=256))
        assert reply.detail == "it runs so already"
        assert keeper.part._server.status.pid == before


async def test_one_that_never_comes_back_is_told_and_ends_the_part(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, task):
        keeper.refuse.write_text("512 256")
        keeper.wish(budget=512)
        await until(task.done)
        assert isinstance(task.exception(), PartFailedError)


async def test_stopping_while_it_stands_still(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, task):
        await keeper.answer(keeper.wish(running=False, at_s=now_s() + 60))
        await keeper.part.stop()
        await until(task.done)
        assert task.exception() is None
        assert keeper.servers() == []
