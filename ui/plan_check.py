"""What `framechat simulate --fit DIR --fit-arms A,B --check` works out and prints: predicted beside measured."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serving.compare.arms import block_workload, server_of
from serving.compare.plan import Arm
from serving.compare.predict import CLAIMED_ERROR, Calibration, Checked, check
from serving.compare.tables import BlockData, Results, read_results
from serving.config import ServingConfig
from serving.load.trace import read_trace
from serving.simulate import EngineSettings
from serving.workload import PlannedRequest, draw
from ui.plan_engine import EngineOptions, make_engine

MS = 1e3
WIDTH = 120


def run_check(folder: Path, fit_arms: str, options: EngineOptions, *, as_json: bool) -> None:
    """Fit, predict and print.

    Raises:
        ValueError: (`FitError` and `ComparisonError` among them) It cannot be worked out; the message is one line.
    """
    results = read_results(folder)
    serving = ServingConfig.model_validate(results.experiment.config["serving"])
    ran = [arm for arm in results.experiment.arms if arm.reason is None]
    largest = max((server_of(arm, serving).max_num_batched_tokens for arm in ran), default=1)
    engine = make_engine(options, serving.server, largest_budget=largest)

    def settings_of(arm: Arm) -> EngineSettings:
        server = server_of(arm, serving)
        settings = EngineSettings.of_server(
            server, cache_blocks=engine.settings.cache_blocks, block_tokens=engine.settings.block_tokens
        )
        if arm.kind == "step_budget" and arm.budget is not None:
            return replace(settings, budget_tokens=arm.budget)
        return settings

    replay = results.experiment.replay
    trace = read_trace(Path(replay)) if replay else None

    def workload_of(block: BlockData) -> list[PlannedRequest]:
        load = block_workload(results.experiment.workload, round_=block.info.round, seed=block.info.seed, trace=trace)
        return draw(load)

    calibration, rows = check(results, _arms(fit_arms, results), settings_of, engine.image_tokens, workload_of)
    if as_json:
        print(json.dumps(_as_dict(calibration, rows), indent=2))
    else:
        _show(Console(width=None if sys.stdout.isatty() else WIDTH), calibration, rows)


def _arms(text: str, results: Results) -> list[str]:
    """Arms by name, or by their budget."""
    by_budget = {str(arm.budget): arm.name for arm in results.experiment.arms if arm.budget is not None}
    names = {arm.name for arm in results.experiment.arms}
    return [part if part in names else by_budget.get(part, part) for part in (item.strip() for item in text.split(","))]


def _show(console: Console, calibration: Calibration, rows: list[Checked]) -> None:
    table = Table(title="Predicted and measured, milliseconds", box=SIMPLE_HEAD, padding=(0, 1))
    for column in ("arm", "class", "figure"):
        table.add_column(column, no_wrap=True)
    for column in ("predicted", "measured", "error", "half-width", f"within {CLAIMED_ERROR:.0%}"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.arm} (fitted)" if row.fitted else row.arm,
            row.traffic_class,
            f"{row.figure.upper()} {row.percentile}",
            _ms(row.predicted_ms),
            _ms(row.measured.value),
            "-" if row.error is None else f"{row.error:+.1%}",
            "-" if row.half_width is None else f"{row.half_width:.1%}",
            row.verdict,
        )
    console.print(table)
    told = [row for row in rows if not row.fitted and row.verdict != "not told"]
    holding = sum(row.verdict == "holds" for row in told)
    unseen = sum(not row.fitted for row in rows)
    console.print(
        f"{holding} of {len(told)} figures of arms that were not fitted are within {CLAIMED_ERROR:.0%}; of "
        f"{unseen - len(told)} more the measurement's own half-width is as large, or cannot be told.",
        soft_wrap=True,
    )
    front, quality = calibration.front_end, calibration.step_time.quality
    console.print(
        f"Front end, measured on the fitted arms: {front.request_s * MS:.1f} ms a request, {front.picture_s * MS:.1f} "
        f"ms more a picture, {front.reply_s * MS:.1f} ms from a step's end to the client; "
        f"{calibration.between_s * MS:.2f} ms between two steps.",
        soft_wrap=True,
    )
    if quality is not None:
        console.print(
            f"Step times {calibration.step_time.source}: error on steps left out of the fit ({quality.steps} in all) "
            f"median {quality.median_error:.1%}, p95 {quality.p95_error:.1%}, their sum {quality.total_error:.1%}.",
            soft_wrap=True,
        )


def _as_dict(calibration: Calibration, rows: list[Checked]) -> dict[str, object]:
    return {
        "claimed_error": CLAIMED_ERROR,
        "calibration": asdict(calibration),
        "figures": [
            {
                "arm": row.arm,
                "fitted": row.fitted,
                "class": row.traffic_class,
                "figure": row.figure,
                "percentile": row.percentile,
                "predicted_ms": row.predicted_ms,
                "measured": row.measured.model_dump(),
                "error": row.error,
                "half_width": row.half_width,
                "verdict": row.verdict,
            }
            for row in rows
        ],
    }


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
