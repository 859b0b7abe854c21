"""What a step's duration is made of: decoding, and each request's prompt tokens and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from serving.compare.tables import StepRow
from serving.steptime import FEATURE_NAMES, FitError, StepTime, fit_steps

_DECODE = ("fixed", "decode_tokens", "decode_context")
_PREFILL = ("prefill_tokens", "prefill_pairs", "prefill_context")
_ENCODER = ("encoder_tokens", "encoder_items")
#: However bad the fit is: with more, it would explain anything.
_MOST_TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class Division:
    """One step's seconds: `decode_s + prefill_s + encoder_s + unexplained_s` is its duration."""

    decode_s: float
    prefill_s: float
    encoder_s: float
    unexplained_s: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Divides steps.

    Attributes:
        model: The fit; None where there were too few steps for one: then a step beyond the median decode-only step is
            all prompt tokens and image tokens, each counted alike.
        decode_only_s: Median duration of decode-only steps; 0 where there were none.
        tolerance: How much longer than predicted a step may take before the rest is unexplained, relative: the fit's
            95th percentile of error, at most 30 %.
        between_s: Median time from one step's end to the next one's start.
    """

    model: StepTime | None
    decode_only_s: float
    tolerance: float
    between_s: float

    def divide(self, step: StepRow) -> Division:
        """Divide one step's duration."""
        if self.model is None:
            return self._by_tokens(step)
        decode_s, prefill_s, encoder_s = (self._predicted(step, names) for names in (_DECODE, _PREFILL, _ENCODER))
        work_s = prefill_s + encoder_s
        if work_s <= 0:
            decode_s = min(step.duration_s, decode_s * (1 + self.tolerance))
            return Division(decode_s, 0.0, 0.0, step.duration_s - decode_s)
        decode_s = min(step.duration_s, decode_s)
        explained_s = min(step.duration_s - decode_s, work_s + self.tolerance * (decode_s + work_s))
        return Division(
            decode_s,
            explained_s * prefill_s / work_s,
            explained_s * encoder_s / work_s,
            step.duration_s - decode_s - explained_s,
        )

    def _predicted(self, step: StepRow, names: Sequence[str]) -> float:
        if self.model is None:
            return 0.0
        costs = dict(zip(FEATURE_NAMES, self.model.linear, strict=True))
        return sum(costs[name] * (1 if name == "fixed" else getattr(step, name)) for name in names)

    def _by_tokens(self, step: StepRow) -> Division:
        tokens = step.prefill_tokens + step.encoder_tokens
        decode_s = min(step.duration_s, self.decode_only_s) if tokens else step.duration_s
        rest_s = step.duration_s - decode_s
        share = step.prefill_tokens / tokens if tokens else 0.0
        return Division(decode_s, rest_s * share, rest_s * (1 - share) if tokens else 0.0, 0.0)


def step_costs(steps: Sequence[StepRow]) -> StepCosts:
    """Fit the costs of one server's steps, given in order."""
    table = {name: np.array([getattr(step, name) for step in steps]) for name in ("duration_s", *FEATURE_NAMES[1:])}
    try:
        model = fit_steps(table, source="these steps")
    except FitError:
        model = None
    quality = None if model is None else model.quality
    alone = [step.duration_s for step in steps if not step.prefill_tokens and not step.encoder_tokens]
    between = [max(0.0, later.start_s - earlier.end_s) for earlier, later in pairwise(steps)]
    return StepCosts(
        model=model,
        decode_only_s=median(alone) if alone else 0.0,
        tolerance=min(quality.p95_error, _MOST_TOLERANCE) if quality is not None else 0.0,
        between_s=median(between) if between else 0.0,
    )
