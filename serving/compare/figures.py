"""The plots of a comparison: the trade-off curve, distributions, and step duration against step tokens.

Every function gives a plotly figure without a background of its own, readable on light and on dark. What is drawn is
bounded; where points were left out the figure's title says so.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from serving.compare.samples import MS, figure_samples
from serving.compare.summary import Figure
from serving.compare.tables import RequestRow, StepRow

Floats = npt.NDArray[np.float64]

CLASS_COLOURS = {"camera": "#e08a1e", "chat": "#3d88e6", "document": "#9a6cf0"}
OTHER_COLOUR = "#7a8794"
BAD_COLOUR = "#e0424d"
GOOD_COLOUR = "#25a05f"
GRID = "rgba(128,140,152,0.28)"
MOST_CURVE_POINTS = 400
MOST_STEPS = 2_400
_TAIL_POINTS = 60
_HEIGHT_PX = 420
_FAR_APART = 8.0


@dataclass(frozen=True, slots=True)
class TradeOff:
    """One point of the trade-off curve, milliseconds; drawn only where both figures have a value.

    Attributes:
        ordered: A budget, which the curve joins in order; a variant stands by itself.
        group: Of which comparison; one curve each.
    """

    name: str
    camera_ttft_p95: Figure
    chat_itl_p99: Figure
    ordered: bool = True
    group: str = ""


def shown(text: str) -> str:
    """Text for a plot, which reads some HTML: every character as it is."""
    return html.escape(text, quote=True)


def arm_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each arm, in order from violet to yellow."""
    places = np.linspace(0.3, 0.88, max(2, len(names)))
    return dict(zip(names, sample_colorscale("Plasma", [float(place) for place in places]), strict=False))


def dressed(figure: go.Figure, *, height_px: int = _HEIGHT_PX) -> go.Figure:
    """Colours that suit a light and a dark page, and margins for a laptop."""
    figure.update_layout(
        template="none",
        height=height_px,
        margin={"l": 64, "r": 24, "t": 48, "b": 52},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#7a8794"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"size": 12}},
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True, title={"standoff": 10})
    return figure


def headed(figure: go.Figure, words: str) -> go.Figure:
    """The figure with one line of text above its legend."""
    figure.update_layout(
        title={"text": shown(words), "font": {"size": 13}, "x": 0, "xref": "container", "y": 1, "yref": "container",
               "xanchor": "left", "yanchor": "top", "pad": {"l": 14, "t": 12}},
        margin={"t": 76},
    )  # fmt: skip
    return figure


def log_ticks(values_ms: Sequence[float]) -> dict[str, object]:
    """A logarithmic axis of times, its marks with their units; few enough for a third of a laptop's width."""
    least, most = math.log10(min(values_ms)), math.log10(max(values_ms))
    steps = (1, 2, 5) if most - least < 1.2 else (1, 3) if most - least < 3 else (1,)
    marks = [step * 10.0**power for power in range(math.floor(least), math.ceil(most) + 1) for step in steps]
    return {"type": "log", "tickvals": marks, "ticktext": [_mark(value) for value in marks], "tickangle": 0}


def linear_ticks(values_ms: Sequence[float]) -> dict[str, object]:
    """A linear axis of times, its marks with their units."""
    most = max(values_ms)
    raw = most / 7
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    marks = [step * number for number in range(9)]
    return {"type": "linear", "tickvals": marks, "ticktext": [_mark(value) for value in marks], "tickangle": 0}


def _mark(value_ms: float) -> str:
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"


def tradeoff_figure(
    points: Sequence[TradeOff], *, ttft_slo_ms: float | None, itl_slo_ms: float | None
) -> go.Figure | None:
    """Camera TTFT p95 against chat ITL p99, one point an arm with its intervals, and the box of both objectives.

    Returns:
        None when no arm has both figures.
    """
    drawn = [point for point in points if point.camera_ttft_p95.value and point.chat_itl_p99.value]
    if not drawn:
        return None
    figure = go.Figure()
    xs = [value for point in drawn for value in _values(point.camera_ttft_p95)] + [ttft_slo_ms or 0]
    ys = [value for point in drawn for value in _values(point.chat_itl_p99)] + [itl_slo_ms or 0]
    if ttft_slo_ms is not None and itl_slo_ms is not None:
        left, bottom = (0.4 * min(value for value in values if value > 0) for values in (xs, ys))
        figure.add_trace(
            go.Scatter(
                x=[left, ttft_slo_ms, ttft_slo_ms, left, left],
                y=[bottom, bottom, itl_slo_ms, itl_slo_ms, bottom],
                fill="toself",
                fillcolor="rgba(37,160,95,0.13)",
                line={"color": GOOD_COLOUR, "width": 1, "dash": "dot"},
                mode="lines",
                name="both objectives are met",
                hoverinfo="skip",
            )
        )
    groups = list(dict.fromkeys(point.group for point in drawn))
    colours = arm_colours(groups) if len(groups) > 1 else dict.fromkeys(groups, CLASS_COLOURS["chat"])
    for group in groups:
        for ordered in (True, False):
            chosen = [point for point in drawn if point.group == group and point.ordered == ordered]
            if chosen:
                figure.add_trace(_curve(chosen, colours[group], ordered=ordered))
    figure.update_xaxes(title="camera TTFT p95", **time_axis(xs))
    figure.update_yaxes(title="chat ITL p99", **time_axis(ys))
    dressed(figure)
    figure.update_layout(margin={"r": 80})  # room for the last point's name
    return figure


