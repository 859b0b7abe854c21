"""One streaming chat-completions request, timed; the only code that talks to a model.

Where the clock is read. A request is *sent* when it is handed to `openai`'s client, before the body is built. A chunk
*arrives* when its last bytes are read from the socket, before anything of any stream that was read at the same time is
parsed (serving/arrival.py); chunks that came in one read have one arrival time. Everything runs in a thread
with an event loop of its own: what the caller's loop or threads do delays a reading by no more than the interpreter
takes to switch threads (5 ms under a thread that never yields, usually far less).

Nothing is hidden in the timing: retries are off, redirects are not followed, connections are reused only while they are
surely open (an idle one is dropped after 2 s; vLLM closes it after 5 s). One exception is visible in `due` and `sent`:
a server that refuses `stream_options` gets the request again with less of it, and TTFT counts from the first sending.
That happens once a client; later requests start with what was accepted.

Why not `ultralytics.LLM` for the picture request, which carries text and pictures to the same kind of server (read in
8.4.190, `ultralytics/models/llm.py`). It returns `openai`'s parsed stream, so a chunk can be timed only after parsing,
and that stream fails on an event without data. It makes its own `openai` client with the default two silent retries, a
ten-minute time-out and the environment's proxies, falling back to `OPENAI_API_KEY`. It encodes the JPEG in the call, at
a quality of its own, on the event loop that times everybody's gaps. And importing it loads torch and OpenCV into this
process. The messages sent here are the ones it would send.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai

from serving.active import ActiveRequest, OnEnd, OnSent, OnToken
from serving.address import is_loopback
from serving.arrival import ArrivalLoop, descriptor_of
from serving.config import Timeouts
from serving.faults import explain
from serving.records import ErrorKind, Outcome, RequestError, now_s
from serving.request import ModelRequest, picture_part, text_part
from serving.sse import EventDecoder
from serving.stream import StreamReader

__all__ = [
    "ActiveRequest",
    "ModelClient",
    "ModelRequest",
    "ModelServerError",
    "picture_part",
    "text_part",
]


_IDLE_CONNECTION_S = 2.0
_MODEL_LIST_TIMEOUT_S = 10.0
_DRAIN_S = 0.25  # after [DONE]: for the end of the body, so that the connection can be reused
_CLOSE_TIMEOUT_S = 5.0
# From the most telling to none; a server that refuses one gets the next.
_STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


class ModelServerError(Exception):
    """The model server could not be asked; `error` says why."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class _Progress:
    """What one request's coroutine knows so far."""

    reader: StreamReader
    model: str
    sent_s: float | None = None
    answering: bool = False
    finished_s: float | None = None


