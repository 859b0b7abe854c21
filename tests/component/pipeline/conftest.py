"""A service on scripted parts: a scripted model server, and a detector that finds what the test drew."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import httpx
import numpy as np
import pytest
import uvicorn
from websockets.sync.client import ClientConnection, connect

from pipeline import maintenance
from pipeline.config import CameraConfig, Config, SourceConfig
from pipeline.detect import DetectorStatus
from pipeline.frame import Detection, Image
from pipeline.serverwatch import STATUS_FILE_VARIABLE
from pipeline.service import create_app
from pipeline.source import open_source
from serving.tls import certificates
from tests.keeper import Keeper
from tests.played import PlayedReader
from tests.scripted_server import (
    DONE,
    ROLE,
    Action,
    Received,
    Script,
    ScriptedServer,
    Send,
    Wait,
    chunk,
    models,
    problem,
    usage,
)

PERSON_BGR = (40, 40, 220)


class ColourDetector:
    """Stands where `DetectorProcess` does: finds red rectangles, one track each, left to right."""

    def __init__(self, _config: object) -> None:
        self.closed = False

    def track(self, _camera_id: str, image: Image, *, scene: int = 0) -> list[Detection]:
        red = ((image[:, :, 2] > 150) & (image[:, :, 0] < 110) & (image[:, :, 1] < 110)).astype(np.uint8)
        contours, _ = cv2.findContours(red, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        boxes = sorted(cv2.boundingRect(contour) for contour in contours)
        return [
            Detection(number + 1, (float(x), float(y), float(x + w), float(y + h)), 0.9)
            for number, (x, y, w, h) in enumerate(box for box in boxes if box[2] * box[3] > 400)
        ]

    def status(self) -> DetectorStatus:
        return DetectorStatus("ready", weights_used="colour.pt")

    def forget(self, _camera_id: str) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class ModelScript:
    """What the scripted model server does; tests change it while it runs."""

    def __init__(self) -> None:
        self.healthy = True
        self.words = ["A ", "red ", "coat."]
        self.gap_s = 0.0
        self.pause_after: int | None = None  # words; then the answer hangs until `go`
        self.refusal: Script | None = None
        self.tokens_per_byte: float | None = None  # /tokenize is offered when set
        self.go = threading.Event()
        self.max_model_len: int | None = None

    def __call__(self, request: Received) -> Script:
        if request.path == "/health":
            return Script(headers={"content-type": "text/plain"}, status=200 if self.healthy else 503)
        if request.path == "/v1/models":
            return models("scripted")
        if request.path == "/tokenize" and self.tokens_per_byte is not None:
            count = int(len(request.body["prompt"].encode()) * self.tokens_per_byte)
            body = json.dumps({"count": count}).encode()
            return Script([Send(body)], headers={"content-type": "application/json"})
        if request.path != "/v1/chat/completions":
            return problem(404, {"detail": "Not Found"})
        if self.refusal is not None:
            return self.refusal
        actions: list[Action] = [Send(ROLE)]
        for number, word in enumerate(self.words, start=1):
            if self.gap_s:
                actions.append(Wait(self.gap_s))
            actions.append(Send(chunk(word, running=number, prompt=600)))
        count = len(self.words)
        actions += [Send(chunk("", running=count, prompt=600, finish="stop")), Send(usage(600, count)), Send(DONE)]
        return Script(actions)


@pytest.fixture
def script() -> ModelScript:
    return ModelScript()


@pytest.fixture
def model_server(script: ModelScript) -> Iterator[ScriptedServer]:
    with ScriptedServer(script) as server:
        yield server


@pytest.fixture
def make_config(tmp_path: Path, model_server: ScriptedServer) -> Callable[..., Config]:
    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = {
            "serving": {"server": {"base_url": model_server.endpoint}},
            "store": {"folder": str(tmp_path / "data")},
            "detect": {"rate_hz": 20},
            "trigger": {"confirm_detections": 2},  # a busy machine sees few of a short video's pictures
            "run_folder": str(tmp_path / "runs"),
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
        return Config.model_validate(tree)

    return make


class Running:
    """A service that listens, and ways to talk to it. Calls go over real sockets."""

    def __init__(self, config: Config, port: int) -> None:
        self.config = config
        self.port = port
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False, verify=certificates()
        )
        self.get, self.post, self.patch = self.http.get, self.http.post, self.http.patch
        self.delete, self.request, self.stream = self.http.delete, self.http.request, self.http.stream

    def live(self, **headers: str) -> ClientConnection:
        """The stream of a tab; the page's own origin unless told otherwise."""
        given = {"origin": "http://127.0.0.1:8501"} | headers
        return connect(
            f"ws://127.0.0.1:{self.port}/live", additional_headers=given, compression=None, open_timeout=20, proxy=None
        )