def _curve(points: Sequence[TradeOff], colour: str, *, ordered: bool) -> go.Scatter:
    name = "budgets, in tokens of a step" if ordered else "variants"
    return go.Scatter(
        x=[point.camera_ttft_p95.value for point in points],
        y=[point.chat_itl_p99.value for point in points],
        error_x=interval_bars([point.camera_ttft_p95 for point in points], colour),
        error_y=interval_bars([point.chat_itl_p99 for point in points], colour),
        mode="lines+markers+text" if ordered else "markers+text",
        text=[shown(point.name) for point in points],
        textposition="top right",
        textfont={"size": 13},
        cliponaxis=False,
        line={"color": colour, "width": 1.5},
        marker={"size": 9, "color": colour, "symbol": "circle" if ordered else "diamond"},
        name=shown(f"{points[0].group}: {name}" if points[0].group else name),
        customdata=[[_range(point.camera_ttft_p95), _range(point.chat_itl_p99)] for point in points],
        hovertemplate="%{text}<br>camera TTFT p95 %{x:,.0f} ms %{customdata[0]}<br>"
        "chat ITL p99 %{y:,.0f} ms %{customdata[1]}<extra></extra>",
    )


def _range(figure: Figure) -> str:
    if figure.low is None:
        return "(no interval yet)"
    return f"({figure.low:,.0f} to {figure.high:,.0f})" if figure.high is not None else f"({figure.low:,.0f} to ?)"


def interval_bars(figures: Sequence[Figure], colour: str) -> dict[str, object]:
    """Error bars; an end that cannot be told is not drawn."""

    def reach(end: float | None, value: float | None) -> float:
        return 0.0 if end is None or value is None else abs(end - value)

    return {
        "type": "data",
        "symmetric": False,
        "array": [reach(item.high, item.value) for item in figures],
        "arrayminus": [reach(item.low, item.value) for item in figures],
        "color": colour,
        "thickness": 1,
        "width": 3,
    }


def _values(figure: Figure) -> list[float]:
    return [value for value in (figure.value, figure.low, figure.high) if value is not None and value > 0]


def time_axis(values: Sequence[float]) -> dict[str, object]:
    """An axis for these times, milliseconds: logarithmic where they are far apart, so that small ones can be told."""
    positive = [value for value in values if value > 0]
    far = max(positive) > _FAR_APART * min(positive)
    return log_ticks(positive) if far else linear_ticks(positive)


