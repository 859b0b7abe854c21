"""The page's script, run by Streamlit's own test runner against a scripted service on a loopback port."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from pipeline.api import (
    CameraView,
    ChatSession,
    ChatTurn,
    DescriptionView,
    Device,
    DocumentView,
    EngineView,
    ServerView,
    StatusView,
)
from tests.answering import answering
from ui import panels
from ui.service_client import ServiceClient, ServiceError

APP = Path(__file__).parents[3] / "ui" / "app.py"


class Service:
    """What the scripted service knows and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.sessions: dict[str, ChatSession] = {}
        self.devices: list[Device] = []
        self.refusal: str | None = None
        self.cameras = [CameraView(camera_id="c1", name="street", source="sample", state="live")]

    def status(self) -> StatusView:
        return StatusView(
            version="0.1.0",
            started_s=0,
            now_s=0,
            server=ServerView(state="ready", endpoint="http://127.0.0.1:8000/v1", attached=False),
            engine=EngineView(),
            cameras=self.cameras,
            detector="sample",
            warnings=[],
        )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:  # noqa: PLR0911 - a table of routes
        self.calls.append((method, path, body))
        path, _, query = path.partition("?")
        if self.refusal is not None and method != "GET":
            return 422, {"detail": self.refusal}
        if path == "/status":
            return 200, self.status().model_dump()
        if path == "/devices":
            return 200, [device.model_dump() for device in self.devices]
        if path == "/cameras":
            return 200, self.cameras[0].model_dump()
        if path == "/descriptions":
            found = DescriptionView(
                description_id="d1", camera_id="c1", camera="street", person_id="P1", track_id=1, state="done",
                frame_s=1, due_s=1, box=(0, 0, 1, 1), text="a red jacket",
            )  # fmt: skip
            return 200, [found.model_dump()] if "q=red" in query else []
        if path == "/chat/sessions":
            session = ChatSession(session_id=f"s{len(self.sessions) + 1}", created_s=0, turns=[])
            self.sessions[session.session_id] = session
            return 200, session.model_dump()
        if path.startswith("/chat/sessions/"):
            known = self.sessions.get(path.rsplit("/", 1)[1])
            return (200, known.model_dump()) if known else (404, {"detail": "no such session"})
        if path == "/chat":
            self.sessions[body["session_id"]].turns += [
                ChatTurn(role="user", text=body["text"]),
                ChatTurn(role="assistant", text="", answer_id="a1", state="waiting"),
            ]
            return 200, None
        return 404, {"detail": f"no {path}"}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    script = Service()

    def answer(method: str, path: str, _headers: object, raw: bytes) -> tuple[int, object]:
        status, found = script.answer(method, path, json.loads(raw) if raw else None)
        return status, 'event: answer\ndata: {"answer_id": "a1"}\n\n' if found is None else found

    with answering(answer) as url:
        monkeypatch.setenv("FRAMECHAT_SERVICE_URL", url)
        yield script


def page() -> AppTest:
    return AppTest.from_file(str(APP), default_timeout=20)


def asked(service: Service, path: str) -> list[Any]:
    return [body for method, called, body in service.calls if method == "POST" and called == path]


def test_the_page_opens_a_conversation_and_keeps_it_in_its_address(service: Service) -> None:
    app = page().run()
    assert not app.exception
    assert app.query_params["chat"] == "s1"
    app.run()
    assert len(service.sessions) == 1


def test_a_reload_finds_the_conversation_of_the_address(service: Service) -> None:
    service.sessions["old"] = ChatSession(session_id="old", created_s=0, turns=[ChatTurn(role="user", text="hello")])
    app = page()
    app.query_params["chat"] = "old"
    app.run()
    assert app.query_params["chat"] == "old"
    assert set(service.sessions) == {"old"}


def test_a_conversation_that_the_service_forgot_becomes_a_new_one_and_says_so(service: Service) -> None:
    app = page()
    app.query_params["chat"] = "gone"
    app.run()
    assert app.query_params["chat"] == "s1"
    assert "no longer has that conversation" in app.toast[0].value


def test_a_question_is_asked_in_the_pages_session_with_its_due_time(service: Service) -> None:
    app = page().run()
    app.chat_input[0].set_value("what is a stall?").run()
    (ask,) = asked(service, "/chat")
    assert (ask["session_id"], ask["text"], ask["camera_id"]) == ("s1", "what is a stall?", None)
    assert ask["due_s"] > 0


