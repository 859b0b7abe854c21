"""Check the simulator on a comparison: fit step times on some arms, predict the others, lay both side by side.

The prediction gets the load as it was sent (when each request was due, how long its prompt and answer were), the step
times and the front end's delays as measured on the fitted arms only, and the engine's settings of each arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from serving.compare.plan import Arm
from serving.compare.summary import Figure, Summary, summarise
from serving.compare.tables import BlockData, ComparisonError, RequestRow, Results, StepRow
from serving.config import ImageTokens
from serving.simulate import EngineSettings, FrontEnd, simulate
from serving.steptime import FEATURE_NAMES, StepTime, fit_steps
from serving.workload import PlannedRequest, Workload

MS = 1e3
CLAIMED_ERROR = 0.09  # Vidur's published error of end-to-end latency (Agrawal et al., MLSys 2024)
CHECKED = (("ttft", "p50"), ("ttft", "p95"), ("itl", "p50"), ("itl", "p99"))
_SEEDS = range(5)  # how step times scatter is drawn so often, for near saturation one draw decides much
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the fitted arms tell: step times (the pause between two steps included) and delays outside the engine."""

    step_time: StepTime
    between_s: float
    front_end: FrontEnd


@dataclass(frozen=True, slots=True)
class Checked:
    """One figure of one class on one arm, predicted and measured, milliseconds."""

    arm: str
    fitted: bool
    traffic_class: str
    figure: str
    percentile: str
    predicted_ms: float | None
    measured: Figure

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured."""
        if self.predicted_ms is None or not self.measured.value:
            return None
        return (self.predicted_ms - self.measured.value) / self.measured.value

    @property
    def half_width(self) -> float | None:
        """Half of the measurement's 95 % interval, of its value; None where an end cannot be told."""
        if self.measured.low is None or self.measured.high is None or not self.measured.value:
            return None
        return (self.measured.high - self.measured.low) / 2 / self.measured.value

    @property
    def verdict(self) -> str:
        """`holds` or `misses` the claim; `not told` where the measurement itself is not that exact."""
        if self.error is None or self.half_width is None or self.half_width >= CLAIMED_ERROR:
            return "not told"
        return "holds" if abs(self.error) <= CLAIMED_ERROR else "misses"


def check(
    results: Results,
    fit_arms: Sequence[str],
    settings_of: Callable[[Arm], EngineSettings],
    image_tokens: ImageTokens,
    workload_of: Callable[[BlockData], list[PlannedRequest]],
) -> tuple[Calibration, list[Checked]]:
    """Fit on `fit_arms`, predict every arm that ran; those fitted are marked.

    `workload_of` draws a block's planned requests again.

    Raises:
        ComparisonError: An arm is unknown, or has no steps or no requests that count.
        FitError: There are too few steps.
    """
    known = {arm.name: arm for arm in results.experiment.arms if arm.reason is None}
    unknown = [name for name in fit_arms if name not in known]
    if unknown or not fit_arms:
        raise ComparisonError(f"arm {', '.join(unknown) or '(none)'} did not run, allowed: {', '.join(known)}")
    valid = [block for block in results.blocks if block.info.invalid is None]
    fitted = [block for block in valid if block.info.arm in fit_arms]
    calibration = calibrate(fitted, image_tokens, results.experiment.workload)
    summary = summarise(results)
    found = []
    for name, arm in known.items():
        blocks = [block for block in valid if block.info.arm == name]
        if blocks:
            pools = _predict(blocks, settings_of(arm), calibration, image_tokens, workload_of)
            found += _side_by_side(name, name in fit_arms, pools, summary)
    return calibration, found


def calibrate(blocks: Sequence[BlockData], image_tokens: ImageTokens, workload: Workload) -> Calibration:
    """Step times and delays of these blocks.

    Raises:
        ComparisonError: They hold no steps.
        FitError: They hold too few.
    """
    steps = [step for block in blocks for step in block.steps]
    if not steps:
        raise ComparisonError("the fitted arms have no steps on record, so nothing can be fitted")
    table = {name: [float(getattr(step, name)) for step in steps] for name in ("duration_s", *FEATURE_NAMES[1:])}
    arms = sorted({block.info.arm for block in blocks})
    step_time = fit_steps(table, source=f"fitted to {', '.join(arms)}")
    pauses = [
        max(0.0, after.start_s - before.end_s)
        for block in blocks
        for before, after in pairwise(block.steps)
        if set(before.request_ids) & set(after.request_ids)
    ]
    between_s = float(np.median(pauses)) if pauses else 0.0
    linear = (step_time.linear[0] + between_s, *step_time.linear[1:])
    return Calibration(replace(step_time, linear=linear), between_s, _front_end(blocks, workload))


