"""`summary.json`: what a comparison found, per arm and class, with intervals; the documented schema is these models.

What counts: requests due after a block's warm-up, in blocks that are valid (the client's own lag did not distort them;
see BlockInfo.invalid). A request that got no token before the block's drain ended, or before the client gave up, counts
in TTFT with the time it had waited by then, which is too little (`unanswered` says how many). Requests that the server
refused have no TTFT and are in `failed`. All percentiles pool the samples of one class on one arm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

from serving.compare.notes import notes_on
from serving.compare.plan import Arm, BlockInfo
from serving.compare.samples import (
    FIGURES,
    MS,
    PERCENTILES,
    FigureName,
    counted_requests,
    figure_samples,
    met_objectives,
    ttft_sample,
)
from serving.compare.statistics import (
    RESAMPLES,
    Estimate,
    Resampled,
    Samples,
    Unit,
    paired_ratio,
    rate,
    slices_per_block,
)
from serving.compare.tables import BlockData, RequestRow, Results
from serving.config import ClassConfig, StrictModel
from serving.records import Outcome, now_s

SUMMARY_FORMAT = 1

_N = TypeVar("_N", int, float)
Verdict = Literal["yes", "no", "undecided"]
# Which figures are laid side by side, arm against arm.
COMPARED: tuple[tuple[FigureName, str], ...] = (
    ("ttft", "p50"), ("ttft", "p95"), ("itl", "p50"), ("itl", "p95"), ("itl", "p99"),
)  # fmt: skip
DEFINITIONS = {
    "ttft": "from the moment a request was due to the first chunk that carries a token",
    "itl": "gap between consecutive token-bearing chunks, every gap one sample, whatever its tokens",
    "itl_per_token": "the same gaps, each divided by its tokens",
    "tpot": "(last token - first token) / (tokens - 1), per request",
    "percentile": "pooled samples of a class on an arm, read at rank q (n - 1) between neighbours",
    "interval": "95 %, block bootstrap over stretches of load; the same stretches of both arms for a ratio",
    "stall": "an ITL gap longer than the class's ITL objective",
    "goodput": "requests a second whose TTFT, and 99th percentile of their own gaps, met their class's objectives",
    "throughput": "tokens that came within the counted part of the load, by the second; cached prompt tokens left out",
}


class Figure(StrictModel):
    """One figure, milliseconds (a rate: per second). An end of the interval that cannot be told is None."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Pool(StrictModel):
    """The percentiles of one pool of samples. `enough`: by percentile, whether there are enough samples to bound it."""

    samples: int
    p50: Figure
    p95: Figure
    p99: Figure
    max_ms: float | None


class ClassResult(StrictModel):
    """One class on one arm.

    Attributes:
        requests: Due in the counted time. failed: by kind of error. cancelled: still open when the drain ended.
        unanswered: Got no token before that; they count in TTFT with the time that they had waited.
        stalls_per_min: Of load.
        goodput_per_s: Requests a second that met both objectives.
        meets_ttft, meets_itl: The class's objectives (TTFT p95, ITL p99): `yes` or `no` when the interval says so.
        behind_turn, behind_cap: Requests that waited behind the turn before, or behind the cap on requests at once.
        cached_share: Prompt tokens that the server had in its cache, of all; None: it does not say.
    """

    requests: int
    done: int
    failed: dict[str, int]
    cancelled: int
    unanswered: int
    ttft: Pool
    itl: Pool
    itl_per_token: Pool
    tpot: Pool
    stalls: int
    stalls_per_min: Figure
    goodput_per_s: Figure
    meets_ttft: Verdict
    meets_itl: Verdict
    behind_turn: int
    behind_turn_s: float
    behind_cap: int
    behind_cap_s: float
    prompt_tokens_mean: float | None
    completion_tokens_mean: float | None
    image_tokens_mean: float
    cached_share: float | None
    tokens_counted: bool


class ArmResult(StrictModel):
    """One arm. `measured_s` is load that counts; `invalid` lists blocks left out, each with its reason."""

    arm: Arm
    blocks: int
    units: int
    measured_s: float
    invalid: dict[int, str]
    classes: dict[str, ClassResult]
    output_tokens_per_s: Figure
    prompt_tokens_per_s: Figure
    meets_all: Verdict
    prefix_hit_rate: float | None
    multimodal_hit_rate: float | None
    kv_cache_max: float | None
    preemptions: int | None
    requests_at_once_max: int | None
    server_at_once_max: int | None
    count_difference_p95: float | None
    loop_lag_p99_ms: float | None
    sent_lag_p99_ms: float | None


class RatioResult(StrictModel):
    """A figure on `arm` by the same on `reference`, over the units that both have.

    `different` is None where it cannot be told. `more`: how many times the load so far would be needed to tell;
    `more_s` is that as further run time of the whole comparison. Both None: it is told, or no useful time is in sight.
    """

    traffic_class: str
    figure: FigureName
    percentile: str
    arm: str
    reference: str
    ratio: float | None
    low: float | None
    high: float | None
    different: bool | None
    more: float | None = None
    more_s: float | None = None


