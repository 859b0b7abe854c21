"""Intervals and ratios on samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from serving.compare.statistics import (
    MIN_UNITS,
    Resampled,
    Samples,
    bounded_above,
    draws,
    how_much_more,
    needed_samples,
    paired_ratio,
    rate,
    resampled_quantiles,
    slices_per_block,
)

QS = (0.5, 0.95, 0.99)


def units(rng: np.random.Generator, count: int, each: int, *, scale: float = 1.0, spread: float = 0.3) -> Samples:
    """Log-normal samples whose unit shifts all of its samples, as a busy stretch of load does."""
    return Samples.of(
        {
            (number, 0): list(scale * np.exp(rng.normal(shift, 0.5, each)))
            for number, shift in enumerate(rng.normal(0, spread, count))
        }
    )


def test_resampled_quantiles_are_those_of_the_samples_drawn_again() -> None:
    rng = np.random.default_rng(1)
    samples = Samples.of({(unit, 0): list(rng.exponential(size=unit + 1)) for unit in range(6)})
    taken = draws(6, 20)
    found = resampled_quantiles(samples, QS, taken)
    by_unit = [samples.values[samples.unit == unit] for unit in range(6)]
    for row, counts in enumerate(taken):
        pooled = np.concatenate([np.tile(values, count) for values, count in zip(by_unit, counts, strict=True)])
        assert found[row] == pytest.approx(np.quantile(pooled, QS))


@pytest.mark.parametrize("count", [pytest.param(8, id="few units"), pytest.param(25, id="many units")])
def test_an_interval_covers_the_truth_about_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(2)
    truth = 1.0  # the median: units and samples are symmetric around 0 on the logarithmic scale
    covered = 0
    runs = 200
    for _ in range(runs):
        (estimate,) = Resampled.of(units(rng, count, 20), (0.5,), resamples=200).estimates()
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
    # 95 % is promised; 200 trials of it are below 0.90 in 1 of 500 cases.
    assert 0.90 <= covered / runs <= 0.99


def test_taking_every_sample_for_independent_would_not_cover() -> None:
    """Why units are drawn and not samples: the same samples, each a unit of its own, promise far too much."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(100):
        samples = units(rng, 10, 30)
        alone = Samples.of({(number, 0): [value] for number, value in enumerate(samples.values)})
        (estimate,) = Resampled.of(alone, (0.5,), resamples=200).estimates()
        covered += (estimate.low or 0) <= 1.0 <= (estimate.high or 0)
    assert covered < 80


def paired(rng: np.random.Generator, count: int, each: int, ratio: float) -> tuple[Samples, Samples]:
    """Two arms under the same load: what the load does to a unit, it does to both."""
    shifts = rng.normal(0, 0.5, count)
    return (
        Samples.of({(n, 0): list(ratio * np.exp(rng.normal(shift, 0.2, each))) for n, shift in enumerate(shifts)}),
        Samples.of({(n, 0): list(np.exp(rng.normal(shift, 0.2, each))) for n, shift in enumerate(shifts)}),
    )


def test_a_known_ratio_is_found_and_pairing_is_what_finds_it() -> None:
    rng = np.random.default_rng(4)
    arm, reference = paired(rng, 12, 30, 1.3)
    found = paired_ratio(Resampled.of(arm, QS), Resampled.of(reference, QS), 0.5)
    assert found.different is True
    assert found.more is None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 1.3 <= found.high
    # The same samples with the units of one arm in another order are not paired any more.
    turned = Samples(reference.values, np.roll(np.arange(12), 5)[reference.unit], reference.units)
    unpaired = paired_ratio(Resampled.of(arm, QS), Resampled.of(turned, QS), 0.5)
    assert unpaired.low is not None
    assert unpaired.high is not None
    assert math.log(unpaired.high / unpaired.low) > 2 * math.log(found.high / found.low)


def test_equal_arms_are_called_different_about_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    runs = 200
    for _ in range(runs):
        arm, reference = paired(rng, 10, 20, 1.0)
        wrong += bool(
            paired_ratio(
                Resampled.of(arm, (0.5,), resamples=200), Resampled.of(reference, (0.5,), resamples=200), 0.5
            ).different
        )
    assert wrong / runs <= 0.10