def _front_end(blocks: Sequence[BlockData], workload: Workload) -> FrontEnd:
    """Delays on the way in, without and with pictures, and on the way out: medians."""
    plain: list[float] = []
    pictured: list[float] = []
    replies: list[float] = []
    for block in blocks:
        first: dict[str, tuple[StepRow | None, StepRow]] = {}
        written: dict[str, StepRow] = {}
        before: StepRow | None = None
        for step in block.steps:
            for request, outputs in zip(step.request_ids, step.request_outputs, strict=True):
                first.setdefault(request, (before, step))
                if outputs:
                    written.setdefault(request, step)
            before = step
        for row in block.requests:
            if row.request_id in written and row.first_token_s is not None:
                replies.append(row.first_token_s - written[row.request_id].end_s)
            delay = _delay(row, *first[row.request_id]) if row.request_id in first and not row.behind_cap_s else None
            if delay is not None:
                load = workload.classes.get(row.traffic_class)
                count = load.pictures.count if load is not None and load.pictures is not None else 0
                (pictured if count else plain).append(delay / max(1, count))
    request_s = _median(plain)
    return FrontEnd(
        request_s=request_s if plain else 0.0,
        picture_s=max(0.0, _median(pictured) - request_s) if pictured else 0.0,
        reply_s=max(0.0, _median(replies)),
    )


def _delay(row: RequestRow, before: StepRow | None, step: StepRow) -> float | None:
    """From due until the engine had the request; None where it may have waited for room in a step.

    Exact when the engine was idle. Else it came between the starts of two steps, the first of which had room for it.
    """
    if before is None or before.end_s <= row.due_s:
        return step.start_s - row.due_s
    if before.waiting or before.decode_tokens + before.prefill_tokens >= before.budget:
        return None
    return max(0.0, (max(row.due_s, before.start_s) + step.start_s) / 2 - row.due_s)


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0


def _predict(
    blocks: Sequence[BlockData],
    settings: EngineSettings,
    calibration: Calibration,
    image_tokens: ImageTokens,
    workload_of: Callable[[BlockData], list[PlannedRequest]],
) -> dict[tuple[str, str], list[float]]:
    """TTFT and ITL samples, seconds, by class and figure, of the requests that the measurement counts."""
    pools: dict[tuple[str, str], list[float]] = {}
    for block in blocks:
        rows, planned = _as_sent(block, workload_of(block), image_tokens)
        if not planned:
            continue
        until_s = block.info.end_s - block.info.start_s
        for seed in _SEEDS:
            result = simulate(
                planned,
                settings,
                calibration.step_time,
                image_tokens=image_tokens,
                front_end=calibration.front_end,
                until_s=until_s,
                seed=seed,
            )
            for row, record in zip(rows, result.records("simulated"), strict=True):
                if row.warm_up:
                    continue
                ttft = record.ttft_s if record.ttft_s is not None else until_s - record.due_s
                pools.setdefault((row.traffic_class, "ttft"), []).append(ttft)
                pools.setdefault((row.traffic_class, "itl"), []).extend(gap.duration_s for gap in record.gaps)
    return pools


def _as_sent(
    block: BlockData, drawn: Sequence[PlannedRequest], image_tokens: ImageTokens
) -> tuple[list[RequestRow], list[PlannedRequest]]:
    """The block's requests as they were sent: due times and token counts of the measurement."""
    by_number = {request.number: request for request in drawn}
    pairs = []
    for row in block.requests:
        planned = by_number.get(_number(row.request_id))
        if planned is None or planned.traffic_class != row.traffic_class:
            raise ComparisonError(f"request {row.request_id} is not in the load as drawn again; was the load changed?")
        pictures = planned.pictures
        shown = pictures.count * image_tokens.count(pictures.width_px, pictures.height_px) if pictures else 0
        text = planned.text_tokens if row.prompt_tokens is None else max(1, row.prompt_tokens - shown)
        done = row.outcome == "done" and row.completion_tokens
        pairs.append(
            (
                row,
                replace(
                    planned,
                    due_s=row.due_s - block.info.start_s,
                    text_tokens=text,
                    prefix_tokens=min(planned.prefix_tokens, text),
                    output_tokens=row.completion_tokens or 1 if done else planned.output_tokens,
                ),
            )
        )
    pairs.sort(key=lambda pair: pair[1].due_s)
    return [row for row, _ in pairs], [replace(request, number=index) for index, (_, request) in enumerate(pairs)]


def _number(request_id: str) -> int:
    """The request's number in its block's plan, which its id ends in."""
    tail = request_id.rsplit("-", 1)[-1]
    return int(tail) if tail.isdigit() else -1


def _side_by_side(
    arm: str, fitted: bool, pools: Mapping[tuple[str, str], Sequence[float]], summary: Summary
) -> list[Checked]:
    measured = next(item for item in summary.arms if item.arm.name == arm)
    rows = []
    for name, result in measured.classes.items():
        for figure, percentile in CHECKED:
            samples = pools.get((name, figure), ())
            rows.append(
                Checked(
                    arm=arm,
                    fitted=fitted,
                    traffic_class=name,
                    figure=figure,
                    percentile=percentile,
                    predicted_ms=float(np.quantile(samples, _QUANTILES[percentile])) * MS if len(samples) else None,
                    measured=getattr(getattr(result, figure), percentile),
                )
            )
    return rows
