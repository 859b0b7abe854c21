"""How the figures stand and walk: a jointed skeleton in any direction, seen by a camera that looks down a little.

Lengths are fractions of the person's height. A figure faces `yaw` radians from the screen's right: 0 walks right,
pi/2 comes towards the camera, pi walks left, 3*pi/2 goes away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Point = tuple[float, float]
_KNEE_AND_ANKLE = (1, 2)  # where they are in a leg: hip, knee, ankle, toe


@dataclass(frozen=True, slots=True)
class Pose:
    """How one person stands at one moment. `phase` is the place in the gait in radians; None stands still."""

    yaw: float
    phase: float | None
    pitch: float = 0.15  # the camera's tilt down, radians
    stance: float = 0.0  # of a standing person: -1 to 1, how the arms hang

    @property
    def action(self) -> str:
        """`standing`, or `walking left`, `right`, `towards the camera` or `away`."""
        if self.phase is None:
            return "standing"
        quarter = round(self.yaw / (math.pi / 2)) % 4
        return ("walking right", "walking towards the camera", "walking left", "walking away")[quarter]


class Skeleton:
    """The joints as screen points (x right, y down, origin between the soles); `girth` is a width factor, about 1."""

    def __init__(self, girth: float, pose: Pose) -> None:
        self.cos, self.sin = math.cos(pose.yaw), math.sin(pose.yaw)
        self.tilt = pose.pitch
        self.girth = girth
        swing, bob = 0.0, 0.0
        phase = pose.phase
        if phase is not None:
            swing = 0.46
            bob = 0.012 * math.cos(2 * phase)
        self.hip = 0.525 - (0.012 - bob if phase is not None else 0.0)
        self.legs, self.arms, self.depths = [], [], []
        for sign in (1.0, -1.0):  # the person's left, then right
            angle = swing * math.sin(phase) * sign if phase is not None else 0.05 * sign
            lift = 0.75 * max(0.0, -math.cos(phase) * sign) if phase is not None else 0.03
            hip = (0.0, self.hip, 0.05 * self.girth * sign)
            knee = (hip[0] + 0.25 * math.sin(angle), hip[1] - 0.25 * math.cos(angle), hip[2])
            lower = angle - lift
            ankle = (knee[0] + 0.245 * math.sin(lower), knee[1] - 0.245 * math.cos(lower), hip[2])
            toe = (ankle[0] + 0.085, max(ankle[1] - 0.015, 0.012), ankle[2] * 1.25)
            self.legs.append([self.at(*joint) for joint in (hip, knee, ankle, toe)])
            bend = -0.8 * angle if phase is not None else 0.1 + 0.25 * pose.stance * sign
            spread = 0.03 if phase is not None else 0.02 + 0.02 * abs(pose.stance)
            shoulder = (0.0, self.hip + 0.285, 0.105 * self.girth**0.5 * sign)
            side = shoulder[2] + spread * sign
            elbow = (0.165 * math.sin(bend), shoulder[1] - 0.165 * math.cos(bend), side)
            fore = bend + 0.35
            hand = (elbow[0] + 0.155 * math.sin(fore), elbow[1] - 0.155 * math.cos(fore), side)
            self.arms.append([self.at(*joint) for joint in (shoulder, elbow, hand)])
            self.depths.append(-sign * self.cos)  # larger is nearer to the camera
        self.neck = self.at(0.01, self.hip + 0.32, 0.0)
        self.head = self.at(0.018, self.hip + 0.405, 0.0)
        self.chest = self.at(0.0, self.hip + 0.285, 0.0)
        self.pelvis = self.at(0.0, self.hip, 0.0)

    def at(self, forward: float, up: float, left: float) -> Point:
        """A point of the body on the screen."""
        depth = forward * self.sin - left * self.cos
        return forward * self.cos + left * self.sin, -up * math.cos(self.tilt) + depth * math.sin(self.tilt)

    def half_width(self, across: float, deep: float) -> float:
        """Half of the outline's width of a flat body: `across` seen from the front, `deep` from the side."""
        return self.girth * math.hypot(across * self.sin, deep * self.cos)


def stride_shown(pose: Pose) -> float:
    """How far the legs of a walker are, on the screen, from those of somebody who stands there.

    Of ankles and knees the pair that differs more; small for somebody who comes or goes with both feet down.
    """
    walking, standing = Skeleton(1.0, pose), Skeleton(1.0, replace(pose, phase=None))
    apart = [_apart(walking, joint) for joint in _KNEE_AND_ANKLE]
    before = [_apart(standing, joint) for joint in _KNEE_AND_ANKLE]
    return max(math.dist(now, then) for now, then in zip(apart, before, strict=True))


def _apart(body: Skeleton, joint: int) -> Point:
    (left_x, left_y), (right_x, right_y) = (leg[joint] for leg in body.legs)
    return left_x - right_x, left_y - right_y
