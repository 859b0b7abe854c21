"""Simulated runs as a comparison, and the check of a prediction on one whose truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.compare.plan import Arm
from serving.compare.predict import Checked, check
from serving.compare.simulated import write_simulated
from serving.compare.summary import Figure
from serving.compare.tables import BlockData, ComparisonError, Results, read_results
from serving.config import ClassConfig, ImageTokens
from serving.simulate import EngineSettings, FrontEnd, Simulation, simulate
from serving.stepsource import fit_from
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, PlannedRequest, Workload, draw

COSTS = {"fixed": 0.03, "decode_tokens": 4e-3, "prefill_tokens": 1e-3, "encoder_tokens": 5e-4}
TRUTH = StepTime(linear=tuple(COSTS.get(name, 0.0) for name in FEATURE_NAMES), source="test")
ENGINE = EngineSettings(budget_tokens=64, buffer_tokens=1024, cache_blocks=2000, prefix_caching=False)
RULE = ImageTokens()
LOAD = Workload(
    duration_s=120,
    seed=2,
    classes={
        "camera": ClassLoad(
            arrivals=Arrivals(rate_per_s=0.2), prompt=Lengths(mean=60), output=Lengths(mean=20),
            pictures=Pictures(width_px=512, height_px=1024),
        ),
        "chat": ClassLoad(arrivals=Arrivals(rate_per_s=0.3), prompt=Lengths(mean=50), output=Lengths(mean=30)),
    },
)  # fmt: skip
CLASSES = {name: ClassConfig(max_tokens=64, ttft_p95_ms=2000, itl_p99_ms=500) for name in LOAD.classes}


def write(folder: Path, budgets: tuple[int, ...] = (64, 256, 1024)) -> dict[str, tuple[int, int, Simulation]]:
    planned = draw(LOAD)
    runs = {
        str(budget): (
            budget,
            ENGINE.cache_blocks,
            simulate(planned, replace(ENGINE, budget_tokens=budget), TRUTH, front_end=FrontEnd(0.02, 0.1, 0.004),
                     log_limit=100_000),
        )
        for budget in budgets
    }  # fmt: skip
    write_simulated(
        folder,
        runs,
        workload=LOAD,
        classes=CLASSES,
        image_tokens=RULE,
        source="a test",
        command=["simulate"],
        config={},
    )
    return runs


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Three budgets of a server whose step times are known."""
    folder = tmp_path_factory.mktemp("simulated") / "runs"
    write(folder)
    return read_results(folder)


def test_the_folder_holds_what_was_simulated_and_says_so(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", (256,))
    results = read_results(tmp_path / "runs")
    (_, _, simulation) = runs["256"]
    assert [arm.name for arm in results.experiment.arms] == ["256 simulated"]
    assert any("Simulated, not measured" in note for note in results.experiment.notes)
    assert (tmp_path / "runs" / "report.html").read_text().count("Simulated, not measured") >= 1
    assert len(results.steps) == len(simulation.steps)
    for number, row in enumerate(results.requests):
        first = float(simulation.token_s[simulation.token_first[number]])
        assert row.ttft_s == pytest.approx(first - simulation.planned[number].due_s, abs=1e-6)
        assert row.tokens_counted
    by_id = {row.request_id: row for row in results.requests}
    written = dict.fromkeys(by_id, 0)
    prefilled = dict.fromkeys(by_id, 0)
    for step in results.steps:
        for name, tokens, prefill, outputs in zip(
            step.request_ids, step.request_tokens, step.request_prefill, step.request_outputs, strict=True
        ):
            written[name] += outputs
            prefilled[name] += tokens if prefill else 0
        assert sum(step.request_tokens) == step.decode_tokens + step.prefill_tokens
        assert sum(step.encoder_request_tokens) == step.encoder_tokens
    for name, row in by_id.items():
        assert written[name] == row.completion_tokens
        assert prefilled[name] == row.prompt_tokens
    assert fit_from(tmp_path / "runs").seconds([1, 2, 0, 0, 0, 0, 0, 0]) == pytest.approx(0.03 + 2 * 4e-3, rel=0.02)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        write(tmp_path)


def checked(measured: Results, fit_arms: list[str]) -> list[Checked]:
    def settings_of(arm: Arm) -> EngineSettings:
        return replace(ENGINE, budget_tokens=arm.budget or 0)

    def workload_of(_: BlockData) -> list[PlannedRequest]:
        return draw(LOAD)

    calibration, rows = check(measured, fit_arms, settings_of, RULE, workload_of)
    assert calibration.front_end.request_s == pytest.approx(0.02, abs=0.02)
    assert calibration.front_end.picture_s == pytest.approx(0.1, abs=0.03)
    assert calibration.front_end.reply_s == pytest.approx(0.004, abs=1e-6)
    assert calibration.between_s == pytest.approx(0, abs=1e-6)
    return rows


def test_arms_that_were_not_fitted_are_predicted(measured: Results) -> None:
    rows = checked(measured, ["64 simulated", "1024 simulated"])
    unseen = [row for row in rows if not row.fitted]
    assert {row.arm for row in unseen} == {"256 simulated"}
    assert len(unseen) == 2 * 4
    for row in unseen:
        assert row.error is not None
        assert abs(row.error) < 0.04, row


def test_a_prediction_from_a_wrong_schedule_is_told_apart(measured: Results) -> None:
    """The same check with every budget taken for 64: what is claimed can fail."""
    _, rows = check(measured, ["64 simulated"], lambda _: ENGINE, RULE, lambda _: draw(LOAD))
    wrong = [row.error for row in rows if row.arm == "1024 simulated" and row.figure == "ttft"]
    assert max(abs(error) for error in wrong if error is not None) > 0.2


def test_an_unknown_arm_is_refused(measured: Results) -> None:
    with pytest.raises(ComparisonError, match="arm 99 did not run"):
        check(measured, ["99"], lambda _: ENGINE, RULE, lambda _: draw(LOAD))


@pytest.mark.parametrize(
    ("predicted", "low", "high", "verdict"),
    [
        pytest.param(105.0, 95.0, 105.0, "holds", id="within"),
        pytest.param(112.0, 95.0, 105.0, "misses", id="beyond"),
        pytest.param(100.0, 80.0, 120.0, "not told", id="measured too loosely"),
        pytest.param(100.0, 95.0, None, "not told", id="no upper bound"),
        pytest.param(None, 95.0, 105.0, "not told", id="no prediction"),
    ],
)
def test_verdicts(predicted: float | None, low: float, high: float | None, verdict: str) -> None:
    row = Checked("a", False, "chat", "itl", "p50", predicted, Figure(value=100.0, low=low, high=high))
    assert row.verdict == verdict
