"""A bench with servers of its own: restarts, warm-up, deaths, the memory's peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serving.compare.bench import Bench, Means
from serving.compare.experiment import Comparison
from serving.compare.hosts import Say
from serving.compare.plan import Arm, Experiment
from serving.compare.tables import read_results
from serving.config import ServerConfig, ServingConfig
from serving.records import now_s
from serving.scheduler.steps import StepReader
from serving.status import ServerStatus
from serving.workload import draw
from tests.component.serving.compare.scripted_arms import CLASSES, Answer, Grey, class_of, experiment, load, playing
from tests.scripted_server import Received, Script, ScriptedServer, problem

ANSWERS = {"camera": Answer(0.01, [0.01], [1]), "chat": Answer(0.01, [0.01], [1])}


@dataclass
class Servers:
    """Servers of ours, as far as the bench can tell: every start is noted, all are one scripted server."""

    endpoint: str
    started: list[ServerConfig] = field(default_factory=list)
    step_budgets: list[int | None] = field(default_factory=list)
    deaths: int = 0
    trouble: str = ""
    _current: ServerConfig | None = None

    async def use(self, server: ServerConfig, say: Say) -> ServerStatus:
        if server != self._current:
            self._current = server
            self.started.append(server)
            say("starting")
        return ServerStatus("ready", "", self.endpoint, attached=False, since_s=now_s(), model="scripted")

    def set_step_budget(self, tokens: int | None) -> None:
        self.step_budgets.append(tokens)

    def step_reader(self) -> StepReader | None:
        return None

    async def stop(self) -> None:
        self._current = None


def means(host: Servers, **server: object) -> Means:
    serving = ServingConfig.model_validate(
        {
            "server": {"max_num_seqs": 5, **server},
            "classes": {**{name: item.model_dump() for name, item in CLASSES.items()}, "document": CLASSES["chat"]},
        }
    )
    return Means(serving=serving, host=host, pictures=Grey())


def with_arms(described: Experiment, *arms: Arm) -> Experiment:
    blocks = [block.model_copy(update={"arm": arms[block.number % len(arms)].name}) for block in described.plan]
    return described.model_copy(update={"arms": list(arms), "plan": blocks})


def step(budget: int) -> Arm:
    return Arm(name=f"step {budget}", kind="step_budget", budget=budget, settings={"max_num_batched_tokens": 128})


def variant(name: str, **settings: object) -> Arm:
    return Arm(name=name, kind="variant", settings=settings)


async def test_step_budgets_move_in_one_server_and_a_variant_gets_its_own(tmp_path: Path) -> None:
    described = with_arms(
        experiment(load(0.3), arms=("a", "b", "c"), warm_up_s=0.0),
        step(64),
        step(128),
        variant("v", max_model_len=2048),
    )
    with ScriptedServer(playing(ANSWERS)) as server:
        host = Servers(server.endpoint)
        await Comparison(tmp_path, described, means(host), on_progress=lambda _: None).run()
    assert [config.max_num_batched_tokens for config in host.started] == [128, 256]
    assert host.step_budgets == [64, 128]
    assert [block.info.server["max_num_scheduled_tokens"] for block in read_results(tmp_path).blocks] == [64, 128, None]


async def test_a_budget_on_the_server_of_step_budgets_gets_its_own_steps_back(tmp_path: Path) -> None:
    whole = Arm(name="budget 128", kind="budget", budget=128, settings={"max_num_batched_tokens": 128})
    described = with_arms(experiment(load(0.3), arms=("a", "b"), warm_up_s=0.0), step(64), whole)
    with ScriptedServer(playing(ANSWERS)) as server:
        host = Servers(server.endpoint)
        await Comparison(tmp_path, described, means(host), on_progress=lambda _: None).run()
    assert len(host.started) == 1
    assert host.step_budgets == [64, None]


async def test_the_warm_up_is_short_of_every_class_and_counted_nowhere(tmp_path: Path) -> None:
    described = experiment(load(0.3), warm_up_s=0.0)
    with ScriptedServer(playing(ANSWERS)) as server:
        await Comparison(tmp_path, described, means(Servers(server.endpoint)), on_progress=lambda _: None).run()
        asked = [item for item in server.received if item.path.endswith("/completions")]
    rows = read_results(tmp_path).requests
    warm = [item for item in asked if item.headers["x-request-id"] not in {row.request_id for row in rows}]
    assert {class_of(item) for item in warm} == {"camera", "chat"}
    assert max(item.body["max_tokens"] for item in warm) == 4
    assert len(asked) == len(warm) + len(rows)


async def test_a_block_whose_server_died_is_done_again_and_a_second_death_refuses_the_arm(tmp_path: Path) -> None:
    host = Servers("")
    described = experiment(load(0.3), rounds=2, warm_up_s=0.0)
    told: list[str] = []

    def dying(request: Received) -> Script:
        # Twice in all: in the first block, and when that is tried again.
        if request.headers["x-request-id"].split("-")[1] == "0000" and host.deaths < 2:
            host.deaths += len(host.started) > host.deaths
            host.trouble = "the model server ended by SIGKILL: out of memory"
        return ANSWERS[class_of(request)].script()

    with ScriptedServer(playing(dying)) as server:
        host.endpoint = server.endpoint
        summary = await Comparison(
            tmp_path, described, means(host), on_progress=lambda progress: told.append(progress.message)
        ).run()
    assert len(host.started) == 2
    assert summary.arms[0].arm.reason == (
        "the server died under this load again: the model server ended by SIGKILL: out of memory"
    )
    assert any("is refused" in message for message in told)
    assert read_results(tmp_path).blocks == []
    assert summary.complete


async def test_one_death_costs_only_time(tmp_path: Path) -> None:
    host = Servers("")

    def dying_once(request: Received) -> Script:
        if request.headers["x-request-id"].split("-")[1] == "0000" and host.deaths == 0:
            host.deaths = 1
        return ANSWERS[class_of(request)].script()

    with ScriptedServer(playing(dying_once)) as server:
        host.endpoint = server.endpoint
        await Comparison(tmp_path, experiment(load(0.3), warm_up_s=0.0), means(host), on_progress=lambda _: None).run()
    (block,) = read_results(tmp_path).blocks
    assert {row.outcome for row in block.requests} == {"done"}
    assert len(host.started) == 2


@pytest.mark.parametrize("most_at_once", [pytest.param(5, id="holds"), pytest.param(4, id="does not hold")])
async def test_a_memory_setting_is_tried_at_the_loads_peak_first(tmp_path: Path, most_at_once: int) -> None:
    described = with_arms(experiment(load(0.3), warm_up_s=0.0), variant("more", gpu_memory_utilization=0.95))
    peak: list[Received] = []

    def pick(request: Received) -> Script:
        if request.headers["x-request-id"].split("-")[2] >= "01000":
            peak.append(request)
            if len(peak) > most_at_once:
                return problem(500, {"error": {"message": "CUDA out of memory", "code": 500}})
        return ANSWERS[class_of(request)].script()

    with ScriptedServer(playing(pick)) as server:
        summary = await Comparison(
            tmp_path, described, means(Servers(server.endpoint)), on_progress=lambda _: None
        ).run()
    assert len(peak) == 5  # as many as may run at once
    reason = summary.arms[0].arm.reason
    if most_at_once == 5:
        assert reason is None
    else:
        assert "does not hold 5 of the largest requests at once" in str(reason)
        assert "CUDA out of memory" in str(reason)


async def test_a_cap_is_not_hidden() -> None:
    described = experiment(load(0.3), warm_up_s=0.0, max_in_flight=1)
    with ScriptedServer(playing({name: Answer(0.1, [0.1], [1]) for name in ANSWERS})) as server:
        bench = Bench(described, means(Servers(server.endpoint)))
        measured = await bench.measure(
            described.arms[0], draw(load(0.3)), block=0, say=lambda _line: None, on_start=lambda: None
        )
        await bench.close()
    assert measured is not None
    assert sum(sent.behind_cap_s > 0 for sent in measured.run.requests) == len(measured.run.requests) - 1
