"""What a reader of a comparison's figures must know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from serving.compare.statistics import needed_samples

if TYPE_CHECKING:
    from serving.compare.summary import ArmResult
    from serving.compare.tables import BlockData

# The server's page is some steps old when it is read.
_COUNT_SLACK = 2
_COUNT_SHARE = 0.25


def notes_on(blocks: Sequence[BlockData], arms: Sequence[ArmResult]) -> list[str]:
    """One sentence for each thing that limits what the figures say."""
    notes = [*_few(arms)]
    if any(block.info.invalid is not None for block in blocks):
        notes.append("blocks are left out in which the client's own lag distorted the figures")
    for arm in arms:
        notes += _waits(arm)
    for block in blocks:
        info = block.info
        difference = info.count_difference_p95 or 0
        if difference > max(_COUNT_SLACK, _COUNT_SHARE * (info.ours_max or 0)):
            notes.append(
                f"block {info.number}: the server's count of requests differs from ours by {difference:.0f}: its front "
                "end has not passed them on yet, or somebody else is using it"
            )
    return notes


def _few(arms: Sequence[ArmResult]) -> list[str]:
    counts = [result.requests for arm in arms for result in arm.classes.values()]
    fewest = min(counts, default=0)
    short = {name: needed_samples(q) for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    short = {name: needed for name, needed in short.items() if 0 < fewest < needed}
    if not short:
        return []
    needs = ", ".join(f"{name} {needed}" for name, needed in short.items())
    return [f"TTFT has no upper bound with {fewest} requests of a class on an arm; needed: {needs}"]


def _waits(arm: ArmResult) -> list[str]:
    notes = []
    for name, result in arm.classes.items():
        if result.unanswered:
            notes.append(
                f"{arm.arm.name}: {result.unanswered} {name} requests had no token when the drain ended, and count "
                "with the time that they had waited: their TTFT is longer than the figures say"
            )
        if result.behind_turn:
            notes.append(
                f"{arm.arm.name}: {result.behind_turn} {name} requests waited {result.behind_turn_s:.0f} s in all for "
                "the answer before theirs, which is part of their TTFT"
            )
        if result.behind_cap:
            notes.append(
                f"{arm.arm.name}: {result.behind_cap} {name} requests waited {result.behind_cap_s:.0f} s in all behind "
                "the cap on requests at once, which is part of their TTFT"
            )
    return notes
