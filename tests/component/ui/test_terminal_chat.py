"""`framechat chat` against a scripted server; in a terminal of its own: tests/integration/test_terminal.py."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.api import ChatTurn, EngineView, ServerView, StatusView
from pipeline.config import Config
from tests.answering import free_port
from tests.scripted_server import (
    DONE,
    KEEP_ALIVE,
    ROLE,
    Action,
    Received,
    Script,
    ScriptedServer,
    Send,
    Wait,
    chunk,
    event,
    models,
    problem,
    usage,
)
from ui.chat_routes import open_route
from ui.terminal_chat import run_chat

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[3]
FIGURES = re.compile(r"TTFT ([\d.]+) ms · ITL p50 ([\d.]+), p95 ([\d.]+), p99 ([\d.]+) ms · (\d+) tokens")
HELLO: list[Action] = [
    Send(ROLE),
    Send(chunk("Hel", running=1)),
    Wait(0.05),
    Send(chunk("lo", running=2)),
    Send(chunk("", running=3, finish="stop")),
    Send(usage(7, 3)),
    Send(DONE),
]


def config_for(endpoint: str, *, service_port: int | None = None, **chat: object) -> Config:
    return Config.model_validate(
        {
            "serving": {"server": {"base_url": endpoint}},
            "service": {"port": service_port or free_port()},
            "chat": {"system_prompt": "Be brief.", **chat},
        }
    )


def model_server(answer: Script | Callable[[Received], Script]) -> Callable[[Received], Script]:
    """A server that lists one model and gives this answer to every chat."""

    def respond(received: Received) -> Script:
        if received.path == "/v1/models":
            return models("scripted")
        if received.path == "/v1/chat/completions":
            return answer if isinstance(answer, Script) else answer(received)
        return problem(404, {"detail": "Not Found"})

    return respond


def asked(server: ScriptedServer) -> list[Received]:
    return [received for received in server.received if received.path.endswith("/chat/completions")]


# --- one message ------------------------------------------------------------------------------------------------------


def test_an_answer_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model_server(Script(HELLO))) as server:
        code = run_chat(config_for(server.endpoint), message="Hi")
        sent_s = asked(server)[0].sent_s
    out, err = capsys.readouterr()
    answer, figures = out.splitlines()
    assert (code, answer, err) == (0, "Hello", "")
    found = FIGURES.fullmatch(figures)
    assert found is not None, figures
    assert int(found[5]) == 3
    gaps_ms = [(sent_s[2] - sent_s[1]) * 1000, (sent_s[3] - sent_s[2]) * 1000]
    assert float(found[2]) == pytest.approx(sum(gaps_ms) / 2, abs=40)
    assert float(found[4]) == pytest.approx(max(gaps_ms), abs=60)


@pytest.mark.parametrize(
    ("answer", "code", "out", "err"),
    [
        pytest.param(problem(400, {"error": {"message": "too hot"}}), 1, "", "too hot", id="rejected"),
        pytest.param(problem(503, {"error": {"message": "full"}}), 1, "", "full", id="overloaded"),
        pytest.param(Script(HELLO[:2]), 1, "Hel\n", "without a finish reason", id="cut"),
        pytest.param(
            Script([Send(chunk("a\x1b[2Jb\x07c\x9bd", running=1)), Send(chunk(running=1, finish="stop"))]),
            0, "a[2Jbcd\n", "", id="no-control-characters",
        ),
        pytest.param(
            Script([Send(chunk(reasoning="hm", running=1)), Send(chunk("yes\n", running=2, finish="stop"))]),
            0, "yes\n", "", id="reasoning-stays-out-of-a-pipe",
        ),
        pytest.param(
            Script([Send(chunk("a", running=1, finish="length"))]), 0, "max_tokens", "", id="says-when-cut-short"
        ),
    ],
)  # fmt: skip
def test_other_answers(answer: Script, code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model_server(answer)) as server:
        assert run_chat(config_for(server.endpoint), message="Hi") == code
    written, complaint = capsys.readouterr()
    assert out in written
    assert err in complaint
    assert len(complaint.splitlines()) == (1 if err else 0)


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1"
    assert run_chat(config_for(endpoint), message="Hi") == 3
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert endpoint in err
    assert "framechat serve" in err


def test_the_key_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMECHAT_API_KEY", "sk-secret")
    with ScriptedServer(problem(401, {"error": "Unauthorized: sk-secret"})) as server:
        assert run_chat(config_for(server.endpoint), message="Hi") == 1
    out, err = capsys.readouterr()
    assert "sk-secret" not in out + err
    assert "key" in err


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMECHAT_API_KEY", "sk-secret")
    with ScriptedServer(model_server(Script(HELLO))) as server:
        assert run_chat(config_for(server.endpoint), message="Hi") == 0
        assert asked(server)[0].headers["authorization"] == "Bearer sk-secret"


def test_the_model_that_the_configuration_names_is_asked() -> None:
    def respond(received: Received) -> Script:
        return models("first", "mine") if received.path == "/v1/models" else model_server(Script(HELLO))(received)

    with ScriptedServer(respond) as server:
        server_config = {"base_url": server.endpoint, "served_model_name": "mine"}
        config = Config.model_validate({"serving": {"server": server_config}, "service": {"port": free_port()}})
        route = open_route(config)
        assert route.where == f"mine at {server.endpoint}"
        route.close()
        assert run_chat(config, message="Hi") == 0
        assert [received.body["model"] for received in asked(server)] == ["mine"]


def test_a_message_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(model_server(Script(HELLO))) as server:
        assert run_chat(config_for(server.endpoint, max_message_chars=5), message="123456") == 2
        assert asked(server) == []
    assert "allowed: 5" in capsys.readouterr().err


# --- lines piped in ---------------------------------------------------------------------------------------------------


def test_piped_lines_are_one_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\n  second  \n"))
    with ScriptedServer(model_server(Script(HELLO))) as server:
        assert run_chat(config_for(server.endpoint)) == 0
        bodies = [received.body for received in asked(server)]
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "second"},
    ]
    assert bodies[1]["messages"][: len(bodies[0]["messages"])] == bodies[0]["messages"], "the prefix cache needs this"
    assert len(FIGURES.findall(capsys.readouterr().out)) == 2


def test_a_failed_line_does_not_end_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("bad\ngood\n"))

    def answer(received: Received) -> Script:
        return problem(500, {"message": "no"}) if received.body["messages"][-1]["content"] == "bad" else Script(HELLO)

    with ScriptedServer(model_server(answer)) as server:
        assert run_chat(config_for(server.endpoint)) == 1
        assert [message["content"] for message in asked(server)[1].body["messages"]] == ["Be brief.", "good"]


# --- through the service ----------------------------------------------------------------------------------------------


def service(endpoint: str, *answer: Action) -> Callable[[Received], Script]:
    """The service's chat API, scripted."""
    as_json = {"content-type": "application/json"}
    status = StatusView(
        version="0",
        started_s=0,
        now_s=0,
        server=ServerView(state="ready", endpoint=endpoint, attached=True, model="scripted"),
        engine=EngineView(),
        cameras=[],
        detector="",
        warnings=[],
    )

    def respond(received: Received) -> Script:
        match received.path:
            case "/status":
                return Script([Send(status.model_dump_json().encode())], headers=as_json)
            case "/chat/sessions":
                session = {"session_id": "s1", "created_s": 0, "turns": []}
                return Script([Send(json.dumps(session).encode())], 201, as_json)
            case "/chat":
                return Script([Send(event({"answer_id": "a1"}, name="answer"))])
            case "/chat/answers/a1/events":
                return Script(answer)
        return problem(404, {"detail": "Not Found"})

    return respond


