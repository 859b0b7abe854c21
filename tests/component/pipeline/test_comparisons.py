"""Comparisons through the service, with a stand-in for the child process: what happens to the product meanwhile."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from typer.main import get_command

from pipeline.api_compare import StartComparison
from pipeline.comparisons import Comparisons
from pipeline.config import Config
from pipeline.errors import ApiError
from serving.compare.report import write_report
from serving.compare.summary import summarise
from serving.compare.tables import write_json
from serving.scheduler.control import SchedulerControl, SchedulerState
from serving.wish import Wish, write
from tests.comparison_data import comparison
from tests.component.pipeline.conftest import ModelScript, Running, wait_for
from tests.keeper import Keeper
from ui.cli import app

MakeConfig = Callable[..., Config]
Serve = Callable[..., Any]

# Copies a comparison that was made before: its description at once, its results when the file `go` is there. With
# `fail` it ends with an error line instead.
CHILD = """
import json, os, pathlib, shutil, sys, time
made, folder, fail = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
if fail:
    print("some line"), print("framechat: " + fail), print("another line")
    sys.exit(1)
shutil.copy(made / "experiment.json", folder)
progress = {"state": "running", "at_s": 1, "started_s": 1, "blocks_done": 1, "blocks_total": 6, "remaining_s": 77.0,
            "message": "block 2", "pid": os.getpid()}
(folder / "progress.json").write_text(json.dumps(progress))
while not (made.parent / "go").exists():
    time.sleep(0.02)
shutil.copytree(made, folder, dirs_exist_ok=True)
(folder / "progress.json").write_text(json.dumps(progress | {"state": "done", "remaining_s": None}))
"""
WANTED = {"kind": "step_budgets", "budgets": [64, 256], "block_s": 10, "rounds": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison on disk, with summary and report."""
    folder = tmp_path_factory.mktemp("made") / "toy"
    results = comparison(folder, budgets=(64, 256), rounds=1, block_s=20)
    summary = summarise(results, resamples=20)
    write_json(folder / "summary.json", summary)
    write_report(results, summary)
    return folder


