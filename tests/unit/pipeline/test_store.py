from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api import DescriptionView
from pipeline.config import StoreConfig
from pipeline.database import DATABASE_NAME, StoreError
from pipeline.store import Store, fts_query
from pipeline.thumbnails import ORPHAN_AGE_S
from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord

JPEG = b"\xff\xd8" + bytes(2000) + b"\xff\xd9"


def make_view(number: int, *, text: str = "a person", frame_s: float | None = None, **more: object) -> DescriptionView:
    fields: dict[str, object] = {
        "description_id": f"{number:032x}",
        "camera_id": "yard",
        "camera": "Yard",
        "person_id": f"p{number}",
        "track_id": number,
        "state": "done",
        "frame_s": 1000.0 + number if frame_s is None else frame_s,
        "due_s": 1000.5 + number,
        "text": text,
        "box": (0.1, 0.2, 0.3, 0.9),
        "model": "m",
    }
    return DescriptionView.model_validate(fields | more)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(StoreConfig(folder=tmp_path / "data"))


def test_a_description_comes_back_as_it_went_in(store: Store) -> None:
    view = make_view(1, text="Red coat.", sent_s=1001.5, ttft_ms=12.5, finish_reason="stop", prompt_tokens=600)
    store.add_description(view, JPEG)
    stored = store.description(view.description_id)
    assert stored == view.model_copy(update={"thumbnail": f"/thumbnails/{view.description_id}.jpg"})
    path = store.thumbnail(view.description_id)
    assert path is not None
    assert path.read_bytes() == JPEG
    assert not list(path.parent.glob("*.part"))


def test_a_request_comes_back_with_every_gap_and_its_error(store: Store) -> None:
    done = RequestRecord(
        "r1", "chat", "m", due_s=10.0, finished_s=12.0, outcome=Outcome.DONE, sent_s=10.1, first_token_s=10.5,
        last_token_s=11.5, gaps=(Gap(11.0, 0.5, 1), Gap(11.5, 0.5, 3)), completion_tokens=5, finish_reason="stop",
    )  # fmt: skip
    failed = RequestRecord(
        "r2", "camera", "m", due_s=11.0, finished_s=11.5, outcome=Outcome.FAILED,
        error=RequestError(ErrorKind.OVERLOADED, "queue full", 503),
    )  # fmt: skip
    store.add_request(done)
    store.add_request(failed)
    assert store.requests() == [done, failed]
    assert store.requests(traffic_class="camera") == [failed]
    assert store.requests(since_s=10.5) == [failed]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("coat", [2, 1], id="one word"),
        pytest.param("red coat", [1], id="every word"),
        pytest.param("re", [1], id="start of the last word"),
        pytest.param("re coat", [], id="start of an earlier word"),
        pytest.param('"a red"', [1], id="phrase"),
        pytest.param('"red a"', [], id="phrase in the wrong order"),
        pytest.param("CAFÉ", [3], id="case and accents"),
        pytest.param("cafe", [3], id="without accents"),
        pytest.param("yard", [3, 2, 1], id="camera's name"),
        pytest.param("NOT coat", [], id="operators are words"),
        pytest.param("text:coat", [], id="columns are words"),
        pytest.param("!!! ***", [], id="no word at all"),
        pytest.param("  ", [3, 2, 1], id="nothing asked"),
    ],
)
def test_search(store: Store, words: str, expected: list[int]) -> None:
    for number, text in enumerate(("A red coat.", "Blue coat, hat", "in front of the café"), start=1):
        store.add_description(make_view(number, text=text), None)
    assert [view.track_id for view in store.search(words)] == expected


def test_search_pages_and_filters(store: Store) -> None:
    for number in range(1, 6):
        store.add_description(make_view(number, camera_id="a" if number % 2 else "b"), None)
    store.add_description(make_view(9, state="skipped", reason="queue full"), None)
    assert [view.track_id for view in store.search(limit=2)] == [9, 5]
    assert [view.track_id for view in store.search(before_s=1003.0)] == [2, 1]
    assert [view.track_id for view in store.search(camera_id="b")] == [4, 2]
    assert [view.track_id for view in store.search(states=("skipped",))] == [9]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(StoreConfig(folder=tmp_path_factory.mktemp("filled")))
    store.add_description(make_view(1, text="A red coat."), None)
    return store


