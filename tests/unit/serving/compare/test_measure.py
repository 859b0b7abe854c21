"""Whether a block is to be believed: the client's own lag against what it would distort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.compare.measure import block_of, most_at_once, why_invalid
from serving.compare.plan import PlannedBlock
from serving.compare.tables import BlockData, StepRow
from serving.config import ImageTokens
from serving.enginemetrics import EngineFigures
from serving.load.run import LoadRun, SentRequest, ServerReading
from serving.records import Gap, Outcome, RequestRecord
from serving.workload import Pictures, PlannedRequest
from tests.unit.serving.compare.test_tables import STEP

PLANNED = PlannedBlock(number=0, arm="64", round=0, seed=1)


def sent(
    number: int,
    *,
    due_s: float = 10.0,
    lag_s: float = 0.001,
    ttft_s: float = 0.2,
    gap_s: float = 0.1,
    waits: float = 0.0,
) -> SentRequest:
    first_s = due_s + ttft_s
    record = RequestRecord(
        request_id=f"r{number}",
        traffic_class="chat",
        model="m",
        due_s=due_s,
        finished_s=first_s + 2 * gap_s,
        outcome=Outcome.DONE,
        sent_s=due_s + waits + lag_s,
        first_token_s=first_s,
        last_token_s=first_s + 2 * gap_s,
        gaps=(Gap(first_s + gap_s, gap_s, 1), Gap(first_s + 2 * gap_s, gap_s, 1)),
        completion_tokens=3,
    )
    planned = PlannedRequest(number, "chat", due_s, 10, 3, pictures=Pictures(width_px=512, height_px=1024))
    return SentRequest(planned, record, behind_turn_s=waits)


def block(run: LoadRun, warm_up_s: float = 0.0, steps: Sequence[StepRow] = ()) -> BlockData:
    return block_of(run, PLANNED, load_s=60, warm_up_s=warm_up_s, image_rule=ImageTokens(), steps=steps, server={})


def test_steps_that_ended_before_the_block_are_not_its_own() -> None:
    before, first, last = (replace(STEP, step=n, start_s=at, end_s=at + 0.5) for n, at in enumerate((9.4, 9.8, 70.0)))
    run = LoadRun(10.0, 80.0, [sent(0)], [0.001], [])
    assert block(run, steps=[before, first, last]).steps == [first, last]


@pytest.mark.parametrize(
    ("requests", "loop_s", "words"),
    [
        pytest.param([sent(0)], [0.001], None, id="quiet"),
        pytest.param([sent(0)], [0.004], None, id="just below 5 % of the gaps"),
        pytest.param([sent(0)], [0.006], "event loop's delay p50 is 6.0 ms, more than 5 % of chat's ITL", id="loop"),
        pytest.param(
            [sent(0, lag_s=0.02)], [0.001], "due-to-sent p50 is 20.0 ms, more than 5 % of chat's TTFT", id="sent"
        ),
        pytest.param([sent(0, lag_s=0.02, ttft_s=2)], [0.001], None, id="late, but nothing to that TTFT"),
        pytest.param([sent(0, waits=1.0, ttft_s=1.2)], [0.001], None, id="waiting for a turn is no lag"),
        pytest.param([], [0.5], None, id="nothing to distort"),
    ],
)
def test_a_lag_is_laid_beside_what_it_distorts(
    requests: list[SentRequest], loop_s: list[float], words: str | None
) -> None:
    run = LoadRun(10.0, 80.0, requests, loop_s, [])
    reason = block(run).info.invalid
    assert reason is None if words is None else words in str(reason)


def test_a_tail_of_lag_is_seen_where_the_median_is_quiet() -> None:
    run = LoadRun(10.0, 80.0, [sent(0)], [0.001] * 97 + [0.05] * 3, [])
    assert "p99 is 50.0 ms" in str(block(run).info.invalid)


def test_the_warm_up_distorts_nothing_that_counts() -> None:
    run = LoadRun(10.0, 80.0, [sent(0, due_s=10.0, gap_s=0.001)], [0.004], [])
    made = block(run, warm_up_s=20.0)
    assert made.requests[0].warm_up
    assert made.info.invalid is None
    assert why_invalid(run, block(run).requests) is not None


def test_the_servers_counts_are_laid_beside_ours() -> None:
    def reading(ours: int, running: int, waiting: int, usage: float) -> ServerReading:
        return ServerReading(
            11.0, ours, EngineFigures(running=running, waiting=waiting, kv_cache_usage=usage, preemptions=ours)
        )

    readings = [reading(2, 2, 0, 0.1), reading(5, 3, 1, 0.4), ServerReading(12.0, 3, EngineFigures())]
    final = EngineFigures(prefix_cache_hit_rate=0.1, multimodal_cache_hit_rate=0.0)
    info = block(LoadRun(10.0, 80.0, [sent(0), sent(1), sent(2, due_s=30.0)], [0.001], readings, final)).info
    assert (info.ours_max, info.server_max) == (2, 4)
    assert info.count_difference_p95 == pytest.approx(0.95)
    assert (info.kv_cache_max, info.preemptions) == (0.4, 3)
    assert (info.prefix_hit_rate, info.multimodal_hit_rate) == (0.1, 0.0)
    assert info.planned == {"chat": 3}


def test_rows_have_their_pictures_tokens_and_overlap_is_counted() -> None:
    rows = block(LoadRun(10.0, 80.0, [sent(0), sent(1, due_s=10.3), sent(2, due_s=50.0)], [0.001], [])).requests
    assert [row.image_tokens for row in rows] == [ImageTokens().count(512, 1024)] * 3
    assert most_at_once(rows) == 2
    assert most_at_once([]) == 0