class Summary(StrictModel):
    """What a comparison found so far."""

    format: int = SUMMARY_FORMAT
    name: str
    at_s: float
    complete: bool
    blocks_done: int
    blocks_planned: int
    arms: list[ArmResult]
    ratios: list[RatioResult]
    objectives: dict[str, ClassConfig]
    definitions: dict[str, str] = DEFINITIONS
    notes: list[str] = []


def summarise(results: Results, *, resamples: int = RESAMPLES) -> Summary:
    """Everything that the blocks so far say."""
    experiment = results.experiment
    books = {arm.name: _Book(arm, results, resamples) for arm in experiment.arms}
    arms = [book.result(experiment.classes) for book in books.values()]
    spent_s = sum(block.info.end_s - block.info.start_s for block in results.blocks)
    running = [book for book in books.values() if book.counted]
    ratios = [
        _compare(book, reference, name, figure, percentile, spent_s)
        for index, reference in enumerate(running)
        for book in running[index + 1 :]
        for name in experiment.workload.classes
        for figure, percentile in COMPARED
    ]
    return Summary(
        name=experiment.name,
        at_s=now_s(),
        complete=len(results.blocks) >= sum(arm.blocks for arm in arms) and _is_complete(results),
        blocks_done=len(results.blocks),
        blocks_planned=len(experiment.plan),
        arms=arms,
        ratios=ratios,
        objectives=experiment.classes,
        notes=[*experiment.notes, *notes_on(results.blocks, arms)],
    )


def _is_complete(results: Results) -> bool:
    refused = {arm.name for arm in results.experiment.arms if arm.reason is not None}
    done = {block.info.number for block in results.blocks}
    return all(planned.number in done or planned.arm in refused for planned in results.experiment.plan)


