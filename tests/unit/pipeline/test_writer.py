"""The thread that writes: in order, within bounds, and a failure is told to whoever waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from pipeline import writer
from pipeline.database import StoreError
from pipeline.retention import Swept
from pipeline.store import Store
from pipeline.writer import StoreWriter
from serving.records import Outcome, RequestRecord


class Kept:
    """Stands where the store does; `error` is what writing raises."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.error: Exception | None = None
        self.closed = False
        self.sweeps: list[Swept] = []

    def add_request(self, record: RequestRecord) -> None:
        if self.error is not None:
            raise self.error
        self.items.append(record)

    def add_description(self, view: Any, thumbnail: bytes | None) -> None:
        if self.error is not None:
            raise self.error
        self.items.append((view, thumbnail))

    def sweep(self, _now_s: float) -> Swept:
        return self.sweeps.pop(0)

    def close(self) -> None:
        self.closed = True


def record(number: int) -> RequestRecord:
    return RequestRecord(f"r{number}", "chat", "m", due_s=0, finished_s=1, outcome=Outcome.DONE)


def writer_of(store: Kept, **more: Any) -> StoreWriter:
    return StoreWriter(cast(Store, store), **more)


async def test_writes_are_in_the_order_of_the_calls_and_done_when_closed() -> None:
    store, seen = Kept(), []
    writes = writer_of(store, on_record=seen.append)
    for number in range(50):
        writes.request(record(number))
    assert await writes.description(cast(Any, "view"), b"jpeg")
    assert store.items == [*(record(number) for number in range(50)), ("view", b"jpeg")]
    assert seen == store.items[:-1]
    writes.request(record(50))
    writes.close()
    assert (store.items[-1], store.closed) == (record(50), True)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        pytest.param(StoreError("disk full; free some"), "disk full; free some", id="the store's own words"),
        pytest.param(OverflowError("int too large"), "OverflowError: int too large", id="anything else"),
    ],
)
async def test_a_write_that_fails_is_told_and_the_next_may_work(error: Exception, problem: str) -> None:
    store = Kept()
    writes = writer_of(store)
    store.error = error
    assert not await writes.description(cast(Any, "view"), None)
    assert (writes.problem, writes.lost) == (problem, 0)  # whoever waited knows
    writes.request(record(1))
    assert await writes.now(lambda: None)
    assert (writes.problem, writes.lost) == ("", 1)
    store.error = None
    assert await writes.description(cast(Any, "view"), None)
    writes.close()


async def test_what_a_slow_disk_keeps_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_MAX_PENDING", 3)
    store, busy, go = Kept(), threading.Event(), threading.Event()
    writes = writer_of(store)

    def slow() -> None:
        busy.set()
        go.wait(10)

    writes.later(slow)
    await asyncio.to_thread(busy.wait, 10)
    for number in range(5):
        writes.request(record(number))
    assert writes.lost == 2
    go.set()
    await writes.now(lambda: None)
    assert store.items == [record(number) for number in range(3)]
    writes.close()
    writes.request(record(9))  # too late
    assert writes.lost == 3


async def test_a_sweep_that_left_something_is_followed_soon_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    store, slept = Kept(), []
    store.sweeps = [Swept(more=True), Swept(), Swept()]
    writes = writer_of(store)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(writer.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await writes.keep_swept()
    assert slept == [1.0, writer.SWEEP_EVERY_S, writer.SWEEP_EVERY_S]
    writes.close()
