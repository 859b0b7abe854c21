"""Whole comparisons against a scripted server: in order, interrupted, refused, resumed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from serving.compare.experiment import Comparison
from serving.compare.hosts import HostError
from serving.compare.plan import Progress
from serving.compare.summary import Summary, summarise
from serving.compare.tables import Results, read_results
from tests.component.serving.compare.scripted_arms import Answer, class_of, experiment, load, means, playing
from tests.scripted_server import Received, Script, ScriptedServer, problem

ANSWERS = {
    "camera": Answer(0.08, [0.03, 0.12, 0.02], [1, 3, 2]),
    "chat": Answer(0.04, [0.02, 0.02, 0.09, 0.03], [1, 1, 1, 2]),
}


def quiet(_progress: Progress) -> None:
    pass


def as_valid(results: Results) -> Results:
    """Whether this machine was quiet enough to be believed is another test's question."""
    blocks = [replace(block, info=block.info.model_copy(update={"invalid": None})) for block in results.blocks]
    return replace(results, blocks=blocks)


async def test_arms_are_interleaved_paired_and_written_block_by_block(tmp_path: Path) -> None:
    seen: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.state == "running":
            seen.append(len(read_results(tmp_path).blocks))

    described = experiment(load(0.4), rounds=2, arms=("a", "b"), warm_up_s=0.0)
    with ScriptedServer(playing(ANSWERS)) as server:
        summary = await Comparison(tmp_path, described, means(server.endpoint), on_progress=watch).run()
    assert seen == [0, 1, 2, 3]
    blocks = read_results(tmp_path).blocks
    assert [(block.info.arm, block.info.round) for block in blocks] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert summary.complete
    assert {ratio.arm for ratio in summarise(as_valid(read_results(tmp_path))).ratios} == {"b"}
    texts = [
        json.dumps(request.body["messages"]) for request in server.received if request.path.endswith("/completions")
    ]
    assert len(texts) == len(set(texts))  # nothing is said twice, so no cache can answer


async def test_an_interrupted_comparison_keeps_its_blocks_and_goes_on(tmp_path: Path) -> None:
    described = experiment(load(0.3), rounds=3, warm_up_s=0.0)
    second = asyncio.Event()

    def watch(progress: Progress) -> None:
        if progress.state == "running" and progress.blocks_done == 1:
            second.set()

    with ScriptedServer(playing(ANSWERS)) as server:
        running = asyncio.ensure_future(
            Comparison(tmp_path, described, means(server.endpoint), on_progress=watch).run()
        )
        await second.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        kept = read_results(tmp_path)
        assert [block.info.number for block in kept.blocks] == [0]
        assert json.loads((tmp_path / "progress.json").read_text())["state"] == "interrupted"
        assert Summary.model_validate_json((tmp_path / "summary.json").read_text()).blocks_done == 1
        summary = await Comparison(tmp_path, described, means(server.endpoint), on_progress=quiet).run()
    results = read_results(tmp_path)
    assert [block.info.number for block in results.blocks] == [0, 1, 2]
    assert results.blocks[0] == kept.blocks[0]
    assert summary.complete


async def test_a_refused_arm_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    class Choosy(type(means("http://127.0.0.1:1/v1").host)):  # type: ignore[misc]
        def set_step_budget(self, tokens: int | None) -> None:
            if tokens == 8:
                raise HostError("8 is less than what runs at once")

    described = experiment(load(0.3), arms=("8", "64"), warm_up_s=0.0)
    arms = [arm.model_copy(update={"kind": "step_budget", "budget": int(arm.name)}) for arm in described.arms]
    described = described.model_copy(update={"arms": arms})
    with ScriptedServer(playing(ANSWERS)) as server:
        given = means(server.endpoint)
        given.host.__class__ = Choosy
        summary = await Comparison(tmp_path, described, given, on_progress=quiet).run()
    assert [arm.arm.reason for arm in summary.arms] == ["8 is less than what runs at once", None]
    assert summary.complete
    assert summary.arms[0].blocks == 0
    assert summary.arms[1].blocks == 1


async def test_step_budgets_of_a_running_server_say_what_they_need(tmp_path: Path) -> None:
    described = experiment(load(0.3), warm_up_s=0.0)
    arm = described.arms[0].model_copy(update={"kind": "step_budget", "budget": 64})
    described = described.model_copy(update={"arms": [arm]})
    with ScriptedServer(playing(ANSWERS)) as server:
        summary = await Comparison(tmp_path, described, means(server.endpoint), on_progress=quiet).run()
    assert "--server-folder" in str(summary.arms[0].arm.reason)


async def test_a_server_that_fails_at_warm_up_is_refused_with_its_words(tmp_path: Path) -> None:
    def refuse(_request: Received) -> Script:
        return problem(400, {"error": {"message": "the prompt is too long", "code": 400}})

    with ScriptedServer(playing(refuse)) as server:
        summary = await Comparison(tmp_path, experiment(load(0.3)), means(server.endpoint), on_progress=quiet).run()
    assert "the prompt is too long" in str(summary.arms[0].arm.reason)


async def test_a_server_that_does_not_know_ignore_eos_is_asked_without(tmp_path: Path) -> None:
    def pick(request: Received) -> Script:
        if "ignore_eos" in request.body:
            return problem(400, {"error": {"message": "unknown field ignore_eos", "code": 400}})
        return ANSWERS[class_of(request)].script()

    with ScriptedServer(playing(pick)) as server:
        await Comparison(
            tmp_path, experiment(load(0.3), warm_up_s=0.0), means(server.endpoint), on_progress=quiet
        ).run()
    assert {row.outcome for row in read_results(tmp_path).requests} == {"done"}
    assert read_results(tmp_path).blocks[0].info.server["exact_outputs"] is False