class ModelClient:
    """Sends requests to one OpenAI-compatible endpoint and times their answers.

    Args:
        endpoint: Base URL, usually ending in /v1.
        model: The model's served name; None asks the server once and takes the first it lists.
        timeouts: How long to wait for a connection, the first token (from sending), each next token. Keep-alives and
            other events without a token extend nothing.
        api_key: Sent as a bearer token when given; never read from the environment here, never in any message.

    Raises:
        ValueError: The key holds characters that an HTTP header cannot carry, or the endpoint is no HTTP URL.
    """

    def __init__(self, endpoint: str, *, model: str | None, timeouts: Timeouts, api_key: str | None = None) -> None:
        key = (api_key or "").strip() or None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("the API key holds characters that an HTTP header cannot carry")
        address = urlsplit(endpoint)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"endpoint is {endpoint!r}, allowed: http://host:port/v1")
        self.endpoint = endpoint
        self._api_key = key
        self._timeouts = timeouts
        self._wanted_model = model
        self._listed_model: str | None = None
        self._options_index = 0
        # Reads are bounded by the deadline in _run, which tells a first token from a gap.
        patience = openai.Timeout(timeouts.connect_s, read=None, write=None)
        omit = openai.Omit()  # what the environment says of some other account stays out of it
        headers: dict[str, Any] = {"OpenAI-Organization": omit, "OpenAI-Project": omit, "Accept-Encoding": "identity"}
        self._no_key: dict[str, Any] = {"Authorization": omit} if key is None else {}
        self._openai = openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=key or "none",
            max_retries=0,
            timeout=patience,
            default_headers=headers,
            http_client=openai.DefaultAsyncHttpxClient(
                timeout=patience,
                follow_redirects=False,
                trust_env=not is_loopback(address.hostname),
                # Without TLS the certificate store is not worth its loading time.
                verify=address.scheme == "https" or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
                limits=httpx2.Limits(keepalive_expiry=_IDLE_CONNECTION_S),
            ),
        )
        self._lock = threading.Lock()
        self._loop: ArrivalLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: set[ActiveRequest] = set()

    def start(
        self,
        request: ModelRequest,
        on_token: OnToken | None = None,
        on_sent: OnSent | None = None,
        on_end: OnEnd | None = None,
    ) -> ActiveRequest:
        """Begin a request and return at once.

        The callbacks run in the client's own thread, between its socket reads: they must be quick, thread-safe and
        never block, or they become part of everybody's gaps.

        Args:
            on_token: Called with every token-bearing chunk as it arrives.
            on_sent: Called with the time at which the request was handed to the HTTP client.
            on_end: Called with the outcome, just before `result` has it.

        Raises:
            RuntimeError: The client is closed.
        """
        active = ActiveRequest(request, on_token, on_sent, on_end)
        with self._lock:  # so that close() finds every request that was started
            self._running_loop().call_soon_threadsafe(self._spawn, active)
        return active

    async def served_model(self) -> str:
        """The model's name: the configured one, or the first that the server lists.

        Raises:
            ModelServerError: It had to be asked for, and the server could not be asked or lists none.
        """
        with self._lock:
            asked = asyncio.run_coroutine_threadsafe(self._model_name(), self._running_loop())
        return await asyncio.wrap_future(asked)

    def measure_lag(self, interval_s: float, on_lag: Callable[[float], None]) -> Callable[[], None]:
        """Measure how late this client is itself: by so much its readings of the clock may be late.

        Args:
            interval_s: Between two timers.
            on_lag: Called in the client's thread with each timer's lateness, seconds.

        Returns:
            A function that ends it.

        Raises:
            RuntimeError: The client is closed.
        """
        stopped = threading.Event()

        async def sample() -> None:
            clock = asyncio.get_running_loop().time
            while not stopped.is_set():
                due = clock() + interval_s
                await asyncio.sleep(interval_s)
                on_lag(clock() - due)

        with self._lock:
            sampling = asyncio.run_coroutine_threadsafe(sample(), self._running_loop())

        def stop() -> None:
            stopped.set()
            sampling.cancel()

        return stop

    async def close(self) -> None:
        """Cancel what is running, close every connection and end the thread. May be called again."""
        with self._lock:
            loop, thread, self._closed = self._loop, self._thread, True
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._shut_down(), loop))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, _CLOSE_TIMEOUT_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the client's thread, started at first use; the caller holds the lock."""
        if self._closed:
            raise RuntimeError("the model client is closed")
        if self._loop is None:
            self._loop = ArrivalLoop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="framechat-client", daemon=True)
            self._thread.start()
        return self._loop

    async def _shut_down(self) -> None:
        for active in tuple(self._active):
            active.cancel("the client was closed")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        await self._openai.close()

    def _spawn(self, active: ActiveRequest) -> None:
        loop = asyncio.get_running_loop()
        progress = _Progress(StreamReader(active.request.max_tokens), self._wanted_model or self._listed_model or "")
        task = loop.create_task(self._serve(active, progress))
        if not active.started(lambda: loop.call_soon_threadsafe(task.cancel)):
            task.cancel()  # before its first step, so that _serve never runs
            self._conclude(active, progress, Outcome.CANCELLED)
            return
        self._tasks.add(task)
        self._active.add(active)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._active.discard(active)

        task.add_done_callback(ended)

    async def _serve(self, active: ActiveRequest, progress: _Progress) -> None:
        """Run one request to its outcome and hand that over."""
        error = None
        try:
            error = await self._attempt(active, progress)
            outcome = Outcome.FAILED if error is not None else Outcome.DONE
        except asyncio.CancelledError:
            complete = progress.reader.ended and progress.reader.finish_reason is not None
            outcome = Outcome.DONE if complete else Outcome.CANCELLED
        except Exception as unexpected:
            # Not the server's doing: a request that cannot be written as JSON, or a bug here. The caller must see it.
            active.break_off(unexpected)
            return
        self._conclude(active, progress, outcome, error)

    @staticmethod
    def _conclude(
        active: ActiveRequest, progress: _Progress, outcome: Outcome, error: RequestError | None = None
    ) -> None:
        request = active.request
        record = progress.reader.record(
            request_id=request.request_id,
            traffic_class=request.traffic_class,
            model=progress.model,
            due_s=request.due_s,
            sent_s=progress.sent_s,
            finished_s=progress.finished_s or now_s(),
            outcome=outcome,
            error=error,
            reason=active.cancel_reason if outcome is Outcome.CANCELLED else None,
        )
        active.end(record)

    async def _attempt(self, active: ActiveRequest, progress: _Progress) -> RequestError | None:
        """Ask, read and time; None is success."""
        try:
            async with asyncio.timeout(self._timeouts.first_token_s) as deadline:
                progress.model = await self._model_name()
                await self._ask(active, progress, deadline)
        except TimeoutError:
            if not progress.reader.ended:  # else only the drain ran out
                return self._too_late(progress)
        except ModelServerError as failure:
            return failure.error
        except Exception as failure:
            if progress.reader.ended:
                return None  # complete; what broke came after the end
            error = explain(failure, endpoint=self.endpoint, answering=progress.answering, api_key=self._api_key)
            if error is None:
                raise
            if error.status == 404:
                self._listed_model = None  # another model may be served by now
            return error
        return self._verdict(progress.reader)

    def _too_late(self, progress: _Progress) -> RequestError:
        if progress.reader.last_token_s is None and progress.reader.finish_reason is None:
            message = f"no token within {self._timeouts.first_token_s:g} s"
            return RequestError(ErrorKind.TIMEOUT_FIRST_TOKEN, message)
        return RequestError(ErrorKind.TIMEOUT_GAP, f"nothing more within {self._timeouts.gap_s:g} s of the last token")

    @staticmethod
    def _verdict(reader: StreamReader) -> RequestError | None:
        if reader.finish_reason is not None:
            return None
        if reader.tokens_counted is None and reader.prompt_tokens is None and not reader.ended:
            return RequestError(ErrorKind.PROTOCOL, "the answer held no chat-completions chunk")
        return RequestError(ErrorKind.CUT, "the stream ended without a finish reason")

    async def _ask(self, active: ActiveRequest, progress: _Progress, deadline: asyncio.Timeout) -> None:
        arguments = {"model": progress.model, "stream": True, **active.request.arguments()}
        arguments["extra_headers"] |= self._no_key
        progress.sent_s = now_s()
        deadline.reschedule(asyncio.get_running_loop().time() + self._timeouts.first_token_s)
        active.sent(progress.sent_s)
        for index in range(self._options_index, len(_STREAM_OPTIONS)):
            options = _STREAM_OPTIONS[index]
            if options is not None:
                arguments["stream_options"] = options
            else:
                arguments.pop("stream_options", None)
            try:
                async with self._openai.chat.completions.with_streaming_response.create(**arguments) as response:
                    progress.answering = True
                    self._options_index = max(self._options_index, index)
                    await self._read(response, active, progress, deadline)
                return
            except openai.APIStatusError as refusal:
                if index + 1 == len(_STREAM_OPTIONS) or not _refuses_stream_options(refusal):
                    raise

    async def _read(
        self,
        response: openai.AsyncAPIResponse[Any],
        active: ActiveRequest,
        progress: _Progress,
        deadline: asyncio.Timeout,
    ) -> None:
        decoder, reader, clock = EventDecoder(), progress.reader, asyncio.get_running_loop().time
        arrived_s, connection = self._arrival_s, descriptor_of(response.http_response.extensions)
        async for data in response.iter_bytes():
            at_s = arrived_s(connection)
            if progress.finished_s is not None:
                continue  # draining
            finish_before, heard = reader.finish_reason, False
            for event in decoder.feed(data):
                for token in reader.feed(at_s, event):
                    heard = heard or token.tokens > 0
                    active.token(token)
            if reader.ended:
                progress.finished_s = at_s
                deadline.reschedule(clock() + _DRAIN_S)
            elif heard or reader.finish_reason != finish_before:
                deadline.reschedule(clock() + self._timeouts.gap_s)

    def _arrival_s(self, connection: int | None) -> float:
        loop = self._loop  # None while the client closes
        return now_s() if loop is None else loop.arrival_s(connection)

    async def _model_name(self) -> str:
        name = self._wanted_model or self._listed_model
        if name is None:
            name = self._listed_model = await self._list_models()
        return name

    async def _list_models(self) -> str:
        timeouts = openai.Timeout(_MODEL_LIST_TIMEOUT_S, connect=self._timeouts.connect_s)
        try:
            listed = await self._openai.models.list(timeout=timeouts, extra_headers=self._no_key)
            names = [model.id for model in listed.data or [] if isinstance(model.id, str)]
        except Exception as failure:
            error = explain(failure, endpoint=self.endpoint, answering=False, api_key=self._api_key)
            if error is None:
                message = f"{self.endpoint}/models gave no list of models ({type(failure).__name__})"
                error = RequestError(ErrorKind.PROTOCOL, message)
            raise ModelServerError(error) from failure
        if not names:
            raise ModelServerError(RequestError(ErrorKind.PROTOCOL, f"{self.endpoint} serves no model"))
        return names[0]


def _refuses_stream_options(error: openai.APIStatusError) -> bool:
    if error.status_code not in (400, 422):
        return False
    body = error.response.text
    return any(word in body for word in ("stream_options", "continuous_usage_stats", "include_usage"))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()
