"""The form that starts a comparison."""

from __future__ import annotations

from typing import Any

import streamlit as st
import yaml
from pydantic import ValidationError

from pipeline.api_compare import MOST_ARMS, BudgetView, StartComparison
from serving.compare.words import run_time
from serving.workload import Workload
from ui.panels import plain
from ui.service_client import ServiceClient, ServiceError

_KINDS = {
    "running": "Step budgets, on the running server",
    "step_budgets": "Step budgets, on a server of its own",
    "budgets": "max_num_batched_tokens, a server for each",
}
_SHIPPED, _FIELDS, _FILE = "The load that comes with FrameChat", "A few fields", "A load file"
_MAX_FILE_BYTES = 256 * 1024
_START_GUESS_S = 60.0  # as `framechat compare` guesses before it has seen a start
_BETWEEN_GUESS_S = 13.0


@st.fragment
def new_comparison(client: ServiceClient, budget: BudgetView) -> None:
    """The form; starts what it says."""
    with st.container(border=True, key="new"):
        st.markdown("**New comparison**")
        if budget.why_no_restart:
            st.caption(
                plain(f"None can be started from here: {budget.why_no_restart}. In a terminal: framechat compare")
            )
            return
        kinds = [kind for kind in _KINDS if kind != "running" or not budget.why_no_step_budget]
        kind = st.radio("What", kinds, format_func=lambda item: _KINDS[item], key="kind")
        text = st.text_input("Budgets, in tokens", value=_usual(budget, kind), key=f"budgets_{kind}")
        problem = ""
        budgets: list[int] = []
        try:
            budgets = _numbers(text)
        except ValueError as error:
            problem = str(error)
        source = st.radio("Load", [_SHIPPED, _FIELDS, _FILE], key="load")
        workload: Workload | None = None
        try:
            workload = _fields() if source == _FIELDS else _file() if source == _FILE else None
        except ValueError as error:
            problem = problem or str(error)
        if source == _FILE and workload is None:
            problem = problem or "choose a load file"
        left, right = st.columns(2)
        block_s = left.number_input("Seconds a block", 5.0, 3600.0, 60.0, 5.0, key="block_s")
        rounds = right.number_input("Blocks for each", 1, 100, 5, key="rounds")
        starts = {"running": 0, "step_budgets": 1, "budgets": len(budgets) * int(rounds)}[kind]
        total_s = len(budgets) * rounds * (block_s + _BETWEEN_GUESS_S) + starts * _START_GUESS_S
        stops = " The product's model server is stopped and comes back afterwards." if kind != "running" else ""
        st.warning(
            f"It loads the server for about {run_time(total_s)}. Meanwhile cameras pause, descriptions that are due "
            f"wait, and chat is refused with the reason.{stops}"
        )
        if problem:
            st.caption(plain(problem))
        if st.button("Start", key="start", type="primary", disabled=bool(problem)):
            _start(client, kind, budgets, workload, float(block_s), int(rounds))


def _usual(budget: BudgetView, kind: str) -> str:
    """Budgets worth a try: fractions of the most that is possible."""
    if kind == "running" and budget.most is not None:
        least = budget.least or 1
        found = {max(least, budget.most // part) for part in (4, 2, 1)}
        return ", ".join(str(item) for item in sorted(found))
    return "64, 256, 2048"


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError("budgets: whole numbers with commas, such as 128, 512") from None
    if not 1 <= len(found) <= MOST_ARMS or min(found) < 1 or len(set(found)) < len(found):
        raise ValueError(f"budgets: 1 to {MOST_ARMS} numbers above 0, every one once")
    return found


def _fields() -> Workload:
    """A load of cameras and chats from a few fields."""
    left, right = st.columns(2)
    with left:
        st.caption("Camera")
        camera_rate = st.number_input("Pictures a second", 0.01, 100.0, 0.2, 0.05, key="camera_rate")
        width = st.number_input("Width, px", 32, 4096, 512, key="width")
        height = st.number_input("Height, px", 32, 4096, 1024, key="height")
        camera_out = st.number_input("Answer, tokens", 1, 4096, 32, key="camera_out")
    with right:
        st.caption("Chat")
        chat_rate = st.number_input("Questions a second", 0.01, 100.0, 0.25, 0.05, key="chat_rate")
        chat_in = st.number_input("Question, tokens", 1, 20_000, 40, key="chat_in")
        chat_out = st.number_input("Answer, tokens", 1, 4096, 60, key="chat_out")
    return _workload(
        {
            "classes": {
                "camera": {
                    "arrivals": {"rate_per_s": camera_rate},
                    "prompt": {"mean": 12},
                    "output": {"mean": camera_out},
                    "pictures": {"width_px": width, "height_px": height},
                },
                "chat": {
                    "arrivals": {"rate_per_s": chat_rate},
                    "prompt": {"mean": chat_in},
                    "output": {"mean": chat_out},
                },
            }
        }
    )


def _file() -> Workload | None:
    """A load from an uploaded YAML file; None while none is chosen."""
    given = st.file_uploader("Load file (YAML, see configs/load-cpu.yaml)", type=["yaml", "yml"], key="load_file")
    if given is None:
        return None
    if given.size > _MAX_FILE_BYTES:
        raise ValueError(f"the load file has {given.size:,} bytes, allowed: {_MAX_FILE_BYTES:,}")
    try:
        tree = yaml.safe_load(given.getvalue().decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the load file is no YAML: {' '.join(str(error).split())[:200]}") from None
    return _workload(tree)


def _workload(tree: Any) -> Workload:
    try:
        return Workload.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the load"
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None


def _start(
    client: ServiceClient, kind: str, budgets: list[int], workload: Workload | None, block_s: float, rounds: int
) -> None:
    try:
        client.start_comparison(
            StartComparison.model_validate(
                {"kind": kind, "budgets": budgets, "workload": workload, "block_s": block_s, "rounds": rounds}
            )
        )
    except ValidationError as error:
        st.error(plain(str(error.errors()[0]["msg"])))
    except ServiceError as error:
        st.error(plain(str(error)))
    else:
        st.rerun()
