"""Budgets applied to the running server: descriptions wait and none is lost, chat says why, and all goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import maintenance
from pipeline.config import Config
from pipeline.describer import Describer
from serving.scheduler.control import BudgetRefusedError, SchedulerControl, SchedulerState
from tests.component.pipeline.conftest import ModelScript, Running, wait_for
from tests.keeper import Keeper
from tests.scripted_server import ScriptedServer

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]


def change(client: Running) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/server/budget").json()["change"]
    return found


def settled(client: Running) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(lambda: view if (view := change(client))["state"] in ("done", "failed") else None)
    return found


def descriptions(client: Running) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/descriptions").json()
    return found


def refusal(client: Running) -> str:
    session_id = client.post("/chat/sessions").json()["session_id"]
    answer = client.post("/chat", json={"session_id": session_id, "text": "hello"})
    assert answer.status_code == 503
    return str(answer.json()["detail"])


def test_descriptions_wait_through_a_restart_and_none_is_lost(
    ours: MakeConfig,
    serve: Serve,
    keeper: Keeper,
    street_video: Path,
    script: ModelScript,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describers: list[Describer] = []

    def make(*parts: Any, **settings: Any) -> Describer:
        describers.append(Describer(*parts, **settings))
        return describers[-1]

    monkeypatch.setattr("pipeline.runtime.Describer", make)
    script.gap_s = 0.3
    config = ours(
        cameras=[{"name": "one", "source": str(street_video)}],
        trigger={"max_in_flight": 1, "max_waiting": 1, "cancel_after_gone_s": 0.2},
        serving={"timeouts": {"first_token_s": 2.0}},
    )
    keeper.hold.set()
    with serve(config) as client:
        wait_for(lambda: any(view["state"] == "streaming" for view in descriptions(client)))
        assert client.post("/server/budget", json={"max_num_batched_tokens": 512}).status_code == 202
        assert change(client)["state"] == "draining"
        wait_for(lambda: keeper.wishes)  # what ran has ended
        assert [view["state"] for view in descriptions(client)] == ["done"]
        for name in ("two", "three", "four"):
            client.post("/cameras", json={"source": str(street_video), "name": name})
        wait_for(lambda: len(descriptions(client)) == 4)
        # A queue of one, a patience of 2 s, and all of them gone for long: each alone would end a request.
        waiting = [view for view in descriptions(client) if view["state"] == "waiting"]
        assert {view["reason"] for view in waiting} == {"the model server is restarted with a budget of 512 tokens"}
        assert "restarted with a budget of 512" in refusal(client)
        assert "restarted with a budget of 512" in client.get("/status").json()["warnings"][0]
        wait_for(lambda: client.get("/server/budget").json()["change"]["state"] == "restarting")
        began_s = client.get("/status").json()["now_s"]
        wait_for(lambda: client.get("/status").json()["now_s"] > began_s + 2.5)
        keeper.hold.clear()
        wait_for(lambda: any(view["state"] == "streaming" for view in descriptions(client)))
        last = next(view for view in descriptions(client) if view["state"] == "waiting")
        describers[0].cancel(last["camera_id"], last["person_id"], "left 20 s ago")  # while it had to wait
        client.post("/cameras", json={"source": str(street_video), "name": "five"})  # more than the queue of one
        assert settled(client) == {"state": "done", "detail": "the model server runs with a budget of 512 tokens, "
                                   "ready after 0 s", "at_s": change(client)["at_s"]}  # fmt: skip
        # Only the one that came afterwards, to a queue that was longer than its patience, may be dropped.
        wait_for(lambda: [v["state"] for v in descriptions(client) if v["camera_id"] != "five"] == ["done"] * 4)
        assert client.get("/status").json()["warnings"] == []
        wait_for(lambda: client.get("/server/budget").json()["max_num_batched_tokens"] == 512)
    assert [(wish.running, wish.max_num_batched_tokens) for wish in keeper.wishes] == [(True, 512)]


def test_what_does_not_end_in_time_is_asked_again_afterwards(
    ours: MakeConfig,
    serve: Serve,
    keeper: Keeper,
    street_video: Path,
    script: ModelScript,
    model_server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "_DRAIN_S", 0.3)
    script.words, script.gap_s = ["word "] * 200, 0.1
    with serve(ours(cameras=[{"name": "Street", "source": str(street_video)}])) as client:
        (view,) = wait_for(lambda: [item for item in descriptions(client) if item["text"]])
        session_id = client.post("/chat/sessions").json()["session_id"]
        with client.stream("POST", "/chat", json={"session_id": session_id, "text": "go"}) as answer:
            lines = answer.iter_lines()
            while "token" not in next(lines):
                pass
            script.words, script.gap_s = ["A ", "red ", "coat."], 0.0
            client.post("/server/budget", json={"max_num_batched_tokens": 512})
            for _ in lines:
                pass
        turn = client.get(f"/chat/sessions/{session_id}").json()["turns"][-1]
        assert (turn["state"], turn["detail"]) == (
            "cancelled",
            "the model server is restarted with a budget of 512 tokens",
        )
        (done,) = wait_for(lambda: [item for item in descriptions(client) if item["state"] == "done"])
    assert (done["description_id"], done["text"]) == (view["description_id"], "A red coat.")
    pictured = [
        item.headers["x-request-id"]
        for item in model_server.received
        if item.path == "/v1/chat/completions" and isinstance(item.body["messages"][-1]["content"], list)
    ]
    assert pictured == [view["description_id"], f"{view['description_id']}-2"]


def test_a_failed_restart_is_told_and_everything_goes_on(
    ours: MakeConfig, serve: Serve, keeper: Keeper, street_video: Path
) -> None:
    keeper.refuse = "no memory for it; the server runs as before"
    with serve(ours()) as client:
        client.post("/server/budget", json={"max_num_batched_tokens": 512})
        assert settled(client)["detail"] == keeper.refuse
        client.post("/cameras", json={"source": str(street_video)})
        wait_for(lambda: any(view["state"] == "done" for view in descriptions(client)))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param({"max_num_batched_tokens": 8}, 422, "at least max_num_seqs (16)", id="the server would refuse it"),
        pytest.param({"max_num_batched_tokens": 0}, 422, "max_num_batched_tokens", id="nothing"),
        pytest.param({"max_num_batched_tokens": 64, "step_budget": 64}, 422, "one of the two", id="both"),
        pytest.param({"tokens": 64}, 422, "tokens", id="another key"),
        pytest.param({"step_budget": 64}, 409, "does not answer", id="no scheduler plugin"),
    ],
)
def test_refusals(
    ours: MakeConfig, serve: Serve, keeper: Keeper, body: dict[str, Any], status: int, words: str
) -> None:
    with serve(ours()) as client:
        answer = client.post("/server/budget", json=body)
        assert answer.status_code == status
        assert words in answer.json()["detail"]
        assert change(client)["state"] == "none"
    assert keeper.wishes == []


def test_one_change_at_a_time(ours: MakeConfig, serve: Serve, keeper: Keeper) -> None:
    keeper.hold.set()
    with serve(ours()) as client:
        assert client.post("/server/budget", json={"max_num_batched_tokens": 512}).status_code == 202
        second = client.post("/server/budget", json={"max_num_batched_tokens": 1024})
        assert second.status_code == 409
        assert "512 tokens" in second.json()["detail"]
        keeper.hold.clear()
        settled(client)


@pytest.mark.parametrize("attached", [pytest.param(True, id="somebody else's"), pytest.param(False, id="no keeper")])
def test_a_server_that_is_not_ours_to_restart(
    make_config: MakeConfig, ours: MakeConfig, serve: Serve, attached: bool
) -> None:
    with serve(make_config() if attached else ours()) as client:
        budget = client.get("/server/budget").json()
        answer = client.post("/server/budget", json={"max_num_batched_tokens": 512})
        assert answer.status_code == 409
        assert answer.json()["detail"] == budget["why_no_restart"] == budget["why_no_step_budget"]
        assert ("not ours" if attached else "framechat up") in budget["why_no_restart"]
        assert client.post("/server/budget", json={"step_budget": 64}).status_code == 409


def test_a_step_budget_is_in_force_at_once(
    ours: MakeConfig, serve: Serve, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"budget": 256}

    def state(_control: SchedulerControl) -> SchedulerState:
        return SchedulerState(now["budget"], 256, 16, 256, asynchronous=False, steps=0, dropped=0)

    def set_step_budget(control: SchedulerControl, tokens: int | None) -> SchedulerState:
        if tokens is not None and not 16 <= tokens <= 256:
            raise BudgetRefusedError(f"{tokens} tokens, allowed: 16 to 256")
        now["budget"] = tokens or 256
        return state(control)

    monkeypatch.setattr(SchedulerControl, "state", state)
    monkeypatch.setattr(SchedulerControl, "set_step_budget", set_step_budget)
    (keeper.status_path.parent / "scheduler.sock").touch()
    with serve(ours()) as client:
        set_ = client.post("/server/budget", json={"step_budget": 64}).json()
        assert (set_["step_budget"], set_["configured"], set_["least"], set_["most"]) == (64, 256, 16, 256)
        wait_for(lambda: client.get("/status").json()["server"]["max_num_scheduled_tokens"] == 64)
        refused = client.post("/server/budget", json={"step_budget": 4})
        assert (refused.status_code, refused.json()["detail"]) == (422, "step_budget: 4 tokens, allowed: 16 to 256")
        assert client.post("/server/budget", json={}).json()["step_budget"] == 256
        wait_for(lambda: client.get("/status").json()["server"]["max_num_scheduled_tokens"] is None)
    assert keeper.wishes == []
