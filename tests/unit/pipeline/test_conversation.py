"""A session as the service holds it: who listens is woken, and what was stored is told again."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.api import ChatTurn
from pipeline.chatstore import StoredChat, StoredTurn
from pipeline.conversation import Answer, Conversation, restored
from pipeline.documents import Document


def answer(state: str = "streaming") -> Answer:
    return Answer("a1", ChatTurn.model_validate({"role": "assistant", "text": "", "state": state, "answer_id": "a1"}))


@pytest.mark.parametrize(
    ("state", "ended"),
    [("waiting", False), ("streaming", False), ("done", True), ("failed", True), ("cancelled", True)],
)
def test_when_an_answer_has_ended(state: str, ended: bool) -> None:
    assert answer(state).ended == ended


async def test_every_listener_is_woken_once_a_change() -> None:
    one = answer()
    bell = one.changed
    listeners = [asyncio.create_task(bell.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    one.update(state="done", detail="as asked")
    assert await asyncio.gather(*listeners) == [True] * 3
    assert (one.turn.state, one.turn.detail, one.ended) == ("done", "as asked", True)
    assert one.changed is not bell  # whoever listens again waits for what comes next
    assert not one.changed.is_set()


def test_only_answers_can_be_listened_to_again() -> None:
    said = ChatTurn(role="assistant", text="Noon.", answer_id="a1")
    session = Conversation("s", 1.0, [ChatTurn(role="user", text="When?"), said])
    (again,) = session.answers()
    assert (again.answer_id, again.text, again.turn, again.ended) == ("a1", "Noon.", said, True)
    assert session.view().turns == session.turns


def test_what_was_stored_is_told_again_but_for_what_is_gone() -> None:
    plan = Document("d1", "plan.txt", "Meet at noon.")

    def turn(text: str, **more: object) -> StoredTurn:
        fields = {"told": True, **more}
        return StoredTurn(ChatTurn(role="user", text=text, attachment="plan.txt"), **fields)  # type: ignore[arg-type]

    stored = StoredChat(
        "s",
        2.0,
        (
            turn("When?", document_id="d1"),
            turn("Where?", document_id="d2"),
            turn("Who?", had_picture=True),
            turn("Never answered", told=False),
        ),
    )
    session = restored(stored, {"d1": plan})
    assert [item.turn.text for item in stored.turns] == [item.text for item in session.turns]
    assert [item.text for item in session.spoken] == ["When?", "Where?", "Who?"]
    assert [item.document for item in session.spoken] == [plan, None, None]
    assert [item.picture_dropped for item in session.spoken] == [False, False, True]
    assert all(item.picture is None for item in session.spoken)
