from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pypdf
import pytest

from pipeline.config import Config
from pipeline.tokens import estimate_tokens, most_tokens
from serving.records import now_s
from tests.component.pipeline.conftest import ModelScript, Running, events, run_service, wait_for
from tests.scripted_server import Cut, Script, ScriptedServer, Send, chunk

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service for the tests that change nothing in it."""
    with ScriptedServer(ModelScript()) as server:
        tree = {
            "serving": {"server": {"base_url": server.endpoint}},
            "store": {"folder": str(tmp_path_factory.mktemp("shared"))},
            "chat": {"max_document_bytes": 200_000},
        }
        with run_service(Config.model_validate(tree)) as service:
            yield service


def ask(client: Running, session_id: str, text: str, **more: Any) -> list[tuple[str, str, Any]]:
    """Ask and listen to the end."""
    answer = client.post("/chat", json={"session_id": session_id, "text": text, **more})
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def new_session(client: Running) -> str:
    return str(client.post("/chat/sessions").json()["session_id"])


def asked(server: ScriptedServer) -> list[dict[str, Any]]:
    return [item.body for item in server.received if item.path == "/v1/chat/completions"]


def said(text: str) -> str:
    """What an answer's stream of events says."""
    return "".join(data["text"] for kind, _, data in events(text) if kind == "token")


def ledger(client: Running, traffic_class: str) -> dict[str, Any]:
    classes = client.get("/latency").json()["classes"]
    return next(item for item in classes if item["traffic_class"] == traffic_class)


@pytest.fixture
def own_server(make_config: MakeConfig, model_server: ScriptedServer) -> Callable[..., Config]:
    """Configurations whose server is ours: its length is known from the configuration."""

    def make(max_model_len: int, **sections: Any) -> Config:
        rule = {"kind": "patches"}
        server = {"base_url": None, "port": model_server.port, "max_model_len": max_model_len, "image_tokens": rule}
        classes = {
            name: {"ttft_p95_ms": 1000, "itl_p99_ms": 500, "max_tokens": 20} for name in ("camera", "chat", "document")
        }
        small = {"picture_width_px": 64, "picture_height_px": 64}
        return make_config(serving={"server": server, "classes": classes}, describe=small, **sections)

    return make


def test_an_answer_streams_and_stays_in_its_session(
    make_config: MakeConfig, serve: Serve, script: ModelScript, model_server: ScriptedServer
) -> None:
    script.gap_s = 0.05
    with serve(make_config(chat={"system_prompt": "Be brief."})) as client:
        session_id = new_session(client)
        first, *tokens, end = ask(client, session_id, " What is it? ")
        assert first[0] == "answer"
        assert [data["text"] for _, _, data in tokens] == ["A ", "red ", "coat."]
        assert [int(number) for _, number, _ in tokens] == [2, 6, 11]  # resuming is by characters
        turn = end[2]
        assert end[0] == "end"
        assert (turn["role"], turn["text"], turn["state"]) == ("assistant", "A red coat.", "done")
        assert turn["answer_id"] == first[2]["answer_id"]
        assert turn["ttft_ms"] > 40
        assert turn["itl_p50_ms"] == pytest.approx(50, abs=40)
        assert turn["completion_tokens"] == 3
        ask(client, session_id, "And now?")
        turns = client.get(f"/chat/sessions/{session_id}").json()["turns"]
        assert [item["text"] for item in turns] == ["What is it?", "A red coat.", "And now?", "A red coat."]
        assert [item["role"] for item in asked(model_server)[1]["messages"]] == ["system", "user", "assistant", "user"]
        assert asked(model_server)[1]["messages"][0]["content"] == "Be brief."
        figures = ledger(client, "chat")
        assert (figures["done"], figures["ttft"]["count"], figures["itl"]["count"]) == (2, 2, 4)


