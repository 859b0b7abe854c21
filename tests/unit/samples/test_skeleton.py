from __future__ import annotations

import math

import pytest

from samples.skeleton import Pose, stride_shown


@pytest.mark.parametrize(
    ("yaw", "phase", "action"),
    [
        pytest.param(0.0, 1.0, "walking right", id="right"),
        pytest.param(0.6, 1.0, "walking right", id="right, turned a little"),
        pytest.param(math.pi / 2, 1.0, "walking towards the camera", id="towards"),
        pytest.param(math.pi, 1.0, "walking left", id="left"),
        pytest.param(1.5 * math.pi, 1.0, "walking away", id="away"),
        pytest.param(1.9 * math.pi, 1.0, "walking right", id="right from below a full turn"),
        pytest.param(math.pi, None, "standing", id="standing"),
    ],
)
def test_a_pose_names_its_action(yaw: float, phase: float | None, action: str) -> None:
    assert Pose(yaw, phase).action == action


@pytest.mark.parametrize("yaw", [0.0, math.pi], ids=["right", "left"])
def test_from_the_side_a_stride_shows_at_every_moment(yaw: float) -> None:
    assert min(stride_shown(Pose(yaw, step * math.pi / 10)) for step in range(20)) > 0.06


def test_from_behind_a_stride_hides_while_both_feet_are_down() -> None:
    assert stride_shown(Pose(1.5 * math.pi, math.pi / 2, pitch=0.02)) < 0.02
    assert stride_shown(Pose(1.5 * math.pi, math.pi / 2, pitch=0.4)) > 0.1


def test_who_stands_shows_no_stride() -> None:
    assert stride_shown(Pose(1.0, None)) == 0.0
