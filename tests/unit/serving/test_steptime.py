from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.stepsource import fit_from
from serving.steptime import FEATURE_NAMES, FitError, StepTime, fit_steps

TRUE = {"fixed": 0.03, "decode_tokens": 2e-4, "prefill_tokens": 1.75e-3, "prefill_pairs": 2e-7, "encoder_items": 0.02}


def table(count: int, noise: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    columns = {
        "decode_tokens": rng.integers(0, 16, count).astype(float),
        "prefill_tokens": rng.choice([0, 0, 64, 256], count).astype(float),
        "encoder_items": rng.choice([0, 0, 0, 9], count).astype(float),
    }
    columns["prefill_pairs"] = columns["prefill_tokens"] * rng.integers(100, 2000, count)
    columns["decode_tokens"][columns["prefill_tokens"] == 0] += 1
    duration = sum(TRUE[name] * columns[name] for name in columns) + TRUE["fixed"]
    return {**columns, "duration_s": duration * (1 + noise * rng.standard_normal(count))}


def test_exact_steps_give_their_costs_back() -> None:
    fitted = fit_steps(table(500), source="test")
    for name, value in zip(FEATURE_NAMES, fitted.linear, strict=True):
        assert value == pytest.approx(TRUE.get(name, 0.0), rel=1e-6, abs=1e-12), name
    assert fitted.quality is not None
    assert fitted.quality.median_error == pytest.approx(0, abs=1e-9)
    assert fitted.quality.steps == 500
    assert set(fitted.quality.unused) == {"decode_context", "prefill_context", "encoder_tokens"}


def test_the_error_is_that_of_steps_left_out() -> None:
    noisy = fit_steps(table(2000, noise=0.05), source="test").quality
    assert noisy is not None
    assert 0.02 < noisy.median_error < 0.05  # the median of a normal's size is 0.67 of its deviation
    assert 0.07 < noisy.p95_error < 0.13
    assert noisy.total_error < 0.02


def test_what_scatters_is_drawn_again_with_its_own_width() -> None:
    """Short steps scatter by 20 %, long ones by 2 %; the draws of each band do the same, around its true mean."""
    rng = np.random.default_rng(2)
    tokens = rng.choice([16.0, 1600.0], 4000)
    duration = 1e-3 * tokens * (1.05 + np.where(tokens > 100, 0.02, 0.2) * rng.standard_normal(4000))
    fitted = fit_steps({"prefill_tokens": tokens, "duration_s": duration}, source="test")
    spread = fitted.spread()
    assert np.array_equal(spread, fitted.spread(0)) and not np.array_equal(spread, fitted.spread(1))
    assert spread[0, 0] == 0 and (np.diff(spread[:, 0]) >= 0).all()
    for size, width in ((16.0, 0.2), (1600.0, 0.02)):
        expected_s = fitted.seconds([1, 0, size, 0, 0, 0, 0, 0])
        band = int(np.searchsorted(spread[:, 0], expected_s * (1 + 1e-9), side="right")) - 1
        drawn = expected_s * spread[band, 1:] / (1e-3 * size)
        assert drawn.mean() == pytest.approx(1.05, rel=0.02)
        assert drawn.std() == pytest.approx(width, rel=0.2)


def test_exact_steps_do_not_scatter() -> None:
    assert np.allclose(fit_steps(table(500), source="test").spread()[:, 1:], 1)
    assert StepTime((0.01,) * len(FEATURE_NAMES), source="test").spread().tolist() == [[0.0, 1.0]]


def test_costs_are_never_negative() -> None:
    data = table(500, noise=0.3, seed=4)
    data["decode_context"] = -data["duration_s"] + 10
    assert min(fit_steps(data, source="test").linear) >= 0


def test_idle_and_broken_rows_are_left_out() -> None:
    data = table(100)
    data["duration_s"][:10] = np.nan
    data["decode_tokens"][10:20] = data["prefill_tokens"][10:20] = 0
    quality = fit_steps(data, source="test").quality
    assert quality is not None and quality.steps == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"duration_s": None}, "no column duration_s", id="no durations"),
        pytest.param({}, "30 or more", id="too few"),
    ],
)
def test_too_little_is_refused(change: dict[str, None], message: str) -> None:
    data = {name: column for name, column in table(10).items() if name not in change}
    with pytest.raises(FitError, match=message):
        fit_steps(data, source="test")


def test_seconds_take_the_larger_of_compute_and_memory() -> None:
    model = StepTime(
        linear=(1.0,) + (0.0,) * 7, compute=(0, 0, 0.5, 0, 0, 0, 0, 0), memory=(2.0,) + (0.0,) * 7, source="t"
    )
    assert model.seconds((1, 0, 1, 0, 0, 0, 0, 0)) == 3.0
    assert model.seconds((1, 0, 10, 0, 0, 0, 0, 0)) == 6.0


def test_a_comparisons_parquet_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({**table(200), "unrelated": np.zeros(200)}), tmp_path / "steps.parquet")
    fitted = fit_from(tmp_path)
    assert fitted.linear[0] == pytest.approx(TRUE["fixed"])
    assert "steps.parquet" in fitted.source


def test_a_servers_log(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    lines = ["INFO something else"]
    for index in range(60):
        tokens = 64 * (index % 3)
        elapsed = 30 + 1.75 * tokens + 0.5 * 4
        lines.append(
            f"INFO Iteration({index}): {min(1, tokens)} context requests, {tokens} context tokens, 4 generation "
            f"requests, 4 generation tokens, iteration elapsed time: {elapsed:.2f} ms"
        )
    log.write_text("\n".join(lines))
    fitted = fit_from(log)
    assert fitted.seconds((1, 4, 128, 0, 0, 0, 0, 0)) == pytest.approx(0.256, rel=1e-3)
    assert fitted.quality is not None and "prefill_pairs" in fitted.quality.unused


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("nothing.log", None, "is not there", id="no such file"),
        pytest.param("other.log", "hello", "log_steps", id="a log without steps"),
        pytest.param("bad.parquet", "hello", "no parquet", id="not parquet"),
    ],
)
def test_files_that_hold_no_steps(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FitError, match=message):
        fit_from(tmp_path / name)
