"""The two sentences, and how figures are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.compare.summary import Figure, RatioResult, Summary, summarise
from serving.compare.words import duration, listed, ratio_of, run_time, span, times, told, verdict
from tests.comparison_data import comparison


@pytest.mark.parametrize(
    ("value_ms", "words"),
    [
        pytest.param(None, "–", id="none"),
        pytest.param(0.1234, "0.12 ms", id="below a millisecond"),
        pytest.param(3.14159, "3.1 ms", id="few"),
        pytest.param(31.4, "31 ms", id="many"),
        pytest.param(2169.4, "2.17 s", id="seconds"),
    ],
)
def test_duration(value_ms: float | None, words: str) -> None:
    assert duration(value_ms) == words


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        pytest.param(Figure(value=31, low=29.2, high=33.4), "29 to 33 ms", id="one unit"),
        pytest.param(Figure(value=950, low=900, high=1200), "900 ms to 1.20 s", id="two units"),
        pytest.param(Figure(value=950, low=900), "from 900 ms", id="open"),
        pytest.param(Figure(value=950), "", id="unknown"),
    ],
)
def test_span(figure: Figure, words: str) -> None:
    assert span(figure) == words


@pytest.mark.parametrize(("seconds", "words"), [(42, "42 s"), (600, "10 min"), (9000, "2.5 h")])
def test_run_time(seconds: float, words: str) -> None:
    assert run_time(seconds) == words


@pytest.mark.parametrize(
    ("names", "words"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_listed(names: list[str], words: str) -> None:
    assert listed(names) == words


def ratio(**more: object) -> RatioResult:
    values = {
        "traffic_class": "chat", "figure": "itl", "percentile": "p99", "arm": "b", "reference": "a", "ratio": 2.0,
        "low": 1.5, "high": 4.0, "different": True,
    }  # fmt: skip
    return RatioResult.model_validate(values | more)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(ratio(), "different", id="told"),
        pytest.param(
            ratio(different=False, more=3.0, more_s=1800), "not sure yet: about 30 min more would tell", id="longer"
        ),
        pytest.param(ratio(different=False), "no difference seen", id="none in sight"),
        pytest.param(ratio(different=None, low=None, high=None), "cannot be told", id="too few"),
    ],
)
def test_told(found: RatioResult, words: str) -> None:
    assert told(found) == words


def test_a_ratio_is_found_either_way_round(tmp_path: Path) -> None:
    summary = of(tmp_path).model_copy(update={"ratios": [ratio()]})
    forward, backward = (
        ratio_of(summary, "chat", "itl", "p99", "b", "a"),
        ratio_of(summary, "chat", "itl", "p99", "a", "b"),
    )
    assert forward is not None
    assert backward is not None
    assert times(forward) == "× 2.00 (1.50 to 4.00)"
    assert (backward.ratio, backward.low, backward.high) == (0.5, 0.25, pytest.approx(1 / 1.5))
    assert ratio_of(summary, "camera", "itl", "p99", "b", "a") is None


def of(folder: Path, **more: object) -> Summary:
    made = {"budgets": (64, 2048), "rounds": 1, "block_s": 30} | more
    return summarise(comparison(folder, **made), resamples=50)  # type: ignore[arg-type]


def answered(summary: Summary, answers: dict[str, str]) -> Summary:
    arms = [arm.model_copy(update={"meets_all": answers[arm.arm.name]}) for arm in summary.arms]
    return summary.model_copy(update={"arms": arms})


@pytest.mark.parametrize(
    ("answers", "first"),
    [
        pytest.param(("yes", "no"), "Step 64 meets every objective; step 2048 does not", id="one meets"),
        pytest.param(("yes", "yes"), "Step 64 and step 2048 meet every objective.", id="both meet"),
        pytest.param(("no", "no"), "None of step 64 and step 2048 meets every objective", id="none meets"),
        pytest.param(("undecided", "no"), "Step 2048 does not meet every objective", id="one unsure"),
        pytest.param(
            ("undecided", "undecided"), "Whether step 64 and step 2048 meet every objective is not", id="unsure"
        ),
    ],
)
def test_the_first_sentence_names_who_meets_the_objectives(
    tmp_path: Path, answers: tuple[str, str], first: str
) -> None:
    summary = answered(of(tmp_path), dict(zip(("step 64", "step 2048"), answers, strict=True)))
    assert verdict(summary).startswith(first)


def test_the_second_sentence_says_what_it_costs_whom(tmp_path: Path) -> None:
    summary = of(tmp_path)
    by_name = {arm.arm.name: arm.classes for arm in summary.arms}
    words = verdict(summary)
    for arm in ("step 64", "step 2048"):
        assert duration(by_name[arm]["chat"].itl.p99.value) in words
        assert duration(by_name[arm]["camera"].ttft.p95.value) in words
    assert words.count(". ") == 1
    assert "From step 64 to step 2048 chat's ITL p99 goes" in words


def test_when_every_arm_was_refused(tmp_path: Path) -> None:
    summary = of(tmp_path)
    refused = [
        arm.model_copy(update={"arm": arm.arm.model_copy(update={"reason": "no memory"}), "classes": {}})
        for arm in summary.arms
    ]
    assert verdict(summary.model_copy(update={"arms": refused})) == (
        "Nothing was measured: the server refused step 64 and step 2048. There is nothing to compare."
    )


def test_when_every_block_was_left_out(tmp_path: Path) -> None:
    summary = of(tmp_path)
    arms = [arm.model_copy(update={"invalid": {0: "the client lagged"}, "classes": {}}) for arm in summary.arms]
    assert verdict(summary.model_copy(update={"arms": arms})).startswith(
        "Nothing was measured: all 2 blocks are left out (the client lagged)."
    )
