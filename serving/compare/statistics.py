"""How sure a figure is: percentiles with block-bootstrap intervals, and paired ratios between arms.

Samples of one server are not independent: a stall hits every answer in flight, a burst makes a minute slow. So what is
drawn again is not samples but *units*, stretches of load (whole blocks, or slices of blocks where there are few), with
all the samples of the requests that were due in them. Arms see the same load in the same round, so units are paired:
each resample takes the same units of both arms, and their ratio is free of what the load does to both (block bootstrap:
Künsch, Annals of Statistics 17, 1989; common random numbers: Law, Simulation Modeling and Analysis).

Percentile intervals of few units are too narrow; they are widened as Hesterberg proposes ("What Teachers Should Know
about the Bootstrap", The American Statistician 69, 2015, section 4.5: normal quantile times sqrt(n / (n - 1)) replaced
by Student's). And no resample can show more than the largest sample seen: where fewer samples were taken than a
distribution-free bound of the percentile needs (q ** n >= 0.025), the upper end is open.

A percentile is read at rank q (n - 1) between neighbours, as in serving/latency.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import norm, t

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]  # half the memory to sum up
Unit = tuple[int, int]  # round, slice of its blocks

LEVEL = 0.95
RESAMPLES = 1000
MIN_UNITS = 5
_WANTED_UNITS = 10
_SLICE_S = 10.0
_CHUNK = 1 << 22  # elements of one piece of work
_LONGEST_FACTOR = 100.0


def slices_per_block(rounds: int, measured_s: float) -> int:
    """How many slices a block is cut into, for there to be ten units or more, none shorter than 10 s."""
    if rounds < 1:
        return 1
    wanted = math.ceil(_WANTED_UNITS / rounds)
    return max(1, min(wanted, int(measured_s / _SLICE_S)))


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one figure on one arm: values sorted, each with the index of its unit in `units`.

    Units without a sample are units all the same: in them nothing happened.
    """

    values: Floats
    unit: Ints
    units: tuple[Unit, ...]

    @staticmethod
    def of(by_unit: Mapping[Unit, Sequence[float]]) -> Samples:
        """From the samples of each unit."""
        units = tuple(sorted(by_unit))
        values = np.concatenate([np.zeros(0), *(np.asarray(by_unit[unit], dtype=float) for unit in units)])
        index = np.repeat(np.arange(len(units)), [len(by_unit[unit]) for unit in units])
        order = np.argsort(values, kind="stable")
        return Samples(values[order], index[order].astype(np.int64), units)

    def only(self, units: Sequence[Unit]) -> Samples:
        """The samples of some units."""
        wanted = {unit: number for number, unit in enumerate(sorted(units))}
        number = np.array([wanted.get(unit, -1) for unit in self.units], dtype=np.int64)
        kept = number[self.unit] >= 0 if len(self.unit) else np.zeros(0, dtype=bool)
        return Samples(self.values[kept], number[self.unit[kept]], tuple(wanted))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; None where it cannot be told (an open end, or too few units for any).

    `samples` is how many it was taken from.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    samples: int = 0


def quantile(samples: Samples, q: float) -> float | None:
    """The q-th quantile of all samples."""
    return float(np.quantile(samples.values, q)) if len(samples.values) else None


