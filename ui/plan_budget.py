"""The tab "which budget?": TTFT and ITL that a load would see under step budgets, and the trade-off between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import streamlit as st

from pipeline.config import Config
from serving.compare.figures import TradeOff, tradeoff_figure
from serving.compare.summary import Figure, Summary
from serving.compare.tables import STEPS, read_experiment
from serving.compiled import is_compiled
from serving.config import ClassConfig, Device
from serving.simulate import ClassForecast, Policy, simulate
from serving.workload import draw
from ui.plan_engine import Engine, EngineOptions, make_engine
from ui.plan_formulas import PERCENTILES, SCHEDULE, STEP
from ui.plan_inputs import CONFIGS, Subject, formulas, trouble
from ui.plan_simulate import parse_budgets, parse_workload

MS = 1e3
_NONE = "none"
_FIRST_LOAD = "load-mixed.yaml"
_MOST_REQUESTS = 20_000
_MOST_RUNS = 12
_MOST_SUMMARY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Question:
    """What is simulated: hashable, so that an answer is kept."""

    load: str
    budgets: tuple[int, ...]
    policies: tuple[Policy, ...]
    long_prefill_tokens: int
    max_num_seqs: int
    engine: EngineOptions


@dataclass(frozen=True, slots=True)
class _Run:
    budget: int
    policy: Policy
    classes: tuple[ClassForecast, ...]
    cut_off: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    runs: tuple[_Run, ...]
    engine: Engine
    requests: int


@st.fragment
def budget_tab(config: Config, subject: Subject) -> None:
    """Inputs on the left, figures on the right."""
    folders = _comparisons(config.comparisons.folder)
    left, right = st.columns([0.3, 0.7], gap="medium")
    with left:
        compared = st.selectbox(
            "Past comparison",
            [_NONE, *folders],
            key="budget_compared",
            help="Its measured points are laid over the simulated ones.",
        )
        folder = folders.get(compared)
        budgets = st.text_input("Step budgets, tokens", "128,256,512,1024,2048", key="budget_budgets", max_chars=200)
        policies = st.multiselect(
            "Scheduling", list(Policy), [Policy.VLLM], format_func=lambda item: item.value, key="budget_policies",
            help=SCHEDULE,
        )  # fmt: skip
        sources = ["roofline of the GPU", *(["measured steps of the comparison"] if _has_steps(folder) else [])]
        source = st.radio("Step times", sources, key=f"budget_source_{compared}", help=STEP)
        server, on_paper = config.serving.server, source == sources[0]
        one, two = st.columns(2)
        chunk = one.number_input(
            "Long prefill, tokens",
            0,
            1_000_000,
            # A threshold that was chosen for a CPU says nothing about a GPU.
            0 if on_paper and server.device is Device.CPU else server.long_prefill_token_threshold,
            key=f"budget_chunk_{on_paper}",
            help="The most that one long prompt may take of a step while others wait; 0: the whole budget "
            "(long_prefill_token_threshold).",
        )
        seqs = two.number_input("Most at once", 1, 1024, server.max_num_seqs, key="budget_seqs", help="max_num_seqs")
        text = _load_text(folder)
    with right, trouble():
        measured = folder if source == sources[-1] and len(sources) > 1 else None
        if not policies:
            raise ValueError("no scheduling policy is chosen, allowed: one or more")
        if measured is not None and subject.model != config.serving.server.model:
            st.info("Step times are those of the comparison's own model.")
        asked = _Question(
            load=text,
            budgets=parse_budgets(budgets, "step budgets"),
            policies=tuple(policies),
            long_prefill_tokens=chunk,
            max_num_seqs=seqs,
            engine=EngineOptions(
                fit=measured,
                gpu=None if measured is not None else subject.gpu,
                model=subject.model,
                tensor_parallel=subject.tensor_parallel,
            ),
        )
        answer = _answer(asked, config, is_compiled())
        _show(answer, config.serving.classes, folder)
        formulas(STEP, SCHEDULE, PERCENTILES)


@st.cache_data(max_entries=32, ttl=3600, show_spinner="Simulating …")
def _answer(asked: _Question, _config: Config, _compiled: bool) -> _Answer:
    workload = parse_workload(asked.load, "the load")
    planned = draw(workload)
    if len(planned) > _MOST_REQUESTS:
        raise ValueError(f"the load has {len(planned):,} requests, allowed on this page: {_MOST_REQUESTS:,}")
    if len(asked.budgets) * len(asked.policies) > _MOST_RUNS:
        raise ValueError(
            f"{len(asked.budgets)} budgets with {len(asked.policies)} policies, allowed on this page: {_MOST_RUNS} "
            "in all"
        )
    engine = make_engine(asked.engine, _config.serving.server, largest_budget=max(asked.budgets))
    runs = []
    for policy in asked.policies:
        for budget in asked.budgets:
            settings = replace(
                engine.settings,
                budget_tokens=budget,
                buffer_tokens=budget,
                long_prefill_threshold=min(asked.long_prefill_tokens, budget),
                max_num_seqs=asked.max_num_seqs,
                policy=policy,
            )
            result = simulate(
                planned, settings, engine.step_time, image_tokens=engine.image_tokens, until_s=2 * workload.duration_s
            )
            runs.append(_Run(budget, policy, tuple(result.classes()), result.cut_off))
    return _Answer(tuple(runs), engine, len(planned))


def _load_text(folder: Path | None) -> str:
    """The load as YAML: one of the files in configs/, the comparison's own, or what the user makes of it."""
    files = {path.name: path for path in sorted(CONFIGS.glob("load-*.yaml"))}
    choices = [*(["the comparison's load"] if folder is not None else []), *files]
    first = 0 if folder is not None else choices.index(_FIRST_LOAD) if _FIRST_LOAD in choices else 0
    chosen = st.selectbox(
        "Load", choices, first, key=f"budget_load_{folder}", help="configs/load-*.yaml; change it below."
    )
    if chosen in files:
        text = files[chosen].read_text(encoding="utf-8")
    else:
        import yaml  # noqa: PLC0415

        workload = read_experiment(folder).workload if folder is not None else None
        text = "" if workload is None else yaml.safe_dump(workload.model_dump(mode="json"), sort_keys=False)
    return st.text_area("Load, as YAML", text, height=260, key=f"budget_text_{chosen}_{folder}", max_chars=20_000)


