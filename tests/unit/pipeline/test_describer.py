"""What becomes of a request for a description, and that whoever picked the person hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from pipeline.api import DescriptionView
from pipeline.config import Config, TriggerConfig
from pipeline.describer import Describer, Job
from pipeline.feed import Feed
from pipeline.frame import Detection, Frame
from pipeline.traffic import Traffic
from pipeline.trigger import Trigger
from pipeline.writer import StoreWriter
from serving.records import ErrorKind, Outcome, RequestError, RequestRecord, now_s
from serving.request import ModelRequest


class Asked:
    """A request at the server; the test says how it ends."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.ended: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()

    def cancel(self, reason: str) -> None:
        self.end(Outcome.CANCELLED, reason=reason)

    def end(self, outcome: Outcome, *, text: str = "", reason: str = "", error: RequestError | None = None) -> None:
        record = RequestRecord(
            request_id=self.request.request_id, traffic_class="camera", model="m", due_s=self.request.due_s,
            finished_s=now_s(), outcome=outcome, text=text, reason=reason, error=error,
        )  # fmt: skip
        if not self.ended.done():
            self.ended.set_result(record)

    async def result(self) -> RequestRecord:
        return await self.ended


class Server:
    """Stands where `Traffic` does."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def due(self, *_: object) -> None:
        pass

    def never_sent(self, *_: object) -> None:
        pass

    def start(self, request: ModelRequest, *_: object) -> Asked:
        self.asked.append(Asked(request))
        return self.asked[-1]


class Stored:
    """Stands where `StoreWriter` does."""

    problem = "disk full"

    def __init__(self) -> None:
        self.views: list[DescriptionView] = []
        self.works = True

    async def description(self, view: DescriptionView, _thumbnail: bytes | None) -> bool:
        if self.works:
            self.views.append(view)
        return self.works

    def ends(self) -> list[tuple[str, str, str]]:
        return [(view.person_id, view.state, view.reason) for view in self.views]


class Told:
    """Stands where a trigger does: keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def waiting(self, person_id: str, reason: str = "") -> None:
        self.heard.append(("waiting", person_id, reason))

    def describing(self, person_id: str) -> None:
        self.heard.append(("describing", person_id))

    def finished(self, person_id: str, now_s: float) -> None:
        self.heard.append(("finished", person_id))

    def dropped(self, person_id: str, reason: str, now_s: float, *, retry: bool = True) -> None:
        self.heard.append(("dropped", person_id, reason, "again" if retry else "for good"))


class Bench:
    """A describer on scripted parts."""

    def __init__(self, *, ready: bool = True, **limits: int) -> None:
        self.server, self.stored, self.told = Server(), Stored(), Told()
        config = Config.model_validate({"trigger": limits})
        traffic, writer = cast(Traffic, self.server), cast(StoreWriter, self.stored)
        self.describer = Describer(config, traffic, writer, Feed(), ready=ready)

    def submit(self, person_id: str, feedback: Any = None) -> None:
        view = DescriptionView(
            description_id=f"d{person_id}", camera_id="door", camera="Door", person_id=person_id, track_id=1,
            state="waiting", frame_s=now_s(), due_s=now_s(), box=(0, 0, 1, 1),
        )  # fmt: skip
        self.describer.submit(Job(view=view, jpegs=(b"jpeg",), thumbnail=b"", feedback=feedback or self.told))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - of anything
                await asyncio.sleep(0)


async def test_a_done_description_is_stored_and_told() -> None:
    bench = Bench()
    bench.submit("1")
    await bench.until(lambda: bench.server.asked)
    bench.server.asked[0].end(Outcome.DONE, text=" A red coat. ")
    await bench.describer.drain()
    assert bench.stored.ends() == [("1", "done", "")]
    assert bench.stored.views[0].text == "A red coat."
    assert bench.told.heard == [("waiting", "1", "waiting for a free slot"), ("finished", "1")]


async def test_what_could_not_be_stored_says_so() -> None:
    bench = Bench()
    bench.stored.works = False
    bench.submit("1")
    await bench.until(lambda: bench.server.asked)
    bench.server.asked[0].end(Outcome.FAILED, error=RequestError(ErrorKind.CUT, "cut"))
    await bench.describer.drain()
    assert bench.told.heard[-1] == ("dropped", "1", "cut; not stored: disk full", "again")


