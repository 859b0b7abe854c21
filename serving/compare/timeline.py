"""The time line of one block: every request a bar of waiting, prefill and decode; stalls joined to what caused them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from serving.compare.attribution import Attribution, in_words, short_id
from serving.compare.figures import BAD_COLOUR, CLASS_COLOURS, OTHER_COLOUR, dressed, headed, shown
from serving.compare.samples import MS
from serving.compare.tables import BlockData, RequestRow

MOST_ROWS = 60
MOST_STALLS = 60
_WINDOW_S = 60.0
_ROW_PX = 13
_BAR = 0.82  # of a row
_MOST_PARTS = 6
_WORTH, _CAUSES = 0.02, 0.1  # parts of a gap: to be named, to be joined to


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap longer than its class's objective.

    Attributes:
        words: What the time went to, one line a part; empty when nobody knows.
        causes: Requests whose work took a good part of it, ids of ours.
    """

    request_id: str
    traffic_class: str
    start_s: float
    end_s: float
    words: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        """How long the stream stood still."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Phases:
    """When a request waited, was prefilled and decoded. `prefill_s` is None where no step record tells its start."""

    due_s: float
    prefill_s: float | None
    first_token_s: float | None
    end_s: float

    def spans(self) -> list[tuple[str, float, float]]:
        """(phase, start, end), in order."""
        first = self.end_s if self.first_token_s is None else self.first_token_s
        if self.prefill_s is None:
            before = [("waiting and prefill", self.due_s, first)]
        else:
            before = [("waiting", self.due_s, self.prefill_s), ("prefill", self.prefill_s, first)]
        return [*before, ("decode", first, self.end_s)] if self.first_token_s is not None else before


def stalls_of(attributed: Sequence[Attribution]) -> list[Stall]:
    """Attributed gaps as stalls to draw, in the same order."""
    return [
        Stall(
            gap.request_id,
            gap.traffic_class,
            gap.end_s - gap.duration_s,
            gap.end_s,
            (gap.missing,)
            if gap.missing is not None
            else tuple(
                in_words(part) for part in gap.parts[:_MOST_PARTS] if part.duration_s >= _WORTH * gap.duration_s
            ),
            tuple(
                part.request_id
                for part in gap.parts
                if part.request_id is not None
                and part.request_id != gap.request_id
                and part.duration_s >= _CAUSES * gap.duration_s
            ),
        )
        for gap in attributed
    ]


def phases(block: BlockData) -> dict[str, Phases]:
    """The phases of every request of a block, by id."""
    started: dict[str, float] = {}
    for step in block.steps:
        for request_id, prefill in zip(step.request_ids, step.request_prefill, strict=True):
            if prefill:
                started.setdefault(request_id, step.start_s)
    found = {}
    for row in block.requests:
        prefill_s = started.get(row.request_id)
        end_s = max(row.last_token_s or row.finished_s, row.due_s)
        if prefill_s is not None:
            prefill_s = min(max(prefill_s, row.due_s), row.first_token_s or end_s)
        found[row.request_id] = Phases(row.due_s, prefill_s, row.first_token_s, end_s)
    return found


def timeline_figure(block: BlockData, stalls: Sequence[Stall]) -> go.Figure | None:
    """The minute around the block's longest stall, or its beginning where nothing stalled; None for an empty block.

    Args:
        block: Its requests and, where the server recorded them, its steps.
        stalls: Of this block, the longest first.
    """
    known = phases(block)
    if not known:
        return None
    start_s, end_s, rows = _window(block, known, stalls)
    index = {row.request_id: number for number, row in enumerate(rows)}
    zero_s = block.info.start_s
    figure = go.Figure()
    for name, spans in _bars(rows, known).items():
        traffic_class, _, phase = name.partition(": ")
        waits = phase.startswith("waiting")
        figure.add_trace(
            go.Bar(
                orientation="h",
                width=_BAR,
                name=shown(phase if waits else name),
                y=[index[row.request_id] for row, _, _ in spans],
                base=[round(begin - zero_s, 3) for _, begin, _ in spans],
                x=[round(end - begin, 3) for _, begin, end in spans],
                text=[_about(row) for row, _, _ in spans],
                textposition="none",
                hovertemplate="%{text}<br>" + shown(phase) + " %{x:.3f} s<extra></extra>",
                marker={"color": _colour(traffic_class, phase), "line": {"width": 0}},
                legendgroup=phase if waits else name,
            )
        )
    seen = [stall for stall in stalls if stall.request_id in index and stall.end_s > start_s and stall.start_s < end_s]
    _draw_stalls(figure, seen[:MOST_STALLS], index, zero_s)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(
        title="seconds since the block began", ticksuffix=" s", range=[start_s - zero_s, end_s - zero_s]
    )
    figure.update_yaxes(title="requests, as they came due", showticklabels=False, autorange="reversed", showgrid=False)
    dressed(figure, height_px=max(320, 150 + _ROW_PX * len(rows)))
    return headed(figure, _title(block, rows, seen, (start_s - zero_s, end_s - zero_s)))


def _colour(traffic_class: str, phase: str) -> str:
    red, green, blue = hex_to_rgb(CLASS_COLOURS.get(traffic_class, OTHER_COLOUR))
    strength = 0.4 if phase.startswith("waiting") else 0.5 if phase == "prefill" else 0.95
    return f"rgba({red},{green},{blue},{strength})"


def _window(
    block: BlockData, known: Mapping[str, Phases], stalls: Sequence[Stall]
) -> tuple[float, float, list[RequestRow]]:
    """Begin, end and requests of the part that is drawn: at most `MOST_ROWS` of them."""
    middle_s = stalls[0].start_s if stalls else block.info.start_s + block.info.warm_up_s + _WINDOW_S / 2
    half_s = _WINDOW_S / 2
    while True:
        begin_s = max(block.info.start_s, middle_s - half_s)
        end_s = min(max(block.info.end_s, begin_s + 1), begin_s + 2 * half_s)
        rows = [
            row
            for row in block.requests
            if known[row.request_id].due_s < end_s and known[row.request_id].end_s > begin_s
        ]
        if len(rows) <= MOST_ROWS or half_s < 0.05:
            return begin_s, end_s, sorted(rows, key=lambda row: row.due_s)[:MOST_ROWS]
        half_s /= 1.5


def _bars(rows: Sequence[RequestRow], known: Mapping[str, Phases]) -> dict[str, list[tuple[RequestRow, float, float]]]:
    """Spans by `class: phase`; waiting is of no class. In the legend's order."""
    bars: dict[str, list[tuple[RequestRow, float, float]]] = {}
    for row in rows:
        for phase, begin, end in known[row.request_id].spans():
            name = f": {phase}" if phase.startswith("waiting") else f"{row.traffic_class}: {phase}"
            bars.setdefault(name, []).append((row, begin, end))
    return dict(sorted(bars.items()))


