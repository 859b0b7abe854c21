"""Cameras that leave while something still holds them, and others that take their names."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import CameraConfig, Config
from pipeline.frame import Detection, Image
from pipeline.runtime import Runtime
from tests.component.pipeline.conftest import ColourDetector, ModelScript, Running, wait_for, write_video

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]


class BusyDetector(ColourDetector):
    """As one that is being started: until it is let go it answers only cameras after the first, and forgets none."""

    go = threading.Event()
    first: str | None = None
    forgotten: list[str] = []
    seen: set[str] = set()

    def track(self, camera_id: str, image: Image, *, scene: int = 0) -> list[Detection]:
        cls = type(self)
        cls.first = cls.first or camera_id
        cls.seen.add(camera_id)
        if camera_id == cls.first:
            cls.go.wait(20)
        return super().track(camera_id, image, scene=scene)

    def forget(self, camera_id: str) -> None:
        type(self).go.wait(20)
        type(self).forgotten.append(camera_id)

    def close(self) -> None:
        type(self).go.set()


@pytest.fixture
def busy(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`serve` with the busy detector."""
    BusyDetector.go.clear()
    BusyDetector.first, BusyDetector.forgotten, BusyDetector.seen = None, [], set()
    monkeypatch.setattr("pipeline.runtime.DetectorProcess", BusyDetector)
    yield serve
    BusyDetector.go.set()


def remove(client: Running, camera_id: str) -> float:
    """Seconds until the answer."""
    began = time.monotonic()
    assert client.delete(f"/cameras/{camera_id}").status_code == 204
    return time.monotonic() - began


def test_a_camera_is_removed_at_once_and_its_name_is_free(
    make_config: MakeConfig, busy: Serve, script: ModelScript, tmp_path: Path
) -> None:
    script.words, script.gap_s = ["word "] * 20, 0.05
    again = write_video(tmp_path / "again.avi", frames=16, people={range(1, 15): 0})
    camera = {"name": "Yard", "source": str(again), "loop": True}
    with busy(make_config(cameras=[camera], trigger={"confirm_detections": 1})) as client:
        wait_for(lambda: BusyDetector.first)
        assert remove(client, "yard") < 2
        assert client.get("/cameras").json() == []
        added = client.post("/cameras", json=camera).json()
        assert added["camera_id"] == "yard"
        wait_for(lambda: any(view["state"] == "streaming" for view in client.get("/descriptions").json()))
        BusyDetector.go.set()  # the first one goes now, and takes nothing of the second with it
        wait_for(lambda: BusyDetector.forgotten)
        wait_for(lambda: any(view["state"] == "done" for view in client.get("/descriptions").json()))
        assert {view["state"] for view in client.get("/descriptions").json()} <= {"done", "streaming", "waiting"}
        assert BusyDetector.forgotten == [BusyDetector.first]
        assert len(BusyDetector.seen) == 2
        assert client.get("/cameras").json()[0]["state"] == "live"


async def test_stopping_waits_for_what_a_removed_camera_holds_but_not_for_long(
    make_config: MakeConfig, busy: Serve, street_video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runtime._LEAVE_S", 0.3)
    monkeypatch.setattr(BusyDetector, "close", lambda _self: None)
    runtime = Runtime(make_config(cameras=[{"name": "Yard", "source": str(street_video), "loop": True}]))
    await runtime.start()
    await asyncio.to_thread(wait_for, lambda: BusyDetector.first)
    await runtime.remove_camera("yard")
    began = time.monotonic()
    await runtime.stop()
    assert 0.3 <= time.monotonic() - began < 5
    BusyDetector.go.set()


def test_a_file_system_that_does_not_answer_holds_up_no_other_camera(
    make_config: MakeConfig, serve: Serve, street_video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = threading.Event()

    def check(camera: CameraConfig) -> str | None:
        if camera.source == "/mnt/dead/v.avi":
            mounted.wait(20)
        return None

    monkeypatch.setattr("pipeline.runtime.check_source", check)
    monkeypatch.setattr("pipeline.runtime._CHECK_S", 0.3)
    with serve(make_config()) as client:
        refused = client.post("/cameras", json={"source": "/mnt/dead/v.avi"})
        assert (refused.status_code, "does not answer" in refused.text) == (422, True)
        assert client.post("/cameras", json={"source": str(street_video)}).status_code == 201
        mounted.set()
