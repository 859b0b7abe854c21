"""The page "Compare": the budget in force, a new comparison, the one that runs, and past ones side by side."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import streamlit as st

from pipeline.api_compare import BudgetView, RunningComparison, SetBudget
from serving.compare.words import run_time
from ui.compare_form import new_comparison
from ui.compare_results import SHOW_NEXT, results
from ui.panels import plain
from ui.service_client import DEFAULT_URL, ServiceClient, ServiceError

_TICK_S = 1.0
_CHANGES = ("draining", "stopping", "starting", "restarting")
_BUSY_PHASES = ("preparing", "running", "restoring")
_AT_ONCE, _RESTART = "Tokens of one step (at once)", "max_num_batched_tokens (restart)"


@st.cache_resource
def _client(url: str) -> ServiceClient:
    return ServiceClient(url)


def show() -> None:
    """Lay the page out."""
    url = os.environ.get("FRAMECHAT_SERVICE_URL", DEFAULT_URL)
    client = _client(url)
    st.subheader("Compare token budgets")
    try:
        now, budget = client.running_comparison(), client.budget()
    except ServiceError as error:
        st.error(plain(str(error)))
        return
    busy = now.phase in _BUSY_PHASES
    left, right = st.columns([0.34, 0.66], gap="medium")
    with left:
        _budget(client, budget)
        _running(client, busy=busy)
        if not busy:
            new_comparison(client, budget)
    with right:
        results(client, _browser_url(url), budget)


def _browser_url(url: str) -> str:
    """Where the browser reaches the service: its public address, or the page's own host and the service's port."""
    public = os.environ.get("FRAMECHAT_PUBLIC_URL")
    if public:
        return public.rstrip("/")
    page = urlsplit(st.context.url or "http://127.0.0.1")
    host = page.hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"{page.scheme or 'http'}://{host}:{urlsplit(url).port or 80}"


def _budget(client: ServiceClient, budget: BudgetView) -> None:
    """The budget in force and a way to change it, looked at every second while it changes."""
    changing = budget.change.state in _CHANGES or budget.change.state in ("stopped", "lent")
    st.fragment(_budget_now, run_every=_TICK_S if changing else None)(client, was_changing=changing)


def _budget_now(client: ServiceClient, *, was_changing: bool) -> None:
    try:
        budget = client.budget()
    except ServiceError as error:
        st.error(plain(str(error)))
        return
    changing = budget.change.state in _CHANGES or budget.change.state in ("stopped", "lent")
    if changing != was_changing:
        st.rerun()
    with st.container(border=True, key="budget"):
        st.markdown(f"**Budget in force: {_in_force(budget)}**")
        if budget.change.state != "none" and budget.change.detail:
            say = {"failed": st.error, "done": st.success}.get(budget.change.state, st.info)
            say(plain(f"{_STATES[budget.change.state]}: {budget.change.detail}"))
        if changing:
            return
        choices = [
            name for name, why in ((_AT_ONCE, budget.why_no_step_budget), (_RESTART, budget.why_no_restart)) if not why
        ]
        if not choices:
            st.caption(plain(budget.why_no_restart or budget.why_no_step_budget))
            return
        how = st.radio("Apply a budget", choices, key="apply_how")
        at_once = how == _AT_ONCE
        known = budget.step_budget if at_once else budget.max_num_batched_tokens
        tokens = st.number_input(
            "Tokens",
            min_value=budget.least or 1 if at_once else 1,
            max_value=budget.most if at_once else 1_000_000,
            value=known or 256,
            step=1,
            key="apply_at_once" if at_once else "apply_restart",
            help=None
            if at_once
            else "Running answers are finished first; descriptions wait and none is lost; chat says why it waits.",
        )
        if st.button("Apply", key="apply", type="primary"):
            _apply(
                client, SetBudget(step_budget=int(tokens)) if at_once else SetBudget(max_num_batched_tokens=int(tokens))
            )
        if not at_once or budget.step_budget != budget.configured:
            st.caption(
                "Until the next start. To keep it, set serving.server.max_num_batched_tokens in the configuration."
            )


_STATES = {
    "draining": "Finishing what runs",
    "stopping": "Stopping the model server",
    "stopped": "The model server is stopped",
    "lent": "The model server is lent out",
    "starting": "Starting the model server",
    "restarting": "Restarting the model server",
    "done": "Done",
    "failed": "It failed",
}


def _in_force(budget: BudgetView) -> str:
    started = budget.max_num_batched_tokens
    if budget.step_budget is not None and budget.step_budget != budget.configured:
        return f"{budget.step_budget} tokens a step (started with {started})"
    return f"{started} tokens" if started is not None else "the server does not say"


def _apply(client: ServiceClient, wanted: SetBudget) -> None:
    try:
        client.set_budget(wanted)
    except ServiceError as error:
        st.error(plain(str(error)))
    else:
        st.rerun()


def _running(client: ServiceClient, *, busy: bool) -> None:
    """The comparison that runs; how the last one ended."""
    st.fragment(_running_now, run_every=_TICK_S if busy else None)(client, was_busy=busy)


def _running_now(client: ServiceClient, *, was_busy: bool) -> None:
    try:
        now = client.running_comparison()
    except ServiceError as error:
        st.error(plain(str(error)))
        return
    if (now.phase in _BUSY_PHASES) != was_busy:
        if was_busy and now.comparison is not None:
            st.session_state[SHOW_NEXT] = now.comparison.name
        st.rerun()
    if now.phase == "none":
        return
    with st.container(border=True, key="running"):
        st.markdown(f"**Comparison {plain(now.name or '')}**")
        if now.phase in ("ended", "failed"):
            (st.error if now.phase == "failed" else st.success)(plain(now.detail or "It is complete."))
            return
        _progress(now)
        if st.button("Stop it", key="stop_comparison"):
            try:
                client.stop_comparison()
            except ServiceError as error:
                st.error(plain(str(error)))


def _progress(now: RunningComparison) -> None:
    """How far it is, and what is left."""
    found = now.comparison
    if now.phase == "running" and found is not None and found.blocks_total:
        left = f", about {run_time(found.remaining_s)} left" if found.remaining_s is not None else ""
        st.progress(
            min(1.0, found.blocks_done / found.blocks_total),
            text=f"{found.blocks_done} of {found.blocks_total} blocks{left}",
        )
        if found.message:
            st.caption(plain(found.message))
    else:
        words = {"preparing": "Preparing", "running": "Starting", "restoring": "Bringing the product back"}[now.phase]
        st.progress(0.0, text=words)
    if now.change is not None and now.change.detail and now.phase != "running":
        st.caption(plain(f"{_STATES.get(now.change.state, '')}: {now.change.detail}"))
    st.caption("Meanwhile cameras are paused, descriptions that are due wait, and chat says why it cannot answer.")
