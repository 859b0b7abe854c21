"""The OpenAI-compatible API over the simulated engine. Everything that leaves it says that it is simulated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.attach import SIMULATED_HEADER
from serving.config import ImageTokens
from serving.mock.engine import Answer, EngineFullError, MockEngine
from serving.mock.metrics import metrics_page
from serving.mock.prompt import Prompt, PromptError, json_tokens, read_prompt, split_tokens, written_tokens
from serving.simlive import LiveSimulation
from serving.simstate import SimRequest
from serving.simulate import EngineSettings, FrontEnd, SimulationError
from serving.steptime import StepTime

SUFFIX = "-simulated"
_MOST_BODY_BYTES = 64 * 2**20
_DEFAULT_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class MockSettings:
    """What is simulated.

    `model` is named in every answer, with `-simulated` behind it; `most_waiting` bounds the queue.
    """

    model: str
    engine: EngineSettings
    step_time: StepTime
    image_tokens: ImageTokens = field(default_factory=ImageTokens)
    front_end: FrontEnd = field(default_factory=FrontEnd)
    most_waiting: int = 256

    @property
    def served_name(self) -> str:
        """The name of the model in the API."""
        return f"{self.model}{SUFFIX}"

    @property
    def description(self) -> str:
        """What is simulated, in one line."""
        engine = self.engine
        return f"simulated: {engine.policy.value} scheduling, budget {engine.budget_tokens}, {self.step_time.source}"


class _StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _ChatBody(BaseModel):
    """What of a request matters here; the rest has no influence on time, and is ignored."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    priority: int = 0
    response_format: dict[str, Any] | None = None


class _TokenizeBody(BaseModel):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


_Body = TypeVar("_Body", bound=BaseModel)


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _SaySimulated:
    """Names the simulation in a header of every response."""

    def __init__(self, app: ASGIApp, text: str) -> None:
        self._app = app
        self._header = (SIMULATED_HEADER.encode(), text.encode("ascii", "replace"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), self._header]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


def create_app(settings: MockSettings) -> FastAPI:
    """The server as an ASGI application; the engine runs as long as it does.

    Raises:
        SimulationError: The settings contradict one another.
    """
    rule = settings.image_tokens
    largest = rule.max_tokens if rule.kind == "patches" else rule.count(rule.longest_edge_px, rule.longest_edge_px)
    live = LiveSimulation(
        settings.engine,
        settings.step_time,
        slots=settings.engine.max_num_seqs + settings.most_waiting,
        largest_image_tokens=largest,
    )
    live.advance(0.0)  # compiles where nothing was compiled before
    engine = MockEngine(live)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    app = FastAPI(title="FrameChat, simulated model server", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_SaySimulated, text=settings.description)
    _add_routes(app, settings, engine)
    return app


def _add_routes(app: FastAPI, settings: MockSettings, engine: MockEngine) -> None:
    card = {
        "id": settings.served_name,
        "object": "model",
        "owned_by": "framechat mock",
        "max_model_len": settings.engine.max_model_len,
    }
    scheduler = {
        "max_num_batched_tokens": settings.engine.buffer_tokens or settings.engine.budget_tokens,
        "max_num_scheduled_tokens": settings.engine.budget_tokens,
        "long_prefill_token_threshold": settings.engine.long_prefill_threshold,
        "max_num_seqs": settings.engine.max_num_seqs,
    }

    @app.exception_handler(_RefusedError)
    async def refused(_: Request, problem: _RefusedError) -> JSONResponse:
        kind = "ServiceUnavailable" if problem.status == 503 else "BadRequestError"
        headers = {"retry-after": "1"} if problem.status == 503 else None
        error = {"message": str(problem), "type": kind, "code": problem.status}
        return JSONResponse({"error": error}, problem.status, headers)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=503 if engine.failed else 200)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": "simulated", "simulated": settings.description}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"simulated": settings.description, "vllm_config": {"scheduler_config": scheduler}}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        page = metrics_page(engine, settings.served_name, settings.description)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = _checked(_TokenizeBody, await _body(request))
        try:
            tokens = list(read_prompt(body.messages, settings.image_tokens).tokens) if body.messages else []
        except PromptError as error:
            raise _RefusedError(400, str(error)) from None
        tokens += split_tokens(body.prompt or "")
        return {"count": len(tokens), "max_model_len": settings.engine.max_model_len, "tokens": [0] * len(tokens)}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = _checked(_ChatBody, await _body(request))
        prompt, output, stops = _read(body, settings)
        front = settings.front_end
        await asyncio.sleep(front.request_s + len(prompt.images) * front.picture_s)
        try:
            answer = engine.submit(
                SimRequest(
                    arrival_s=0.0,
                    prompt_tokens=len(prompt.tokens),
                    output_tokens=len(output),
                    priority=body.priority,
                    images=prompt.images,
                ),
                [*prompt.tokens, *output],
            )
        except SimulationError as error:
            raise _RefusedError(400, str(error)) from None
        except EngineFullError:
            raise _RefusedError(503, f"{settings.most_waiting} requests wait already") from None
        reply = _Reply(
            answer, settings.served_name, request.headers.get("x-request-id"), len(prompt.tokens), output, stops
        )
        if body.stream:
            options = body.stream_options or _StreamOptions()
            return StreamingResponse(reply.stream(options), media_type="text/event-stream")
        return JSONResponse(await reply.whole(request))


