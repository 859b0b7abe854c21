"""Comparisons for tests, drawn from a seed by a toy engine. Shapes to draw and to read, never results.

The toy serves running requests first and then prefills within the budget, one step after the other; a step takes a
fixed time, and more for every token. So stalls, and the prefills that cause them, fit together as in a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.compare.plan import Arm, BlockInfo, Experiment, PlannedBlock
from serving.compare.tables import BlockData, RequestRow, Results, StepRow, write_block, write_joined, write_json
from serving.config import ClassConfig
from serving.workload import Arrivals, ClassLoad, Lengths, PlannedRequest, Workload, draw

START_S = 1_800_000_000.0
FIXED_S, PREFILL_S, DECODE_S = 0.030, 0.00175, 0.001
CLASSES = {
    "camera": ClassConfig(ttft_p95_ms=6_000, itl_p99_ms=1_000, max_tokens=48),
    "chat": ClassConfig(ttft_p95_ms=4_000, itl_p99_ms=300, max_tokens=256),
}


@dataclass
class _Running:
    planned: PlannedRequest
    request_id: str
    due_s: float
    left: int
    context: int = 0
    admitted: bool = False
    generated: int = 0
    first_s: float | None = None
    last_s: float | None = None
    ends: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def workload(duration_s: float, rate_per_s: float = 0.25) -> Workload:
    """Chat with short prompts and camera requests of about 1,000 tokens."""
    arrivals = Arrivals(rate_per_s=rate_per_s)
    return Workload(
        duration_s=duration_s,
        classes={
            "camera": ClassLoad(arrivals=arrivals, prompt=Lengths(mean=1000), output=Lengths(mean=24)),
            "chat": ClassLoad(arrivals=arrivals, prompt=Lengths(mean=40), output=Lengths(mean=60)),
        },
    )


def block(
    number: int, arm: Arm, load: Workload, *, round_: int = 0, steps: bool = True, most_at_once: int = 16
) -> BlockData:
    """One block of the toy engine under `load` (its own seed is the round)."""
    start_s = START_S + number * (load.duration_s + 30)
    warm_up_s = min(5.0, load.duration_s / 5)
    rng = np.random.default_rng([7, number])
    coming = [
        _Running(item, f"b{number}-r{item.number}", start_s + item.due_s, item.text_tokens)
        for item in draw(load.model_copy(update={"seed": round_}))
    ]
    budget = arm.budget or 2048
    now_s, records, active, finished = start_s, [], [], []
    while coming or active:
        while coming and coming[0].due_s <= now_s and len(active) < most_at_once:
            active.append(coming.pop(0))
        if not active:
            now_s = coming[0].due_s
            continue
        step_start_s, left = now_s, budget
        tokens: list[tuple[_Running, int, bool]] = []
        for item in active:
            take = min(left, item.left if item.left else 1)
            if take:
                tokens.append((item, take, item.left > 0))
                left -= take
        decode = sum(count for _, count, prefill in tokens if not prefill)
        prefill = sum(count for _, count, prefill in tokens if prefill)
        duration_s = (FIXED_S + PREFILL_S * prefill + DECODE_S * decode) * float(rng.normal(1, 0.03))
        now_s += duration_s
        outputs = {id(item): int(not prefilled or item.left == count) for item, count, prefilled in tokens}
        for item, count, prefilled in tokens:
            item.context += count
            if prefilled:
                item.left -= count
                if item.left:
                    continue
            token_s = now_s + 0.001
            if item.last_s is not None:
                item.ends.append(token_s)
                item.gaps.append(token_s - item.last_s)
            item.first_s = item.first_s or token_s
            item.last_s = token_s
            item.generated += 1
        records.append(
            StepRow(
                block=number, arm=arm.name, step=len(records), start_s=step_start_s, end_s=now_s, duration_s=duration_s,
                budget=budget, decode_tokens=decode, prefill_tokens=prefill,
                decode_context=sum(item.context for item, _, prefilled in tokens if not prefilled),
                prefill_pairs=0, prefill_context=0, encoder_tokens=0, encoder_items=0, running=len(tokens),
                waiting=len(active) - len(tokens), preempted=0, kv_cache_usage=0.1,
                request_ids=tuple(item.request_id for item, _, _ in tokens),
                request_tokens=tuple(count for _, count, _ in tokens),
                request_prefill=tuple(prefilled for _, _, prefilled in tokens),
                request_outputs=tuple(outputs[id(item)] for item, _, _ in tokens),
            )
        )  # fmt: skip
        done = [item for item in active if item.generated >= item.planned.output_tokens]
        finished += done
        active = [item for item in active if item not in done]
    requests = [
        RequestRow(
            block=number, arm=arm.name, request_id=item.request_id, traffic_class=item.planned.traffic_class,
            due_s=item.due_s, sent_s=item.due_s + 0.001, first_token_s=item.first_s, last_token_s=item.last_s,
            finished_s=(item.last_s or item.due_s) + 0.001, outcome="done", error_kind=None, error=None, reason=None,
            finish_reason="length", prompt_tokens=item.planned.text_tokens, cached_tokens=0,
            completion_tokens=item.generated, image_tokens=0, warm_up=item.due_s < start_s + warm_up_s,
            behind_cap_s=0.0, tokens_counted=True, gap_end_s=tuple(item.ends), gap_duration_s=tuple(item.gaps),
            gap_tokens=(1,) * len(item.gaps),
        )
        for item in sorted(finished, key=lambda item: item.due_s)
    ]  # fmt: skip
    planned = {name: sum(row.traffic_class == name for row in requests) for name in load.classes}
    info = BlockInfo(
        number=number, arm=arm.name, round=round_, seed=round_, start_s=start_s, end_s=now_s, load_s=load.duration_s,
        warm_up_s=warm_up_s, planned=planned,
    )  # fmt: skip
    return BlockData(info, requests, records if steps else [])


def comparison(
    folder: Path,
    *,
    budgets: tuple[int, ...] = (64, 256, 2048),
    rounds: int = 3,
    block_s: float = 60,
    rate_per_s: float = 0.25,
    steps: bool = True,
    refused: tuple[str, ...] = (),
    name: str = "toy",
    command: tuple[str, ...] = ("framechat", "compare", "--step-budgets", "64,256,2048"),
) -> Results:
    """A comparison of step budgets as it would lie in `folder`; arms named in `refused` ran not at all."""
    arms = [
        Arm(
            name=f"step {budget}", kind="step_budget", budget=budget,
            reason="the server refused it" if f"step {budget}" in refused else None,
        )
        for budget in budgets
    ]  # fmt: skip
    load = workload(block_s, rate_per_s)
    running = [arm for arm in arms if arm.reason is None]
    plan = [
        PlannedBlock(number=number, arm=arm.name, round=number // len(running), seed=number // len(running))
        for number, arm in enumerate(running * rounds)
    ]
    experiment = Experiment(
        name=name, created_s=START_S, command=list(command), config={"serving": {"server": {"model": "sample"}}},
        workload=load, classes=CLASSES, arms=arms, plan=plan, seed=1, block_s=block_s, warm_up_s=min(5.0, block_s / 5),
        drain_s=30, planned_s=len(plan) * (block_s + 30), steps=steps, versions={"framechat": "0.1.0", "vllm": "toy"},
        machine={"cpu": "toy", "cores": 2},
    )  # fmt: skip
    by_name = {arm.name: arm for arm in arms}
    blocks = [block(item.number, by_name[item.arm], load, round_=item.round, steps=steps) for item in plan]
    results = Results(folder, experiment, blocks)
    write_json(folder / "experiment.json", experiment)
    for item in blocks:
        write_block(folder, item)
    write_joined(results)
    return results
