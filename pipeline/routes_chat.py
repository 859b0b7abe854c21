"""Addresses of chat sessions, their answers and documents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, File, Header, Query, Request, UploadFile
from sse_starlette import EventSourceResponse, ServerSentEvent

from pipeline.api import ChatAsk, ChatSession, ChatTurn, DocumentView
from pipeline.chat import Chat
from pipeline.conversation import Answer
from pipeline.errors import ApiError
from pipeline.origins import too_large
from pipeline.parts import parts_of
from pipeline.routes_descriptions import PING_S

router = APIRouter()
_SEND_TIMEOUT_S = 30.0


@router.post("/chat/sessions", status_code=201)
async def new_session(request: Request) -> ChatSession:
    """Start a conversation."""
    return parts_of(request).chat.create()


@router.get("/chat/sessions/{session_id}")
async def session(request: Request, session_id: str) -> ChatSession:
    """A conversation with its turns; a running answer's is there as far as it has come."""
    return parts_of(request).chat.session(session_id)


@router.post("/chat", response_class=EventSourceResponse)
async def ask(request: Request, question: ChatAsk) -> EventSourceResponse:
    """Ask; the answer comes as server-sent events, and goes on when nobody listens."""
    answer = await parts_of(request).chat.ask(question)
    return _stream(answer, 0, first=True)


@router.get("/chat/answers/{answer_id}/events", response_class=EventSourceResponse)
async def answer_events(
    request: Request,
    answer_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> EventSourceResponse:
    """The answer's events after the one of `Last-Event-ID` (or `after`); from its start without one."""
    given = last_event_id or ""
    return _stream(parts_of(request).chat.answer(answer_id), int(given) if given.isdecimal() else after)


@router.post("/chat/answers/{answer_id}/cancel")
async def cancel(request: Request, answer_id: str) -> ChatTurn:
    """Stop an answer; what it has said stays."""
    return parts_of(request).chat.cancel(answer_id)


@router.post("/documents", status_code=201)
async def add_document(request: Request, file: Annotated[UploadFile, File()]) -> DocumentView:
    """Take a text or PDF (multipart, `file`) for a later question."""
    parts = parts_of(request)
    most_bytes = parts.runtime.config.chat.max_document_bytes
    content = await file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ApiError(413, too_large(most_bytes))
    return (await parts.documents.add(file.filename or "document", content)).view()


def _stream(answer: Answer, position: int, *, first: bool = False) -> EventSourceResponse:
    """Events whose id is the number of characters that have been sent: resuming is going on from there."""

    async def events() -> AsyncIterator[ServerSentEvent]:
        if first:
            yield ServerSentEvent(json.dumps({"answer_id": answer.answer_id}), event="answer", id="0", sep="\n")
        async for item in Chat.events(answer, position):
            if item.turn is not None:
                data, kind = item.turn.model_dump_json(), "end"
            else:
                data, kind = json.dumps({"text": item.text}), "token"
            yield ServerSentEvent(data, event=kind, id=str(item.position), sep="\n")

    return EventSourceResponse(events(), ping=PING_S, send_timeout=_SEND_TIMEOUT_S, sep="\n")
