"""What counts in a summary, and what its verdicts say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.compare.plan import Arm, Experiment, PlannedBlock
from serving.compare.samples import ttft_sample
from serving.compare.summary import Summary, summarise
from serving.compare.tables import BlockData, RequestRow, Results
from tests.unit.serving.compare.test_tables import REQUEST, UNSENT, experiment, info

CANCELLED = replace(
    REQUEST, first_token_s=None, last_token_s=None, finished_s=130.0, outcome="cancelled", completion_tokens=None,
    gap_end_s=(), gap_duration_s=(), gap_tokens=(),
)  # fmt: skip
FAILED = replace(CANCELLED, outcome="failed")


def chat(number: int, *, ttft_s: float = 0.2, gaps_s: tuple[float, ...] = (0.1, 0.1), **changes: Any) -> RequestRow:
    due_s = 111.0 + number
    ends = [due_s + ttft_s + sum(gaps_s[: index + 1]) for index in range(len(gaps_s))]
    given = {
        "request_id": f"r{number}",
        "due_s": due_s,
        "sent_s": due_s,
        "first_token_s": due_s + ttft_s,
        "last_token_s": ends[-1],
        "finished_s": ends[-1],
        "completion_tokens": 1 + len(gaps_s),
        "gap_end_s": tuple(ends),
        "gap_duration_s": gaps_s,
        "gap_tokens": (1,) * len(gaps_s),
        **changes,
    }
    return replace(REQUEST, **given)


def results(*blocks: list[RequestRow], described: Experiment | None = None, **changes: Any) -> Results:
    data = [BlockData(info(number).model_copy(update=changes), rows) for number, rows in enumerate(blocks)]
    return Results(Path("nowhere"), described or experiment(len(blocks)), data)


def summary(*blocks: list[RequestRow], **changes: Any) -> Summary:
    return summarise(results(*blocks, **changes), resamples=200)


@pytest.mark.parametrize(
    ("row", "sample"),
    [
        pytest.param(REQUEST, 1.0, id="answered"),
        pytest.param(CANCELLED, 30.0, id="waited until the drain ended: at least so long"),
        pytest.param(replace(FAILED, error_kind="timeout_first_token"), 30.0, id="the client gave up"),
        pytest.param(replace(FAILED, error_kind="overloaded"), None, id="refused at once is no short wait"),
        pytest.param(replace(FAILED, error_kind="server"), None, id="broken"),
        pytest.param(UNSENT, None, id="skipped"),
    ],
)
def test_what_a_request_contributes_to_ttft(row: RequestRow, sample: float | None) -> None:
    assert ttft_sample(row) == sample


def test_requests_without_an_answer_are_counted_and_said() -> None:
    nothing: dict[str, Any] = {"first_token_s": None, "last_token_s": None, "gap_end_s": (), "gap_duration_s": (),
                               "gap_tokens": ()}  # fmt: skip
    waited = chat(1, outcome="cancelled", finished_s=150.0, **nothing)
    rows = [chat(0), waited, replace(FAILED, due_s=115.0, error_kind="overloaded")]
    found = summary(rows)
    result = found.arms[0].classes["chat"]
    assert (result.requests, result.done, result.cancelled, result.unanswered) == (3, 1, 1, 1)
    assert result.failed == {"overloaded": 1}
    assert result.ttft.samples == 2
    assert result.ttft.max_ms == pytest.approx(38_000)
    assert any("1 chat requests had no token" in note for note in found.notes)


def test_the_warm_up_and_invalid_blocks_do_not_count() -> None:
    found = summary([chat(0), chat(1, ttft_s=50.0, warm_up=True)])
    assert found.arms[0].classes["chat"].requests == 1
    left_out = summary([chat(0)], invalid="too busy")
    assert left_out.arms[0].classes == {}
    assert left_out.arms[0].invalid == {0: "too busy"}
    assert any("left out" in note for note in left_out.notes)


@pytest.mark.parametrize(
    ("gap_s", "verdict"),
    [pytest.param(0.2, "yes", id="below"), pytest.param(0.9, "no", id="above")],
)
def test_objectives_are_met_or_missed_when_the_interval_says_so(gap_s: float, verdict: str) -> None:
    blocks = [[chat(number, gaps_s=(gap_s,) * 50) for number in range(10)] for _ in range(6)]
    result = summary(*blocks).arms[0].classes["chat"]
    assert result.meets_itl == verdict
    assert result.itl.p99.value == pytest.approx(1000 * gap_s)


def test_an_objective_within_the_interval_is_undecided() -> None:
    blocks = [[chat(number, gaps_s=(0.45 if block % 2 else 0.55,) * 50) for number in range(10)] for block in range(6)]
    found = summary(*blocks)
    assert found.arms[0].classes["chat"].meets_itl == "undecided"
    assert found.arms[0].meets_all == "undecided"


def test_prompt_tokens_that_the_cache_had_are_no_throughput() -> None:
    rows = [chat(0, prompt_tokens=100, cached_tokens=60), chat(1, prompt_tokens=100, cached_tokens=0)]
    arm = summary(rows).arms[0]
    assert arm.prompt_tokens_per_s.value == pytest.approx(140 / 50)  # of 60 s of load, 10 are warm-up
    assert arm.output_tokens_per_s.value == pytest.approx(6 / 50)
    assert arm.classes["chat"].cached_share == pytest.approx(0.3)


def test_arms_of_the_same_rounds_are_laid_side_by_side() -> None:
    arms = [Arm(name="64", kind="step_budget", budget=64), Arm(name="256", kind="step_budget", budget=256)]
    plan = [
        PlannedBlock(number=number, arm=arms[number % 2].name, round=number // 2, seed=number // 2)
        for number in range(12)
    ]
    described = experiment().model_copy(update={"arms": arms, "plan": plan})
    blocks = []
    for planned in plan:
        # What a round does to both is more than what the arms differ by.
        slow = 1 + planned.round
        factor = 1.3 if planned.arm == "256" else 1.0
        rows = [chat(number, gaps_s=(0.01 * slow * factor * (1 + 0.001 * number),) * 20) for number in range(10)]
        data = info(planned.number).model_copy(update={"arm": planned.arm, "round": planned.round})
        blocks.append(BlockData(data, [replace(row, arm=planned.arm, block=planned.number) for row in rows]))
    found = summarise(Results(Path("nowhere"), described, blocks), resamples=300)
    (ratio,) = [item for item in found.ratios if (item.figure, item.percentile) == ("itl", "p95")]
    assert (ratio.arm, ratio.reference) == ("256", "64")
    assert ratio.ratio == pytest.approx(1.3, rel=0.02)
    assert ratio.different is True
    assert found.complete
    assert Summary.model_validate_json(found.model_dump_json()) == found


def test_somebody_else_on_the_server_is_said() -> None:
    found = summary([chat(0)], ours_max=4, count_difference_p95=9.0)
    assert any("differs from ours by 9" in note for note in found.notes)
    assert not any("differs" in note for note in summary([chat(0)], ours_max=4, count_difference_p95=1.0).notes)
