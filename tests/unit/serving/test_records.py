from __future__ import annotations

import time
from dataclasses import replace

import pytest

from serving.records import Gap, Outcome, RequestRecord, now_s

BASE = RequestRecord(
    request_id="r",
    traffic_class="chat",
    model="m",
    due_s=10.0,
    sent_s=10.5,
    first_token_s=12.0,
    last_token_s=14.0,
    finished_s=14.5,
    outcome=Outcome.DONE,
    gaps=(Gap(14.0, 2.0, 4),),
    completion_tokens=5,
)


@pytest.mark.parametrize(
    ("changes", "ttft_s", "tpot_s"),
    [
        pytest.param({}, 2.0, 0.5, id="from-due-not-from-sent"),
        pytest.param({"first_token_s": None, "last_token_s": None}, None, None, id="no-token"),
        pytest.param({"completion_tokens": 1, "last_token_s": 12.0}, 2.0, None, id="one-token"),
        pytest.param({"completion_tokens": None}, 2.0, None, id="no-usage"),
    ],
)
def test_derived_figures(changes: dict[str, object], ttft_s: float | None, tpot_s: float | None) -> None:
    record = replace(BASE, **changes)  # type: ignore[arg-type]
    assert (record.ttft_s, record.tpot_s) == (ttft_s, tpot_s)


def test_now_is_the_wall_clock_and_never_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert now_s() == pytest.approx(time.time(), abs=0.5)
    before_s = now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert now_s() >= before_s
