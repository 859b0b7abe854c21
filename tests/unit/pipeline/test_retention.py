"""What one sweep removes, and what it leaves for the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.api import DescriptionView
from pipeline.config import StoreConfig
from pipeline.retention import _enough, _Old
from pipeline.store import Store
from serving.records import Outcome, RequestRecord

DAY_S = 86_400.0
NOW_S = 100 * DAY_S


def described(store: Store, number: int, frame_s: float) -> str:
    view = DescriptionView(
        description_id=f"{number:032x}", camera_id="yard", camera="Yard", person_id="p", track_id=1, state="done",
        frame_s=frame_s, due_s=frame_s, text="words", box=(0, 0, 1, 1), model="m",
    )  # fmt: skip
    store.add_description(view, b"jpeg" * 100)
    return view.description_id


def requested(store: Store, name: str, due_s: float) -> None:
    store.add_request(RequestRecord(name, "chat", "m", due_s=due_s, finished_s=due_s, outcome=Outcome.DONE))


def left(store: Store) -> tuple[int, int]:
    """Descriptions and requests."""
    return len(store.search(limit=500)), len(store.requests())


def limited(folder: Path, **limits: float) -> Store:
    return Store(StoreConfig.model_validate({"folder": folder, **limits}))


def test_requests_go_with_the_descriptions_of_their_time(tmp_path: Path) -> None:
    store = limited(tmp_path)
    for number in range(4):
        described(store, number, NOW_S - 10 + number)
        requested(store, f"r{number}", NOW_S - 10 + number)
    # One byte too many: the oldest description is enough.
    full = Store(StoreConfig(folder=tmp_path, max_bytes=store.size_bytes() - 1))
    swept = full.sweep(NOW_S)
    assert (swept.descriptions, swept.requests, swept.more) == (1, 1, False)
    assert [record.request_id for record in full.requests()] == ["r1", "r2", "r3"]


def test_requests_do_not_go_alone_while_older_descriptions_are_left(tmp_path: Path) -> None:
    store = limited(tmp_path, max_age_days=30, max_bytes=1)
    for number in range(2):
        described(store, number, NOW_S - 40 * DAY_S)
    described(store, 2, NOW_S - 20)
    requested(store, "new", NOW_S - 10)
    swept = store.sweep(NOW_S, limit=2)  # as many as are too old
    assert (swept.descriptions, swept.requests, swept.more) == (2, 0, True)
    assert left(store) == (1, 1)
    store.sweep(NOW_S, limit=2)
    assert left(store) == (0, 1)
    store.sweep(NOW_S, limit=2)
    assert left(store) == (0, 0)


def test_what_is_exactly_as_old_as_allowed_stays(tmp_path: Path) -> None:
    store = limited(tmp_path, max_age_days=30)
    described(store, 1, NOW_S - 30 * DAY_S)
    gone = described(store, 2, NOW_S - 30 * DAY_S - 1)
    assert store.thumbnail(gone) is not None
    assert store.sweep(NOW_S).descriptions == 1
    assert store.thumbnail(gone) is None
    assert left(store) == (1, 0)
    swept = store.sweep(NOW_S)
    assert (swept.descriptions, swept.requests, swept.orphans, swept.more) == (0, 0, 0, False)


@pytest.mark.parametrize(
    ("excess", "chosen"), [(0, []), (1, ["a"]), (10, ["a"]), (11, ["a", "b"]), (1000, ["a", "b", "c"])]
)
def test_as_few_as_free_enough(excess: int, chosen: list[str]) -> None:
    rows = [_Old("chat", name, at_s, 10) for name, at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    assert [row.key for row in _enough(rows, excess)] == chosen
