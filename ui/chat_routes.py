"""Two ways for the terminal's chat to reach the model: straight to the server, or through the running service.

Both give a :class:`Reply`: a queue of text as it comes, ended by the answer's figures. Straight needs no more than
`framechat serve`. Where the service runs on the same model server the chat goes through it, so that its requests are in
the one ledger and the page shows what they cost.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from pipeline.api import ChatAsk, ChatTurn
from pipeline.config import Config
from pipeline.prompt import PromptBuilder, PromptError, Spoken
from pipeline.tokens import TokenCounter
from serving.address import reachable_host
from serving.attach import UnreachableError, describe_running
from serving.client import ModelClient, ModelRequest
from serving.command import ServerError
from serving.latency import gap_percentiles
from serving.records import ErrorKind, Outcome, RequestRecord, TokenEvent
from serving.sse import EventDecoder
from ui.service_client import ServiceClient, ServiceError, ServiceUnreachableError

_UNREACHABLE = frozenset({ErrorKind.CONNECT, ErrorKind.TIMEOUT_CONNECT})
_SERVICE_SILENCE_S = 60.0  # the service sends keep-alives well within this


class ChatRouteError(Exception):
    """The answer cannot be had; one line with the mend.

    Attributes:
        unreachable: The model server (or the service) did not answer at all.
        wrong_input: The message is at fault.
    """

    def __init__(self, message: str, *, unreachable: bool = False, wrong_input: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self.wrong_input = wrong_input


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of an answer as it came."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """How an answer ended, and its latency in milliseconds; None where there is no sample."""

    outcome: Outcome
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p95_ms: float | None = None
    itl_p99_ms: float | None = None
    tokens: int | None = None
    note: str = ""
    unreachable: bool = False


@dataclass(slots=True)
class Reply:
    """An answer on its way: pieces, then exactly one Figures. `stop` asks for its end, which the queue still tells."""

    stop: Callable[[], None]
    items: queue.SimpleQueue[Piece | Figures] = field(default_factory=queue.SimpleQueue)


class Route(Protocol):
    """A conversation with a model, its history kept."""

    @property
    def where(self) -> str:
        """Who answers, for the user."""

    def ask(self, text: str, due_s: float) -> Reply:
        """Begin an answer.

        Raises:
            ChatRouteError: It cannot be begun.
        """

    def close(self) -> None:
        """Give everything back."""


def open_route(config: Config) -> Route:
    """Through the service if it runs on the configured model server, else straight to that.

    Raises:
        ChatRouteError: Neither answers, or the server refuses.
    """
    return ServiceRoute.find(config) or DirectRoute(config)


class DirectRoute:
    """Straight to the model server.

    Raises:
        ChatRouteError: It does not answer, or refuses the key.
    """

    def __init__(self, config: Config) -> None:
        server = config.serving.server
        api_key = os.environ.get(server.api_key_env) or None
        self._limits = config.serving.classes["chat"]
        self._runner = asyncio.Runner()
        try:
            running = self._runner.run(describe_running(server.endpoint, api_key, model=server.served_model_name))
        except ServerError as error:
            self._runner.close()
            mend = "start it with `framechat serve`, or name a running one with --server-url"
            unreachable = isinstance(error, UnreachableError)
            raise ChatRouteError(f"{error}; {mend}" if unreachable else str(error), unreachable=unreachable) from error
        self.where = f"{running.model} at {server.endpoint}"
        self._client = ModelClient(
            server.endpoint, model=running.model, timeouts=config.serving.timeouts, api_key=api_key
        )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._counter = TokenCounter(server.endpoint, headers)
        self._prompts = PromptBuilder(
            config, self._counter, max_model_len=lambda: running.max_model_len, model=lambda: running.model
        )
        self._history: list[Spoken] = []
        self._most_turns = 2 * config.chat.max_history_messages

    def ask(self, text: str, due_s: float) -> Reply:
        """Begin an answer.

        Raises:
            ChatRouteError: The message does not fit what the model can read.
        """
        spoken = Spoken("user", text)
        try:
            built = self._runner.run(self._prompts.build(self._history, spoken, self._limits.max_tokens))
        except PromptError as error:
            raise ChatRouteError(str(error), wrong_input=True) from error
        reply = Reply(lambda: active.cancel("stopped by the user"))

        def took(event: TokenEvent) -> None:
            if event.text:
                reply.items.put(Piece(event.text, event.reasoning))

        def ended(record: RequestRecord) -> None:
            if record.text.strip():
                self._history += [spoken, Spoken("assistant", record.text)]
                del self._history[: -self._most_turns]
            reply.items.put(_figures(record, built.note))

        active = self._client.start(
            ModelRequest(
                traffic_class="chat",
                messages=built.messages,
                max_tokens=self._limits.max_tokens,
                temperature=self._limits.temperature,
                due_s=due_s,
                priority=self._limits.priority,
                extra_body=self._limits.extra_body,
            ),
            on_token=took,
            on_end=ended,
        )
        return reply

    def close(self) -> None:
        """End what runs and give the connections back."""
        self._runner.run(self._client.close())
        self._runner.run(self._counter.close())
        self._runner.close()


def _figures(record: RequestRecord, note: str) -> Figures:
    itl = gap_percentiles(record.gaps)
    notes = [note]
    unreachable = False
    if record.error is not None:
        notes.append(record.error.message)
        unreachable = record.error.kind in _UNREACHABLE
    elif record.outcome is Outcome.CANCELLED:
        notes.append("stopped")
    elif record.finish_reason == "length":
        notes.append("cut at the longest allowed length (serving.classes.chat.max_tokens)")
    return Figures(
        record.outcome,
        _ms(record.ttft_s),
        _ms(itl.p50_s),
        _ms(itl.p95_s),
        _ms(itl.p99_s),
        record.completion_tokens,
        "; ".join(part for part in notes if part),
        unreachable,
    )


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000


class ServiceRoute:
    """Through the running service's chat."""

    def __init__(self, service: ServiceClient, where: str) -> None:
        self._service = service
        self.where = where
        self._http = httpx.Client(
            base_url=service.base_url, timeout=httpx.Timeout(5, read=_SERVICE_SILENCE_S), trust_env=False
        )
        try:
            self._session_id = service.new_session().session_id
        except ServiceError as error:
            self.close()
            raise ChatRouteError(str(error)) from error

    @classmethod
    def find(cls, config: Config) -> ServiceRoute | None:
        """The route when a service answers at the configured address and uses the configured model server."""
        service = ServiceClient(f"http://{reachable_host(config.service.host)}:{config.service.port}")
        try:
            server = service.status().server
        except ServiceError:
            service.close()
            return None
        if server.endpoint.rstrip("/") != config.serving.server.endpoint:
            service.close()
            return None
        return cls(service, f"{server.model or 'the model'} through the service at {service.base_url}")

    def ask(self, text: str, due_s: float) -> Reply:
        """Begin an answer.

        Raises:
            ChatRouteError: The service refuses or cannot be reached.
        """
        try:
            answer_id = self._service.ask(ChatAsk(session_id=self._session_id, text=text, due_s=due_s))
        except ServiceError as error:
            gone = isinstance(error, ServiceUnreachableError) or error.status == httpx.codes.SERVICE_UNAVAILABLE
            wrong = error.status in (httpx.codes.UNPROCESSABLE_ENTITY, httpx.codes.REQUEST_ENTITY_TOO_LARGE)
            raise ChatRouteError(str(error), unreachable=gone, wrong_input=wrong) from error
        reply = Reply(lambda: self._stop(answer_id))
        threading.Thread(target=self._follow, args=(answer_id, reply), daemon=True).start()
        return reply

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()
        self._service.close()

    def _stop(self, answer_id: str) -> None:
        try:
            self._service.cancel_answer(answer_id)
        except ServiceError as error:
            raise ChatRouteError(str(error)) from error

    def _follow(self, answer_id: str, reply: Reply) -> None:
        """Read the answer's events to their end; in a thread, so that Ctrl-C finds the reader of the queue."""
        note = "the service ended the answer's stream early"
        try:
            decoder = EventDecoder()
            with self._http.stream("GET", f"/chat/answers/{answer_id}/events") as response:
                response.raise_for_status()
                for data in response.iter_bytes():
                    for event in decoder.feed(data):
                        if event.name == "token":
                            reply.items.put(Piece(str(json.loads(event.data)["text"])))
                        elif event.name == "end":
                            reply.items.put(_figures_of(ChatTurn.model_validate_json(event.data)))
                            return
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
            note = f"the service's stream broke ({type(error).__name__})"
        except (ValueError, KeyError, TypeError):
            note = "the service's answer could not be read; are both the same version?"
        reply.items.put(Figures(Outcome.FAILED, note=note, unreachable=False))


def _figures_of(turn: ChatTurn) -> Figures:
    outcome = {"done": Outcome.DONE, "cancelled": Outcome.CANCELLED}.get(turn.state, Outcome.FAILED)
    return Figures(
        outcome,
        turn.ttft_ms,
        turn.itl_p50_ms,
        turn.itl_p95_ms,
        turn.itl_p99_ms,
        turn.completion_tokens,
        turn.detail,
    )
