"""From one stretch of load to a block: its rows, and whether its figures can be trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from serving.compare.plan import BlockInfo, Lag, PlannedBlock
from serving.compare.tables import BlockData, RequestRow, StepRow, request_row
from serving.config import ImageTokens
from serving.load.run import LoadRun
from serving.records import Outcome
from serving.workload import PlannedRequest

LAG_SHARE = 0.05
_PERCENTILES = (0.5, 0.95, 0.99)


def block_of(
    run: LoadRun,
    planned: PlannedBlock,
    *,
    load_s: float,
    warm_up_s: float,
    image_rule: ImageTokens,
    steps: Sequence[StepRow] = (),
    steps_lost: int = 0,
    server: Mapping[str, object],
) -> BlockData:
    """The rows and the facts of a block that has ended."""
    rows = [
        request_row(
            sent.record,
            sent.planned,
            block=planned.number,
            arm=planned.arm,
            image_tokens=image_tokens(sent.planned, image_rule),
            warm_up=sent.planned.due_s < warm_up_s,
            behind_cap_s=sent.behind_cap_s,
            behind_turn_s=sent.behind_turn_s,
        )
        for sent in run.requests
    ]
    lag = _lag(run)
    counts = [
        (reading.ours, reading.figures.running + reading.figures.waiting)
        for reading in run.readings
        if reading.figures.running is not None and reading.figures.waiting is not None
    ]
    return BlockData(
        BlockInfo(
            number=planned.number,
            arm=planned.arm,
            round=planned.round,
            seed=planned.seed,
            start_s=run.start_s,
            end_s=run.end_s,
            load_s=load_s,
            warm_up_s=warm_up_s,
            planned=dict(Counter(sent.planned.traffic_class for sent in run.requests)),
            cancelled=sum(row.outcome == Outcome.CANCELLED.value for row in rows),
            lag=lag,
            invalid=why_invalid(run, rows),
            behind_cap=sum(row.behind_cap_s > 0 for row in rows),
            behind_cap_s=sum(row.behind_cap_s for row in rows),
            ours_max=most_at_once(rows),
            server_max=max((server for _, server in counts), default=None),
            count_difference_p95=(
                float(np.quantile([abs(ours - server) for ours, server in counts], 0.95)) if counts else None
            ),
            prefix_hit_rate=run.final.prefix_cache_hit_rate,
            multimodal_hit_rate=run.final.multimodal_cache_hit_rate,
            kv_cache_max=max(
                (r.figures.kv_cache_usage for r in run.readings if r.figures.kv_cache_usage is not None), default=None
            ),
            preemptions=_grown([reading.figures.preemptions for reading in run.readings]),
            steps_lost=steps_lost,
            server=dict(server),
        ),
        rows,
        [row for row in steps if row.end_s > run.start_s],  # those before were for what prepared the block
    )


def image_tokens(planned: PlannedRequest, rule: ImageTokens) -> int:
    """Image tokens of a planned request, by the rule of its pictures or else the server's."""
    return 0 if planned.pictures is None else planned.pictures.count * planned.pictures.tokens_each(rule)


def most_at_once(rows: Sequence[RequestRow]) -> int:
    """The most requests that were open (sent and not ended) at one moment."""
    changes = [(row.sent_s, 1) for row in rows if row.sent_s is not None]
    changes += [(row.finished_s, -1) for row in rows if row.sent_s is not None]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def why_invalid(run: LoadRun, rows: Sequence[RequestRow]) -> str | None:
    """The lag that exceeds 5 % of what it would distort, percentile by percentile, class by class; None for none.

    A late event loop reads the clock late: it is laid beside ITL. A request that was handed over late has that in its
    TTFT.
    """
    lags = [(sent, sent.lag_s) for sent in run.requests if sent.lag_s is not None]
    for name in sorted({row.traffic_class for row in rows}):
        mine = [row for row in rows if row.traffic_class == name and not row.warm_up]
        gaps = [gap for row in mine for gap in row.gap_duration_s]
        ttfts = [row.ttft_s for row in mine if row.ttft_s is not None]
        late = [lag_s for sent, lag_s in lags if sent.planned.traffic_class == name]
        for what, lag, figure, values in (
            ("the event loop's delay", run.loop_lags_s, "ITL", gaps),
            ("due-to-sent", late, "TTFT", ttfts),
        ):
            if not lag or not values:
                continue
            for q in _PERCENTILES:
                lag_s, value_s = float(np.quantile(lag, q)), float(np.quantile(values, q))
                if lag_s > LAG_SHARE * value_s:
                    return (
                        f"{what} p{round(100 * q)} is {1000 * lag_s:.1f} ms, more than 5 % of {name}'s {figure} "
                        f"({1000 * value_s:.1f} ms): this machine is too busy to measure that"
                    )
    return None


def _lag(run: LoadRun) -> Lag:
    sent = [lag_s for request in run.requests if (lag_s := request.lag_s) is not None]
    loop = _quantiles(run.loop_lags_s)
    handed = _quantiles(sent)
    return Lag(
        loop_p95_s=loop[1], loop_p99_s=loop[2], loop_max_s=loop[3],
        sent_p50_s=handed[0], sent_p95_s=handed[1], sent_p99_s=handed[2], sent_max_s=handed[3],
    )  # fmt: skip


def _quantiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    if not values:
        return None, None, None, None
    p50, p95, p99, most = (float(value) for value in np.quantile(values, (*_PERCENTILES, 1.0)))
    return p50, p95, p99, most


def _grown(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(0, known[-1] - known[0]) if len(known) > 1 else None
