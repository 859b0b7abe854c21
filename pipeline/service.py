"""The service: cameras side by side, chat sessions, live pictures, status and metrics, on one HTTP API."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pipeline import routes_cameras, routes_chat, routes_compare, routes_descriptions, routes_status
from pipeline.chat import Chat
from pipeline.chatstore import ChatStore
from pipeline.comparisons import Comparisons
from pipeline.config import Config
from pipeline.database import StoreError
from pipeline.describe import encode_jpeg, frame_view
from pipeline.documents import Document, Documents
from pipeline.errors import add_handlers
from pipeline.live import MAX_WISH_BYTES, Live, Pulse
from pipeline.maintenance import Maintenance
from pipeline.origins import Gate
from pipeline.parts import STOPPING, Parts
from pipeline.pictures import Pictures
from pipeline.prompt import PromptBuilder
from pipeline.runtime import Runtime
from pipeline.store import Store
from pipeline.tokens import TokenCounter
from serving.address import reachable_host
from serving.records import now_s

_STOP_S = 5
_TIMELINE_S = 120.0
_NEWS_S = 3.0  # of the time line, once a second: what is new, with some overlap


def create_app(config: Config) -> FastAPI:
    """The service as an ASGI application; its parts start and stop with the application's lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        runtime = Runtime(config, keep_cameras=True)
        await runtime.start()
        counter = TokenCounter(config.serving.server.endpoint, runtime.api_headers)
        parts = await _assemble(config, runtime, counter)
        app.state.parts = parts
        try:
            yield
        finally:
            await parts.comparisons.close()
            await parts.maintenance.close()
            await parts.chat.close(STOPPING)
            await counter.close()
            await runtime.stop()

    app = FastAPI(title="FrameChat", description=__doc__ or "", lifespan=lifespan)
    add_handlers(app)
    app.add_middleware(Gate, config=config)
    for routes in (routes_status, routes_cameras, routes_descriptions, routes_chat, routes_compare):
        app.include_router(routes.router)
    return app


async def _assemble(config: Config, runtime: Runtime, counter: TokenCounter) -> Parts:
    chats = ChatStore(runtime.store.database)

    async def keep(document: Document) -> None:
        await runtime.writer.now(lambda: chats.add_document(document, now_s()))

    documents = Documents(keep, await asyncio.to_thread(chats.documents))
    prompts = PromptBuilder(
        config,
        counter,
        max_model_len=lambda: runtime.server.max_model_len,
        model=lambda: runtime.server.view.model,
    )

    async def picture(camera_id: str) -> bytes | None:
        def make() -> bytes | None:
            frame = runtime.camera(camera_id).frame()
            if frame is None:
                return None
            return encode_jpeg(frame_view(frame.image, None, config.describe), config.describe.jpeg_quality)

        return await asyncio.to_thread(make)

    def camera_name(camera_id: str) -> str | None:
        worker = runtime.cameras.get(camera_id)
        return None if worker is None else worker.camera.name

    async def status() -> str:
        return await asyncio.to_thread(lambda: runtime.status().model_dump_json())

    async def latency(everything: bool) -> str:
        seconds = _TIMELINE_S if everything else _NEWS_S
        return await asyncio.to_thread(lambda: runtime.figures.latency(None, seconds).model_dump_json())

    maintenance = Maintenance(runtime, lambda: chat)
    chat = Chat(
        config,
        runtime.traffic,
        prompts,
        documents,
        picture=picture,
        camera_name=camera_name,
        unready=lambda: maintenance.why_not() or runtime.server.why_not(),
        chats=chats,
        later=runtime.writer.later,
    )
    await chat.restore()
    pictures = Pictures(runtime.cameras.get, config.service.live_rate_hz)
    live = Live(
        runtime.feed, pictures, Pulse(status, latency), lambda: list(runtime.cameras), config.service.live_width_px
    )
    return Parts(runtime, chat, documents, pictures, live, maintenance, Comparisons(config, maintenance))


class _Server(uvicorn.Server):
    """Says where it listens, and ends in order on SIGINT and SIGTERM instead of dying of them afterwards."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self.interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started:
            print(f"FrameChat service on http://{reachable_host(self.config.host)}:{self.config.port}", flush=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        parts = getattr(self._app.state, "parts", None)
        if parts is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(parts.end_streams)
        super().handle_exit(sig, frame)


def run(config: Config) -> int:
    """Serve until told to stop.

    Returns:
        The process's exit code: 0 after SIGTERM, 130 after SIGINT, 1 when it could not start.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    host, port = config.service.host, config.service.port
    try:
        Store(config.store).close()
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except StoreError as error:
        print(f"framechat: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        mend = "end the program that uses it, or set service.port" if error.errno == errno.EADDRINUSE else "see service"
        print(f"framechat: {host}:{port} cannot be used ({os.strerror(error.errno or 0)}); {mend}", file=sys.stderr)
        return 1
    app = create_app(config)
    server = _Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws_max_size=2 * MAX_WISH_BYTES,
            ws_per_message_deflate=False,  # JPEG does not compress further
            timeout_graceful_shutdown=_STOP_S,
        ),
        app,
    )
    with listening:
        server.run(sockets=[listening])
    if not server.started:
        return 1
    return 130 if server.interrupted else 0
