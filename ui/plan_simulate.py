"""What `framechat simulate` works out and prints: TTFT and ITL of a load, per class and step budget."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.config import Config
from serving.compare.simulated import MOST_STEP_ENTRIES, write_simulated
from serving.compiled import is_compiled
from serving.config import ClassConfig
from serving.latency import Percentiles
from serving.simulate import EngineSettings, FrontEnd, Policy, Simulation, simulate
from serving.steptime import StepTime
from serving.workload import Workload, draw
from ui.plan_engine import EngineOptions, make_engine

MS = 1e3
WIDTH = 120


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What `framechat simulate` was asked, as on its command line."""

    load: Path
    budgets: tuple[int, ...]
    policies: tuple[Policy, ...]
    engine: EngineOptions
    split_tokens: int | None
    front_end: FrontEnd
    report: Path | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    budget: int
    policy: Policy
    simulation: Simulation


def run_simulate(options: SimulateOptions, config: Config, *, as_json: bool) -> None:
    """Simulate every budget and policy, and print what comes out.

    Raises:
        ValueError: (its kinds included, and `OSError`) The options cannot be worked out; the message is one line.
    """
    server = config.serving.server
    workload = read_workload(options.load)
    planned = draw(workload)
    engine = make_engine(options.engine, server, largest_budget=max(options.budgets))
    step_time, settings = engine.step_time, engine.settings
    if not as_json and not is_compiled():
        Console(stderr=True).print("Compiling the simulator once, some 20 seconds...")
    rows = []
    for budget in options.budgets:
        for policy in options.policies:
            chosen = replace(
                settings, budget_tokens=budget, buffer_tokens=budget, policy=policy, split_tokens=options.split_tokens
            )
            result = simulate(
                planned,
                chosen,
                step_time,
                image_tokens=engine.image_tokens,
                front_end=options.front_end,
                log_limit=MOST_STEP_ENTRIES + 1 if options.report is not None else 0,
            )
            rows.append(_Row(budget, policy, result))
    if options.report is not None:
        several = len(options.policies) > 1
        written = write_simulated(
            options.report,
            {
                f"{row.budget} {row.policy.value}" if several else str(row.budget): (
                    row.budget,
                    settings.cache_blocks,
                    row.simulation,
                )
                for row in rows
            },
            workload=workload,
            classes=config.serving.classes,
            image_tokens=engine.image_tokens,
            source=step_time.source,
            command=sys.argv,
            config=config.model_dump(mode="json"),
        )
        Console(stderr=True, soft_wrap=True).print(f"Report: {written}")
    if as_json:
        print(json.dumps(_as_dict(rows, step_time, workload, settings), indent=2))
    else:
        width = None if sys.stdout.isatty() else WIDTH  # piped output has no terminal to fit
        _show(Console(width=width), rows, step_time, config.serving.classes)


def parse_budgets(text: str, name: str) -> tuple[int, ...]:
    """Step budgets from text such as `128,512`; `name` is what messages call it.

    Raises:
        ValueError: They are not whole numbers of 1 or more.
    """
    try:
        budgets = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} is {text!r}, allowed: whole numbers with commas, such as 128,512") from None
    if min(budgets) < 1:
        raise ValueError(f"{name} is {text!r}, allowed: 1 or more each")
    return budgets


def read_workload(path: Path) -> Workload:
    """Read a load from its YAML file; raises as `parse_workload`."""
    return parse_workload(path.read_text(), path.name)


def parse_workload(text: str, name: str) -> Workload:
    """A load from YAML; `name` is what messages call it.

    Raises:
        ValueError: It is no YAML, or not a load; pydantic's message is shortened to the first fault.
    """
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name}: {where or 'the load'}: {first['msg'].removeprefix('Value error, ')}") from None


def _figures(pool: Percentiles) -> dict[str, float | int | None]:
    values = {"p50_ms": pool.p50_s, "p95_ms": pool.p95_s, "p99_ms": pool.p99_s, "max_ms": pool.max_s}
    return {"count": pool.count, **{name: None if value is None else value * MS for name, value in values.items()}}


def _as_dict(rows: list[_Row], step_time: StepTime, workload: Workload, settings: EngineSettings) -> dict[str, Any]:
    return {
        "simulated": True,
        "step_time": asdict(step_time),
        "load": workload.model_dump(mode="json"),
        "engine": asdict(settings),
        "results": [
            {
                "budget": row.budget,
                "policy": row.policy.value,
                "steps": len(row.simulation.steps),
                "span_s": row.simulation.span_s,
                "cut_off": row.simulation.cut_off,
                "classes": {
                    item.traffic_class: {
                        "requests": item.requests,
                        "finished": item.finished,
                        "preemptions": item.preemptions,
                        "cached_prompt_tokens": item.cached_prompt_tokens,
                        "ttft": _figures(item.ttft),
                        "itl": _figures(item.itl),
                        "tpot": _figures(item.tpot),
                    }
                    for item in row.simulation.classes()
                },
            }
            for row in rows
        ],
    }


def _show(console: Console, rows: list[_Row], step_time: StepTime, objectives: dict[str, ClassConfig]) -> None:
    several = len({row.policy for row in rows}) > 1
    table = Table(title="Simulated, milliseconds (! misses the objective)", box=SIMPLE_HEAD, padding=(0, 1))
    names = ["budget", *(["policy"] if several else []), "class"]
    for column in names:
        table.add_column(column, justify="right" if column == "budget" else "left", no_wrap=True)
    for column in ("TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "max", "done"):
        table.add_column(column, justify="right", no_wrap=True)
    preempted = 0
    for row in rows:
        for item in row.simulation.classes():
            preempted += item.preemptions
            goal = objectives.get(item.traffic_class)
            table.add_row(
                str(row.budget),
                *([row.policy.value] if several else []),
                item.traffic_class,
                _ms(item.ttft.p50_s),
                _ms(item.ttft.p95_s, goal.ttft_p95_ms if goal else None),
                _ms(item.ttft.p99_s),
                _ms(item.itl.p50_s),
                _ms(item.itl.p95_s),
                _ms(item.itl.p99_s, goal.itl_p99_ms if goal else None),
                _ms(item.itl.max_s),
                "all" if item.finished == item.requests else f"{item.finished / item.requests:.0%}",
            )
    console.print(table)
    console.print(f"Step times: {step_time.source}.", soft_wrap=True)
    if step_time.quality is not None:
        quality = step_time.quality
        console.print(
            f"Fit error on steps left out of it ({quality.steps} steps in all): median {quality.median_error:.1%}, "
            f"p95 {quality.p95_error:.1%}, their sum {quality.total_error:.1%}."
            + (f" Not in the data, so taken as free: {', '.join(quality.unused)}." if quality.unused else ""),
            soft_wrap=True,
        )
    if preempted:
        console.print(f"{preempted} preemptions: the KV cache is too small for what runs at once.")
    if any(row.simulation.cut_off for row in rows):
        console.print("Cut off before every request was done: the load is more than the server can take.")


def _ms(value_s: float | None, objective_ms: float | None = None) -> str:
    if value_s is None:
        return "-"
    value = value_s * MS
    text = f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"
    return f"{text} !" if objective_ms is not None and value > objective_ms else text
