"""A small comparison of step budgets on the real server: blocks, steps, exact texts, cache hits as they should be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from serving.compare.arms import check_arms, plan_blocks, step_budget_arms
from serving.compare.bench import Means
from serving.compare.experiment import Comparison
from serving.compare.hosts import RunningServer
from serving.compare.plan import Experiment
from serving.compare.tables import Results
from serving.config import ServingConfig
from serving.load.contents import Pixels
from serving.records import now_s
from serving.scheduler.control import SchedulerControl
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, Workload
from tests.integration.served import ServedModel

pytestmark = pytest.mark.integration

BUDGETS = (32, 96)
LOAD = Workload(
    duration_s=9,
    seed=3,
    classes={
        "camera": ClassLoad(
            arrivals=Arrivals(process="constant", rate_per_s=0.3),
            prompt=Lengths(mean=10),
            output=Lengths(mean=6),
            pictures=Pictures(width_px=256, height_px=512),
        ),
        "chat": ClassLoad(
            arrivals=Arrivals(process="constant", rate_per_s=0.6),
            prompt=Lengths(kind="uniform", minimum=130, maximum=150),
            output=Lengths(mean=10),
        ),
    },
)


class Stripes:
    """Pictures that need no video."""

    def picture(self, number: int, width_px: int, height_px: int) -> Pixels:
        picture = np.zeros((height_px, width_px, 3), dtype=np.uint8)
        picture[:, :: 4 + number % 5] = 200
        return picture


async def compared(server: ServedModel, folder: Path, budgets: Sequence[int], *, cache_friendly: bool) -> Results:
    tree = server.config.serving.model_dump()
    tree["server"]["base_url"] = server.endpoint
    serving = ServingConfig.model_validate(tree)
    arms = check_arms(step_budget_arms(budgets, attached=True), serving)
    plan = plan_blocks(arms, serving, rounds=1, rounds_per_start=1, seed=LOAD.seed)
    experiment = Experiment(
        name=folder.name, created_s=now_s(), command=["framechat", "compare"], config={}, workload=LOAD,
        classes={name: serving.classes[name] for name in LOAD.classes}, arms=arms, plan=plan, seed=LOAD.seed,
        block_s=LOAD.duration_s, warm_up_s=0, drain_s=40, planned_s=60, attached=True, cache_friendly=cache_friendly,
    )  # fmt: skip
    host = RunningServer(serving.server, api_key=None, folder=server.log_path.parent)
    means = Means(serving=serving, host=host, pictures=Stripes())
    comparison = Comparison(folder, experiment, means, on_progress=lambda _progress: None)
    await comparison.run()
    return comparison.results


async def test_step_budgets_of_the_running_server(model_server: ServedModel, tmp_path: Path) -> None:
    control = SchedulerControl(model_server.log_path.parent)
    before = control.state().step_budget
    results = await compared(model_server, tmp_path, BUDGETS, cache_friendly=False)
    assert control.state().step_budget == before
    assert [arm.reason for arm in results.experiment.arms] == [None, None]
    assert sorted(block.info.arm for block in results.blocks) == ["step 32", "step 96"]
    for block in results.blocks:
        budget = int(block.info.arm.removeprefix("step "))
        assert {row.outcome for row in block.requests} == {"done"}
        assert {row.budget for row in block.steps} == {budget}
        assert max(row.decode_tokens + row.prefill_tokens for row in block.steps) <= budget
        ids = {request_id for step in block.steps for request_id in step.request_ids}
        assert {row.request_id for row in block.requests} <= ids
        # Texts are exact: all that the server counts above them is the template's, the same for every chat.
        chats = [row for row in block.requests if row.traffic_class == "chat"]
        assert len({row.request_id for row in chats}) == len(chats) == 6
        assert block.info.server["exact_texts"] is True
        assert {row.completion_tokens for row in chats} == {10}
        assert sum(row.cached_tokens or 0 for row in block.requests) == 0
        assert block.info.prefix_hit_rate == 0
        assert block.info.multimodal_hit_rate == 0
        pictured = [row for row in block.requests if row.traffic_class == "camera"]
        assert {row.image_tokens for row in pictured} == {576}
        encoded = {request_id for step in block.steps for request_id in step.encoder_request_ids}
        assert encoded == {row.request_id for row in pictured}
    first, second = (sorted(row.prompt_tokens or 0 for row in block.requests) for block in results.blocks)
    assert first == second  # the arms of a round are paired: the same lengths


async def test_cache_friendly_content_is_found_in_the_cache(model_server: ServedModel, tmp_path: Path) -> None:
    results = await compared(model_server, tmp_path, BUDGETS[1:], cache_friendly=True)
    (block,) = results.blocks
    assert (block.info.prefix_hit_rate or 0) > 0.3
    assert (block.info.multimodal_hit_rate or 0) > 0.5
