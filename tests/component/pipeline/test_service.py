from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pipeline.config import Config
from serving.records import now_s
from tests.component.pipeline.conftest import ModelScript, Running, events, run_service, wait_for, write_video
from tests.scripted_server import Cut, Script, ScriptedServer, Send, chunk

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service without a camera or a model server, shared by the tests that need neither."""
    folder = tmp_path_factory.mktemp("idle")
    config = {
        "serving": {"server": {"base_url": "http://127.0.0.1:9/v1"}},
        "store": {"folder": str(folder)},
        "service": {"max_upload_bytes": 200_000},
    }
    with run_service(Config.model_validate(config), ready=False) as service:
        yield service


def camera(path: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"name": "Street", "source": str(path), **more}]


def ended(client: Running, count: int = 1) -> list[dict[str, Any]]:
    """The stored descriptions, once there are `count` of them."""

    def enough() -> list[dict[str, Any]]:
        found = client.get("/descriptions", params={"state": ["done", "failed", "cancelled", "skipped"]}).json()
        return found if len(found) >= count else []

    return list(wait_for(enough))


def decoded(jpeg: bytes) -> Any:
    return np.asarray(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR))


def counters(client: Running) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_one_person_is_described_once_with_every_stage(
    make_config: MakeConfig, serve_and_read: Serve, street_video: Path, model_server: ScriptedServer
) -> None:
    schema = {"type": "object", "properties": {"coat": {"type": "string"}}, "required": ["coat"]}
    describe = {"prompt": "Who?", "system_prompt": "You watch.", "json_schema": schema}
    config = make_config(cameras=camera(street_video), describe=describe)
    with serve_and_read(config) as client:
        wait_for(lambda: client.get("/cameras").json()[0]["state"] == "ended")
        (view,) = ended(client)
        assert view["state"] == "done"
        assert view["text"] == "A red coat."
        assert view["person_id"] == "street-1"
        assert view["frame_s"] <= view["due_s"] <= view["sent_s"] <= view["first_token_s"] <= view["last_token_s"]
        assert view["ttft_ms"] == pytest.approx((view["first_token_s"] - view["due_s"]) * 1000)
        assert view["waiting_ms"] == pytest.approx((view["sent_s"] - view["due_s"]) * 1000)
        assert view["frame_age_ms"] == pytest.approx((view["due_s"] - view["frame_s"]) * 1000)
        assert (view["prompt_tokens"], view["completion_tokens"], view["finish_reason"]) == (600, 3, "stop")
        x1, y1, x2, y2 = view["box"]
        assert (y1, y2) == pytest.approx((80 / 240, 200 / 240), abs=0.02)
        assert x2 - x1 == pytest.approx(44 / 320, abs=0.02)
        thumbnail = client.get(view["thumbnail"])
        assert thumbnail.headers["content-type"] == "image/jpeg"
        image = decoded(thumbnail.content)
        assert max(image.shape[:2]) == config.store.thumbnail_side_px
        assert image[:, :, 2].mean() > image[:, :, 0].mean() + 20  # it shows the red person

        (asked,) = [item.body for item in model_server.received if item.path == "/v1/chat/completions"]
        assert asked["messages"][0] == {"role": "system", "content": "You watch."}
        assert asked["messages"][1]["content"][0] == {"type": "text", "text": "Who?"}
        assert asked["response_format"]["json_schema"]["schema"] == schema
        assert asked["max_tokens"] == config.serving.classes["camera"].max_tokens

        street = client.get("/cameras").json()[0]
        assert (street["people_seen"], street["people_described"]) == (1, 1)
        assert (street["people_not_described"], street["people_unconfirmed"]) == ({}, 0)
        (person,) = client.get("/cameras/street/people").json()
        assert (person["person_id"], person["state"], person["descriptions"]) == ("street-1", "described", 1)
        assert person["track_ids"] == [view["track_id"]]
        assert person["first_seen_s"] < view["due_s"] <= person["last_seen_s"] + 1
        assert client.get("/descriptions", params={"q": "coat"}).json() == [view]
        assert client.get("/descriptions", params={"q": "hat"}).json() == []
        assert counters(client)['framechat_requests_total{outcome="done",traffic_class="camera"}'] == 1
        latency = {item["traffic_class"]: item for item in client.get("/latency").json()["classes"]}
        assert latency["camera"]["ttft"]["count"] == 1
        assert latency["camera"]["itl"]["count"] == 2
        assert latency["chat"]["ttft"]["count"] == 0


def test_starts_degraded_and_catches_up(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.healthy = False
    with serve(make_config(cameras=camera(street_video)), ready=False) as client:
        waiting = wait_for(lambda: client.get("/descriptions").json())
        assert waiting[0]["state"] == "waiting"
        assert waiting[0]["reason"] == "waiting for the model server"
        assert client.get(waiting[0]["thumbnail"]).status_code == 200  # not stored yet, and can be seen
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert "503" in health["detail"]
        assert client.get("/status").json()["server"]["state"] == "down"
        session = client.post("/chat/sessions").json()["session_id"]
        refused = client.post("/chat", json={"session_id": session, "text": "hello"})
        assert refused.status_code == 503
        assert "model server" in refused.json()["detail"]
        script.healthy = True
        (view,) = ended(client)
        assert view["state"] == "done"
        assert view["description_id"] == waiting[0]["description_id"]


def test_nobody_is_due_before_the_server_can_be_asked(
    make_config: MakeConfig, serve: Serve, tmp_path: Path, script: ModelScript
) -> None:
    script.healthy = False
    video = write_video(tmp_path / "again.avi", frames=16, people={range(1, 15): 0})
    config = make_config(cameras=camera(video, loop=True), trigger={"reentry_window_s": 0})
    with serve(config, ready=False) as client:
        reason = "left before the model server was ready"
        wait_for(lambda: reason in client.get("/cameras").json()[0]["people_not_described"])
        tracks = wait_for(
            lambda: [track for track in client.get("/cameras").json()[0]["tracks"] if track["state"] == "watched"]
        )
        assert tracks[0]["reason"].startswith("waiting for")
        assert client.get("/descriptions").json() == []
        healed_s = now_s()
        script.healthy = True
        (view, *_) = wait_for(lambda: client.get("/descriptions", params={"state": "done"}).json())
        assert view["due_s"] > healed_s
        assert view["frame_age_ms"] < 5000


def test_a_full_queue_skips_the_stalest_and_says_so(
    make_config: MakeConfig, serve: Serve, tmp_path: Path, script: ModelScript
) -> None:
    crowd = {range(2, 16): -50, range(3, 17): 0, range(4, 18): 50}
    video = write_video(tmp_path / "crowd.avi", frames=20, people=crowd)
    script.healthy = False
    config = make_config(cameras=camera(video), trigger={"max_waiting": 2, "max_in_flight": 1})
    with serve(config, ready=False) as client:
        (skipped,) = ended(client)
        assert (skipped["state"], skipped["reason"]) == ("skipped", "queue full, model server not ready")
        others = [view for view in client.get("/descriptions").json() if view["state"] == "waiting"]
        assert len(others) == 2
        assert skipped["due_s"] <= min(view["due_s"] for view in others)
        latency = {item["traffic_class"]: item for item in client.get("/latency").json()["classes"]}
        assert latency["camera"]["skipped"] == {"queue full, model server not ready": 1}
        assert latency["camera"]["waiting"] == 2
        script.healthy = True
        assert sorted(view["state"] for view in ended(client, 3)) == ["done", "done", "skipped"]


def test_a_stream_cut_in_the_middle_is_a_failed_description_with_its_cause(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.refusal = Script([Send(chunk("A red", running=2)), Cut()])
    config = make_config(cameras=camera(street_video), trigger={"retry_after_s": 60})
    with serve(config) as client:
        (view,) = ended(client)
        assert view["state"] == "failed"
        assert view["text"] == "A red"
        assert view["reason"]
        latency = {item["traffic_class"]: item for item in client.get("/latency").json()["classes"]}
        assert latency["camera"]["failures"] == {"cut": 1}


def test_an_overloaded_server_is_asked_again(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.refusal = Script([Send(b'{"error": {"message": "queue is full"}}')], status=503)
    with serve(make_config(cameras=camera(street_video))) as client:
        again = wait_for(
            lambda: [view for view in client.get("/descriptions").json() if "queue is full" in view["reason"]]
        )
        assert again[0]["state"] == "waiting"
        script.refusal = None
        (view,) = ended(client)
        assert (view["state"], view["reason"]) == ("done", "")


def test_a_person_who_left_long_ago_is_given_up(
    make_config: MakeConfig, serve: Serve, tmp_path: Path, script: ModelScript, model_server: ScriptedServer
) -> None:
    script.words, script.gap_s = ["slow "] * 100, 0.2
    video = write_video(tmp_path / "left.avi", frames=50, people={range(2, 13): 0})
    with serve(make_config(cameras=camera(video), trigger={"cancel_after_gone_s": 0.5})) as client:
        (view,) = ended(client)
        assert (view["state"], view["reason"]) == ("cancelled", "left 1 s ago")
        (asked,) = [item for item in model_server.received if item.path == "/v1/chat/completions"]
        assert asked.gone.wait(5)
        left = wait_for(lambda: client.get("/cameras").json()[0]["people_not_described"])
        assert left == {"cancelled": 1}
        (person,) = client.get("/cameras/street/people").json()
        assert (person["state"], person["reason"]) == ("skipped", "cancelled: left 1 s ago")
        assert client.get("/cameras").json()[0]["people_described"] == 0


def test_removing_a_camera_cancels_what_it_asked_and_frees_the_server(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript, model_server: ScriptedServer
) -> None:
    script.words, script.gap_s = ["slow "] * 100, 0.2
    with serve(make_config(cameras=camera(street_video))) as client:
        wait_for(lambda: [view for view in client.get("/descriptions").json() if view["text"]])
        assert client.delete("/cameras/street").status_code == 204
        (view,) = ended(client)
        assert (view["state"], view["reason"]) == ("cancelled", "camera removed")
        assert view["text"].startswith("slow")
        assert client.get("/cameras").json() == []
        (asked,) = [item for item in model_server.received if item.path == "/v1/chat/completions"]
        assert asked.gone.wait(5)


def test_descriptions_and_their_tokens_are_streamed(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.words, script.gap_s = ["A ", "red ", "coat."], 0.1
    with serve(make_config(cameras=camera(street_video))) as client:
        with client.live() as socket:
            socket.send(json.dumps({"cameras": []}))
            states, text = [], ""
            while "done" not in states:
                message = json.loads(socket.recv())
                if message["type"] == "description":
                    states.append(message["state"])
                    if message["state"] == "streaming" and message["first_token_s"] is None:
                        assert message["text"] == ""
                elif message["type"] == "token":
                    text += message["text"]
        assert states[0] == "waiting"
        assert states[-1] == "done"
        assert "streaming" in states
        assert text == "A red coat."
        assert message["text"] == text


def receive_frame(socket: Any) -> tuple[dict[str, Any], bytes, list[str]]:
    """The next picture, and the types of the texts before it."""
    types: list[str] = []
    while True:
        message = socket.recv()
        if isinstance(message, bytes):
            (size,) = struct.unpack(">I", message[:4])
            return json.loads(message[4 : 4 + size]), message[4 + size :], types
        types.append(json.loads(message)["type"])


def test_live_stream_of_a_tab(make_config: MakeConfig, serve: Serve, street_video: Path) -> None:
    config = make_config(cameras=camera(street_video, loop=True), service={"live_width_px": 320})
    with serve(config) as client:
        wait_for(lambda: client.get("/cameras").json()[0]["tracks"])
        with client.live() as socket:
            socket.send(json.dumps({"cameras": "all", "max_width_px": 150}))
            first, jpeg, types = receive_frame(socket)
            assert types[:3] == ["status", "latency", "descriptions"]
            assert (first["camera_id"], first["width_px"], first["height_px"]) == ("street", 160, 120)
            image = decoded(jpeg)
            assert image.shape == (120, 160, 3)
            frames = [first] + [receive_frame(socket)[0] for _ in range(4)]
            times = [frame["frame_s"] for frame in frames]
            assert times == sorted(set(times))  # every picture is a new one
            socket.send(json.dumps({"cameras": ["street"], "max_width_px": 5000}))
            widths = [receive_frame(socket)[0]["width_px"] for _ in range(4)]
            assert widths[-1] == 320
            socket.send(json.dumps({"cameras": []}))
            kinds = [socket.recv() for _ in range(8)]
            assert all(isinstance(message, str) for message in kinds[-4:])  # pictures have stopped, status goes on


@pytest.mark.parametrize("wish", ["nonsense", '{"cameras": 5}', '{"cameras": [5]}', '{"max_width_px": -1}', "[]"])
def test_a_wish_that_makes_no_sense_ends_the_stream(idle: Running, wish: str) -> None:
    with idle.live() as socket:
        socket.send(wish)
        with pytest.raises(ConnectionClosed) as caught:
            for _ in range(10):
                socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 200, id="no browser"),
        pytest.param({"origin": "http://127.0.0.1:8501"}, 200, id="the page"),
        pytest.param({"origin": "http://localhost:8501"}, 200, id="the page by another name"),
        pytest.param({"origin": "http://127.0.0.1:3000"}, 403, id="another program's page"),
        pytest.param({"origin": "https://evil.example"}, 403, id="a page elsewhere"),
        pytest.param({"origin": "http://evil.example:8501"}, 403, id="a page elsewhere on our port"),
        pytest.param({"origin": "null"}, 403, id="a sandboxed page"),
        pytest.param({"host": "evil.example:8600"}, 403, id="a rebound name"),
        pytest.param({"host": "evil.example", "origin": "http://evil.example:8501"}, 403, id="a rebound page"),
        pytest.param({"host": "localhost:8600", "origin": "http://localhost:8501"}, 200, id="localhost"),
        pytest.param({"host": "[::1"}, 403, id="no host at all"),
    ],
)
def test_only_the_page_may_use_it(idle: Running, headers: dict[str, str], status: int) -> None:
    answer = idle.get("/status", headers=headers)
    assert answer.status_code == status
    if status == 200 and "origin" in headers:
        assert answer.headers["access-control-allow-origin"] == headers["origin"]
    if status == 403:
        assert set(answer.json()) == {"detail", "extra"}
        assert "access-control-allow-origin" not in answer.headers
        if "host" not in headers:
            with pytest.raises(InvalidStatus):
                idle.live(**headers)


def test_the_public_address_is_allowed(make_config: MakeConfig, serve: Serve) -> None:
    config = make_config(service={"public_url": "https://cameras.example/api"})
    headers = {"host": "cameras.example", "origin": "https://cameras.example"}
    with serve(config) as client:
        assert client.get("/status", headers=headers).status_code == 200
        asked = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        answer = client.http.options("/chat", headers=asked)
        assert answer.status_code == 204
        assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        pytest.param("POST", "/cameras", {"source": 5}, 422, "source: ", id="wrong type"),
        pytest.param("POST", "/cameras", {}, 422, "source: field required", id="missing field"),
        pytest.param("POST", "/cameras", {"source": "/no/such.mp4"}, 422, "no such file", id="no such file"),
        pytest.param("POST", "/cameras", {"source": "0", "name": "<b>"}, 422, "name: ", id="name with markup"),
        pytest.param("POST", "/cameras", {"source": "ftp://x/y"}, 422, "ftp:// is not read", id="address of no use"),
        pytest.param("POST", "/cameras", {"source": "rtsp://u:hunter2@h/x"}, 422, "password_env", id="password"),
        pytest.param("PATCH", "/cameras/none", {"paused": True}, 404, "camera 'none'", id="no such camera"),
        pytest.param("DELETE", "/cameras/none", None, 404, "camera 'none'", id="nothing to remove"),
        pytest.param("GET", "/cameras/none/people", None, 404, "camera 'none'", id="nobody of no camera"),
        pytest.param("GET", "/cameras/none/picture.jpg", None, 404, "camera 'none'", id="no such picture"),
        pytest.param("GET", "/thumbnails/..%2f..%2fx.jpg", None, 404, "", id="path out of the folder"),
        pytest.param("GET", "/thumbnails/abc.jpg", None, 404, "thumbnail 'abc'", id="no such thumbnail"),
        pytest.param("GET", "/descriptions?limit=0", None, 422, "limit: ", id="limit of 0"),
        pytest.param("GET", "/latency?window_s=x", None, 422, "window_s: ", id="no number"),
        pytest.param("GET", "/nowhere", None, 404, "/nowhere", id="no such address"),
        pytest.param("PUT", "/cameras", {}, 405, "PUT", id="no such method"),
    ],
)
def test_refusals_are_one_line(idle: Running, method: str, path: str, body: Any, status: int, words: str) -> None:
    answer = idle.request(method, path, json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"detail", "extra"}
    detail = answer.json()["detail"]
    assert words in detail
    assert "\n" not in detail
    assert "hunter2" not in answer.text


def test_add_pause_and_remove_while_running(make_config: MakeConfig, serve: Serve, street_video: Path) -> None:
    with serve(make_config(service={"max_cameras": 2})) as client:
        added = client.post("/cameras", json={"source": str(street_video), "loop": True})
        assert added.status_code == 201
        assert added.json()["name"] == "camera 1"
        second = client.post("/cameras", json={"source": str(street_video), "name": "camera 1"})
        assert second.status_code == 409
        assert client.post("/cameras", json={"source": str(street_video), "name": "Camera-1"}).json()["camera_id"] == (
            "camera-1-2"
        )
        assert client.post("/cameras", json={"source": str(street_video)}).status_code == 409  # two at most
        wait_for(lambda: client.get("/cameras").json()[0]["state"] == "live")
        assert client.get("/cameras/camera-1/picture.jpg").headers["content-type"] == "image/jpeg"
        assert client.patch("/cameras/camera-1", json={"paused": True}).json()["state"] == "paused"
        assert "no picture yet" in client.get("/cameras/camera-1/picture.jpg").json()["detail"]
        wait_for(lambda: client.get("/cameras").json()[0]["frames"] == 0)
        assert client.patch("/cameras/camera-1", json={"paused": False}).status_code == 200
        wait_for(lambda: client.get("/cameras").json()[0]["state"] == "live")
        client.delete("/cameras/camera-1")
        assert [item["camera_id"] for item in client.get("/cameras").json()] == ["camera-1-2"]


def test_an_uploaded_video_can_be_watched_and_goes_with_its_camera(
    make_config: MakeConfig, serve_and_read: Serve, street_video: Path
) -> None:
    with serve_and_read(make_config()) as client:
        answer = client.post("/uploads", files={"file": ("my video.avi", street_video.read_bytes(), "video/avi")})
        assert answer.status_code == 201
        source = Path(answer.json()["source"])
        assert source.read_bytes() == street_video.read_bytes()
        view = client.post("/cameras", json={"source": str(source)}).json()
        wait_for(lambda: client.get("/cameras").json()[0]["frames"] > 0)
        client.delete(f"/cameras/{view['camera_id']}")
        assert not source.exists()


def test_only_the_newest_unwatched_uploads_are_kept(
    make_config: MakeConfig, serve: Serve, street_video: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "uploads"
    with serve(make_config()) as client:
        old = [folder / f"{number:032x}.avi" for number in range(6)]
        for number, file in enumerate(old):
            file.write_bytes(b"x")
            os.utime(file, (number, number))
        client.post("/cameras", json={"source": str(street_video)})
        answer = client.post("/uploads", files={"file": ("v.avi", street_video.read_bytes())})
        assert {file.name for file in folder.iterdir()} == {
            *(file.name for file in old[3:]), Path(answer.json()["source"]).name
        }  # fmt: skip
        assert street_video.exists()


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        pytest.param({"file": ("x.mp4", b"not a video" * 50)}, 422, "x.mp4: ", id="no video"),
        pytest.param({"file": ("x.mp4", b"")}, 422, "empty", id="empty"),
        pytest.param({"file": ("x.mp4", b"a" * 300_000)}, 413, "too large", id="too large"),
        pytest.param({"file": (None, b"text field")}, 422, "file: missing", id="no file in it"),
    ],
)
def test_uploads_that_are_refused_leave_nothing(idle: Running, files: Any, status: int, words: str) -> None:
    answer = idle.post("/uploads", files=files)
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert list((idle.config.store.folder / "uploads").iterdir()) == []


def test_a_body_that_hides_its_size_is_bounded_too(idle: Running) -> None:
    def endless() -> Any:
        for _ in range(40):
            yield b"[" * 100_000

    answer = idle.post("/cameras", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_the_newest_descriptions_survive_a_restart(make_config: MakeConfig, serve: Serve, street_video: Path) -> None:
    with serve(make_config(cameras=camera(street_video))) as client:
        (before,) = ended(client)
    with serve(make_config()) as client:
        assert client.get("/descriptions").json() == [before]
        with client.live() as socket:
            while (message := json.loads(socket.recv()))["type"] != "descriptions":
                pass
            assert message["items"] == [before]


def test_stopping_stores_what_was_under_way(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.words, script.gap_s = ["slow "] * 100, 0.2
    with serve(make_config(cameras=camera(street_video))) as client:
        wait_for(lambda: [view for view in client.get("/descriptions").json() if view["text"]])
        began = time.monotonic()
    assert time.monotonic() - began < 10
    with serve(make_config()) as client:
        (view,) = client.get("/descriptions").json()
        assert (view["state"], view["reason"]) == ("cancelled", "the service stops")


def test_description_stream_of_events(
    make_config: MakeConfig, serve: Serve, street_video: Path, script: ModelScript
) -> None:
    script.healthy = False
    with serve(make_config(cameras=camera(street_video)), ready=False) as client:
        wait_for(lambda: client.get("/descriptions").json())
        body = ""
        with client.stream("GET", "/descriptions/stream") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for part in answer.iter_text():
                body += part
                if '"state":"waiting"' in body:
                    break
        kind, _, view = events(body)[0]
        assert (kind, view["state"]) == ("description", "waiting")
