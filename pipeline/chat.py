"""Chat sessions, kept by the service: an answer runs to its end whoever listens, and can be listened to again."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from pipeline.api import ChatAsk, ChatSession, ChatTurn
from pipeline.chatstore import ChatStore, StoredTurn
from pipeline.config import Config
from pipeline.conversation import Answer, AnswerEvent, Conversation, restored
from pipeline.documents import Document, Documents
from pipeline.prompt import PromptBuilder, PromptError, Spoken
from pipeline.traffic import Traffic
from serving.config import ClassConfig
from serving.latency import gap_percentiles
from serving.records import Outcome, RequestRecord, TokenEvent, now_s
from serving.request import ModelRequest

_MAX_TURNS = 400
_WAITING_PER_SLOT = 4
_DUE_AT_MOST_AGO_S = 60.0
STOPPED = "stopped by the user"


class ChatError(Exception):
    """A request that cannot be done; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Chat:
    """Every conversation of a service. Belongs to one event loop.

    Args:
        picture: The current picture of a camera as JPEG, by camera id; None when it has none.
        camera_name: A camera's name, by id; None when there is no such camera.
        unready: Why the model server cannot be asked now; empty when it can.
        chats: Where conversations are kept.
        later: Does a write to `chats`, in order, without being waited for.
    """

    def __init__(
        self,
        config: Config,
        traffic: Traffic,
        prompts: PromptBuilder,
        documents: Documents,
        *,
        picture: Callable[[str], Awaitable[bytes | None]],
        camera_name: Callable[[str], str | None],
        unready: Callable[[], str],
        chats: ChatStore,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._config = config.chat
        self._classes = config.serving.classes
        self._traffic = traffic
        self._prompts = prompts
        self._documents = documents
        self._picture = picture
        self._camera_name = camera_name
        self._unready = unready
        self._chats = chats
        self._later = later
        self._sessions: OrderedDict[str, Conversation] = OrderedDict()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._slots = asyncio.Semaphore(self._config.max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Answers waiting for a slot or being written."""
        return len(self._tasks)

    async def restore(self) -> None:
        """Take up the conversations of earlier runs.

        Raises:
            StoreError: They cannot be read.
        """
        documents = {document.document_id: document for document in self._documents.all()}
        for stored in await asyncio.to_thread(self._chats.chats, self._config.max_sessions):
            session = self._sessions[stored.session_id] = restored(stored, documents)
            self._answers |= {answer.answer_id: answer for answer in session.answers()}

    def create(self) -> ChatSession:
        """A new conversation; the one unused longest is forgotten when there are too many.

        Raises:
            ChatError: Every session is answering.
        """
        if len(self._sessions) >= self._config.max_sessions:
            idle = next((key for key, old in self._sessions.items() if old.running is None), None)
            if idle is None:
                raise ChatError(429, f"all {self._config.max_sessions} chat sessions are answering; try again later")
            self._forget(self._sessions.pop(idle))
        session = Conversation(uuid.uuid4().hex, now_s())
        self._sessions[session.session_id] = session
        return self._shown(session)

    def session(self, session_id: str) -> ChatSession:
        """A conversation with its turns.

        Raises:
            ChatError: There is none of that id.
        """
        return self._shown(self._find(session_id))

    def _shown(self, session: Conversation) -> ChatSession:
        return session.view().model_copy(update={"max_message_chars": self._config.max_message_chars})

    async def ask(self, ask: ChatAsk) -> Answer:
        """Take a user's turn and start its answer.

        Raises:
            ChatError: No such session, camera or document; empty or too long; busy; model server not ready.
        """
        session = self._find(ask.session_id)
        text = ask.text.strip()
        if not text:
            raise ChatError(422, "text is empty; write a message")
        if len(text) > self._config.max_message_chars:
            allowed = self._config.max_message_chars
            raise ChatError(422, f"text has {len(text):,} characters, allowed: {allowed:,}; attach it as a document")
        if session.running is not None:
            raise ChatError(409, "this session is still answering; stop that answer or wait for it")
        if len(self._tasks) >= self._config.max_in_flight * (1 + _WAITING_PER_SLOT):
            raise ChatError(429, f"{len(self._tasks)} answers are waiting or running; try again later")
        unready = self._unready()
        if unready:
            raise ChatError(503, unready)
        arrived_s = now_s()
        due_s = ask.due_s if ask.due_s is not None and 0 <= arrived_s - ask.due_s <= _DUE_AT_MOST_AGO_S else arrived_s
        answer = Answer(uuid.uuid4().hex, ChatTurn(role="assistant", text="", state="waiting"))
        answer.turn.answer_id = answer.answer_id
        session.running = answer  # from here on the session is taken
        try:
            spoken = await self._spoken(ask, text)
            has_document = spoken.document is not None or any(turn.document is not None for turn in session.spoken)
            traffic_class = "document" if has_document else "chat"
            limits = self._classes[traffic_class]
            built = await self._prompts.build(session.spoken, spoken, limits.max_tokens, gone=session.gone)
        except PromptError as error:
            session.running = None
            raise ChatError(413, str(error)) from error
        except BaseException:
            session.running = None
            raise
        if not built.has_document:
            traffic_class, limits = "chat", self._classes["chat"]
        session.gone += built.left_out
        del session.spoken[: built.left_out]  # what is too old for this prompt is too old for every later one
        answer.turn.detail = built.note
        session.turns += [ChatTurn(role="user", text=text, attachment=spoken.attachment), answer.turn]
        for gone in session.turns[:-_MAX_TURNS]:
            self._answers.pop(gone.answer_id or "", None)
        del session.turns[:-_MAX_TURNS]
        question = StoredTurn(
            session.turns[-2],
            document_id=None if spoken.document is None else spoken.document.document_id,
            had_picture=spoken.picture is not None,
        )
        self._later(
            partial(
                self._chats.ask,
                *(session.session_id, session.created_s, arrived_s, question, answer.turn.model_copy()),
                most_turns=_MAX_TURNS,
            )
        )
        self._answers[answer.answer_id] = answer
        request = self._request(answer, traffic_class, limits, built.messages, due_s)
        self._traffic.due(answer.answer_id, traffic_class, due_s)
        task = asyncio.get_running_loop().create_task(self._answer(session, spoken, answer, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answer

    def answer(self, answer_id: str) -> Answer:
        """An answer, running or ended.

        Raises:
            ChatError: There is none of that id.
        """
        answer = self._answers.get(answer_id)
        if answer is None:
            raise ChatError(404, f"answer {answer_id[:40]!r} is not known; reload the session")
        return answer

    def cancel(self, answer_id: str, reason: str = STOPPED) -> ChatTurn:
        """Stop an answer; what it said so far stays. Harmless when it has ended.

        Raises:
            ChatError: There is none of that id.
        """
        answer = self.answer(answer_id)
        if not answer.ended:
            answer.cancelled = answer.cancelled or reason
            if answer.active is not None:
                answer.active.cancel(reason)
            answer.ring()
        return answer.turn

    @staticmethod
    async def events(answer: Answer, position: int = 0) -> AsyncIterator[AnswerEvent]:
        """The answer's events from character `position` on; ends after `end`.

        A listener that is slow gets several tokens in one event, so nothing queues up for it.
        """
        position = max(0, min(position, len(answer.text)))
        while True:
            changed = answer.changed
            if len(answer.text) > position:
                text = answer.text[position:]
                position = len(answer.text)
                yield AnswerEvent("token", position, text)
                continue
            if answer.ended:
                yield AnswerEvent("end", position, turn=answer.turn)
                return
            await changed.wait()

    def stop(self, reason: str) -> None:
        """Stop every answer; their listeners hear the end."""
        for answer in list(self._answers.values()):
            self.cancel(answer.answer_id, reason)

    async def close(self, reason: str) -> None:
        """Stop every answer; returns when all have ended."""
        self.stop(reason)
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- one answer ------------------------------------------------------------------------------------------------

    async def _spoken(self, ask: ChatAsk, text: str) -> Spoken:
        """The user's turn with what is attached to it."""
        document: Document | None = None
        picture: bytes | None = None
        attachment: list[str] = []
        if ask.document_id is not None:
            document = self._documents.get(ask.document_id)
            if document is None:
                raise ChatError(404, f"document {ask.document_id[:40]!r} is not kept any more; upload it again")
            attachment.append(f"document {document.name}")
        if ask.camera_id is not None:
            name = self._camera_name(ask.camera_id)
            if name is None:
                raise ChatError(404, f"camera {ask.camera_id[:40]!r} does not exist; choose one of the list")
            picture = await self._picture(ask.camera_id)
            if picture is None:
                raise ChatError(409, f"camera {name} has no picture yet; try again when it is live")
            attachment.append(f"picture of {name}")
        return Spoken("user", text, document=document, picture=picture, attachment=", ".join(attachment))

    def _request(
        self, answer: Answer, traffic_class: str, limits: ClassConfig, messages: list[dict[str, Any]], due_s: float
    ) -> ModelRequest:
        return ModelRequest(
            traffic_class=traffic_class,
            messages=messages,
            max_tokens=limits.max_tokens,
            temperature=limits.temperature,
            due_s=due_s,
            request_id=answer.answer_id,
            priority=limits.priority,
            extra_body=limits.extra_body,
        )

    async def _answer(self, session: Conversation, spoken: Spoken, answer: Answer, request: ModelRequest) -> None:
        told = False
        try:
            async with self._slots:
                if not answer.cancelled:
                    told = await self._run(session, spoken, answer, request)
                    return
            reason = answer.cancelled
            self._traffic.never_sent(
                request.request_id, request.traffic_class, request.due_s, Outcome.CANCELLED, reason
            )
            answer.update(state="cancelled", detail=reason)
        finally:
            session.running = None
            if not answer.ended:
                answer.update(state="failed", detail="the service stopped")
            self._later(partial(self._chats.end, answer.turn.model_copy(), told=told))

    async def _run(self, session: Conversation, spoken: Spoken, answer: Answer, request: ModelRequest) -> bool:
        """Whether the next prompt may hold this question and its answer."""
        loop = asyncio.get_running_loop()

        def took(event: TokenEvent) -> None:
            if answer.turn.ttft_ms is None and event.tokens:
                answer.update(state="streaming", ttft_ms=(event.at_s - request.due_s) * 1000)
            if event.text and not event.reasoning:
                answer.text += event.text
                answer.update(text=answer.text)

        def token(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(took, event)

        answer.active = self._traffic.start(request, token)
        if answer.cancelled:
            answer.active.cancel(answer.cancelled)
        record = await answer.active.result()
        answer.active = None
        told = bool(answer.text.strip())
        if told:
            session.spoken += [spoken, Spoken("assistant", answer.text)]
        answer.update(**_end(record, answer.turn.detail))
        return told

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _find(self, session_id: str) -> Conversation:
        session = self._sessions.get(session_id)
        if session is None:
            raise ChatError(404, f"chat session {session_id[:40]!r} does not exist; start a new one")
        self._sessions.move_to_end(session_id)
        return session

    def _forget(self, session: Conversation) -> None:
        self._later(partial(self._chats.forget, session.session_id))
        for turn in session.turns:
            if turn.answer_id is not None:
                self._answers.pop(turn.answer_id, None)


def _end(record: RequestRecord, note: str) -> dict[str, object]:
    """What a finished answer's turn shows, from its record."""
    told = [note]
    if record.error is not None:
        told.append(record.error.message)
    elif record.reason:
        told.append(record.reason)
    elif record.finish_reason == "length":
        told.append("cut at the longest allowed length")
    itl = gap_percentiles(record.gaps)
    return {
        "state": record.outcome.value,
        "detail": "; ".join(part for part in told if part),
        "ttft_ms": None if record.ttft_s is None else record.ttft_s * 1000,
        "itl_p50_ms": None if itl.p50_s is None else itl.p50_s * 1000,
        "itl_p95_ms": None if itl.p95_s is None else itl.p95_s * 1000,
        "itl_p99_ms": None if itl.p99_s is None else itl.p99_s * 1000,
        "completion_tokens": record.completion_tokens,
    }