async def test_so_many_run_and_so_many_wait() -> None:
    bench = Bench(max_in_flight=1, max_waiting=2)
    for person_id in "1234":
        bench.submit(person_id)
    await bench.until(lambda: bench.stored.views)
    assert bench.stored.ends() == [("2", "skipped", "queue full")]
    assert (bench.describer.running, bench.describer.pending(), bench.describer.has_room()) == (1, 3, False)
    bench.server.asked[0].end(Outcome.DONE, text="x")
    await bench.until(lambda: len(bench.server.asked) == 2)
    assert bench.server.asked[1].request.request_id == "d3"
    await bench.describer.close("the service stops")
    assert bench.stored.ends()[1:] == [
        ("1", "done", ""), ("4", "cancelled", "the service stops"), ("3", "cancelled", "the service stops")
    ]  # fmt: skip


@pytest.mark.parametrize("person_id", [pytest.param("1", id="running"), pytest.param("2", id="waiting")])
async def test_a_cancelled_request_ends_for_good(person_id: str) -> None:
    bench = Bench(max_in_flight=1)
    bench.submit("1")
    bench.submit("2")
    await bench.until(lambda: bench.server.asked)
    bench.describer.cancel("elsewhere", person_id, "left")
    bench.describer.cancel("door", person_id, "left 20 s ago")
    await bench.until(lambda: bench.stored.views)
    assert bench.stored.ends() == [(person_id, "cancelled", "left 20 s ago")]
    await bench.until(lambda: bench.told.heard[-1] == ("dropped", person_id, "left 20 s ago", "for good"))
    await bench.describer.close("")


async def test_one_cancelled_before_it_could_be_sent_ends_too() -> None:
    bench = Bench()
    bench.submit("1")
    bench.describer.cancel("door", None, "camera removed")
    await bench.until(lambda: bench.stored.views)
    assert bench.stored.ends() == [("1", "cancelled", "camera removed")]


async def test_an_overloaded_server_is_asked_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.describer._HOLD_S", 0.0)
    bench = Bench()
    bench.submit("1")
    for attempt in range(3):
        await bench.until(lambda count=attempt: len(bench.server.asked) > count)
        bench.server.asked[-1].end(Outcome.FAILED, error=RequestError(ErrorKind.OVERLOADED, "busy"))
    await bench.describer.drain()
    assert [asked.request.request_id for asked in bench.server.asked] == ["d1", "d1-2", "d1-3"]
    assert bench.stored.ends() == [("1", "failed", "busy")]


async def test_what_waits_while_the_server_is_held_is_neither_dropped_nor_given_up() -> None:
    bench = Bench(max_waiting=1)
    bench.describer.hold("a new budget")
    for person_id in "123":
        bench.submit(person_id)
    await bench.until(lambda: len(bench.told.heard) == 3)
    assert bench.told.heard == [("waiting", person_id, "a new budget") for person_id in "123"]
    bench.describer.cancel("door", "1", "left 20 s ago")
    bench.describer.release()
    await bench.until(lambda: len(bench.server.asked) == 2)
    bench.describer.cancel("door", "3", "left 20 s ago")  # it was held, too
    while bench.describer.pending():
        bench.server.asked[-1].end(Outcome.DONE, text="x")
        bench.server.asked[-2].end(Outcome.DONE, text="x")
        await asyncio.sleep(0)
    assert sorted(bench.stored.ends()) == [(person_id, "done", "") for person_id in "123"]


@pytest.mark.parametrize(
    ("held", "ends", "not_described"),
    [
        pytest.param(False, ["cancelled"], {"cancelled": 1}, id="cancelled"),
        pytest.param(True, ["done"], {}, id="held, and done all the same"),
    ],
)
async def test_who_left_is_counted_as_what_is_stored_of_them(
    held: bool, ends: list[str], not_described: dict[str, int]
) -> None:
    bench = Bench()
    trigger = Trigger(TriggerConfig(confirm_detections=1, cancel_after_gone_s=5))
    noise = np.random.default_rng(1).integers(0, 255, (240, 320, 3), np.uint8)
    (picked,) = trigger.update(Frame(noise, 0, 100.0), [Detection(1, (100, 50, 150, 200), 0.9)])
    if held:
        bench.describer.hold("a new budget")
    bench.submit(picked.person_id, trigger)
    await bench.until(lambda: trigger.people()[0].reason in ("a new budget", "waiting for a free slot"))
    (left,) = trigger.tick(106.0)
    bench.describer.cancel("door", left.person_id, left.reason)
    await asyncio.sleep(0)
    bench.describer.release()
    await bench.until(lambda: bench.server.asked)
    bench.server.asked[0].end(Outcome.DONE, text="A red coat.")  # too late for the one that was cancelled
    await bench.describer.drain()
    trigger.tick(120.0)
    counts = trigger.counts()
    assert [view.state for view in bench.stored.views] == ends
    assert (counts.described, counts.not_described) == (len(ends) - len(not_described), not_described)