@settings(max_examples=150, deadline=None)
@given(words=st.text(max_size=30) | st.text(alphabet="\"'*^:()-+{}ANDORT \0\ud800_aé%", max_size=20))
def test_no_query_is_a_syntax_error(filled: Store, words: str) -> None:
    assert len(filled.search(words)) <= 1


def test_queries_of_words_are_never_empty_phrases() -> None:
    assert fts_query('a"b') == '"a" AND "b"*'
    assert fts_query('"" ! "') is None


def test_age_retention_is_bounded_and_removes_pictures(tmp_path: Path) -> None:
    store = Store(StoreConfig(folder=tmp_path, max_age_days=1))
    now_s = 10 * 86_400.0
    for number in range(7):
        store.add_description(make_view(number, frame_s=now_s - 2 * 86_400 + number), JPEG)
    store.add_description(make_view(99, frame_s=now_s - 10), JPEG)
    store.add_request(RequestRecord("old", "chat", "m", due_s=5.0, finished_s=6.0, outcome=Outcome.DONE))
    first = store.sweep(now_s, limit=5)
    assert (first.descriptions, first.requests, first.more) == (5, 1, True)
    second = store.sweep(now_s, limit=5)
    assert (second.descriptions, second.more) == (2, False)
    assert [view.track_id for view in store.search()] == [99]
    assert len(list(tmp_path.rglob("*.jpg"))) == 1
    assert store.check() == "ok"


def test_size_retention_removes_the_oldest_until_it_fits(tmp_path: Path) -> None:
    store = Store(StoreConfig(folder=tmp_path, max_bytes=400_000))
    for number in range(60):
        store.add_description(make_view(number, text="word " * 50), bytes(10_000))
        store.add_request(
            RequestRecord(f"r{number}", "camera", "m", due_s=1000.0 + number, finished_s=2000.0, outcome=Outcome.DONE)
        )
    assert store.size_bytes() > 400_000
    for _ in range(20):
        if not store.sweep(2000.0, limit=10).descriptions:
            break
    left = [view.track_id for view in store.search()]
    assert left == list(range(59, 59 - len(left), -1))  # the newest stay, without holes
    assert 15 < len(left) < 45
    assert store.size_bytes() <= 400_000
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] < 5  # the file shrank, too
    connection.close()
    assert min(record.due_s for record in store.requests()) >= 1000.0 + min(left) - 1


def test_size_retention_ends_with_requests_alone(tmp_path: Path) -> None:
    store = Store(StoreConfig(folder=tmp_path, max_bytes=1))
    for number in range(4):
        store.add_request(
            RequestRecord(f"r{number}", "chat", "m", due_s=float(number), finished_s=9.0, outcome=Outcome.DONE)
        )
    assert store.sweep(10.0, limit=3).requests == 3
    assert store.sweep(10.0, limit=3).requests == 1
    assert store.sweep(10.0, limit=3).more is False


def test_files_without_a_row_are_removed_when_old(store: Store) -> None:
    kept = make_view(1)
    store.add_description(kept, JPEG)
    path = store.thumbnail(kept.description_id)
    assert path is not None
    old_s = time.time() - ORPHAN_AGE_S - 10
    os.utime(path, (old_s, old_s))
    folder = path.parent
    for name, age_s in (("lost.jpg", old_s), ("cut.part", old_s), ("fresh.part", time.time())):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (age_s, age_s))
    assert sum(store.sweep(0.0).orphans for _ in range(256)) == 2
    assert sorted(file.name for file in folder.iterdir()) == sorted([path.name, "fresh.part"])


@pytest.mark.parametrize("asked", ["../../etc/passwd", "", "a" * 100, "a\0b", "%2e", "0" * 32])
def test_thumbnails_of_strange_names_are_none(store: Store, asked: str) -> None:
    assert store.thumbnail(asked) is None


def test_a_newer_schema_and_a_foreign_database_are_refused(tmp_path: Path) -> None:
    Store(StoreConfig(folder=tmp_path)).close()
    with sqlite3.connect(tmp_path / DATABASE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match=r"schema 99 of a newer FrameChat.*store\.folder"):
        Store(StoreConfig(folder=tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    with sqlite3.connect(other / DATABASE_NAME) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(StoreError, match="not a FrameChat database"):
        Store(StoreConfig(folder=other))


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / DATABASE_NAME).write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match=r"framechat\.sqlite3: .*; ") as caught:
        Store(StoreConfig(folder=tmp_path))
    assert "\n" not in str(caught.value)
