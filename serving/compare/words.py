"""What a comparison found, in words and as plain text: the two sentences first, and how figures are written."""

from __future__ import annotations

from collections.abc import Sequence

from serving.compare.summary import ArmResult, ClassResult, Figure, RatioResult, Summary

CAMERA, CHAT = "camera", "chat"
NONE = "–"


def duration(value_ms: float | None) -> str:
    """Milliseconds as people write them: `31 ms`, `2.17 s`."""
    if value_ms is None:
        return NONE
    if value_ms < 1:
        return f"{value_ms:.2f} ms"
    if value_ms < 10:
        return f"{value_ms:.1f} ms"
    return f"{value_ms:,.0f} ms" if value_ms < 1000 else f"{value_ms / 1000:,.2f} s"


def run_time(seconds: float) -> str:
    """Seconds as people write them: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def span(figure: Figure) -> str:
    """A figure's interval: `29 to 33 ms`; `from 29 ms` where its upper end cannot be told."""
    if figure.low is None:
        return ""
    if figure.high is None:
        return f"from {duration(figure.low)}"
    low, high = duration(figure.low), duration(figure.high)
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(f' {unit}')} to {high}"


def times(ratio: RatioResult) -> str:
    """A ratio with its interval: `× 3.1 (2.4 to 4.0)`."""
    if ratio.ratio is None:
        return NONE
    bounds = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low is not None and ratio.high is not None else ""
    return f"× {ratio.ratio:.2f}{bounds}"


def told(ratio: RatioResult) -> str:
    """Whether two arms are different, or how much longer to run until that can be told."""
    if ratio.different:
        return "different"
    if ratio.more_s is not None and ratio.more is not None and ratio.more > 1:
        return f"not sure yet: about {run_time(ratio.more_s)} more would tell"
    return "cannot be told" if ratio.ratio is None or ratio.low is None else "no difference seen"


def listed(names: Sequence[str]) -> str:
    """`64`, `64 and 128`, `64, 128 and 256`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def class_names(summary: Summary) -> list[str]:
    """The classes that have figures: chat and camera first."""
    names = list(dict.fromkeys(name for arm in summary.arms for name in arm.classes))
    return sorted(names, key=lambda name: (name != CHAT, name != CAMERA))


def measured(summary: Summary) -> list[ArmResult]:
    """The arms that have samples."""
    return [arm for arm in summary.arms if arm.classes]


def verdict(summary: Summary) -> str:
    """The answer in two sentences."""
    arms = measured(summary)
    if not arms:
        return f"Nothing was measured: {_why_nothing(summary)}. There is nothing to compare."
    return f"{_objectives(summary, arms)} {_price(summary, arms)}"


def _why_nothing(summary: Summary) -> str:
    refused = [arm.arm.name for arm in summary.arms if arm.arm.reason is not None]
    left_out = [reason for arm in summary.arms for reason in arm.invalid.values()]
    if len(refused) == len(summary.arms):
        return f"the server refused {listed(refused)}"
    if left_out:
        which = "its only block is" if len(left_out) == 1 else f"all {len(left_out)} blocks are"
        return f"{which} left out ({left_out[0]})"
    return "no block has ended yet"


def _objectives(summary: Summary, arms: Sequence[ArmResult]) -> str:
    met, missed, unsure = (
        [arm.arm.name for arm in arms if arm.meets_all == answer] for answer in ("yes", "no", "undecided")
    )
    which = _which(summary, arms)
    if not met and not unsure:
        return f"None of {listed(missed)} meets every objective{which}."
    if not met and not missed:
        return f"Whether {listed(unsure)} {_verb(unsure, 'meets', 'meet')} every objective is not sure yet."
    parts = []
    if met:
        parts.append(f"{listed(met)} {_verb(met, 'meets', 'meet')} every objective")
    if missed:
        what = "" if met else " meet every objective"
        parts.append(f"{listed(missed)} {_verb(missed, 'does', 'do')} not{what}{which}")
    if unsure:
        parts.append(f"for {listed(unsure)} it is not sure yet")
    return _sentence("; ".join(parts))


def _which(summary: Summary, arms: Sequence[ArmResult]) -> str:
    """Which objectives no arm meets, for the reader who has to change something."""
    missed = []
    for name in summary.objectives:
        results = [arm.classes[name] for arm in arms if name in arm.classes]
        if results and all(result.meets_ttft == "no" for result in results):
            missed.append(f"{name} TTFT p95")
        if results and all(result.meets_itl == "no" for result in results):
            missed.append(f"{name} ITL p99")
    return f" (no arm meets that of {listed(missed)})" if missed else ""


def _price(summary: Summary, arms: Sequence[ArmResult]) -> str:
    """What the ends of the scale cost each class."""
    budgets = sorted((arm for arm in arms if arm.arm.budget is not None), key=lambda arm: arm.arm.budget or 0)
    first, last = (budgets[0], budgets[-1]) if len(budgets) > 1 else (arms[0], arms[-1])
    if first is last:
        return _alone(first)
    parts = []
    for name, figure, percentile in ((CHAT, "itl", "p99"), (CAMERA, "ttft", "p95")):
        before, after = (_value(arm.classes.get(name), figure, percentile) for arm in (first, last))
        if before is None or after is None:
            continue
        words = f"{name}'s {figure.upper()} {percentile} goes from {duration(before)} to {duration(after)}"
        ratio = ratio_of(summary, name, figure, percentile, last.arm.name, first.arm.name)
        parts.append(words + (f" ({told(ratio)})" if ratio is not None and not ratio.different else ""))
    if not parts:
        return f"From {first.arm.name} to {last.arm.name} there are no samples to compare."
    return f"From {first.arm.name} to {last.arm.name} {' and '.join(parts)}."


def _alone(arm: ArmResult) -> str:
    parts = []
    for name, figure, percentile in ((CHAT, "itl", "p99"), (CAMERA, "ttft", "p95")):
        value = _value(arm.classes.get(name), figure, percentile)
        if value is not None:
            parts.append(f"{name}'s {figure.upper()} {percentile} is {duration(value)}")
    return _sentence(f"with {arm.arm.name} {' and '.join(parts)}") if parts else f"{arm.arm.name} has no samples."


def ratio_of(summary: Summary, name: str, figure: str, percentile: str, arm: str, reference: str) -> RatioResult | None:
    """How one arm's figure compares to another's, whichever way round it was taken; None where it was not."""
    for ratio in summary.ratios:
        if (ratio.traffic_class, ratio.figure, ratio.percentile) != (name, figure, percentile):
            continue
        if (ratio.arm, ratio.reference) == (arm, reference):
            return ratio
        if (ratio.arm, ratio.reference) == (reference, arm):
            return _turned(ratio)
    return None


def _turned(ratio: RatioResult) -> RatioResult:
    def inverse(value: float | None) -> float | None:
        return 1 / value if value else None

    return ratio.model_copy(
        update={
            "arm": ratio.reference,
            "reference": ratio.arm,
            "ratio": inverse(ratio.ratio),
            "low": inverse(ratio.high),
            "high": inverse(ratio.low),
        }
    )


def _value(result: ClassResult | None, figure: str, percentile: str) -> float | None:
    if result is None:
        return None
    pool = result.itl if figure == "itl" else result.ttft
    found: Figure = getattr(pool, percentile)
    return found.value


def _verb(names: Sequence[str], one: str, many: str) -> str:
    return one if len(names) == 1 else many


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."
