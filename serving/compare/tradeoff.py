"""The trade-off curve's points, from a comparison's summary."""

from __future__ import annotations

from serving.compare.figures import TradeOff
from serving.compare.summary import Summary
from serving.compare.words import CAMERA, CHAT, measured


def tradeoff_points(summary: Summary, group: str = "") -> list[TradeOff]:
    """One point an arm that has samples of both classes, budgets in order."""
    return [
        TradeOff(
            arm.arm.name, arm.classes[CAMERA].ttft.p95, arm.classes[CHAT].itl.p99, arm.arm.kind != "variant", group
        )
        for arm in sorted(measured(summary), key=lambda arm: arm.arm.budget or 0)
        if CAMERA in arm.classes and CHAT in arm.classes
    ]