def _comparisons(root: Path) -> dict[str, Path]:
    """Past comparisons, newest first."""
    found = [path.parent for path in root.glob("*/summary.json")] if root.is_dir() else []
    found.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    return {folder.name: folder for folder in found[:50]}


def _has_steps(folder: Path | None) -> bool:
    return folder is not None and (folder / STEPS).is_file()


def _show(answer: _Answer, objectives: dict[str, ClassConfig], folder: Path | None) -> None:
    points = [_point(run, several=len({item.policy for item in answer.runs}) > 1) for run in answer.runs]
    if folder is not None:
        points += _measured(folder)
    camera, chat = objectives.get("camera"), objectives.get("chat")
    figure = tradeoff_figure(
        points,
        ttft_slo_ms=camera.ttft_p95_ms if camera else None,
        itl_slo_ms=chat.itl_p99_ms if chat else None,
    )
    if figure is None:
        st.info("The trade-off plot needs the classes camera and chat in the load.")
    else:
        figure.update_layout(legend={"orientation": "h", "y": -0.3}, margin={"t": 10}, height=380)
        st.plotly_chart(figure, width="stretch", key="budget_plot", config={"displaylogo": False})
    st.dataframe(_table(answer, objectives), hide_index=True, width="stretch", key="budget_table")
    st.caption(
        f"Milliseconds; **!** misses the objective. {answer.requests:,} requests. Simulated, not measured. "
        f"Step times: {answer.engine.step_time.source}."
    )
    quality = answer.engine.step_time.quality
    if quality is not None:
        unused = f" Not in the data, so taken as free: {', '.join(quality.unused)}." if quality.unused else ""
        st.caption(
            f"Fit error on steps left out of it ({quality.steps:,} steps in all): median {quality.median_error:.1%}, "
            f"p95 {quality.p95_error:.1%}, their sum {quality.total_error:.1%}.{unused}"
        )
    if any(run.cut_off for run in answer.runs):
        st.warning("Cut off at twice the load's length: with some of these budgets the server cannot keep up.")


def _point(run: _Run, *, several: bool) -> TradeOff:
    classes = {item.traffic_class: item for item in run.classes}
    camera, chat = classes.get("camera"), classes.get("chat")
    return TradeOff(
        name=str(run.budget),
        camera_ttft_p95=Figure(value=_in_ms(camera.ttft.p95_s if camera else None)),
        chat_itl_p99=Figure(value=_in_ms(chat.itl.p99_s if chat else None)),
        group=f"simulated, {run.policy.value}" if several else "simulated",
    )


def _measured(folder: Path) -> list[TradeOff]:
    """The points of a comparison that was measured."""
    path = folder / "summary.json"
    if path.stat().st_size > _MOST_SUMMARY_BYTES:
        raise ValueError(f"{path.name} is larger than {_MOST_SUMMARY_BYTES >> 20} MiB")
    summary = Summary.model_validate_json(path.read_text(encoding="utf-8"))
    empty = Figure(value=None)
    return [
        TradeOff(
            name=result.arm.name,
            camera_ttft_p95=result.classes["camera"].ttft.p95 if "camera" in result.classes else empty,
            chat_itl_p99=result.classes["chat"].itl.p99 if "chat" in result.classes else empty,
            ordered=result.arm.kind != "variant",
            group=f"measured, {folder.name}",
        )
        for result in summary.arms
    ]


def _table(answer: _Answer, objectives: dict[str, ClassConfig]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    several = len({run.policy for run in answer.runs}) > 1
    for run in answer.runs:
        for item in run.classes:
            goal = objectives.get(item.traffic_class)
            rows.append(
                {
                    "budget": run.budget,
                    **({"scheduling": run.policy.value} if several else {}),
                    "class": item.traffic_class,
                    "TTFT p50": _ms(item.ttft.p50_s),
                    "TTFT p95": _ms(item.ttft.p95_s, goal.ttft_p95_ms if goal else None),
                    "TTFT p99": _ms(item.ttft.p99_s),
                    "ITL p50": _ms(item.itl.p50_s),
                    "ITL p95": _ms(item.itl.p95_s),
                    "ITL p99": _ms(item.itl.p99_s, goal.itl_p99_ms if goal else None),
                    "ITL max": _ms(item.itl.max_s),
                    "done": f"{item.finished / item.requests:.0%}",
                }
            )
    return rows


def _in_ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * MS


def _ms(value_s: float | None, objective_ms: float | None = None) -> str:
    if value_s is None:
        return "–"
    value = value_s * MS
    text = f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
    return f"{text} !" if objective_ms is not None and value > objective_ms else text
