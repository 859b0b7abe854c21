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
from serving.capacity import DEFAULT_OVERHEAD_BYTES, MemoryBudget, activation_peak_bytes, weights_bytes
from serving.compiled import is_compiled
from serving.config import ClassConfig, ImageTokens, ServerConfig
from serving.kvcache import DEFAULT_BLOCK_TOKENS, cache_layout, kv_dtype, pool_size
from serving.latency import Percentiles
from serving.modelfiles import ModelFiles, image_rule
from serving.modelshape import ModelShape, ShapeError, read_shape
from serving.roofline import Machine, find_machine, model_cost, roofline_step_time
from serving.simulate import EngineSettings, FrontEnd, Policy, Simulation, simulate
from serving.stepsource import fit_from
from serving.steptime import StepTime
from serving.workload import PlannedRequest, Workload, draw
from ui.plan_kv import open_model

MS = 1e3
WIDTH = 120


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What `framechat simulate` was asked, as on its command line."""

    load: Path
    budgets: tuple[int, ...]
    policies: tuple[Policy, ...]
    fit: Path | None
    gpu: str | None
    model: str | None
    parameters: int | None
    tensor_parallel: int
    cache_tokens: int | None
    split_tokens: int | None
    front_end_ms: float
    picture_ms: float


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
    files = open_model(options.model or server.model) if options.model or not server.base_url else None
    step_time, machine = _step_time(options, files)
    settings = _settings(options, server, files, machine)
    rule = _image_rule(files, server, planned)
    if not as_json and not is_compiled():
        Console(stderr=True).print("Compiling the simulator once, some 20 seconds...")
    front_end = FrontEnd(request_s=options.front_end_ms / MS, picture_s=options.picture_ms / MS)
    rows = []
    for budget in options.budgets:
        for policy in options.policies:
            chosen = replace(
                settings, budget_tokens=budget, buffer_tokens=budget, policy=policy, split_tokens=options.split_tokens
            )
            result = simulate(planned, chosen, step_time, image_tokens=rule, front_end=front_end)
            rows.append(_Row(budget, policy, result))
    if as_json:
        print(json.dumps(_as_dict(rows, step_time, workload, settings), indent=2))
    else:
        width = None if sys.stdout.isatty() else WIDTH  # piped output has no terminal to fit
        _show(Console(width=width), rows, step_time, config.serving.classes)


def read_workload(path: Path) -> Workload:
    """Read a load from its YAML file.

    Raises:
        ValueError: It is no YAML, or not a load; pydantic's message is shortened to the first fault.
    """
    from pydantic import ValidationError  # noqa: PLC0415

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is no YAML: {' '.join(str(error).split())}") from None
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path.name}: {where or 'the load'}: {first['msg'].removeprefix('Value error, ')}") from None


def _step_time(options: SimulateOptions, files: ModelFiles | None) -> tuple[StepTime, Machine | None]:
    if (options.fit is None) == (options.gpu is None):
        raise ValueError("give either --fit (measured steps) or --gpu (a roofline), to say how long a step takes")
    if options.fit is not None:
        return fit_from(options.fit), None
    machine = find_machine(options.gpu or "")
    if files is None:
        raise ValueError("--gpu needs a model, to know what a step computes; give --model")
    shape = read_shape(files.config)
    cost = model_cost(
        shape,
        kv_dtype("auto", shape.dtype),
        tensor_parallel=options.tensor_parallel,
        parameters=options.parameters,
        weight_bytes=files.weight_bytes,
        vision=files.config.get("vision_config"),
        image_tokens_per_patch=_tokens_per_patch(files),
    )
    return roofline_step_time(machine, cost), machine


def _tokens_per_patch(files: ModelFiles) -> float:
    """Image tokens made of one patch: patches are merged (Qwen-VL) or shuffled (Idefics3) together."""
    vision = files.config.get("vision_config") or {}
    merged = files.config.get("scale_factor") or vision.get("spatial_merge_size") or 1
    return float(1 / merged**2)


def _settings(
    options: SimulateOptions, server: ServerConfig, files: ModelFiles | None, machine: Machine | None
) -> EngineSettings:
    block = DEFAULT_BLOCK_TOKENS["gpu" if machine is not None else server.device.value]
    if options.cache_tokens is not None:
        blocks = options.cache_tokens // block + 1
    else:
        if files is None:
            raise ValueError("the size of the KV cache is not known; give --cache-tokens")
        shape = read_shape(files.config)
        layout = cache_layout(
            shape, kv_dtype("auto", shape.dtype), block_tokens=block, tensor_parallel=options.tensor_parallel
        )
        cache = _cache_bytes(options, server, files, shape, machine)
        blocks = pool_size(
            layout, cache, max_model_len=server.max_model_len, in_flight_tokens=max(options.budgets)
        ).blocks
        if len(layout.groups) > 1:
            raise ShapeError("the simulator knows one kind of attention layer; this model mixes kinds")
    return EngineSettings.of_server(server, cache_blocks=blocks, block_tokens=block)


def _cache_bytes(
    options: SimulateOptions, server: ServerConfig, files: ModelFiles, shape: ModelShape, machine: Machine | None
) -> int:
    if machine is None:
        if server.kv_cache_memory_bytes is None:
            raise ValueError("the config does not set kv_cache_memory_bytes; give --cache-tokens")
        return server.kv_cache_memory_bytes
    memory = MemoryBudget(
        total_bytes=machine.memory_bytes,
        utilization=server.gpu_memory_utilization or 0.9,
        weight_bytes=weights_bytes(shape, files_bytes=files.weight_bytes, tensor_parallel=options.tensor_parallel),
        activation_bytes=activation_peak_bytes(
            shape,
            budget_tokens=max(options.budgets),
            max_num_seqs=server.max_num_seqs,
            tensor_parallel=options.tensor_parallel,
        ),
        overhead_bytes=DEFAULT_OVERHEAD_BYTES,
    )
    return memory.cache_bytes


def _image_rule(files: ModelFiles | None, server: ServerConfig, planned: list[PlannedRequest]) -> ImageTokens:
    """The model's own rule where it says one, else the config's; a load without pictures needs none."""
    if files is None or all(request.pictures is None for request in planned):
        return server.image_tokens
    try:
        return image_rule(files)
    except ShapeError:
        return server.image_tokens


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