def test_a_page_reload_loses_nothing(make_config: MakeConfig, serve: Serve, script: ModelScript) -> None:
    script.words, script.gap_s = [f"w{number} " for number in range(12)], 0.06
    whole = "".join(script.words)
    with serve(make_config()) as client:
        session_id = new_session(client)
        heard = ""
        with client.stream("POST", "/chat", json={"session_id": session_id, "text": "go"}) as answer:
            for part in answer.iter_text():
                heard += part
                if len(said(heard)) >= 6:
                    break  # the page is gone
        answer_id = events(heard)[0][2]["answer_id"]
        last_id = events(heard)[-1][1]
        running = client.get(f"/chat/sessions/{session_id}").json()["turns"][-1]
        assert (running["state"], running["answer_id"]) == ("streaming", answer_id)
        rest = client.get(f"/chat/answers/{answer_id}/events", headers={"last-event-id": last_id}).text
        assert said(heard) + said(rest) == whole
        assert events(rest)[-1][2]["state"] == "done"
        again = client.get(f"/chat/answers/{answer_id}/events").text
        assert said(again) == whole
        assert said(client.get(f"/chat/answers/{answer_id}/events", params={"after": 3}).text) == whole[3:]


def test_stopping_an_answer_keeps_its_words_and_frees_the_server(
    make_config: MakeConfig, serve: Serve, script: ModelScript, model_server: ScriptedServer
) -> None:
    script.words, script.gap_s = ["word "] * 100, 0.1
    with serve(make_config()) as client:
        session_id = new_session(client)
        heard = ""
        with client.stream("POST", "/chat", json={"session_id": session_id, "text": "go"}) as answer:
            for part in answer.iter_text():
                heard += part
                if said(heard):
                    answer_id = events(heard)[0][2]["answer_id"]
                    client.post(f"/chat/answers/{answer_id}/cancel")
        turn = events(heard)[-1][2]
        assert (turn["state"], turn["detail"]) == ("cancelled", "stopped by the user")
        assert turn["text"] == said(heard)
        (question,) = [item for item in model_server.received if item.path == "/v1/chat/completions"]
        assert question.gone.wait(5)
        assert client.post(f"/chat/answers/{answer_id}/cancel").json()["state"] == "cancelled"  # once more is harmless
        script.words, script.gap_s = ["ok"], 0
        ask(client, session_id, "and?")
        history = [message["content"] for message in asked(model_server)[-1]["messages"][-3:]]
        assert history == ["go", turn["text"], "and?"]
        assert ledger(client, "chat")["cancelled"] == 1


def test_a_broken_stream_is_a_failed_turn_and_the_session_goes_on(
    make_config: MakeConfig, serve: Serve, script: ModelScript
) -> None:
    script.refusal = Script([Send(chunk("Half", running=1)), Cut()])
    with serve(make_config()) as client:
        session_id = new_session(client)
        end = ask(client, session_id, "go")[-1][2]
        assert (end["state"], end["text"]) == ("failed", "Half")
        assert end["detail"]
        script.refusal = None
        assert ask(client, session_id, "again")[-1][2]["state"] == "done"


def test_one_answer_at_a_time_in_a_session_and_the_rest_waits_its_turn(
    make_config: MakeConfig, serve: Serve, script: ModelScript, model_server: ScriptedServer
) -> None:
    script.words, script.gap_s = ["word "] * 60, 0.1
    with serve(make_config(chat={"max_in_flight": 1, "max_sessions": 2})) as client:
        first, second = new_session(client), new_session(client)
        ids = []
        for session_id in (first, second):
            with client.stream("POST", "/chat", json={"session_id": session_id, "text": "go"}) as answer:
                start = next(answer.iter_text())
                ids.append(events(start)[0][2]["answer_id"])
        busy = client.post("/chat", json={"session_id": first, "text": "more"})
        assert busy.status_code == 409
        assert client.post("/chat/sessions").status_code == 429  # both are answering
        wait_for(lambda: len(asked(model_server)) == 1)
        assert client.get(f"/chat/sessions/{second}").json()["turns"][-1]["state"] == "waiting"
        assert ledger(client, "chat")["waiting"] == 1
        client.post(f"/chat/answers/{ids[1]}/cancel")
        client.post(f"/chat/answers/{ids[0]}/cancel")
        ends = [events(client.get(f"/chat/answers/{answer_id}/events").text)[-1][2] for answer_id in ids]
        assert [end["state"] for end in ends] == ["cancelled", "cancelled"]
        assert len(asked(model_server)) == 1  # the one that waited was never sent
        assert new_session(client)  # the one unused longest made room


