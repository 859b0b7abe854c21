"""A comparison's summary as a table in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serving.compare.summary import ClassResult, Figure, Pool, RatioResult, Summary


def show_summary(console: Console, summary: Summary, folder: Path) -> None:
    """Print what each arm cost each class, and which arms differ."""
    console.print()
    for name, objective in summary.objectives.items():
        table = Table(
            box=SIMPLE_HEAD,
            title=f"{name}: TTFT p95 within {objective.ttft_p95_ms:g} ms, ITL p99 within {objective.itl_p99_ms:g} ms",
            title_justify="left",
        )
        for column in (
            "arm",
            "requests",
            "TTFT p50",
            "p95",
            "p99",
            "ITL p50",
            "p95",
            "p99",
            "max",
            "stalls",
            "goodput/s",
        ):
            table.add_column(column, justify="left" if column == "arm" else "right")
        for arm in summary.arms:
            if name in arm.classes:
                table.add_row(arm.arm.name, *_cells(arm.classes[name]))
            elif arm.arm.reason is not None:
                table.add_row(arm.arm.name, "refused")
        console.print(table)
    console.print("Milliseconds, with 95 % intervals; open where there are too few samples to bound it.")
    for arm in summary.arms:
        if arm.arm.reason is not None:
            console.print(f"{arm.arm.name} is refused: {arm.arm.reason}", soft_wrap=True)
            continue
        for number, reason in arm.invalid.items():
            console.print(f"{arm.arm.name}: block {number} is left out: {reason}", soft_wrap=True)
        if not arm.classes:
            console.print(f"{arm.arm.name}: no block that counts", soft_wrap=True)
            continue
        hits = "" if arm.prefix_hit_rate is None else f", prefix cache hit rate {arm.prefix_hit_rate:.0%}"
        pictures = "" if arm.multimodal_hit_rate is None else f", picture cache {arm.multimodal_hit_rate:.0%}"
        console.print(
            f"{arm.arm.name}: {_shown(arm.output_tokens_per_s, 1)} output and "
            f"{_shown(arm.prompt_tokens_per_s, 0)} prompt tokens/s, objectives met: {arm.meets_all}{hits}{pictures}",
            soft_wrap=True,
        )
    _differences(console, summary.ratios)
    for note in summary.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    console.print(f"In {folder}: report.html, summary.json, requests.parquet, steps.parquet", soft_wrap=True)


def _differences(console: Console, ratios: list[RatioResult]) -> None:
    shown = [ratio for ratio in ratios if (ratio.figure, ratio.percentile) in {("ttft", "p95"), ("itl", "p99")}]
    if not shown:
        return
    table = Table(box=SIMPLE_HEAD, title="Side by side, same load", title_justify="left")
    for column in ("figure", "arms", "ratio", "different"):
        table.add_column(column, justify="left")
    for ratio in shown:
        if ratio.ratio is None:
            continue
        bounds = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
        if ratio.different is None or not ratio.different:
            verdict = "not shown"
            if ratio.more_s is not None:
                verdict += f"; about {ratio.more_s / 60:,.0f} min more to tell"
        else:
            verdict = "yes"
        table.add_row(
            f"{ratio.traffic_class} {ratio.figure.upper()} {ratio.percentile}",
            f"{ratio.arm} / {ratio.reference}",
            f"{ratio.ratio:.2f}{bounds}",
            verdict,
        )
    console.print(table)


def _cells(result: ClassResult) -> list[str]:
    return [
        f"{result.done}/{result.requests}",
        *(_shown(figure) for figure in _figures(result.ttft)),
        *(_shown(figure) for figure in _figures(result.itl)),
        "-" if result.itl.max_ms is None else f"{result.itl.max_ms:,.0f}",
        str(result.stalls),
        _shown(result.goodput_per_s, 2),
    ]


def _figures(pool: Pool) -> list[Figure]:
    return [pool.p50, pool.p95, pool.p99]


def _shown(figure: Figure, digits: int = 0) -> str:
    if figure.value is None:
        return "-"
    text = f"{figure.value:,.{digits}f}"
    if figure.low is None and figure.high is None:
        return text
    low = "" if figure.low is None else f"{figure.low:,.{digits}f}"
    high = "" if figure.high is None else f"{figure.high:,.{digits}f}"
    return f"{text} [{low}-{high}]"
