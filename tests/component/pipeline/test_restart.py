"""What a restart of the service brings back: chats, documents, cameras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.api import ChatTurn
from pipeline.chatstore import INTERRUPTED, ChatStore, StoredTurn
from pipeline.config import Config
from pipeline.database import Database
from serving.records import now_s
from tests.component.pipeline.conftest import Running, events
from tests.scripted_server import ScriptedServer

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]


def ask(client: Running, session_id: str, text: str, **more: Any) -> dict[str, Any]:
    """The answer's turn."""
    answer = client.post("/chat", json={"session_id": session_id, "text": text, **more})
    assert answer.status_code == 200, answer.text
    return dict(events(answer.text)[-1][2])


def prompts(server: ScriptedServer) -> list[list[str]]:
    """What each request's messages said, without the system prompt."""
    bodies = [item.body for item in server.received if item.path == "/v1/chat/completions"]
    return [[message["content"] for message in body["messages"][1:]] for body in bodies]


def test_a_chat_and_its_document_go_on_after_a_restart(
    make_config: MakeConfig, serve: Serve, model_server: ScriptedServer
) -> None:
    with serve(make_config()) as client:
        session_id = client.post("/chat/sessions").json()["session_id"]
        document = client.post("/documents", files={"file": ("plan.txt", b"Meet at noon.")}).json()
        other = client.post("/documents", files={"file": ("other.txt", b"Bring bread.")}).json()
        answer_id = ask(client, session_id, "When?", document_id=document["document_id"])["answer_id"]
        before = client.get(f"/chat/sessions/{session_id}").json()
    with serve(make_config()) as client:
        assert client.get(f"/chat/sessions/{session_id}").json() == before
        again = events(client.get(f"/chat/answers/{answer_id}/events").text)
        assert again[-1][2] == before["turns"][-1]
        ask(client, session_id, "Where?")
        assert prompts(model_server)[1] == ["Document:\nMeet at noon.\n\nWhen?", "A red coat.", "Where?"]
        ask(client, session_id, "And this?", document_id=other["document_id"])
        assert prompts(model_server)[2][-1] == "Document:\nBring bread.\n\nAnd this?"
        assert client.get("/latency").json()["classes"][2]["done"] == 2  # of the class `document`


def test_an_answer_cut_by_a_kill_comes_back_as_one_that_failed(
    make_config: MakeConfig, serve: Serve, model_server: ScriptedServer
) -> None:
    config = make_config()
    database = Database(config.store.folder)
    waiting = ChatTurn(role="assistant", text="", state="waiting", answer_id="a1")
    question = StoredTurn(ChatTurn(role="user", text="Hello?"))
    ChatStore(database).ask("s1", now_s(), now_s(), question, waiting, most_turns=10)
    database.close()
    with serve(config) as client:
        turns = client.get("/chat/sessions/s1").json()["turns"]
        assert [(turn["text"], turn["state"], turn["detail"]) for turn in turns] == [
            ("Hello?", "done", ""), ("", "failed", INTERRUPTED),
        ]  # fmt: skip
        ask(client, "s1", "Again?")
        assert prompts(model_server) == [["Again?"]]  # what was never answered is not told again


def test_a_forgotten_chat_stays_forgotten(make_config: MakeConfig, serve: Serve) -> None:
    limits = {"max_sessions": 2}
    with serve(make_config(chat=limits)) as client:
        sessions = [client.post("/chat/sessions").json()["session_id"] for _ in range(2)]
        for session_id in sessions:
            ask(client, session_id, "Hello?")
        newest = client.post("/chat/sessions").json()["session_id"]  # the first has to go
        ask(client, newest, "Hello?")
    with serve(make_config(chat=limits)) as client:
        codes = [client.get(f"/chat/sessions/{name}").status_code for name in [*sessions, newest]]
        assert codes == [404, 200, 200]


def names(client: Running) -> list[str]:
    return [camera["name"] for camera in client.get("/cameras").json()]


def test_cameras_come_back_as_they_were_left(
    make_config: MakeConfig, serve: Serve, tmp_path: Path, street_video: Path
) -> None:
    videos = {name: tmp_path / f"{name}.avi" for name in ("hall", "yard", "gate", "roof")}
    for file in videos.values():
        file.write_bytes(street_video.read_bytes())
    configured = [{"name": name, "source": str(videos[name])} for name in ("hall", "yard")]
    with serve(make_config(cameras=configured)) as client:
        for name in ("gate", "roof"):
            view = client.post("/cameras", json={"source": str(videos[name]), "name": name, "rotate": 90}).json()
        assert client.delete(f"/cameras/{view['camera_id']}").status_code == 204
        assert client.delete("/cameras/yard").status_code == 204
    with serve(make_config(cameras=configured)) as client:
        assert names(client) == ["hall", "gate"]
        assert any("yard" in warning for warning in client.get("/status").json()["warnings"])
        client.post("/cameras", json={"source": str(videos["yard"]), "name": "yard"})
        assert not any("yard" in warning for warning in client.get("/status").json()["warnings"])
    # The configuration wins over an added camera of its name, and one that was changed there is watched again.
    other = [{"name": "gate", "source": str(videos["roof"])}, {"name": "yard", "source": str(videos["hall"])}]
    with serve(make_config(cameras=other)) as client:
        found = {camera["name"]: camera["source"] for camera in client.get("/cameras").json()}
        assert found == {"gate": str(videos["roof"]), "yard": str(videos["hall"])}


def test_no_password_is_stored(
    make_config: MakeConfig, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATE_PASSWORD", "hunter2")
    with serve(make_config()) as client:
        refused = client.post("/cameras", json={"source": "rtsp://u:hunter2@127.0.0.1:9/x", "name": "a"})
        assert refused.status_code == 422
        asked = {"source": "rtsp://127.0.0.1:9/x", "name": "b", "username": "u", "password_env": "GATE_PASSWORD"}
        assert client.post("/cameras", json=asked).status_code == 201
    stored = b"".join(file.read_bytes() for file in (tmp_path / "data").rglob("*") if file.is_file())
    assert b"GATE_PASSWORD" in stored
    assert b"hunter2" not in stored
    with serve(make_config()) as client:
        assert names(client) == ["b"]


def test_an_uploaded_video_is_still_there_for_its_camera(
    make_config: MakeConfig, serve: Serve, street_video: Path
) -> None:
    with serve(make_config()) as client:
        uploads = [
            Path(client.post("/uploads", files={"file": ("v.avi", street_video.read_bytes())}).json()["source"])
            for _ in range(2)
        ]
        client.post("/cameras", json={"source": str(uploads[0]), "name": "video"})
    with serve(make_config()) as client:
        assert [file.exists() for file in uploads] == [True, False]
        assert names(client) == ["video"]
