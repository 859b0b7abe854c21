"""One chat session as the service holds it: its turns, its running answer, and what the next prompt may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.api import ChatSession, ChatTurn
from pipeline.chatstore import StoredChat
from pipeline.documents import Document
from pipeline.prompt import Spoken
from serving.client import ActiveRequest

_ENDED = ("done", "failed", "cancelled")


@dataclass(slots=True, eq=False)
class Answer:
    """One answer: its text so far, and a bell that rings when there is more."""

    answer_id: str
    turn: ChatTurn
    text: str = ""
    active: ActiveRequest | None = None
    cancelled: str = ""  # why
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.turn.state in _ENDED

    def ring(self) -> None:
        """Wake everyone who listens."""
        bell, self.changed = self.changed, asyncio.Event()
        bell.set()

    def update(self, **changes: object) -> None:
        """Change the turn that the session shows."""
        for name, value in changes.items():
            setattr(self.turn, name, value)
        self.ring()


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """`token`: text that was added, `position` characters are there now; `end`: the finished turn."""

    kind: str
    position: int
    text: str = ""
    turn: ChatTurn | None = None


@dataclass(slots=True, eq=False)
class Conversation:
    """One session.

    Attributes:
        spoken: What the next prompt may hold.
        gone: Turns that no prompt holds any more.
    """

    session_id: str
    created_s: float
    turns: list[ChatTurn] = field(default_factory=list)
    spoken: list[Spoken] = field(default_factory=list)
    gone: int = 0
    running: Answer | None = None

    def view(self) -> ChatSession:
        """As the page shows it."""
        return ChatSession(session_id=self.session_id, created_s=self.created_s, turns=self.turns)

    def answers(self) -> list[Answer]:
        """Its ended answers, to be listened to again."""
        return [Answer(turn.answer_id, turn, turn.text) for turn in self.turns if turn.answer_id is not None]


def restored(chat: StoredChat, documents: Mapping[str, Document]) -> Conversation:
    """The conversation that was stored. A document that is not kept any more is not told again, nor is a picture."""
    spoken = [
        Spoken(
            stored.turn.role,
            stored.turn.text,
            document=documents.get(stored.document_id or ""),
            attachment=stored.turn.attachment,
            picture_dropped=stored.had_picture,
        )
        for stored in chat.turns
        if stored.told
    ]
    return Conversation(chat.session_id, chat.created_s, [stored.turn for stored in chat.turns], spoken)