def thinned_curve(values: Sequence[float] | Floats) -> tuple[Floats, Floats]:
    """An ECDF of at most `MOST_CURVE_POINTS` points: the sorted values and the share at or below each.

    Where there are more values, points are spread evenly over the shares, and the largest values are all kept: that is
    where stalls are.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    count = len(ordered)
    share = np.arange(1, count + 1) / max(1, count)
    if count <= MOST_CURVE_POINTS:
        return ordered, share
    even = np.linspace(0, count - 1 - _TAIL_POINTS, MOST_CURVE_POINTS - _TAIL_POINTS).round().astype(np.int64)
    kept = np.concatenate([even, np.arange(count - _TAIL_POINTS, count)])
    return ordered[kept], share[kept]


def distribution_figure(
    requests: Mapping[str, Sequence[RequestRow]],
    traffic_class: str,
    *,
    ttft_slo_ms: float | None,
    itl_slo_ms: float | None,
) -> go.Figure | None:
    """One class, one curve an arm: ECDF of TTFT and of ITL, and the share of gaps longer than a time.

    Args:
        requests: The counted rows, by arm.
        ttft_slo_ms, itl_slo_ms: The objectives, as lines.

    Returns:
        None when no arm has a sample.
    """  # fmt: skip
    figure = make_subplots(cols=3, subplot_titles=("TTFT", "ITL", "ITL: share of gaps at least so long"))
    colours = arm_colours(list(requests))
    left_out = 0
    seen: dict[int, list[float]] = {1: [], 2: []}
    for arm, rows in requests.items():
        mine = [row for row in rows if row.traffic_class == traffic_class]
        ttft, gaps = ([value * MS for row in mine for value in figure_samples(row, name)] for name in ("ttft", "itl"))
        for column, values in ((1, ttft), (2, gaps), (3, gaps)):
            if not values:
                continue
            x, share = thinned_curve(values)
            if column in seen:
                left_out += len(values) - len(x)
                seen[column] += [float(x[0]), float(x[-1])]
            y = 1 - share + 1 / len(values) if column == 3 else share
            figure.add_trace(
                go.Scatter(
                    x=_short(x), y=np.round(y, 6), mode="lines", name=shown(arm), legendgroup=arm,
                    showlegend=column == 1 or (column == 2 and not ttft),
                    line={"color": colours[arm], "width": 1.8, "shape": "vh" if column == 3 else "hv"},
                    hovertemplate=f"{shown(arm)}: %{{x:,.1f}} ms, %{{y:.4f}}<extra></extra>",
                ),
                row=1, col=column,
            )  # fmt: skip
    if not any(seen.values()):
        return None
    for column, objective in ((1, ttft_slo_ms), (2, itl_slo_ms), (3, itl_slo_ms)):
        if objective is not None:
            figure.add_vline(x=objective, line={"color": BAD_COLOUR, "width": 1, "dash": "dash"}, row=1, col=column)
    for column, found in ((1, seen[1]), (2, seen[2]), (3, seen[2])):
        if positive := [value for value in found if value > 0]:
            figure.update_xaxes(**log_ticks(positive), row=1, col=column)
    figure.update_yaxes(title="share at or below", range=[0, 1.01], col=1)
    figure.update_yaxes(range=[0, 1.01], col=2)
    figure.update_yaxes(type="log", col=3, tickformat="~p", dtick=1)
    dressed(figure, height_px=380)
    figure.update_annotations(font={"size": 13}, yshift=2)
    figure.update_layout(legend={"y": -0.12, "yanchor": "top"}, margin={"b": 70})
    note = f"; {left_out:,} points between others are left out, the longest times are all there" if left_out else ""
    headed(figure, f"{traffic_class}; dashed: the objective{note}")
    figure.update_layout(margin={"t": 72})
    return figure


def steps_figure(steps: Sequence[StepRow], *, seed: int = 0) -> go.Figure | None:
    """Step duration against the step's tokens, by what the step held; None when there are no steps."""
    if not steps:
        return None
    kinds: dict[str, list[StepRow]] = {"decode alone": [], "with prefill": [], "with pictures encoded": []}
    for step in steps:
        kind = (
            "with pictures encoded" if step.encoder_items else "with prefill" if step.prefill_tokens else "decode alone"
        )
        kinds[kind].append(step)
    colours = (CLASS_COLOURS["chat"], CLASS_COLOURS["camera"], CLASS_COLOURS["document"])
    rng = np.random.default_rng(seed)
    figure = go.Figure()
    drawn = 0
    for (kind, rows), colour in zip(kinds.items(), colours, strict=True):
        kept = _some(rows, MOST_STEPS // len(kinds), rng)
        drawn += len(kept)
        if not kept:
            continue
        figure.add_trace(
            go.Scatter(
                x=[row.decode_tokens + row.prefill_tokens for row in kept],
                y=_short(np.array([row.duration_s * MS for row in kept])),
                mode="markers",
                name=f"{kind} ({len(rows):,})",
                marker={"size": 5, "color": colour, "opacity": 0.6},
                text=[shown(f"{row.arm}: {row.decode_tokens} decode + {row.prefill_tokens} prefill") for row in kept],
                hovertemplate="%{text}<br>%{y:,.1f} ms<extra></extra>",
            )
        )
    figure.update_xaxes(title="tokens of the step")
    figure.update_yaxes(title="duration of the step", ticksuffix=" ms", tickformat=",.0f", rangemode="tozero")
    dressed(figure)
    if drawn < len(steps):
        headed(figure, f"{drawn:,} of {len(steps):,} steps: the longest of each kind, and others at random")
    return figure


def _some(rows: Sequence[StepRow], most: int, rng: np.random.Generator) -> list[StepRow]:
    """At most so many: the longest tenth of that number, the others at random."""
    if len(rows) <= most:
        return list(rows)
    ordered = sorted(rows, key=lambda row: -row.duration_s)
    longest = ordered[: most // 10]
    chosen = rng.choice(np.arange(len(longest), len(ordered)), most - len(longest), replace=False)
    return longest + [ordered[index] for index in chosen]


def _short(values: Floats) -> list[float]:
    """Five digits are more than a plot shows; as text they keep the report small."""
    return [float(f"{value:.5g}") for value in values]