@pytest.fixture
def child(made: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stands where `framechat compare` does; the result lets it end."""
    go = made.parent / "go"
    go.unlink(missing_ok=True)

    def command(_self: Comparisons, _name: str, _wanted: StartComparison, folder: Path) -> list[str]:
        return [sys.executable, "-c", CHILD, str(made), str(folder), ""]

    monkeypatch.setattr(Comparisons, "command", command)
    return go.touch


def now(client: Running) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/comparisons/running").json()
    return found


def ended(client: Running) -> dict[str, Any]:
    found: dict[str, Any] = wait_for(lambda: view if (view := now(client))["phase"] in ("ended", "failed") else None)
    return found


def states(client: Running) -> set[str]:
    return {camera["state"] for camera in client.get("/cameras").json()}


@pytest.mark.parametrize("kind", ["step_budgets", "running"])
def test_the_product_stands_still_and_comes_back(
    ours: MakeConfig,
    serve: Serve,
    keeper: Keeper,
    child: Callable[[], None],
    street_video: Path,
    script: ModelScript,
    kind: str,
) -> None:
    keeper._on_wish = lambda wish: setattr(script, "healthy", wish.running)
    camera = {"name": "Street", "source": str(street_video), "loop": True}
    with serve(ours(cameras=[camera])) as client:
        wait_for(lambda: any(view["state"] == "done" for view in client.get("/descriptions").json()))
        assert client.post("/comparisons", json=WANTED | {"kind": kind}).status_code == 202
        found = wait_for(lambda: view if (view := now(client))["comparison"] else None)
        assert found["phase"] == "running"
        shown = found["comparison"]
        assert (shown["state"], shown["arms"]) == ("running", ["step 64", "step 256"])
        assert (shown["remaining_s"], shown["message"]) == (77.0, "block 2")
        assert states(client) == {"paused"}
        session_id = client.post("/chat/sessions").json()["session_id"]
        refused = client.post("/chat", json={"session_id": session_id, "text": "hello"})
        assert (refused.status_code, "a comparison of token budgets runs" in refused.text) == (503, True)
        for refused in (
            client.post("/cameras", json={"source": str(street_video)}),
            client.patch("/cameras/street", json={"paused": False}),
        ):
            assert (refused.status_code, "cameras rest: a comparison" in refused.text) == (409, True)
        assert states(client) == {"paused"}
        again = client.post("/comparisons", json=WANTED)
        assert (again.status_code, "runs already" in again.text) == (409, True)
        assert client.post("/server/budget", json={"max_num_batched_tokens": 512}).status_code == 409
        if kind == "running":
            assert keeper.wishes == []
        else:
            assert not keeper.wishes[0].running
            wait_for(lambda: keeper.renewals > 2)
        child()
        assert ended(client)["phase"] == "ended"
        wait_for(lambda: "paused" not in states(client))
        wait_for(lambda: client.get("/health").json()["status"] == "ok")
        (listed,) = client.get("/comparisons").json()
        assert (listed["state"], listed["blocks_done"], listed["has_report"]) == ("done", 2, True)
        with client.stream("POST", "/chat", json={"session_id": session_id, "text": "hello"}) as answer:
            assert answer.status_code == 200
    asked = [(wish.running, wish.max_num_batched_tokens) for wish in keeper.wishes]
    assert asked == ([] if kind == "running" else [(False, 256), (True, 256)])


def test_a_file_that_has_ended_is_not_played_again_afterwards(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None], street_video: Path
) -> None:
    with serve(ours(cameras=[{"name": "Street", "source": str(street_video)}])) as client:
        wait_for(lambda: states(client) == {"ended"})
        wait_for(lambda: [view["state"] for view in client.get("/descriptions").json()] == ["done"])
        client.post("/comparisons", json=WANTED | {"kind": "running"})
        wait_for(lambda: now(client)["comparison"])
        wait_for(lambda: states(client) == {"ended"})  # not paused, also where the pause came just before
        child()
        assert ended(client)["phase"] == "ended"
        later_s = client.get("/status").json()["now_s"] + 1  # longer than the file
        while client.get("/status").json()["now_s"] < later_s:
            assert states(client) == {"ended"}
        assert len(client.get("/descriptions").json()) == 1


def test_a_step_budget_that_was_left_behind_is_put_back(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_is = {"budget": 128}

    def state(_control: SchedulerControl) -> SchedulerState:
        return SchedulerState(now_is["budget"], 256, 16, 256, asynchronous=False, steps=0, dropped=0)

    def set_step_budget(control: SchedulerControl, tokens: int | None) -> SchedulerState:
        now_is["budget"] = tokens or 256
        return state(control)

    monkeypatch.setattr(SchedulerControl, "state", state)
    monkeypatch.setattr(SchedulerControl, "set_step_budget", set_step_budget)
    with serve(ours()) as client:
        client.post("/comparisons", json=WANTED | {"kind": "running"})
        wait_for(lambda: now(client)["comparison"])
        now_is["budget"] = 64  # the comparison's, which is then killed
        client.post("/comparisons/running/stop")
        ended(client)
        assert client.get("/server/budget").json()["step_budget"] == 128


def test_a_child_that_fails_is_told_in_its_own_words(
    ours: MakeConfig, serve: Serve, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def command(_self: Comparisons, _name: str, _wanted: StartComparison, folder: Path) -> list[str]:
        return [sys.executable, "-c", CHILD, "x", str(folder), "class camera is unknown; name another"]

    monkeypatch.setattr(Comparisons, "command", command)
    with serve(ours()) as client:
        client.post("/comparisons", json=WANTED)
        view = ended(client)
        assert view["phase"] == "failed"
        assert view["detail"] == "the comparison ended with exit code 1: class camera is unknown; name another"
        assert client.get("/comparisons").json() == []
    assert [wish.running for wish in keeper.wishes] == [False, True]
    assert list((tmp_path / "comparisons").iterdir()) == []


def test_the_wish_to_stop_never_overtakes_the_one_to_go_on(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, wish: Wish) -> None:
        if keeper.renewals and not wish.running:
            time.sleep(0.4)  # a busy disk, while the comparison ends
        write(path, wish)

    monkeypatch.setattr("pipeline.maintenance.write", slow)
    with serve(ours()) as client:
        client.post("/comparisons", json=WANTED)
        wait_for(lambda: keeper.renewals)
        child()
        assert ended(client)["phase"] == "ended"
        time.sleep(0.5)
    assert [wish.running for wish in keeper.wishes] == [False, True]


def test_one_can_be_stopped_and_its_blocks_stay(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None]
) -> None:
    with serve(ours()) as client:
        client.post("/comparisons", json=WANTED)
        wait_for(lambda: now(client)["comparison"])
        assert client.post("/comparisons/running/stop").status_code == 202
        assert ended(client)["detail"] == "stopped; its finished blocks are kept"
        (listed,) = client.get("/comparisons").json()
        assert listed["state"] == "interrupted"
        assert client.post("/comparisons/running/stop").status_code == 409
    assert [wish.running for wish in keeper.wishes] == [False, True]


def test_a_server_that_does_not_stop_is_told_and_all_goes_on(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None], street_video: Path
) -> None:
    keeper.refuse = "it hangs"
    with serve(ours(cameras=[{"name": "Street", "source": str(street_video), "loop": True}])) as client:
        client.post("/comparisons", json=WANTED)
        assert "could not be stopped: it hangs" in ended(client)["detail"]
        wait_for(lambda: "paused" not in states(client))


def test_a_service_that_stops_takes_the_child_with_it(
    ours: MakeConfig, serve: Serve, keeper: Keeper, child: Callable[[], None]
) -> None:
    with serve(ours()) as client:
        client.post("/comparisons", json=WANTED)
        wait_for(lambda: now(client)["comparison"])
        name = now(client)["name"]
    with serve(ours()) as client:
        assert now(client)["phase"] == "none"
        (listed,) = client.get("/comparisons").json()
        assert (listed["name"], listed["state"]) == (name, "interrupted")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"budgets": []}, "budgets", id="none"),
        pytest.param({"budgets": [8, 64]}, "at least max_num_seqs (16)", id="too small"),
        pytest.param({"budgets": [64, 64]}, "every budget once", id="twice"),
        pytest.param({"budgets": list(range(16, 48))}, "budgets", id="too many"),
        pytest.param({"block_s": 1}, "block_s", id="too short"),
        pytest.param({"rounds": 0}, "rounds", id="no rounds"),
        pytest.param({"rounds": 100, "block_s": 3600}, "200 h of load, allowed: 24 h", id="for days"),
        pytest.param({"kind": "magic"}, "kind", id="kind"),
        pytest.param({"load": "/etc/passwd"}, "load", id="a path"),
        pytest.param({"workload": {"classes": {"radio": {}}}}, "radio, allowed: camera, chat", id="unknown class"),
        pytest.param({"workload": {"classes": {}}}, "classes is empty", id="empty load"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_stops(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    comparisons = Comparisons(Config(comparisons={"folder": tmp_path}), idle_maintenance(tmp_path))
    with pytest.raises((ValidationError, ApiError), match=re.escape(words)):
        comparisons.start(StartComparison.model_validate(WANTED | change))
    assert not comparisons.running


def idle_maintenance(folder: Path) -> Any:
    """As of a product that does nothing but run."""
    return SimpleNamespace(why_no_restart=lambda: "", why_not=lambda: "", run_folder=folder / "runs" / "now")


def test_a_refusal_names_the_field(ours: MakeConfig, serve: Serve, keeper: Keeper) -> None:
    with serve(ours()) as client:
        answer = client.post("/comparisons", json=WANTED | {"budgets": []})
        assert (answer.status_code, answer.json()["detail"][:9]) == (422, "budgets: ")
    assert keeper.wishes == []


def test_none_can_be_started_beside_somebody_elses_server(make_config: MakeConfig, serve: Serve) -> None:
    with serve(make_config()) as client:
        answer = client.post("/comparisons", json=WANTED)
        assert (answer.status_code, "not ours" in answer.text) == (409, True)


def test_past_ones_are_read_and_nothing_else_is(ours: MakeConfig, serve: Serve, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "comparisons"
    folder.mkdir()
    (folder / "toy").symlink_to(made)  # out of the folder
    config = ours()
    with serve(config) as client:
        assert client.get("/comparisons").json() == []
        assert client.get("/comparisons/toy").status_code == 404
        (folder / "toy").unlink()
        (made.parent / "go").unlink(missing_ok=True)
        comparison(folder / "mine", budgets=(64,), rounds=1, block_s=10)
        result = client.get("/comparisons/mine").json()
        assert (result["comparison"]["blocks_done"], result["summary"]) == (1, None)
        assert client.get("/comparisons/mine/report.html").status_code == 404
        for name in ("..", "%2e%2e", ".hidden", "mine%2f..%2fmine", "none"):
            assert client.get(f"/comparisons/{name}/report.html").status_code == 404
        (folder / "mine" / "summary.json").write_text('{"name": "mine"}')
        (folder / "mine" / "report.html").write_text("<p>report</p>")
        assert client.get("/comparisons/mine").json()["summary"] == {"name": "mine"}
        report = client.get("/comparisons/mine/report.html")
        assert report.text == "<p>report</p>"
        policy = report.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'")
        (folder / "mine" / "summary.json").write_text("{")
        broken = client.get("/comparisons/mine")
        assert (broken.status_code, "--from" in broken.text) == (500, True)


@pytest.mark.parametrize(
    ("kind", "says", "not_says"),
    [
        pytest.param("budgets", ["--budgets 64,256"], ["--step-budgets", "--server-url"], id="budgets"),
        pytest.param("step_budgets", ["--step-budgets 64,256"], ["--server-url"], id="step budgets"),
        pytest.param(
            "running", ["--step-budgets 64,256", "--server-url http://", "--server-folder "], [], id="running"
        ),
    ],
)
def test_the_command_is_one_that_framechat_knows(
    tmp_path: Path, kind: str, says: list[str], not_says: list[str]
) -> None:
    load = {"classes": {"chat": {"arrivals": {"rate_per_s": 0.5}}}}
    wanted = StartComparison.model_validate(WANTED | {"kind": kind, "workload": load})
    comparisons = Comparisons(Config(comparisons={"folder": tmp_path}), idle_maintenance(tmp_path))
    argv = comparisons.command("one", wanted, tmp_path / "one")
    line = " ".join(argv)
    for words in says:
        assert words in line
    for words in not_says:
        assert words not in line
    compare = get_command(app).commands["compare"]  # type: ignore[attr-defined]
    context = compare.make_context("compare", argv[argv.index("compare") + 1 :], resilient_parsing=True)
    assert (context.params["rounds"], context.params["block_s"], context.params["name"]) == (2, 10, "one")
    assert context.params["load"] == tmp_path / "one" / "load.yaml"
    assert context.params["config"] == tmp_path / "one" / "config.yaml"
