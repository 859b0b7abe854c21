from __future__ import annotations

import numpy as np
import pytest

from samples.training.evaluate_detector import average_precision, matched, overlaps


def boxes(*rows: tuple[float, float, float, float]) -> np.ndarray:
    return np.asarray(rows, np.float32).reshape(-1, 4)


def test_overlaps_are_intersection_over_union() -> None:
    table = overlaps(boxes((0, 0, 10, 10)), boxes((0, 0, 10, 10), (5, 0, 15, 10), (20, 20, 30, 30)))
    assert table[0] == pytest.approx([1.0, 1 / 3, 0.0], abs=1e-5)


def test_each_person_is_found_once_by_the_surest_box() -> None:
    found = boxes((0, 0, 10, 10), (0, 0, 10, 9), (40, 40, 50, 50))
    right = matched(found, np.array([0.6, 0.9, 0.8], np.float32), boxes((0, 0, 10, 10)))
    assert right.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("right", "total", "expected"),
    [
        pytest.param([True, True], 2, 1.0, id="all found"),
        pytest.param([True, True], 4, 0.5, id="half missed"),
        pytest.param([False, True], 1, 0.5, id="a false one first"),
        pytest.param([True, False, True], 2, 0.5 + 0.5 * 2 / 3, id="a false one between"),
        pytest.param([False, False], 3, 0.0, id="none right"),
        pytest.param([], 3, 0.0, id="nothing found"),
    ],
)
def test_average_precision(right: list[bool], total: int, expected: float) -> None:
    scores = np.linspace(0.9, 0.1, len(right)).astype(np.float32)
    assert average_precision(np.asarray(right, bool), scores, total) == pytest.approx(expected)