def test_a_first_token_counts_from_enter(make_config: MakeConfig, serve: Serve) -> None:
    with serve(make_config()) as client:
        session_id = new_session(client)
        earlier = ask(client, session_id, "go", due_s=now_s() - 2)[-1][2]
        assert earlier["ttft_ms"] > 2000
        for nonsense in (now_s() + 500, now_s() - 5000):
            assert ask(client, session_id, "go", due_s=nonsense)[-1][2]["ttft_ms"] < 2000


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param({"text": "  "}, 422, "text is empty", id="empty"),
        pytest.param({"text": "x" * 8001}, 422, "8,001 characters, allowed: 8,000", id="too long"),
        pytest.param({"text": "x", "session_id": "none"}, 404, "session 'none'", id="no such session"),
        pytest.param({"text": "x", "document_id": "none"}, 404, "document 'none'", id="no such document"),
        pytest.param({"text": "x", "camera_id": "none"}, 404, "camera 'none'", id="no such camera"),
        pytest.param({}, 422, "text: field required", id="no text"),
    ],
)
def test_questions_that_are_refused(shared: Running, body: dict[str, str], status: int, words: str) -> None:
    session_id = new_session(shared)
    answer = shared.post("/chat", json={"session_id": session_id, **body})
    assert answer.status_code == status
    assert words in answer.json()["detail"]
    assert shared.get(f"/chat/sessions/{session_id}").json()["turns"] == []
    assert ask(shared, session_id, "fine")[-1][2]["state"] == "done"  # the session is not stuck


@pytest.mark.parametrize(
    ("exact", "left_out"),
    [
        pytest.param(None, 4, id="estimated"),
        pytest.param(0.3, 2, id="counted by the server"),
    ],
)
def test_history_is_trimmed_in_sight(
    own_server: Callable[..., Config],
    serve: Serve,
    script: ModelScript,
    model_server: ScriptedServer,
    exact: float | None,
    left_out: int,
) -> None:
    script.tokens_per_byte = exact
    script.words = ["ok"]
    with serve(own_server(300, chat={"system_prompt": ""})) as client:
        session_id = new_session(client)
        for _ in range(2):
            assert ask(client, session_id, "x" * 300)[-1][2]["detail"] == ""
        end = ask(client, session_id, "y" * 400)[-1][2]
        assert end["state"] == "done"
        sent = asked(model_server)[-1]["messages"]
        assert [message["content"] for message in sent][-1] == "y" * 400
        assert sent[0]["role"] == "user"
        assert 5 - len(sent) == left_out
        assert end["detail"] == f"the {left_out} oldest messages were left out to fit what the model reads"
        assert "left out" in ask(client, session_id, "short")[-1][2]["detail"]  # and stays in sight


def test_a_document_makes_a_document_request_that_later_questions_find_cached(
    make_config: MakeConfig, serve: Serve, model_server: ScriptedServer
) -> None:
    with serve(make_config()) as client:
        document = client.post("/documents", files={"file": ("plan.txt", "Meet at noon. Ä".encode())}).json()
        assert (document["name"], document["characters"]) == ("plan.txt", 15)
        assert document["estimated_tokens"] == estimate_tokens("Meet at noon. Ä")
        session_id = new_session(client)
        ask(client, session_id, "When?", document_id=document["document_id"])
        ask(client, session_id, "Where?")
        one, two = (item["messages"] for item in asked(model_server))
        assert one[-1]["content"] == "Document:\nMeet at noon. Ä\n\nWhen?"
        assert two[: len(one)] == one  # what was sent before starts what is sent now
        figures = {name: ledger(client, name)["done"] for name in ("chat", "document")}
        assert figures == {"chat": 0, "document": 2}
        turns = client.get(f"/chat/sessions/{session_id}").json()["turns"]
        assert [turn["attachment"] for turn in turns] == ["document plan.txt", "", "", ""]


@pytest.mark.parametrize(
    ("exact", "status"),
    [pytest.param(None, 413, id="estimated"), pytest.param(0.2, 200, id="counted by the server: it fits")],
)
def test_a_document_that_does_not_fit_is_refused_with_the_figures(
    own_server: Callable[..., Config], serve: Serve, script: ModelScript, exact: float | None, status: int
) -> None:
    script.tokens_per_byte = exact
    with serve(own_server(300, chat={"system_prompt": ""})) as client:
        document = client.post("/documents", files={"file": ("long.txt", b"word " * 200)}).json()
        body = {"session_id": new_session(client), "text": "What?", "document_id": document["document_id"]}
        answer = client.post("/chat", json=body)
        assert answer.status_code == status
        if status == 413:
            assert "long.txt with the question is about 339 tokens, allowed: 248" in answer.json()["detail"]


