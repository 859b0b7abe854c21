from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, cast

import numpy as np
import pytest
from fastapi import WebSocket

from pipeline.api import DescriptionView, TrackView
from pipeline.camera import CameraWorker
from pipeline.feed import Feed
from pipeline.frame import Frame
from pipeline.live import Live, Pulse
from pipeline.pictures import Pictures, shared_width
from serving.records import now_s


class Worker:
    """A camera that has a new picture each time it is asked."""

    camera_id = "yard"

    def __init__(self) -> None:
        self.asked = 0

    def frame(self) -> Frame:
        self.asked += 1
        return Frame(np.full((48, 64, 3), self.asked % 200, np.uint8), self.asked, now_s())

    def tracks(self) -> list[TrackView]:
        return []


class Socket:
    """A tab: what it says, and what it was sent; `open` holds sending back while it is cleared."""

    def __init__(self, wish: str = '{"cameras": "all"}') -> None:
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.says.put_nowait({"type": "websocket.receive", "text": wish})
        self.open = asyncio.Event()
        self.open.set()
        self.texts: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.closed: int | None = None

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict[str, Any]:
        return await self.says.get()

    async def send_text(self, text: str) -> None:
        await self.open.wait()
        self.texts.append(json.loads(text))

    async def send_bytes(self, data: bytes) -> None:
        await self.open.wait()
        (size,) = struct.unpack(">I", data[:4])
        self.numbers.append(round(json.loads(data[4 : 4 + size])["frame_s"] * 1000))

    async def close(self, code: int = 1000, _reason: str = "") -> None:
        self.closed = code

    def leave(self) -> None:
        self.says.put_nowait({"type": "websocket.disconnect"})


class House:
    """A live stream with one camera."""

    def __init__(self, rate_hz: float = 100.0) -> None:
        self.worker = Worker()
        self.workers = {"yard": cast(CameraWorker, self.worker)}
        self.feed = Feed()
        self.beats = 0

        async def status() -> str:
            self.beats += 1
            return '{"now_s": 1}'

        async def latency(everything: bool) -> str:
            return json.dumps({"everything": everything})

        pictures = Pictures(self.workers.get, rate_hz)
        self.pulse = Pulse(status, latency)
        self.live = Live(self.feed, pictures, self.pulse, lambda: list(self.workers), 960)

    def serve(self, socket: Socket) -> asyncio.Task[None]:
        return asyncio.create_task(self.live.serve(cast(WebSocket, socket)))


def described(number: int, state: str = "done") -> DescriptionView:
    return DescriptionView.model_validate(
        {
            "description_id": str(number), "camera_id": "yard", "camera": "Yard", "person_id": "p", "track_id": 1,
            "state": state, "frame_s": 1.0, "due_s": float(number), "box": (0, 0, 1, 1),
        }
    )  # fmt: skip


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_slow_tab_gets_the_newest_and_nothing_queues_up() -> None:
    house, slow, quick = House(), Socket(), Socket()
    tasks = [house.serve(slow), house.serve(quick)]
    await until(lambda: len(slow.numbers) > 2)
    slow.open.clear()
    await asyncio.sleep(0.02)
    had, others_had = len(slow.numbers), len(quick.numbers)
    await until(lambda: len(quick.numbers) > others_had + 25)  # nobody else is held up
    assert len(slow.numbers) == had
    newest = quick.numbers[-1]
    slow.open.set()
    await until(lambda: len(slow.numbers) >= had + 3)
    # One picture was on its way when the tab stopped; the next is the newest, and all between were never sent to it.
    assert slow.numbers[had + 1] >= newest
    assert len(slow.numbers) < len(quick.numbers) - 20
    for socket in (slow, quick):
        socket.leave()
    await asyncio.gather(*tasks)


async def test_tabs_share_one_encoding_and_nobody_looking_means_no_work() -> None:
    house = House(rate_hz=50)
    sockets = [Socket() for _ in range(4)]
    tasks = [house.serve(socket) for socket in sockets]
    await until(lambda: all(len(socket.numbers) > 15 for socket in sockets))
    assert house.worker.asked < 2 * max(len(socket.numbers) for socket in sockets)
    for socket in sockets:
        socket.leave()
    await asyncio.gather(*tasks)
    await asyncio.sleep(0.05)
    asked = house.worker.asked
    beats = house.beats
    await asyncio.sleep(0.2)
    assert house.worker.asked == asked
    assert house.beats == beats
    assert all(socket.closed for socket in sockets)


async def test_a_tab_too_far_behind_is_told_the_present_instead() -> None:
    house, tab = House(rate_hz=1), Socket('{"cameras": []}')
    task = house.serve(tab)
    await until(lambda: any(text["type"] == "descriptions" for text in tab.texts))
    tab.open.clear()
    for number in range(3000):
        house.feed.publish(described(number))
        await asyncio.sleep(0)
    tab.open.set()
    await until(lambda: tab.texts[-1].get("description_id") == "2999")
    resyncs = [text for text in tab.texts if text["type"] == "descriptions"]
    assert len(resyncs) == 2
    assert resyncs[-1]["items"][0]["description_id"] == "2999"
    assert len(tab.texts) < 1500
    tab.leave()
    await task


async def test_the_whole_time_line_once_and_then_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.live.PULSE_S", 0.02)
    house, tab = House(rate_hz=1), Socket()
    task = house.serve(tab)
    await until(lambda: len([text for text in tab.texts if text["type"] == "latency"]) > 3)
    assert [text["everything"] for text in tab.texts if text["type"] == "latency"][:4] == [True, False, False, False]
    tab.leave()
    await task


async def test_cameras_that_come_and_go_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.live.PULSE_S", 0.02)
    house, tab = House(), Socket()
    task = house.serve(tab)
    await until(lambda: tab.numbers)
    yard = house.workers.pop("yard")
    await asyncio.sleep(0.1)
    had = len(tab.numbers)
    await asyncio.sleep(0.1)
    assert len(tab.numbers) == had
    house.workers["yard"] = cast(CameraWorker, Worker())  # another camera of the same name
    await until(lambda: len(tab.numbers) > had)
    assert house.workers["yard"] is not yard
    tab.leave()
    await task


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [(1, 960, 160), (160, 960, 160), (161, 960, 320), (640, 960, 640), (5000, 960, 960), (500, 300, 300)],
)
def test_shared_widths(wanted: int, most: int, expected: int) -> None:
    assert shared_width(wanted, most) == expected