@contextlib.contextmanager
def run_service(config: Config, *, ready: bool = True) -> Iterator[Running]:
    """Run the service for a configuration; with `ready`, wait until it has found its model server."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(config), host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        service = Running(config, server.servers[0].sockets[0].getsockname()[1])
        if ready:
            wait_for(lambda: service.get("/health").json()["status"] == "ok")
        with contextlib.closing(service.http):
            yield service
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def open_played(camera: CameraConfig, settings: SourceConfig, log_name: str) -> Any:
    """Videos play in this process; anything else is read as the product reads it."""
    if camera.source.endswith(".avi"):
        return PlayedReader(camera, settings)
    return open_source(camera, settings, log_name)


@pytest.fixture
def serve(serve_and_read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`serve_and_read` without a process for each video."""
    monkeypatch.setattr("pipeline.camera.open_source", open_played)
    return serve_and_read


@pytest.fixture
def serve_and_read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run_service` with the detector that finds what the test drew, and with short waits between looks."""
    monkeypatch.setattr("pipeline.runtime.DetectorProcess", ColourDetector)
    monkeypatch.setattr("pipeline.serverwatch._POLL_S", 0.1)
    monkeypatch.setattr("pipeline.describer._HOLD_S", 0.1)
    return run_service


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0) -> Any:
    """Poll until `condition` gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not true within {timeout_s} s")


@pytest.fixture(scope="session")
def street_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second of a noisy street at 20 fps; one red person walks through its middle."""
    return write_video(tmp_path_factory.mktemp("video") / "street.avi", frames=20, people={range(2, 17): 0})


def write_video(path: Path, *, frames: int, people: dict[range, int]) -> Path:
    """A video in which each of `people` (frames in view: starting column) walks to the right."""
    noise = np.random.default_rng(3).integers(60, 140, (240, 320, 3), dtype=np.uint8)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 20, (320, 240))
    for number in range(frames):
        image = noise.copy()
        image[:, :, 2] = 60
        for seen, column in people.items():
            if number in seen:
                x = 60 + column + 3 * (number - seen.start)
                image[80:200, x : x + 44] = PERSON_BGR
                image[100:110, x + 10 : x + 34 : 4] = (90, 90, 160)
                image[140:180:6, x + 4 : x + 40] = (90, 90, 160)
        writer.write(image)
    writer.release()
    return path


def events(text: str) -> list[tuple[str, str, Any]]:
    """Server-sent events as (event, id, data)."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found


@pytest.fixture
def keeper(tmp_path: Path, model_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """Stands where the supervisor keeps the model server; the service looks often and waits briefly."""
    with Keeper(tmp_path / "run", model_server.endpoint) as found:
        monkeypatch.setenv(STATUS_FILE_VARIABLE, str(found.status_path))
        monkeypatch.setattr(maintenance, "_POLL_S", 0.02)
        monkeypatch.setattr(maintenance, "RENEW_S", 0.05)
        monkeypatch.setattr(maintenance, "_DRAIN_S", 5.0)
        yield found


@pytest.fixture
def ours(make_config: Callable[..., Config], model_server: ScriptedServer, tmp_path: Path) -> Callable[..., Config]:
    """A configuration in which the scripted server is ours: started by the keeper, not attached."""

    def make(**sections: Any) -> Config:
        server = {"port": urlsplit(model_server.endpoint).port, "model": "scripted"}
        serving = {"server": server, **sections.pop("serving", {})}
        return make_config(serving=serving, comparisons={"folder": str(tmp_path / "comparisons")}, **sections)

    return make
