from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pipeline.api import ChatTurn
from pipeline.camerastore import CameraStore, StoredCamera
from pipeline.chatstore import ChatStore, StoredTurn
from pipeline.config import CameraConfig, StoreConfig
from pipeline.database import DATABASE_NAME
from pipeline.documents import MAX_DOCUMENTS, Document
from pipeline.store import Store
from tests.unit.pipeline.test_store import make_view

DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreConfig(folder=tmp_path, max_age_days=1, max_bytes=10**6))


def converse(chats: ChatStore, session_id: str, at_s: float, number: int = 1, **more: object) -> None:
    """One question and its answer."""
    question = StoredTurn(ChatTurn(role="user", text=f"question {number}"), **more)  # type: ignore[arg-type]
    answer = ChatTurn(role="assistant", text="", state="waiting", answer_id=f"{session_id}-{number}")
    chats.ask(session_id, 1.0, at_s, question, answer, most_turns=6)
    chats.end(answer.model_copy(update={"text": f"answer {number}", "state": "done"}), told=True)


def test_a_chat_comes_back_with_its_newest_turns(store: Store) -> None:
    chats = ChatStore(store.database)
    for number in range(1, 6):
        converse(chats, "s", float(number), number, had_picture=number == 5)
    (chat,) = chats.chats(10)
    assert [stored.turn.text for stored in chat.turns] == [
        "question 3", "answer 3", "question 4", "answer 4", "question 5", "answer 5",
    ]  # fmt: skip
    assert all(stored.told for stored in chat.turns)
    assert [stored.had_picture for stored in chat.turns] == [False] * 4 + [True, False]


def test_the_chats_used_last_come_back(store: Store) -> None:
    chats = ChatStore(store.database)
    for name, at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("a", 4.0)):
        converse(chats, name, at_s, number=int(at_s))
    assert [chat.session_id for chat in chats.chats(2)] == ["c", "a"]
    chats.forget("a")
    assert [chat.session_id for chat in chats.chats(9)] == ["b", "c"]


def test_documents_are_bounded_but_those_of_a_chat_stay(store: Store) -> None:
    chats = ChatStore(store.database)
    for number in range(MAX_DOCUMENTS + 3):
        chats.add_document(Document(f"d{number}", "n", "text"), float(number))
        if number == 1:
            converse(chats, "s", 0.5, document_id="d1")
    kept = [document.document_id for document in chats.documents()]
    assert len(kept) == MAX_DOCUMENTS + 1
    assert kept[:2] == ["d1", "d3"]


def test_what_nobody_used_for_long_goes_with_the_old_descriptions(store: Store) -> None:
    chats = ChatStore(store.database)
    now_s = 10 * DAY_S
    for name, used_s in (("old", now_s - 2 * DAY_S), ("new", now_s - 60)):
        chats.add_document(Document(f"of {name}", "n", "text"), now_s - 3 * DAY_S)
        converse(chats, name, used_s, document_id=f"of {name}")
    store.add_description(make_view(1, frame_s=now_s - 2 * DAY_S), None)
    swept = store.sweep(now_s)
    assert (swept.descriptions, swept.chats, swept.documents) == (1, 1, 1)
    assert [chat.session_id for chat in chats.chats(9)] == ["new"]
    assert [document.document_id for document in chats.documents()] == ["of new"]
    assert store.check() == "ok"


def test_the_oldest_of_everything_goes_when_it_is_too_much(tmp_path: Path) -> None:
    store = Store(StoreConfig(folder=tmp_path, max_bytes=600_000))
    chats = ChatStore(store.database)
    for number in range(10):
        at_s = 1000.0 + number
        store.add_description(make_view(number, frame_s=at_s), bytes(40_000))
        chats.add_document(Document(f"d{number}", "n", "x" * 40_000), at_s + 0.5)
    converse(chats, "s", 1004.2)
    while store.sweep(2000.0, limit=3).more:
        pass
    assert store.size_bytes() <= 600_000
    left = min(view.frame_s for view in store.search())
    assert min(float(document.document_id[1:]) + 1000.5 for document in chats.documents()) == pytest.approx(left, abs=1)
    assert [chat.session_id for chat in chats.chats(9)] == (["s"] if left <= 1004 else [])


def test_a_database_of_schema_1_is_taken_over(store: Store, tmp_path: Path) -> None:
    store.add_description(make_view(1, text="A red coat."), None)
    store.close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        for table in ("chat_turns", "chats", "documents", "cameras"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    again = Store(StoreConfig(folder=tmp_path))
    assert [view.track_id for view in again.search("coat")] == [1]
    converse(ChatStore(again.database), "s", 1.0)
    assert len(ChatStore(again.database).chats(9)) == 1


def test_a_camera_that_cannot_be_read_any_more_is_left_out(store: Store, tmp_path: Path) -> None:
    cameras = CameraStore(store.database)
    gate = StoredCamera("gate", CameraConfig(name="gate", source="0", rotate=90), removed=False)
    cameras.keep(gate)
    cameras.keep(StoredCamera("yard", CameraConfig(name="yard", source="1"), removed=True))
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("""UPDATE cameras SET camera = '{"name": "yard"}' WHERE camera_id = 'yard'""")
    connection.close()
    assert cameras.cameras() == [gate]
    cameras.forget("gate")
    assert cameras.cameras() == []