def test_a_small_difference_is_undecided_and_the_extra_length_would_show_it() -> None:
    rng = np.random.default_rng(6)
    decided_early, decided_late, factors = 0, 0, []
    for _ in range(30):
        arm, reference = paired(rng, 8, 10, 1.06)
        found = paired_ratio(Resampled.of(arm, QS, resamples=300), Resampled.of(reference, QS, resamples=300), 0.5)
        decided_early += bool(found.different)
        if found.more is not None:
            factors.append(found.more)
    more = float(np.median(factors))
    assert 1 < more < 30
    for _ in range(30):
        arm, reference = paired(rng, round(8 * more), 10, 1.06)
        late = paired_ratio(Resampled.of(arm, QS, resamples=300), Resampled.of(reference, QS, resamples=300), 0.5)
        decided_late += bool(late.different)
    assert decided_late > decided_early


@pytest.mark.parametrize(
    ("count", "more"),
    [pytest.param(0, None, id="none in common"), pytest.param(2, MIN_UNITS / 2, id="two units")],
)
def test_too_few_units_decide_nothing_and_say_how_many_are_needed(count: int, more: float | None) -> None:
    rng = np.random.default_rng(7)
    if count:
        arm, reference = paired(rng, count, 30, 5.0)
    else:
        arm, reference = Samples.of({(0, 0): [1.0]}), Samples.of({(1, 0): [1.0]})
    found = paired_ratio(Resampled.of(arm, QS), Resampled.of(reference, QS), 0.5)
    assert (found.low, found.high, found.different) == (None, None, None)
    assert found.more == more


def test_a_percentile_that_the_samples_cannot_bound_is_open_above_and_decides_nothing() -> None:
    rng = np.random.default_rng(8)
    arm, reference = paired(rng, 10, 15, 3.0)  # 150 samples: their p99 is all but their largest
    estimate = Resampled.of(arm, QS).estimates()[2]
    assert estimate.low is not None
    assert estimate.high is None
    found = paired_ratio(Resampled.of(arm, QS), Resampled.of(reference, QS), 0.99)
    assert found.different is None
    assert found.more == pytest.approx(needed_samples(0.99) / 150)
    assert paired_ratio(Resampled.of(arm, QS), Resampled.of(reference, QS), 0.95).different is True


@pytest.mark.parametrize(("q", "needed"), [(0.5, 6), (0.95, 72), (0.99, 368)])
def test_needed_samples(q: float, needed: int) -> None:
    assert needed_samples(q) == needed
    assert bounded_above(q, needed)
    assert not bounded_above(q, needed - 1)


def test_arms_that_lack_units_are_compared_over_those_that_both_have() -> None:
    rng = np.random.default_rng(9)
    arm, reference = paired(rng, 12, 30, 1.5)
    short = reference.only(reference.units[:8])
    found = paired_ratio(Resampled.of(arm, QS), Resampled.of(short, QS), 0.5)
    whole = paired_ratio(Resampled.of(arm.only(arm.units[:8]), QS), Resampled.of(short, QS), 0.5)
    assert found.units == 8
    assert found == whole


def test_a_rate_and_its_interval() -> None:
    rng = np.random.default_rng(10)
    covered = 0
    for _ in range(200):
        by_unit = {(number, 0): float(rng.poisson(20)) for number in range(12)}
        estimate = rate(by_unit, dict.fromkeys(by_unit, 10.0), resamples=300)
        assert estimate.value == pytest.approx(sum(by_unit.values()) / 120)
        covered += (estimate.low or 0) <= 2.0 <= (estimate.high or 0)
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize(
    ("value", "bounds", "more"),
    [
        pytest.param(1.2, (0.9, 1.6), (math.log(1.2 / 0.9) / math.log(1.2)) ** 2, id="above"),
        pytest.param(0.8, (0.6, 1.1), (math.log(1.1 / 0.8) / math.log(1 / 0.8)) ** 2, id="below"),
        pytest.param(1.001, (0.5, 2.0), None, id="not within reach"),
        pytest.param(1.0, (0.5, 2.0), None, id="no difference"),
    ],
)
def test_how_much_more(value: float, bounds: tuple[float, float], more: float | None) -> None:
    assert how_much_more(value, bounds) == (None if more is None else pytest.approx(more))


@pytest.mark.parametrize(
    ("rounds", "measured_s", "slices"),
    [
        pytest.param(12, 65, 1, id="enough blocks"),
        pytest.param(3, 65, 4, id="few blocks"),
        pytest.param(1, 65, 6, id="one block, slices not below 10 s"),
        pytest.param(1, 5, 1, id="a short block is not cut"),
    ],
)
def test_blocks_are_cut_where_there_are_few(rounds: int, measured_s: float, slices: int) -> None:
    assert slices_per_block(rounds, measured_s) == slices