def pdf_of(text: str, *, pages: int = 1, password: str | None = None) -> bytes:
    """A small PDF with `text` on every page."""
    writer = pypdf.PdfWriter()
    for _ in range(pages):
        page = writer.add_blank_page(200, 200)
        stream = pypdf.generic.DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        font = pypdf.generic.DictionaryObject()
        for key, value in (("/Type", "/Font"), ("/Subtype", "/Type1"), ("/BaseFont", "/Helvetica")):
            font[pypdf.generic.NameObject(key)] = pypdf.generic.NameObject(value)
        fonts = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/F1"): writer._add_object(font)})
        resources = pypdf.generic.DictionaryObject({pypdf.generic.NameObject("/Font"): fonts})
        page[pypdf.generic.NameObject("/Resources")] = resources
        page[pypdf.generic.NameObject("/Contents")] = writer._add_object(stream)
    if password is not None:
        writer.encrypt(password, algorithm="RC4-128")
    output = io.BytesIO()
    writer.write(output)
    return output.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "status", "words"),
    [
        pytest.param("a.pdf", pdf_of("Gate five"), 201, "", id="PDF"),
        pytest.param("a.pdf", pdf_of("secret", password="x"), 422, "a.pdf: is encrypted", id="encrypted"),  # noqa: S106
        pytest.param("a.pdf", b"%PDF-1.7 and then nothing", 422, "a.pdf: is not a PDF that can be read", id="broken"),
        pytest.param("a.pdf", pdf_of(""), 422, "a.pdf: holds no text", id="scan"),
        pytest.param("a.pdf", pdf_of("x", pages=501), 422, "501 pages, allowed: 500", id="too many pages"),
        pytest.param("a.bin", bytes(range(128, 256)), 422, "a.bin: is neither UTF-8 text nor a PDF", id="neither"),
        pytest.param("../../a.txt", b"plain", 201, "", id="path in the name"),
        pytest.param("a.txt", "Größe".encode("utf-16"), 201, "", id="UTF-16"),
        pytest.param("a.txt", b"x" * 200_001, 413, "too large", id="too large"),
    ],
)
def test_documents(shared: Running, name: str, content: bytes, status: int, words: str) -> None:
    answer = shared.post("/documents", files={"file": (name, content)})
    assert answer.status_code == status, answer.text
    if status == 201:
        assert answer.json()["name"] == Path(name).name
        assert answer.json()["characters"] in (5, 9)
    else:
        assert words in answer.json()["detail"]
        assert "\n" not in answer.json()["detail"]


def test_the_current_picture_goes_along_and_older_ones_only_as_far_as_allowed(
    make_config: MakeConfig, serve: Serve, street_video: Path, model_server: ScriptedServer
) -> None:
    cameras = [{"name": "Yard", "source": str(street_video), "loop": True}]
    config = make_config(
        cameras=cameras, detect={"rate_hz": 0.01}, serving={"server": {
            "base_url": model_server.endpoint, "max_images_per_request": 1}},
    )  # fmt: skip
    with serve(config) as client:
        wait_for(lambda: client.get("/cameras").json()[0]["frames"])
        session_id = new_session(client)
        ask(client, session_id, "What do you see?", camera_id="yard")
        end = ask(client, session_id, "And now?", camera_id="yard")[-1][2]
        assert end["detail"] == "only the newest 1 pictures were shown to the model"
        one, two = (item["messages"] for item in asked(model_server))
        assert [part["type"] for part in one[-1]["content"]] == ["text", "image_url"]
        assert two[1]["content"] == "What do you see?"
        assert [part["type"] for part in two[-1]["content"]] == ["text", "image_url"]
        turns = client.get(f"/chat/sessions/{session_id}").json()["turns"]
        assert turns[0]["attachment"] == "picture of Yard"
        assert ledger(client, "chat")["done"] == 2


@pytest.mark.parametrize("text", ["", "word " * 9, "ä" * 10, "漢字", "\ud800", json.dumps({"a": 1})])
def test_estimates_are_within_the_bound(text: str) -> None:
    assert estimate_tokens(text) <= most_tokens(text)
