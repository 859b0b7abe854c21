"""Simulated runs as a comparison's folder: one report then shows predictions as it shows measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.compare.plan import Arm, BlockInfo, Experiment, PlannedBlock
from serving.compare.report import write_report
from serving.compare.summary import summarise
from serving.compare.tables import (
    BlockData,
    RequestRow,
    Results,
    StepRow,
    request_row,
    write_block,
    write_joined,
    write_json,
)
from serving.config import ClassConfig, ImageTokens
from serving.records import Gap, RequestRecord, now_s
from serving.simulate import STEP_NAMES, Simulation
from serving.steptime import FEATURE_NAMES
from serving.workload import Workload

MODEL = "simulated"
MOST_STEP_ENTRIES = 2_000_000  # requests of steps, over all runs: what a folder and its report can hold


def write_simulated(
    folder: Path,
    runs: Mapping[str, tuple[int, int, Simulation]],
    *,
    workload: Workload,
    classes: Mapping[str, ClassConfig],
    image_tokens: ImageTokens,
    source: str,
    command: Sequence[str],
    config: Mapping[str, Any],
) -> Path:
    """Write the folder and its report; returns the report's path. A run is an arm: its budget, pool of blocks, result.

    `source` says where the step times are from; it stands with every arm's name as a note that nothing was measured.

    Raises:
        ValueError: The folder holds something already, or there are too many steps to keep.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty, allowed: a new folder")
    entries = sum(len(result.schedule) for _, _, result in runs.values())
    if entries > MOST_STEP_ENTRIES:
        raise ValueError(f"{entries:,} entries of steps, allowed in a report: {MOST_STEP_ENTRIES:,}; shorten the load")
    missing = set(workload.classes) - set(classes)
    if missing:
        raise ValueError(f"class {', '.join(sorted(missing))} has no objectives in serving.classes")
    start_s = now_s()
    arms = [Arm(name=f"{name} {MODEL}", kind="budget", budget=budget) for name, (budget, _, _) in runs.items()]
    plan = [PlannedBlock(number=number, arm=arm.name, round=0, seed=workload.seed) for number, arm in enumerate(arms)]
    experiment = Experiment(
        name=folder.name,
        created_s=start_s,
        command=list(command),
        config=dict(config),
        workload=workload,
        classes={name: classes[name] for name in workload.classes},
        arms=arms,
        plan=plan,
        seed=workload.seed,
        block_s=workload.duration_s,
        warm_up_s=0.0,
        drain_s=0.0,
        planned_s=0.0,
        steps=True,
        pictures=MODEL,
        notes=[f"Simulated, not measured: no server ran. Step times: {source}."],
    )
    blocks = [
        _block(planned, budget, pool, result, start_s, image_tokens)
        for planned, (budget, pool, result) in zip(plan, runs.values(), strict=True)
    ]
    results = Results(folder, experiment, blocks)
    write_json(folder / "experiment.json", experiment)
    for block in blocks:
        write_block(folder, block)
    write_joined(results)
    summary = summarise(results)
    write_json(folder / "summary.json", summary)
    return write_report(results, summary)


def _block(
    planned: PlannedBlock, budget: int, pool_blocks: int, result: Simulation, start_s: float, rule: ImageTokens
) -> BlockData:
    records = [_moved(record, start_s, planned.number) for record in result.records(MODEL)]
    requests: list[RequestRow] = []
    for record, request in zip(records, result.planned, strict=True):
        pictures = request.pictures
        shown = pictures.count * rule.count(pictures.width_px, pictures.height_px) if pictures else 0
        requests.append(
            request_row(
                record,
                request,
                block=planned.number,
                arm=planned.arm,
                image_tokens=shown,
                warm_up=False,
                behind_cap_s=0.0,
            )
        )
    info = BlockInfo(
        number=planned.number,
        arm=planned.arm,
        round=planned.round,
        seed=planned.seed,
        start_s=start_s,
        end_s=start_s + result.span_s,
        load_s=max(request.due_s for request in result.planned),
        warm_up_s=0.0,
        planned=dict(Counter(request.traffic_class for request in result.planned)),
    )
    return BlockData(info, requests, _steps(planned, budget, pool_blocks, result, start_s, records))


def _moved(record: RequestRecord, start_s: float, block: int) -> RequestRecord:
    """The record on the wall clock, under an id that no other block has."""

    def at(value: float | None) -> float | None:
        return None if value is None else start_s + value

    return replace(
        record,
        request_id=f"{MODEL}-{block:04d}-{record.request_id.rsplit('-', 1)[-1]}",
        due_s=start_s + record.due_s,
        sent_s=at(record.sent_s),
        first_token_s=at(record.first_token_s),
        last_token_s=at(record.last_token_s),
        finished_s=start_s + record.finished_s,
        tokens_counted=True,
        gaps=tuple(Gap(start_s + gap.end_s, gap.duration_s, gap.tokens) for gap in record.gaps),
    )


def _steps(
    planned: PlannedBlock,
    budget: int,
    pool_blocks: int,
    result: Simulation,
    start_s: float,
    records: Sequence[RequestRecord],
) -> list[StepRow]:
    column = {name: STEP_NAMES.index(name) for name in STEP_NAMES}
    bounds = np.searchsorted(result.schedule[:, 0], np.arange(len(result.steps) + 1))
    seen = [0] * len(result.planned)
    images = [_image_tokens(result, number) for number in range(len(result.planned))]
    rows = []
    for number, values in enumerate(result.steps.tolist()):
        entries = result.schedule[bounds[number] : bounds[number + 1]].tolist()
        prefill, outputs = [], []
        for _, request, tokens, _ in entries:
            length = int(result.prompt_tokens[request])
            # What a preempted request computes again counts as its prompt.
            prefill.append(seen[request] < length or tokens > 1)
            seen[request] += tokens
            outputs.append(int(seen[request] >= length))
        start = start_s + values[column["start_s"]]
        encoded = [(request, count) for _, request, _, count in entries if count]
        rows.append(
            StepRow(
                block=planned.number,
                arm=planned.arm,
                step=number,
                start_s=start,
                end_s=start + values[column["duration_s"]],
                duration_s=values[column["duration_s"]],
                budget=budget,
                **{name: int(values[column[name]]) for name in FEATURE_NAMES[1:]},
                running=int(values[column["running"]]),
                waiting=int(values[column["waiting"]]),
                preempted=int(values[column["preempted"]]),
                kv_cache_usage=1 - values[column["free_blocks"]] / max(1, pool_blocks - 1),
                request_ids=tuple(records[request].request_id for _, request, _, _ in entries),
                request_tokens=tuple(tokens for _, _, tokens, _ in entries),
                request_prefill=tuple(prefill),
                request_outputs=tuple(outputs),
                encoder_request_ids=tuple(records[request].request_id for request, _ in encoded),
                encoder_request_tokens=tuple(images[request] * count for request, count in encoded),
            )
        )
    return rows


def _image_tokens(result: Simulation, number: int) -> int:
    """Tokens of each picture of a request."""
    request = result.planned[number]
    count = request.pictures.count if request.pictures else 0
    return (int(result.prompt_tokens[number]) - request.text_tokens) // count if count else 0