def _draw_stalls(figure: go.Figure, stalls: Sequence[Stall], index: Mapping[str, int], zero_s: float) -> None:
    """Each stall a red line on its request's bar; thin lines lead to the requests that caused it."""
    if not stalls:
        return
    along_x: list[float | None] = []
    along_y: list[int | None] = []
    joined_x: list[float | None] = []
    joined_y: list[int | None] = []
    for stall in stalls:
        row = index[stall.request_id]
        along_x += [round(stall.start_s - zero_s, 3), round(stall.end_s - zero_s, 3), None]
        along_y += [row, row, None]
        middle = round((stall.start_s + stall.end_s) / 2 - zero_s, 3)
        for cause in stall.causes:
            if cause in index:
                joined_x += [middle, middle, None]
                joined_y += [row, index[cause], None]
    line = {"color": BAD_COLOUR}
    figure.add_trace(
        go.Scatter(
            x=joined_x, y=joined_y, mode="lines", line=line | {"width": 1, "dash": "dot"}, name="caused by",
            hoverinfo="skip", visible=True if joined_x else "legendonly",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(x=along_x, y=along_y, mode="lines", line=line | {"width": 4}, name="stall", hoverinfo="skip")
    )
    figure.add_trace(
        go.Scatter(
            x=[round((stall.start_s + stall.end_s) / 2 - zero_s, 3) for stall in stalls],
            y=[index[stall.request_id] for stall in stalls],
            mode="markers",
            marker={"color": BAD_COLOUR, "size": 7},
            text=["<br>".join(shown(line) for line in stall.words) or "cause not known" for stall in stalls],
            customdata=[round(stall.duration_s * MS, 1) for stall in stalls],
            hovertemplate="stall of %{customdata:,.1f} ms<br>%{text}<extra></extra>",
            showlegend=False,
        )
    )


def _title(block: BlockData, rows: Sequence[RequestRow], seen: Sequence[Stall], window: tuple[float, float]) -> str:
    words = (
        f"block {block.info.number}, {block.info.arm}: {window[0]:.0f} to {window[1]:.0f} s of it, "
        f"{len(rows)} of {len(block.requests):,} requests, {min(len(seen), MOST_STALLS)} stalls"
    )
    if len(seen) > MOST_STALLS:
        words += f" (the longest of {len(seen):,})"
    return words


def _about(row: RequestRow) -> str:
    tokens = f"{row.prompt_tokens:,} prompt" if row.prompt_tokens is not None else "prompt unknown"
    made = f"{row.completion_tokens:,} new" if row.completion_tokens is not None else "output unknown"
    return shown(f"{row.traffic_class} {short_id(row.request_id)}: {tokens} and {made} tokens, {row.outcome}")
