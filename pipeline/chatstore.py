"""Chats and documents in the database, so that a restart of the service shows the same ones.

A question is stored when it is asked and its answer when that has ended; what was being answered when the service was
killed comes back as an answer that was not finished. Pictures that went along with a question are not kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from pipeline.api import ChatTurn
from pipeline.database import Database
from pipeline.documents import MAX_DOCUMENTS, Document
from pipeline.schema import chat_turns, chats, documents

INTERRUPTED = "the service stopped before the answer was finished"


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """One side's turn. `told`: the next prompt may hold it, with its document; a picture it had is gone."""

    turn: ChatTurn
    told: bool = False
    document_id: str | None = None
    had_picture: bool = False


@dataclass(frozen=True, slots=True)
class StoredChat:
    """A conversation, its turns oldest first."""

    session_id: str
    created_s: float
    turns: tuple[StoredTurn, ...]


class ChatStore:
    """Chats and documents. Every method blocks and may be called from any thread; each may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def ask(
        self,
        session_id: str,
        created_s: float,
        asked_s: float,
        question: StoredTurn,
        answer: ChatTurn,
        *,
        most_turns: int,
    ) -> None:
        """Store a question and that it is being answered; of the chat's turns the newest `most_turns` stay."""
        common = {"session_id": session_id, "answer_id": answer.answer_id, "told": False}
        rows = [
            common
            | {
                "turn": question.turn.model_dump_json(),
                "document_id": question.document_id,
                "had_picture": question.had_picture,
            },
            common | {"turn": answer.model_dump_json(), "document_id": None, "had_picture": False},
        ]
        mine = chat_turns.c.session_id == session_id
        newest = select(chat_turns.c.turn_id).where(mine).order_by(chat_turns.c.turn_id.desc()).limit(most_turns)
        attached = select(chat_turns.c.document_id).where(mine, chat_turns.c.document_id.is_not(None))
        with self._database.writing() as connection:
            connection.execute(
                upsert(chats)
                .values(session_id=session_id, created_s=created_s, used_s=asked_s)
                .on_conflict_do_update(index_elements=["session_id"], set_={"used_s": asked_s})
            )
            connection.execute(insert(chat_turns), rows)
            connection.execute(delete(chat_turns).where(mine, chat_turns.c.turn_id.not_in(newest)))
            connection.execute(update(documents).where(documents.c.document_id.in_(attached)).values(used_s=asked_s))

    def end(self, answer: ChatTurn, *, told: bool) -> None:
        """Store an ended answer. `told`: it and its question are part of the next prompts."""
        both = chat_turns.c.answer_id == answer.answer_id
        last = select(func.max(chat_turns.c.turn_id)).where(both).scalar_subquery()
        with self._database.writing() as connection:
            connection.execute(update(chat_turns).where(both).values(told=told))
            connection.execute(
                update(chat_turns).where(chat_turns.c.turn_id == last).values(turn=answer.model_dump_json())
            )

    def forget(self, session_id: str) -> None:
        """Remove a chat with its turns."""
        with self._database.writing() as connection:
            connection.execute(delete(chats).where(chats.c.session_id == session_id))

    def chats(self, limit: int) -> list[StoredChat]:
        """The `limit` chats used last, the one unused longest first. What was being answered has failed."""
        newest = select(chats).order_by(chats.c.used_s.desc()).limit(limit)
        with self._database.reading() as connection:
            found = list(connection.execute(newest))
            names = [row.session_id for row in found]
            rows = connection.execute(
                select(chat_turns).where(chat_turns.c.session_id.in_(names)).order_by(chat_turns.c.turn_id)
            )
            turns: dict[str, list[StoredTurn]] = defaultdict(list)
            for row in rows:
                turns[row.session_id].append(_turn(row))
        return [StoredChat(row.session_id, row.created_s, tuple(turns[row.session_id])) for row in reversed(found)]

    def add_document(self, document: Document, at_s: float) -> None:
        """Store a document; beside the newest MAX_DOCUMENTS only those stay that a chat refers to."""
        newest = select(documents.c.document_id).order_by(documents.c.used_s.desc()).limit(MAX_DOCUMENTS)
        referred = select(chat_turns.c.document_id).where(chat_turns.c.document_id.is_not(None))
        row = {
            "document_id": document.document_id,
            "name": document.name,
            "text": document.text,
            "used_s": at_s,
        }
        with self._database.writing() as connection:
            connection.execute(insert(documents), row)
            connection.execute(
                delete(documents).where(
                    documents.c.document_id.not_in(newest), documents.c.document_id.not_in(referred)
                )
            )

    def documents(self) -> list[Document]:
        """Every stored document, the one unused longest first."""
        query = select(documents).order_by(documents.c.used_s)
        with self._database.reading() as connection:
            return [Document(row.document_id, row.name, row.text) for row in connection.execute(query)]


def _turn(row: Row[tuple[object, ...]]) -> StoredTurn:
    turn = ChatTurn.model_validate_json(row.turn)
    if turn.state in ("waiting", "streaming"):
        turn = turn.model_copy(update={"state": "failed", "detail": INTERRUPTED})
    return StoredTurn(turn, row.told, row.document_id, row.had_picture)
