"""What one request contributes to a comparison's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from serving.compare.tables import BlockData, RequestRow
from serving.config import ClassConfig
from serving.records import ErrorKind, Outcome

MS = 1e3

FigureName = Literal["ttft", "itl", "itl_per_token", "tpot"]
FIGURES: tuple[FigureName, ...] = ("ttft", "itl", "itl_per_token", "tpot")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_WAITED = {ErrorKind.TIMEOUT_FIRST_TOKEN.value}


def counted_requests(block: BlockData) -> list[RequestRow]:
    """The requests of a block that count: none of an invalid one, and none of the warm-up."""
    return [] if block.info.invalid is not None else [row for row in block.requests if not row.warm_up]


def ttft_sample(row: RequestRow) -> float | None:
    """A request's TTFT, seconds; of one that waited in vain the time that it had waited; None for other failures."""
    if row.ttft_s is not None:
        return row.ttft_s
    waited = row.outcome == Outcome.CANCELLED.value or row.error_kind in _WAITED
    return row.finished_s - row.due_s if waited else None


def figure_samples(row: RequestRow, figure: FigureName) -> Sequence[float]:
    """A request's samples of one figure, seconds."""
    match figure:
        case "ttft":
            value = ttft_sample(row)
            return [] if value is None else [value]
        case "tpot":
            return [] if row.tpot_s is None else [row.tpot_s]
        case "itl":
            return row.gap_duration_s
        case "itl_per_token":
            return [gap / tokens for gap, tokens in zip(row.gap_duration_s, row.gap_tokens, strict=True)]


def met_objectives(row: RequestRow, objectives: ClassConfig) -> bool:
    """Whether a request was done within its class's objectives: TTFT, and the 99th percentile of its own gaps."""
    if row.outcome != Outcome.DONE.value or row.ttft_s is None or row.ttft_s * MS > objectives.ttft_p95_ms:
        return False
    return not row.gap_duration_s or float(np.quantile(row.gap_duration_s, 0.99)) * MS <= objectives.itl_p99_ms
