"""Comparisons side by side: the curve, the figures, the report, and a button that applies what was found."""

from __future__ import annotations

import time

import streamlit as st
from pydantic import ValidationError

from pipeline.api_compare import BudgetView, ComparisonView, SetBudget
from serving.compare.figures import tradeoff_figure
from serving.compare.summary import ArmResult, Figure, Summary
from serving.compare.tradeoff import tradeoff_points
from serving.compare.words import CAMERA, CHAT, class_names, duration, span, verdict
from ui.panels import plain
from ui.service_client import ServiceClient, ServiceError

SHOW_NEXT = "show_next"  # in the session: a comparison that has just ended, to be shown
_CHOSEN = "chosen"
_MOST_AT_ONCE = 4
_REPORT_HEIGHT_PX = 900
_MEETS = {"yes": "met", "no": "not met", "undecided": "not sure yet"}


def results(client: ServiceClient, browser_url: str, budget: BudgetView) -> None:
    """Choose comparisons, look at them, apply a budget."""
    try:
        known = {item.name: item for item in client.comparisons()}
    except ServiceError as error:
        st.error(plain(str(error)))
        return
    if not known:
        st.info("There is no comparison yet. Start one here, or in a terminal with framechat compare.")
        return
    ended = st.session_state.pop(SHOW_NEXT, None)
    if ended in known:
        st.session_state[_CHOSEN] = [ended]
    chosen = st.multiselect(
        "Comparisons, side by side",
        list(known),
        default=None if _CHOSEN in st.session_state else list(known)[:1],
        format_func=lambda name: _label(known[name]),
        max_selections=_MOST_AT_ONCE,
        key=_CHOSEN,
    )
    found = {name: summary for name in chosen if (summary := _summary(client, name)) is not None}
    for name, summary in found.items():
        st.markdown(f"**{plain(name)}**: {plain(verdict(summary))}")
    if found:
        _curve(found)
        st.dataframe(_rows(found), hide_index=True, width="stretch", key="figures")
        _apply_arm(client, found, budget)
    for name in chosen:
        if known[name].has_report:
            _report(name, f"{browser_url}/comparisons/{name}/report.html")


def _label(item: ComparisonView) -> str:
    when = time.strftime("%d %b %H:%M", time.localtime(item.created_s))
    state = "" if item.state == "done" else f", {item.state}: {item.blocks_done} of {item.blocks_total} blocks"
    return f"{item.name} ({when}, {', '.join(item.arms)}{state})"


def _summary(client: ServiceClient, name: str) -> Summary | None:
    try:
        tree = client.comparison(name).summary
        if tree is None:
            st.caption(plain(f"{name}: no block has ended yet."))
            return None
        return Summary.model_validate(tree)
    except ServiceError as error:
        st.error(plain(str(error)))
    except ValidationError:
        st.error(
            plain(f"{name} was made by another version; draw it again: framechat compare --from comparisons/{name}")
        )
    return None


def _curve(found: dict[str, Summary]) -> None:
    several = len(found) > 1
    points = [point for name, summary in found.items() for point in tradeoff_points(summary, name if several else "")]
    objectives = next(iter(found.values())).objectives
    camera, chat = objectives.get(CAMERA), objectives.get(CHAT)
    figure = tradeoff_figure(
        points,
        ttft_slo_ms=None if camera is None else camera.ttft_p95_ms,
        itl_slo_ms=None if chat is None else chat.itl_p99_ms,
    )
    if figure is not None:
        st.plotly_chart(figure, key="tradeoff", config={"displaylogo": False})


def _rows(found: dict[str, Summary]) -> list[dict[str, str]]:
    rows = []
    for name, summary in found.items():
        for arm in summary.arms:
            row = {"arm": arm.arm.name if len(found) == 1 else f"{name}: {arm.arm.name}"}
            if arm.arm.reason is not None:
                row["objectives"] = f"refused: {arm.arm.reason}"
            else:
                row["objectives"] = _MEETS[arm.meets_all] if arm.classes else "no samples"
                row |= _figures(summary, arm)
            rows.append(row)
    return rows


def _figures(summary: Summary, arm: ArmResult) -> dict[str, str]:
    cells: dict[str, str] = {}
    for name in class_names(summary):
        result = arm.classes.get(name)
        if result is None:
            continue
        for label, pool in (("ITL", result.itl), ("TTFT", result.ttft)):
            cells |= {f"{name} {label} {q}": _cell(getattr(pool, q)) for q in ("p50", "p95", "p99")}
        cells[f"{name} stalls/min"] = _number(result.stalls_per_min)
        cells[f"{name} good/s"] = _number(result.goodput_per_s)
    return cells | {"tokens out/s": _number(arm.output_tokens_per_s), "tokens in/s": _number(arm.prompt_tokens_per_s)}


def _cell(figure: Figure) -> str:
    bounds = span(figure)
    return duration(figure.value) + (f" ({bounds})" if bounds else "")


def _number(figure: Figure) -> str:
    if figure.value is None:
        return "–"
    bounds = f" ({figure.low:.2f} to {figure.high:.2f})" if figure.low is not None and figure.high is not None else ""
    return f"{figure.value:.2f}{bounds}"


def _apply_arm(client: ServiceClient, found: dict[str, Summary], budget: BudgetView) -> None:
    """Apply an arm's budget to the running server."""
    arms = {
        f"{name}: {arm.arm.name}" if len(found) > 1 else arm.arm.name: arm
        for name, summary in found.items()
        for arm in summary.arms
        if arm.arm.budget is not None and arm.arm.reason is None and arm.arm.kind != "variant"
    }
    if not arms or (budget.why_no_restart and budget.why_no_step_budget):
        return
    left, right = st.columns([0.6, 0.4], vertical_alignment="bottom")
    name = left.selectbox("Apply to the running server", list(arms), key="apply_arm")
    tokens = arms[name].arm.budget or 0
    at_once = _fits_at_once(arms[name], budget)
    label = f"Apply {tokens} tokens, {'at once' if at_once else 'with a restart'}"
    if right.button(label, key="apply_found", disabled=not at_once and bool(budget.why_no_restart)):
        try:
            client.set_budget(SetBudget(step_budget=tokens) if at_once else SetBudget(max_num_batched_tokens=tokens))
        except ServiceError as error:
            st.error(plain(str(error)))
        else:
            st.rerun()


def _fits_at_once(arm: ArmResult, budget: BudgetView) -> bool:
    """A step budget within what the running server was started with needs no restart."""
    possible = not budget.why_no_step_budget and budget.least is not None and budget.most is not None
    return (
        possible
        and arm.arm.kind == "step_budget"
        and (budget.least or 0) <= (arm.arm.budget or 0) <= (budget.most or 0)
    )


def _report(name: str, url: str) -> None:
    left, right = st.columns([0.5, 0.5], vertical_alignment="center")
    left.link_button(f"Open the report of {plain(name)}", url, icon=":material/open_in_new:")
    if right.toggle("Show it here", key=f"report_{name}"):
        st.iframe(url, height=_REPORT_HEIGHT_PX)