def _read(body: _ChatBody, settings: MockSettings) -> tuple[Prompt, list[str], bool]:
    """Prompt and answer of a request, and whether the answer ends by itself before the request's limit."""
    if body.model not in (None, settings.served_name):
        raise _RefusedError(404, f"the model {body.model!r} is not here; this is {settings.served_name}")
    if body.n not in (None, 1):
        raise _RefusedError(400, f"n is {body.n}, allowed: 1")
    if body.priority and not settings.engine.by_priority:
        raise _RefusedError(400, "the request has a priority, and the engine schedules in order of arrival")
    try:
        prompt = read_prompt(body.messages, settings.image_tokens)
    except PromptError as error:
        raise _RefusedError(400, str(error)) from None
    room = settings.engine.max_model_len - len(prompt.tokens)
    asked = body.max_completion_tokens or body.max_tokens
    if room < 1 or (asked or 0) > room:
        raise _RefusedError(
            400,
            f"the prompt has {len(prompt.tokens)} tokens and {asked or 1} are asked for, allowed: "
            f"{settings.engine.max_model_len} in all",
        )
    limit = asked or min(_DEFAULT_OUTPUT_TOKENS, room)
    wanted = body.response_format or {}
    schema = (wanted.get("json_schema") or {}).get("schema") if wanted.get("type") == "json_schema" else None
    if isinstance(schema, dict):
        output = json_tokens(schema)
        return prompt, output[:limit], len(output) <= limit
    return prompt, written_tokens(limit), False


class _Reply:
    """One answer in OpenAI's form."""

    def __init__(
        self, answer: Answer, model: str, request_id: str | None, prompt_tokens: int, output: list[str], stops: bool
    ) -> None:
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._output = output
        self._finish = "stop" if stops else "length"
        self._head = {
            "id": f"chatcmpl-{request_id or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _usage(self, written: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self._answer.cached_tokens},
        }

    async def stream(self, options: _StreamOptions) -> AsyncIterator[str]:
        """Server-sent events, one a token; leaving the iteration cancels the request."""

        def event(delta: dict[str, Any] | None, written: int, finish: str | None = None) -> str:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
            if options.include_usage and (options.continuous_usage_stats or delta is None):
                chunk["usage"] = self._usage(written)
            return f"data: {json.dumps(chunk)}\n\n"

        try:
            written = 0
            async for _ in self._answer.steps():
                if written == 0:
                    yield event({"role": "assistant", "content": ""}, 0)
                written += 1
                last = written == len(self._output)
                yield event({"content": self._output[written - 1]}, written, self._finish if last else None)
            if options.include_usage:
                yield event(None, written)
            yield "data: [DONE]\n\n"
        except SimulationError as error:
            yield f"data: {json.dumps({'error': {'message': str(error), 'code': 500}})}\n\n"
        finally:
            self._answer.close()

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer in one piece; a client that leaves cancels it."""
        try:
            leaving = asyncio.create_task(_left(request))
            writing = asyncio.create_task(self._all())
            await asyncio.wait({leaving, writing}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not writing.done():
                writing.cancel()
                raise _RefusedError(499, "the client has left")
            try:
                written = writing.result()
            except SimulationError as error:
                raise _RefusedError(500, str(error)) from None
        finally:
            self._answer.close()
        message = {"role": "assistant", "content": "".join(self._output)}
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": self._finish}],
            "usage": self._usage(written),
        }

    async def _all(self) -> int:
        return sum([step async for step in self._answer.steps()])


async def _left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """The request's body, refused when it is larger than any sensible one."""
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > _MOST_BODY_BYTES:
            raise _RefusedError(413, f"the request is larger than {_MOST_BODY_BYTES >> 20} MiB")
    return bytes(found)


def _checked(kind: type[_Body], raw: bytes) -> _Body:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _RefusedError(400, f"{where or 'the request'}: {first['msg']}") from None
