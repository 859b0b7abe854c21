"""The page Compare, run by Streamlit's own test runner against a scripted service on a loopback port."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from streamlit.testing.v1 import AppTest

from pipeline.api_compare import BudgetView, ChangeView, ComparisonResult, ComparisonView, RunningComparison
from serving.compare.summary import Summary, summarise
from serving.compare.words import verdict
from tests.answering import Answer, answering
from tests.comparison_data import comparison

IDLE = ChangeView(state="none", detail="", at_s=0)
HOSTILE = "<b>x</b> ![p](http://evil.test/p.png)"


def script() -> None:
    from ui.page_compare import show

    show()


class Service:
    """What the scripted service knows and what it was asked."""

    def __init__(self, summary: Summary) -> None:
        self.budget = BudgetView(
            max_num_batched_tokens=256, step_budget=256, configured=256, least=16, most=256, change=IDLE
        )
        self.running = RunningComparison()
        self.summaries = {"toy": summary.model_dump(mode="json")}
        self.known = [view("toy")]
        self.refusal = ""
        self.posted: list[tuple[str, Any]] = []

    def __call__(self, method: str, path: str, _headers: Mapping[str, str], body: bytes) -> Answer:
        if method == "POST":
            self.posted.append((path, json.loads(body) if body else None))
            if self.refusal:
                return 409, {"detail": self.refusal}
        name = path.rpartition("/")[2]
        pages: dict[str, Any] = {
            "/server/budget": self.budget.model_dump(),
            "/comparisons/running": self.running.model_dump(),
            "/comparisons/running/stop": self.running.model_dump(),
        }
        if path == "/comparisons":
            return 200, self.running.model_dump() if method == "POST" else [item.model_dump() for item in self.known]
        if path in pages:
            return 200, pages[path]
        found = next((item for item in self.known if item.name == name), None)
        if found is None:
            return 404, {"detail": f"no {path}"}
        return 200, ComparisonResult(comparison=found, summary=self.summaries.get(name)).model_dump()


def view(name: str, **more: Any) -> ComparisonView:
    values = {
        "created_s": 1.8e9, "state": "done", "arms": ["step 64", "step 2048"], "kind": "step_budget", "blocks_done": 2,
        "blocks_total": 2, "has_report": True,
    }  # fmt: skip
    return ComparisonView(name=name, **(values | more))


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    made = comparison(tmp_path_factory.mktemp("toy"), budgets=(64, 2048), rounds=1, block_s=30)
    return summarise(made, resamples=20)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, summary: Summary) -> Iterator[Service]:
    found = Service(summary)
    with answering(found) as url:
        monkeypatch.setenv("FRAMECHAT_SERVICE_URL", url)
        yield found


def page() -> AppTest:
    app = AppTest.from_function(script, default_timeout=30).run()
    assert not app.exception
    return app


def words(app: AppTest) -> str:
    blocks = [*app.markdown, *app.caption, *app.info, *app.warning, *app.error, *app.success]
    return "\n".join(str(item.value).replace("\\", "") for item in blocks)


def test_it_shows_the_budget_the_form_and_the_newest_result(service: Service, summary: Summary) -> None:
    app = page()
    said = words(app)
    assert "Budget in force: 256 tokens" in said
    assert verdict(summary) in said
    assert "Meanwhile cameras pause" in said
    figures = app.dataframe[0].value
    assert list(figures["arm"]) == ["step 64", "step 2048"]
    assert "ms" in figures["chat ITL p99"][0]


def test_a_step_budget_is_applied_at_once(service: Service) -> None:
    app = page()
    app.number_input(key="apply_at_once").set_value(64).run()
    app.button(key="apply").click().run()
    assert service.posted == [("/server/budget", {"max_num_batched_tokens": None, "step_budget": 64})]


def test_another_start_up_budget_is_applied_with_a_restart(service: Service) -> None:
    app = page()
    app.radio(key="apply_how").set_value("max_num_batched_tokens (restart)").run()
    app.number_input(key="apply_restart").set_value(512).run()
    app.button(key="apply").click().run()
    assert service.posted == [("/server/budget", {"max_num_batched_tokens": 512, "step_budget": None})]


def test_a_moved_step_budget_and_the_state_of_a_change_are_shown(service: Service) -> None:
    service.budget = service.budget.model_copy(update={"step_budget": 64})
    assert "64 tokens a step (started with 256)" in words(page())
    change = ChangeView(state="draining", detail="2 running requests are finished first", at_s=0)
    service.budget = service.budget.model_copy(update={"change": change})
    app = page()
    assert "Finishing what runs: 2 running requests are finished first" in words(app)
    assert not [button for button in app.button if button.key == "apply"]


def test_without_a_server_of_ours_nothing_can_be_changed(service: Service) -> None:
    why = "the model server is not ours"
    service.budget = BudgetView(max_num_batched_tokens=None, why_no_step_budget=why, why_no_restart=why, change=IDLE)
    app = page()
    assert why in words(app)
    assert "the server does not say" in words(app)
    assert not [button for button in app.button if button.key in ("apply", "start", "apply_found")]


def test_a_comparison_is_started_as_the_form_says(service: Service) -> None:
    app = page()
    app.radio(key="kind").set_value("step_budgets").run()
    app.text_input(key="budgets_step_budgets").set_value("64, 512").run()
    app.number_input(key="block_s").set_value(30).run()
    app.number_input(key="rounds").set_value(4).run()
    assert "about 7 min" in words(app)
    assert "stopped and comes back" in words(app)
    app.button(key="start").click().run()
    assert service.posted == [
        (
            "/comparisons",
            {"kind": "step_budgets", "budgets": [64, 512], "workload": None, "block_s": 30.0, "rounds": 4},
        )
    ]


def test_a_load_from_a_few_fields(service: Service) -> None:
    app = page()
    app.radio(key="load").set_value("A few fields").run()
    app.number_input(key="chat_rate").set_value(0.5).run()
    app.number_input(key="width").set_value(1024).run()
    app.button(key="start").click().run()
    (_, asked), *_ = service.posted
    classes = asked["workload"]["classes"]
    assert classes["chat"]["arrivals"]["rate_per_s"] == 0.5
    assert classes["camera"]["pictures"]["width_px"] == 1024


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(yaml.safe_dump({"classes": {"chat": {}}}).encode(), "", id="a load"),
        pytest.param(b"classes: {chat: {rate: 1}}", "classes.chat.rate", id="an unknown key"),
        pytest.param(b"\xff\xfe", "is no YAML", id="no text"),
        pytest.param(b"x" * 300_000, "allowed: 262,144", id="too large"),
    ],
)
def test_a_load_file(service: Service, content: bytes, problem: str) -> None:
    app = page()
    app.radio(key="load").set_value("A load file").run()
    app.file_uploader(key="load_file").upload("load.yaml", content, "application/yaml").run()
    start = app.button(key="start")
    assert start.disabled is bool(problem)
    if problem:
        assert problem in words(app)
    else:
        start.click().run()
        assert "chat" in service.posted[0][1]["workload"]["classes"]


@pytest.mark.parametrize("text", ["a", "64, 64", ", ".join(str(number) for number in range(1, 20))])
def test_budgets_that_cannot_be_are_told(service: Service, text: str) -> None:
    app = page()
    app.text_input(key="budgets_running").set_value(text).run()
    assert app.button(key="start").disabled
    assert "budgets: " in words(app)


def test_a_refusal_is_shown_as_plain_text(service: Service) -> None:
    service.refusal = HOSTILE
    app = page()
    app.button(key="start").click().run()
    assert "\\!\\[p\\]\\(http" in app.error[0].value


def test_progress_while_it_runs_and_stop(service: Service) -> None:
    found = view("now", state="running", blocks_done=3, blocks_total=12, remaining_s=600, message=HOSTILE)
    service.running = RunningComparison(phase="running", name="now", comparison=found, change=IDLE)
    app = page()
    assert "Meanwhile cameras are paused" in words(app)
    assert "\\!\\[p\\]" in "".join(item.value for item in app.caption)
    assert not [button for button in app.button if button.key == "start"]
    app.button(key="stop_comparison").click().run()
    assert service.posted == [("/comparisons/running/stop", None)]


def test_one_that_has_just_ended_is_shown(service: Service) -> None:
    service.summaries["new"] = service.summaries["toy"]
    service.known.append(view("new"))
    app = page()
    assert app.multiselect(key="chosen").value == ["toy"]
    app.session_state["show_next"] = "new"
    app.run()
    assert app.multiselect(key="chosen").value == ["new"]
    app.run()
    assert app.multiselect(key="chosen").value == ["new"]


def test_how_the_last_one_ended(service: Service) -> None:
    service.running = RunningComparison(phase="failed", name="now", detail="every arm was refused")
    app = page()
    assert "every arm was refused" in words(app)
    assert app.button(key="start")


def test_two_side_by_side_and_a_budget_of_them_applied(service: Service, summary: Summary) -> None:
    other = summary.model_copy(update={"name": "other"})
    service.summaries["other"] = other.model_dump(mode="json")
    service.known.append(view("other"))
    app = page()
    app.multiselect(key="chosen").set_value(["toy", "other"]).run()
    assert list(app.dataframe[0].value["arm"]) == [
        "toy: step 64", "toy: step 2048", "other: step 64", "other: step 2048",
    ]  # fmt: skip
    app.selectbox(key="apply_arm").set_value("other: step 64").run()
    app.button(key="apply_found").click().run()
    app.selectbox(key="apply_arm").set_value("other: step 2048").run()
    app.button(key="apply_found").click().run()
    assert [body for _, body in service.posted] == [
        {"max_num_batched_tokens": None, "step_budget": 64},  # the running server can do that
        {"max_num_batched_tokens": 2048, "step_budget": None},  # that is beyond it
    ]


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        pytest.param(None, "no block has ended yet", id="no block"),
        pytest.param({"format": 99}, "made by another version", id="another version"),
    ],
)
def test_a_result_that_is_not_there_or_cannot_be_read(service: Service, tree: Any, says: str) -> None:
    service.summaries["toy"] = tree
    assert says in words(page())


def test_no_comparison_yet(service: Service) -> None:
    service.known = []
    assert "There is no comparison yet" in words(page())


def test_the_page_stands_when_the_service_is_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRAMECHAT_SERVICE_URL", "http://127.0.0.1:9")
    assert "cannot be reached" in words(page())