def draws(units: int, resamples: int, seed: int = 0) -> Counts:
    """How often each unit is taken in each resample, shape (resamples, units); rows sum to `units`."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.int32)


def resampled_quantiles(samples: Samples, qs: Sequence[float], taken: Counts) -> Floats:
    """Quantiles of each resample, shape (resamples, len(qs)); NaN where a resample has no sample."""
    result = np.full((len(taken), len(qs)), np.nan)
    count = len(samples.values)
    if count == 0:
        return result
    size = max(1, _CHUNK // count)
    for start in range(0, len(taken), size):
        upto = np.cumsum(taken[start : start + size][:, samples.unit], axis=1, dtype=np.int64)
        total = upto[:, -1]
        # Rows one above the other are one ascending sequence, which is searched at once.
        stride = int(total.max()) + 1
        lift = np.arange(len(upto)) * stride
        ladder = (upto + lift[:, None]).ravel()
        ranks = np.outer(np.maximum(total - 1, 0), qs)
        below = np.floor(ranks).astype(np.int64)
        above = np.minimum(below + 1, np.maximum(total - 1, 0)[:, None])

        def values(rank: Ints, lift: Ints = lift, ladder: Ints = ladder) -> Floats:
            """The samples at these ranks of each row."""
            found = np.searchsorted(ladder, rank + lift[:, None], side="right") - np.arange(len(lift))[:, None] * count
            taken_values: Floats = samples.values[np.minimum(found, count - 1)]
            return taken_values

        lower = values(below)
        piece = lower + (ranks - below) * (values(above) - lower)
        result[start : start + size] = np.where(total[:, None] > 0, piece, np.nan)
    return result


def interval(resampled: Floats, units: int) -> tuple[float, float] | None:
    """The 95 % interval of resampled values, widened for few units; None below five units or with too many gaps."""
    kept = resampled[np.isfinite(resampled)]
    if units < MIN_UNITS or len(kept) == 0 or len(kept) < 0.9 * len(resampled):
        return None
    tail = float(norm.cdf(-math.sqrt(units / (units - 1)) * t.ppf((1 + LEVEL) / 2, units - 1)))
    low, high = np.quantile(kept, (tail, 1 - tail))
    return float(low), float(high)


def bounded_above(q: float, samples: int) -> bool:
    """Whether so many samples can bound the q-th quantile from above: one of them lies beyond it with 97.5 %."""
    return samples > 0 and q**samples < (1 - LEVEL) / 2


def needed_samples(q: float) -> int:
    """The fewest samples that bound the q-th quantile from above."""
    return math.floor(math.log((1 - LEVEL) / 2) / math.log(q)) + 1


@dataclass(frozen=True, slots=True)
class Resampled:
    """Samples, and their quantiles in each resample: shape (resamples, len(qs)); none below five units.

    Samples with the same units are resampled alike, so that their quantiles are paired row by row.
    """

    samples: Samples
    qs: tuple[float, ...]
    drawn: Floats

    @staticmethod
    def of(samples: Samples, qs: Sequence[float], *, resamples: int = RESAMPLES) -> Resampled:
        """Draw the resamples."""
        units = len(samples.units)
        taken = draws(units, resamples) if units >= MIN_UNITS else np.zeros((0, units), dtype=np.int32)
        return Resampled(samples, tuple(qs), resampled_quantiles(samples, qs, taken))

    def only(self, units: Sequence[Unit]) -> Resampled:
        """The same of some units."""
        if tuple(sorted(units)) == self.samples.units:
            return self
        return Resampled.of(self.samples.only(units), self.qs, resamples=len(self.drawn) or RESAMPLES)

    def estimates(self) -> list[Estimate]:
        """The quantiles with their intervals."""
        count, units = len(self.samples.values), len(self.samples.units)
        found = []
        for column, q in enumerate(self.qs):
            low, high = interval(self.drawn[:, column], units) or (None, None)
            found.append(Estimate(quantile(self.samples, q), low, high if bounded_above(q, count) else None, count))
        return found


def rate(by_unit: Mapping[Unit, float], unit_s: Mapping[Unit, float], *, resamples: int = RESAMPLES) -> Estimate:
    """Something a second: the sum over units by the sum of their seconds (a ratio of sums, resampled together)."""
    units = sorted(by_unit)
    if not units:
        return Estimate(None)
    counts = np.array([by_unit[unit] for unit in units])
    seconds = np.array([unit_s[unit] for unit in units])
    value = float(counts.sum() / seconds.sum())
    taken = draws(len(units), resamples)
    bounds = interval((taken @ counts) / (taken @ seconds), len(units))
    low, high = bounds or (None, None)
    return Estimate(value, low, high, int(counts.sum()))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure on one arm by the same figure on another, over the units that both have.

    Attributes:
        different: The interval does not hold 1; None where it cannot be told.
        more: How many times the load so far would be needed for a difference of this size to show; None when it shows
            already, or when none of any use is in sight (100 times and more).
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    different: bool | None = None
    more: float | None = None
    units: int = 0


def paired_ratio(arm: Resampled, reference: Resampled, q: float) -> Ratio:
    """The ratio of two arms' q-th quantiles, from resamples that take the same units of both. `q` is one of `qs`."""
    common = sorted(set(arm.samples.units) & set(reference.samples.units))
    above, below = arm.only(common), reference.only(common)
    top, bottom = quantile(above.samples, q), quantile(below.samples, q)
    if top is None or bottom is None or bottom <= 0 or top <= 0:
        return Ratio(None, units=len(common))
    value = top / bottom
    if len(common) < MIN_UNITS:
        return Ratio(value, more=MIN_UNITS / len(common) if common else None, units=len(common))
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = above.drawn[:, above.qs.index(q)] / below.drawn[:, below.qs.index(q)]
    bounds = interval(drawn, len(common))
    if bounds is None:
        return Ratio(value, units=len(common))
    fewest = min(len(above.samples.values), len(below.samples.values))
    if not bounded_above(q, fewest):
        # Both quantiles are (nearly) the largest sample: their ratio's interval says nothing.
        return Ratio(value, more=needed_samples(q) / fewest, units=len(common))
    different = not bounds[0] <= 1 <= bounds[1]
    more = None if different else how_much_more(value, bounds)
    return Ratio(value, *bounds, different, more, len(common))


def how_much_more(value: float, bounds: tuple[float, float]) -> float | None:
    """How many times as much load until an interval that shrinks with the square root of it leaves 1 out.

    On the side of 1: half-widths are taken on a logarithmic scale, where ratios are nearly symmetric. None when the
    difference is so small that a hundred times the load would not show it.
    """
    effect = abs(math.log(value))
    if bounds[0] <= 0 or effect == 0:
        return None
    reach = math.log(value / bounds[0]) if value > 1 else math.log(bounds[1] / value)
    factor = (reach / effect) ** 2
    return max(factor, 1.0) if factor < _LONGEST_FACTOR else None
