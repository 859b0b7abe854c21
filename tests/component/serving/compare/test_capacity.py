from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.compare.bench import Bench
from serving.compare.capacity import Capacity, CapacitySearch, bisect, capacity_lines, judge, with_rate
from serving.compare.plan import BlockInfo
from serving.compare.tables import BlockData, ComparisonError, RequestRow
from serving.records import now_s
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures
from tests.component.serving.compare.scripted_arms import class_of, experiment, load, means, playing
from tests.scripted_server import DONE, ROLE, Action, Received, Script, ScriptedServer, Send, Wait, chunk, usage
from tests.unit.serving.compare.test_tables import REQUEST


@pytest.mark.parametrize(
    ("limit", "first"),
    [
        pytest.param(0.7, 0.5, id="a little above"),
        pytest.param(7.0, 0.5, id="far above"),
        pytest.param(0.03, 0.5, id="far below"),
        pytest.param(0.5, 0.5, id="at the first rate"),
    ],
)
async def test_bisection_brackets_the_limit(limit: float, first: float) -> None:
    tried: list[float] = []

    async def try_rate(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    holds, fails = await bisect(try_rate, first)
    assert holds is not None
    assert fails is not None
    assert holds <= limit < fails
    assert fails / holds <= 1.15
    assert len(tried) == len(set(tried)) <= 12


@pytest.mark.parametrize(("always", "found"), [(True, (16.0, None)), (False, (None, 0.015625))])
async def test_a_limit_out_of_reach_ends_the_search(always: bool, found: tuple[float | None, float | None]) -> None:
    async def try_rate(_rate: float) -> bool:
        return always

    holds, fails = await bisect(try_rate, 0.5)
    assert (holds, fails) == found


async def test_rates_too_slow_for_a_block_are_not_tried() -> None:
    tried: list[float] = []

    async def fails(rate: float) -> bool:
        tried.append(rate)
        return False

    assert await bisect(fails, 0.5, least=0.1) == (None, 0.125)
    assert tried == [0.5, 0.25, 0.125]


def block(*rows: RequestRow) -> BlockData:
    info = BlockInfo(
        number=0, arm="a", round=0, seed=0, start_s=90, end_s=160, load_s=60, warm_up_s=0, planned={"chat": len(rows)}
    )
    return BlockData(info, list(rows))


def row(gap_s: float, **changes: object) -> RequestRow:
    return replace(REQUEST, gap_duration_s=(gap_s,), gap_end_s=(102.0,), gap_tokens=(1,), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        pytest.param([row(0.4)], "", id="holds"),
        pytest.param([row(0.6)], "ITL p99 is 600 ms, above 500", id="gaps too long"),
        pytest.param(
            [row(0.4), row(0.1, traffic_class="camera", outcome="cancelled")], "1 requests were not", id="queue"
        ),
        pytest.param([row(0.4, traffic_class="camera")], "no chat request", id="nobody to watch"),
        pytest.param([row(0.4), row(9.0, warm_up=True)], "", id="the warm-up does not count"),
    ],
)
def test_what_holds(rows: list[RequestRow], why: str) -> None:
    probe = judge(block(*rows), 0.5, 500)
    assert probe.holds == (not why)
    assert why in probe.why


def test_only_the_cameras_rate_is_moved() -> None:
    moved = with_rate(load(), 9.0)
    assert moved.classes["camera"].arrivals.rate_per_s == 9.0
    assert moved.classes["chat"] == load().classes["chat"]


async def test_the_search_on_a_server_whose_chat_slows_with_each_camera_request(tmp_path: Path) -> None:
    """Each camera request in the last third of a second adds 20 ms to a chat's gaps; the objective is 60 ms."""
    seen: list[float] = []

    def pick(request: Received) -> Script:
        if class_of(request) == "camera":
            seen.append(now_s())
            return Script(
                [Send(ROLE), Send(chunk("a", running=1)), Send(chunk(finish="length", running=1)), Send(DONE)]
            )
        recent = sum(now_s() - at_s < 0.33 for at_s in seen)
        gap_s = 0.005 + 0.02 * recent
        actions: list[Action] = [Send(ROLE), Send(chunk("a", running=1)), Wait(gap_s), Send(chunk("b", running=2))]
        return Script([*actions, Send(chunk(finish="length", running=2)), Send(usage(9, 2)), Send(DONE)])

    small = load(
        0.7,
        camera=ClassLoad(
            arrivals=Arrivals(process="constant", rate_per_s=6), output=Lengths(mean=1), prompt=Lengths(mean=4),
            pictures=Pictures(width_px=16, height_px=16),
        ),
    )  # fmt: skip
    described = experiment(small, drain_s=1.0, warm_up_s=0.1)
    said: list[str] = []
    with ScriptedServer(playing(pick)) as server:
        search = CapacitySearch(tmp_path, described, Bench(described, means(server.endpoint)), say=said.append)
        found = await search.run()
        (arm,) = found.arms
        assert arm.holds_per_s is not None
        assert arm.fails_per_s is not None
        assert 3 <= arm.holds_per_s < arm.fails_per_s <= 15
        kept = Capacity.model_validate_json((tmp_path / "capacity.json").read_text())
        assert kept == found
        assert kept.complete
        before = len(server.received)
        again = await CapacitySearch(
            tmp_path, described, Bench(described, means(server.endpoint)), say=said.append
        ).run()
        assert again.arms == found.arms
        assert len(server.received) == before  # what was tried is not tried again
    assert "camera requests a second hold" in capacity_lines(found)[0]


def test_a_load_without_a_camera_is_refused(tmp_path: Path) -> None:
    described = experiment(load())
    only_chat = described.workload.model_copy(update={"classes": {"chat": described.workload.classes["chat"]}})
    described = described.model_copy(update={"workload": only_chat})
    with pytest.raises(ComparisonError, match="camera and chat"):
        CapacitySearch(tmp_path, described, Bench(described, means("http://127.0.0.1:9/v1")), say=print)