TURN = ChatTurn(
    role="assistant",
    text="Hello",
    state="done",
    ttft_ms=100,
    itl_p50_ms=20,
    itl_p95_ms=30,
    itl_p99_ms=40,
    completion_tokens=3,
)


def test_the_service_is_used_when_it_runs_on_this_server(capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1"
    stream = [
        Send(event({"text": "Hel"}, name="token")),
        Send(KEEP_ALIVE),
        Send(event({"text": "lo"}, name="token")),
        Send(event(TURN.model_dump_json(), name="end")),
    ]
    with ScriptedServer(service(endpoint, *stream)) as server:
        assert run_chat(config_for(endpoint, service_port=server.port), message="Hi") == 0
        ask = next(received.body for received in server.received if received.path == "/chat")
    assert capsys.readouterr().out == "Hello\nTTFT 100.0 ms · ITL p50 20.0, p95 30.0, p99 40.0 ms · 3 tokens\n"
    assert (ask["session_id"], ask["text"]) == ("s1", "Hi")
    assert ask["due_s"] == pytest.approx(time.time(), abs=30)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        pytest.param([Send(event({"text": "x"}, name="token"))], "ended the answer's stream early", id="ends-early"),
        pytest.param([Send(event("{}", name="end"))], "could not be read", id="not-understood"),
        pytest.param(
            [Send(event(TURN.model_copy(update={"state": "failed", "detail": "boom"}).model_dump_json(), name="end"))],
            "boom", id="failed",
        ),
    ],
)  # fmt: skip
def test_the_services_failures(stream: list[Action], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/v1"
    with ScriptedServer(service(endpoint, *stream)) as server:
        assert run_chat(config_for(endpoint, service_port=server.port), message="Hi") == 1
    assert says in capsys.readouterr().err


def test_a_service_of_another_server_is_left_alone() -> None:
    with ScriptedServer(model_server(Script(HELLO))) as server, ScriptedServer(service("http://other/v1")) as other:
        assert run_chat(config_for(server.endpoint, service_port=other.port), message="Hi") == 0
        assert len(asked(server)) == 1
        assert [received.path for received in other.received] == ["/status"]


def test_ctrl_c_at_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", type("Typing", (io.StringIO,), {"isatty": lambda _self: True})())
    monkeypatch.setattr("builtins.input", interrupted)
    with ScriptedServer(model_server(Script(HELLO))) as server:
        assert run_chat(config_for(server.endpoint)) == 130


def test_a_reader_that_leaves_early_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with ScriptedServer(model_server(Script(HELLO))) as server, os.fdopen(writer, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        assert run_chat(config_for(server.endpoint), message="Hi") == 1
