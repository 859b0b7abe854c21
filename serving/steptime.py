"""How long one step of the engine takes, from what it does.

linear . f + max(compute . f, memory . f), where f are the step's features: one; decode tokens; prefill tokens; tokens
of context that decodes read; pairs of query and key that prefills attend over; tokens of context that prefills read;
image tokens encoded; images encoded. That a step's time is a sum of such terms, fitted per machine, is Vidur's
observation (Agrawal et al., MLSys 2024, section 4), which predicts end-to-end latency within 9 %.

Either fitted from measured steps (only the linear part, every coefficient at least 0), or from a machine's and a
model's published figures (serving/roofline.py), and then marked as such.

Steps that do the same do not take the same time. A fit keeps how far the measured ones lie from it, as ratios, apart
for short and long steps; the simulator draws from these, without which the p99 of gaps would be too low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Floats = npt.NDArray[np.float64]

FEATURE_NAMES = (
    "fixed",
    "decode_tokens",
    "prefill_tokens",
    "decode_context",
    "prefill_pairs",
    "prefill_context",
    "encoder_tokens",
    "encoder_items",
)
_NONE = (0.0,) * len(FEATURE_NAMES)
_MIN_STEPS = 30
_DRAWS = 4093  # a prime, so that no period of a load falls together with the table's
_QUANTILES = 201
_BAND_STEPS = 50


class FitError(ValueError):
    """The steps do not allow a fit; the message is one line."""


@dataclass(frozen=True, slots=True)
class FitQuality:
    """How well the fit reproduces steps that it has not seen (every fifth, left out of a fit of its own).

    Errors are |predicted - measured| / measured, of single steps and of the sum of all.
    """

    steps: int
    median_error: float
    p95_error: float
    total_error: float
    unused: tuple[str, ...]  # features that no step had, whose cost is therefore unknown


@dataclass(frozen=True, slots=True)
class Band:
    """Steps that should take at least `from_s`: `ratios` are evenly spaced quantiles of measured over fitted."""

    from_s: float
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds per unit of each feature. `source` says where the figures come from; `quality` only for a fit.

    `bands` say how measured steps scatter around it, the shortest first; none: every step takes just so long.
    """

    linear: tuple[float, ...]
    source: str
    compute: tuple[float, ...] = _NONE
    memory: tuple[float, ...] = _NONE
    quality: FitQuality | None = None
    bands: tuple[Band, ...] = ()

    def coefficients(self) -> Floats:
        """As the simulator takes them: rows linear, compute and memory, (3, features)."""
        return np.array([self.linear, self.compute, self.memory], dtype=float)

    def spread(self, seed: int = 0) -> Floats:
        """As the simulator takes it: a row a band, (bands, 1 + draws): from which duration, then ratios in turn.

        The same draws for the same seed; a single ratio of one where nothing was measured.
        """
        if not self.bands:
            return np.array([[0.0, 1.0]])
        rng = np.random.default_rng(seed)
        return np.stack(
            [
                np.array(
                    [band.from_s, *np.interp(rng.random(_DRAWS), np.linspace(0, 1, len(band.ratios)), band.ratios)]
                )
                for band in self.bands
            ]
        )

    def seconds(self, features: Sequence[float] | Floats) -> float:
        """Duration of a step with these features, in `FEATURE_NAMES`' order."""
        values = np.asarray(features, dtype=float)
        return float(values @ self.linear + max(values @ self.compute, values @ self.memory))


def fit_steps(table: Mapping[str, Sequence[float] | npt.NDArray[Any]], *, source: str) -> StepTime:
    """Fit from a table of steps: a column `duration_s`, and a column for each feature (absent ones count as zero).

    Least squares of relative errors, with coefficients of at least 0, so that a long step does not outweigh many short
    ones. Two fits are made: one on all steps, which is returned, and one without every fifth, to say how far off it is.

    Raises:
        FitError: There are too few steps, or no durations.
    """
    if "duration_s" not in table:
        raise FitError(f"the steps have no column duration_s (columns: {', '.join(sorted(table))})")
    duration = np.asarray(table["duration_s"], dtype=float)
    columns = [np.ones(len(duration))]
    columns += [np.asarray(table.get(name, np.zeros(len(duration))), dtype=float) for name in FEATURE_NAMES[1:]]
    features = np.stack(columns, axis=1)
    busy = (duration > 0) & np.isfinite(duration) & (features[:, 1] + features[:, 2] > 0)
    features, duration = features[busy], duration[busy]
    if len(duration) < _MIN_STEPS:
        raise FitError(f"{len(duration)} steps with work and a duration, allowed: {_MIN_STEPS} or more")
    held = np.arange(len(duration)) % 5 == 4
    predicted = features[held] @ _solve(features[~held], duration[~held])
    errors = np.abs(predicted - duration[held]) / duration[held]
    quality = FitQuality(
        steps=len(duration),
        median_error=float(np.median(errors)),
        p95_error=float(np.percentile(errors, 95)),
        total_error=float(abs(predicted.sum() - duration[held].sum()) / duration[held].sum()),
        unused=tuple(name for name, column in zip(FEATURE_NAMES, features.T, strict=True) if not column.any()),
    )
    linear = _solve(features, duration)
    return StepTime(
        linear=tuple(float(value) for value in linear),
        source=source,
        quality=quality,
        bands=_bands(features @ linear, duration),
    )


def _bands(fitted: Floats, measured: Floats) -> tuple[Band, ...]:
    """Bands of steps that should take about the same time, a factor of 1.4 at most unless there are too few."""
    order = np.argsort(fitted)
    octave = np.floor(2 * np.log2(fitted[order] / fitted[order[0]])).astype(np.int64)
    edges = [0]
    for edge in np.flatnonzero(np.diff(octave)) + 1:
        if edge - edges[-1] >= _BAND_STEPS and len(order) - edge >= _BAND_STEPS:
            edges.append(int(edge))
    bands: list[Band] = []
    for first, last in pairwise([*edges, len(order)]):
        mine = order[first:last]
        ratios = np.quantile(measured[mine] / fitted[mine], np.linspace(0, 1, _QUANTILES))
        bands.append(Band(float(fitted[mine[0]]) if bands else 0.0, tuple(float(value) for value in ratios)))
    return tuple(bands)


def _solve(features: Floats, duration: Floats) -> Floats:
    """Coefficients >= 0 of least relative error; columns are scaled to one size first, for nnls' sake."""
    weighted = features / duration[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(weighted / scale, np.ones(len(duration)))
    return np.asarray(solution / scale, dtype=float)
