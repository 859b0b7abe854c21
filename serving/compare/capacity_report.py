"""The report's part on the capacity search: which rates held on each arm, and how near chat came to its objective."""

from __future__ import annotations

import plotly.graph_objects as go

from serving.compare import report_tables as tables
from serving.compare.capacity import ArmCapacity, Capacity
from serving.compare.figures import BAD_COLOUR, arm_colours, dressed, interval_bars, shown, time_axis
from serving.compare.report_tables import text
from serving.compare.words import NONE


def capacity_figure(found: Capacity) -> go.Figure | None:
    """The watched class's ITL p99 at each rate that was tried, a curve an arm; hollow points did not hold.

    Returns:
        None when no rate has a figure.
    """
    figure = go.Figure()
    colours = arm_colours([item.arm.name for item in found.arms])
    heights = [found.objective_ms]
    for item in found.arms:
        tried = sorted(
            (probe for probe in item.probes if probe.itl_p99_ms.value is not None), key=lambda probe: probe.rate_per_s
        )
        if not tried:
            continue
        colour = colours[item.arm.name]
        heights += [value for probe in tried for value in (probe.itl_p99_ms.value, probe.itl_p99_ms.high) if value]
        figure.add_trace(
            go.Scatter(
                x=[probe.rate_per_s for probe in tried],
                y=[probe.itl_p99_ms.value for probe in tried],
                error_y=interval_bars([probe.itl_p99_ms for probe in tried], colour),
                mode="lines+markers",
                line={"color": colour, "width": 1.5},
                marker={
                    "size": 9,
                    "color": colour,
                    "symbol": ["circle" if probe.holds else "circle-open" for probe in tried],
                },
                name=shown(item.arm.name),
                customdata=[shown(probe.why or "holds") for probe in tried],
                hovertemplate="%{x:.3f} a second: %{y:,.0f} ms<br>%{customdata}<extra></extra>",
            )
        )
    if not figure.data:
        return None
    figure.add_hline(y=found.objective_ms, line={"color": BAD_COLOUR, "width": 1, "dash": "dot"})
    figure.update_xaxes(title=f"{found.raised} requests a second", rangemode="tozero")
    figure.update_yaxes(title=f"{found.watched} ITL p99", **time_axis(heights))
    return dressed(figure)


def capacity_table(found: Capacity) -> str:
    """One row an arm: the highest rate that held, the lowest that did not, and why that one did not."""
    rows = [[text(item.arm.name), *_row(item)] for item in found.arms]
    head = ["", f"{found.raised} requests a second that hold", "that do not", "why not", "rates tried"]
    return tables.table(head, rows, name="Capacity")


def _row(item: ArmCapacity) -> list[str]:
    if item.arm.reason is not None:
        return [f"<span class=bad>refused</span><small class=wide>{text(item.arm.reason)}</small>"]
    slowest = min((probe for probe in item.probes if not probe.holds), key=lambda probe: probe.rate_per_s, default=None)
    invalid = [probe.invalid for probe in item.probes if probe.invalid]
    doubt = f"<small class=wide>{len(invalid)} with a client that lagged</small>" if invalid else ""
    return [
        _rate(item.holds_per_s),
        _rate(item.fails_per_s),
        f"<span class=wrapped>{text(slowest.why)}</span>" if slowest else NONE,
        f"{len(item.probes)}{doubt}",
    ]


def _rate(rate_per_s: float | None) -> str:
    return NONE if rate_per_s is None else f"{rate_per_s:.3f}"