class _Book:
    """One arm's requests, by unit."""

    def __init__(self, arm: Arm, results: Results, resamples: int) -> None:
        self.arm = arm
        self._resamples = resamples
        self.all_blocks = [block for block in results.blocks if block.info.arm == arm.name]
        self.counted = [block for block in self.all_blocks if block.info.invalid is None]
        rounds = len({block.info.round for block in results.blocks})
        experiment = results.experiment
        self._slices = slices_per_block(rounds, experiment.block_s - experiment.warm_up_s)
        self.unit_s: dict[Unit, float] = {}
        self._pools: dict[tuple[str, FigureName], Resampled] = {}
        self.requests: dict[str, dict[Unit, list[RequestRow]]] = {name: {} for name in experiment.workload.classes}
        for block in self.counted:
            self._take(block)

    def _take(self, block: BlockData) -> None:
        info = block.info
        for slice_number in range(self._slices):
            unit = (info.round, slice_number)
            self.unit_s[unit] = info.measured_s / self._slices
            for by_unit in self.requests.values():
                by_unit[unit] = []
        for row in counted_requests(block):
            self.requests[row.traffic_class][self._unit(info, row.due_s)].append(row)

    def _unit(self, info: BlockInfo, at_s: float) -> Unit:
        """Of a moment in the counted part of a block."""
        into_s = at_s - info.start_s - info.warm_up_s
        return info.round, min(self._slices - 1, max(0, int(into_s / info.measured_s * self._slices)))

    def pool(self, name: str, figure: FigureName) -> Resampled:
        if (name, figure) not in self._pools:
            samples = Samples.of(
                {
                    unit: [value for row in rows for value in figure_samples(row, figure)]
                    for unit, rows in self.requests[name].items()
                }
            )
            self._pools[name, figure] = Resampled.of(samples, tuple(PERCENTILES.values()), resamples=self._resamples)
        return self._pools[name, figure]

    def result(self, classes: Mapping[str, ClassConfig]) -> ArmResult:
        infos = [block.info for block in self.all_blocks]
        found = {name: self._class(name, classes[name]) for name in self.requests} if self.counted else {}
        output, prompt = self._tokens()
        return ArmResult(
            arm=self.arm,
            blocks=len(infos),
            units=len(self.unit_s),
            measured_s=sum(self.unit_s.values()),
            invalid={info.number: info.invalid for info in infos if info.invalid is not None},
            classes=found,
            output_tokens_per_s=_figure(rate(output, self.unit_s, resamples=self._resamples), 1),
            prompt_tokens_per_s=_figure(rate(prompt, self.unit_s, resamples=self._resamples), 1),
            meets_all=_all([verdict for item in found.values() for verdict in (item.meets_ttft, item.meets_itl)]),
            prefix_hit_rate=_mean(info.prefix_hit_rate for info in infos),
            multimodal_hit_rate=_mean(info.multimodal_hit_rate for info in infos),
            kv_cache_max=_max(info.kv_cache_max for info in infos),
            preemptions=_sum(info.preemptions for info in infos),
            requests_at_once_max=_max(info.ours_max for info in infos),
            server_at_once_max=_max(info.server_max for info in infos),
            count_difference_p95=_max(info.count_difference_p95 for info in infos),
            loop_lag_p99_ms=_ms(_max(info.lag.loop_p99_s for info in infos)),
            sent_lag_p99_ms=_ms(_max(info.lag.sent_p99_s for info in infos)),
        )

    def _class(self, name: str, objectives: ClassConfig) -> ClassResult:
        by_unit = self.requests[name]
        rows = [row for unit_rows in by_unit.values() for row in unit_rows]
        pools = {figure: self._figures(name, figure) for figure in FIGURES}

        def per(count: Callable[[RequestRow], float], unit: float = 1.0) -> Figure:
            counts = {key: float(sum(map(count, unit_rows))) for key, unit_rows in by_unit.items()}
            return _figure(rate(counts, self.unit_s, resamples=self._resamples), unit)

        def stalls(row: RequestRow) -> int:
            return sum(gap * MS > objectives.itl_p99_ms for gap in row.gap_duration_s)

        prompts = [row.prompt_tokens for row in rows if row.prompt_tokens is not None]
        cached = [row for row in rows if row.cached_tokens is not None and row.prompt_tokens]
        return ClassResult(
            requests=len(rows),
            done=sum(row.outcome == Outcome.DONE.value for row in rows),
            failed=dict(Counter(row.error_kind for row in rows if row.error_kind is not None)),
            cancelled=sum(row.outcome == Outcome.CANCELLED.value for row in rows),
            unanswered=sum(row.ttft_s is None and ttft_sample(row) is not None for row in rows),
            **pools,
            stalls=sum(map(stalls, rows)),
            stalls_per_min=per(stalls, 60.0),
            goodput_per_s=per(lambda row: met_objectives(row, objectives)),
            meets_ttft=_verdict(pools["ttft"].p95, objectives.ttft_p95_ms),
            meets_itl=_verdict(pools["itl"].p99, objectives.itl_p99_ms),
            behind_turn=sum(row.behind_turn_s > 0 for row in rows),
            behind_turn_s=sum(row.behind_turn_s for row in rows),
            behind_cap=sum(row.behind_cap_s > 0 for row in rows),
            behind_cap_s=sum(row.behind_cap_s for row in rows),
            prompt_tokens_mean=_mean(prompts),
            completion_tokens_mean=_mean(row.completion_tokens for row in rows),
            image_tokens_mean=_mean(row.image_tokens for row in rows) or 0.0,
            cached_share=(
                sum(row.cached_tokens or 0 for row in cached) / sum(row.prompt_tokens or 0 for row in cached)
                if cached
                else None
            ),
            tokens_counted=all(row.tokens_counted for row in rows if row.gap_tokens),
        )

    def _figures(self, name: str, figure: FigureName) -> Pool:
        pool = self.pool(name, figure)
        p50, p95, p99 = (_figure(item, MS) for item in pool.estimates())
        values = pool.samples.values
        most = float(values[-1]) * MS if len(values) else None
        return Pool(samples=len(values), p50=p50, p95=p95, p99=p99, max_ms=most)

    def _tokens(self) -> tuple[dict[Unit, float], dict[Unit, float]]:
        """Output and computed prompt tokens that came within the counted part, by unit; of all requests."""
        output = dict.fromkeys(self.unit_s, 0.0)
        prompt = dict.fromkeys(self.unit_s, 0.0)
        for block in self.counted:
            info = block.info
            first_s, last_s = info.start_s + info.warm_up_s, info.start_s + info.load_s
            for row in block.requests:
                if row.first_token_s is not None and first_s <= row.first_token_s < last_s:
                    unit = self._unit(info, row.first_token_s)
                    output[unit] += 1
                    prompt[unit] += (row.prompt_tokens or 0) - (row.cached_tokens or 0)
                for end_s, tokens in zip(row.gap_end_s, row.gap_tokens, strict=True):
                    if first_s <= end_s < last_s:
                        output[self._unit(info, end_s)] += tokens
        return output, prompt


def _compare(
    book: _Book, reference: _Book, name: str, figure: FigureName, percentile: str, spent_s: float
) -> RatioResult:
    ratio = paired_ratio(book.pool(name, figure), reference.pool(name, figure), PERCENTILES[percentile])
    return RatioResult(
        traffic_class=name,
        figure=figure,
        percentile=percentile,
        arm=book.arm.name,
        reference=reference.arm.name,
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        different=ratio.different,
        more=ratio.more,
        more_s=None if ratio.more is None else (ratio.more - 1) * spent_s,
    )


def _figure(estimate: Estimate, unit: float) -> Figure:
    def scaled(value: float | None) -> float | None:
        return None if value is None else value * unit

    return Figure(value=scaled(estimate.value), low=scaled(estimate.low), high=scaled(estimate.high))


def _verdict(figure: Figure, objective_ms: float) -> Verdict:
    if figure.high is not None and figure.high <= objective_ms:
        return "yes"
    if figure.low is not None and figure.low > objective_ms:
        return "no"
    return "undecided"


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    kept = list(verdicts)
    if "no" in kept:
        return "no"
    return "yes" if kept and "undecided" not in kept else "undecided"


def _mean(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None


def _max(values: Iterable[_N | None]) -> _N | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    kept = [value for value in values if value is not None]
    return sum(kept) if kept else None


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * MS