def test_the_switch_attaches_the_chosen_cameras_picture(service: Service) -> None:
    app = page().run()
    app.toggle(key="attach").set_value(True).run()
    app.chat_input[0].set_value("who is there?").run()
    (ask,) = asked(service, "/chat")
    assert ask["camera_id"] == "c1"


def test_a_refused_question_is_kept_with_the_reason(service: Service) -> None:
    app = page().run()
    service.refusal = "8 answers are in flight; wait for one to end"
    app.chat_input[0].set_value("one more").run()
    assert not app.exception
    unsent = app.session_state["unsent"]
    assert unsent["text"] == "one more"
    assert "8 answers are in flight" in unsent["reason"]


class Typed(dict[str, Any]):
    """Streamlit's session state with a question as the chat input gives it; its own tests cannot drop a file."""

    def __init__(self, text: str, *names: str) -> None:
        files = [SimpleNamespace(name=name, type="application/pdf", read=lambda *_: b"%PDF-") for name in names]
        self.question = SimpleNamespace(text=text, files=files)


def test_a_question_whose_document_is_refused_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> DocumentView:
        raise ServiceError("plan.pdf holds no text")

    state = Typed("what does it say?", "plan.pdf")
    monkeypatch.setattr(st, "session_state", state)
    client = cast("ServiceClient", SimpleNamespace(add_document=refuse))
    panels._ask(client, ChatSession(session_id="s1", created_s=0, turns=[]), "c1")
    assert (state["unsent"]["text"], state["unsent"]["camera_id"]) == ("what does it say?", "c1")
    assert "holds no text. Sent again, it goes without the document" in state["unsent"]["reason"]
    assert "document_id" not in state["unsent"]


def test_the_longest_message_is_the_services(service: Service) -> None:
    service.sessions["old"] = ChatSession(session_id="old", created_s=0, turns=[], max_message_chars=123)
    app = page()
    app.query_params["chat"] = "old"
    assert app.run().chat_input[0].max_chars == 123


def test_search_asks_the_service_for_the_words(service: Service) -> None:
    app = page().run()
    app.text_input(key="search").set_value("  red jacket ").run()
    assert not app.exception
    assert any(path.startswith("/descriptions?q=red+jacket") for _, path, _ in service.calls)


def test_an_address_becomes_a_camera(service: Service) -> None:
    app = page().run()
    texts = {text.label: text for text in app.text_input}
    texts["Source"].set_value("rtsp://door.lan/stream")
    texts["User name"].set_value("viewer")
    texts["Password variable"].set_value("DOOR_PASSWORD")
    next(button for button in app.button if button.label == "Watch this camera").click().run()
    (added,) = asked(service, "/cameras")
    assert added["source"] == "rtsp://door.lan/stream"
    assert (added["username"], added["password_env"], added["name"]) == ("viewer", "DOOR_PASSWORD", None)


def test_a_refused_camera_is_told_as_plain_text(service: Service) -> None:
    app = page().run()
    service.refusal = "source ![x](http://evil.example/p.png) cannot be used"
    {text.label: text for text in app.text_input}["Source"].set_value("nonsense")
    next(button for button in app.button if button.label == "Watch this camera").click().run()
    assert "\\!\\[x\\]\\(http" in app.error[0].value


def test_webcams_are_listed_and_one_click_adds_one(service: Service) -> None:
    service.devices = [Device(index=2, path="/dev/video2", name="Desk camera")]
    app = page().run()
    button = next(button for button in app.button if "Desk camera" in button.label)
    button.click().run()
    (added,) = asked(service, "/cameras")
    assert added["source"] == "2"


def test_no_webcam_is_said(service: Service) -> None:
    app = page().run()
    assert any("No webcam is found" in info.value for info in app.info)


def test_the_page_stands_when_the_service_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("FRAMECHAT_SERVICE_URL", f"http://127.0.0.1:{port}")
    app = page().run()
    assert not app.exception
    assert app.chat_input[0].disabled
    assert any("cannot be reached" in error.value for error in app.error)


def test_a_conversation_is_kept_while_the_tab_visits_another_page(service: Service) -> None:
    app = page().run()
    del app.query_params["chat"]  # as a visit to another page leaves the address
    app.run()
    assert app.query_params["chat"] == "s1"
    assert set(service.sessions) == {"s1"}
