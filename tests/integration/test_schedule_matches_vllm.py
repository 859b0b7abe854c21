"""The simulated scheduler decides every step as vLLM's own `Scheduler` does: both get the same requests."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from serving.simkernel import FEATURES, VLLM
from serving.simrun import STUCK
from serving.simstate import STATE, Rules, SimImage, SimRequest, new_sim
from serving.simulate import run_to_end
from serving.steptime import StepTime

pytestmark = pytest.mark.integration

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
DRIVER = Path(__file__).with_name("vllm_schedule.py")
MAX_STEPS = 600
BASE: dict[str, Any] = {
    "budget": 64,
    "max_num_seqs": 8,
    "threshold": 0,
    "adaptive": False,
    "chunked": True,
    "by_priority": False,
    "watermark": 0.0,
    "reserve_prompt": True,
    "whole_items": False,
    "prefix_caching": True,
    "block_tokens": 16,
    "blocks": 400,
    "encoder_budget": 64,
    "encoder_cache": 64,
    "max_model_len": 512,
    "asynchronous": False,
}
# Each variant is drawn with several seeds; tight pools force preemption, tight encoder caches force waiting.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "large budget": {"budget": 256, "encoder_budget": 256, "encoder_cache": 256},
    "few slots": {"max_num_seqs": 2},
    "threshold": {"threshold": 24},
    "adaptive threshold": {"threshold": 8, "adaptive": True},
    "whole prompts": {"chunked": False, "budget": 512},
    "preemption": {"blocks": 40},
    "preemption, no prefix cache": {"blocks": 40, "prefix_caching": False},
    "first chunk only": {"blocks": 40, "reserve_prompt": False},
    "watermark": {"blocks": 60, "watermark": 0.1},
    "priority": {"by_priority": True, "max_num_seqs": 3},
    "priority, preemption": {"by_priority": True, "blocks": 40},
    "whole images": {"whole_items": True},
    "small blocks": {"block_tokens": 8, "blocks": 90},
    "asynchronous": {"asynchronous": True},
    "asynchronous, preemption": {"asynchronous": True, "blocks": 40},
    "asynchronous, priority": {"asynchronous": True, "blocks": 40, "by_priority": True, "max_num_seqs": 4},
    "asynchronous, threshold": {"asynchronous": True, "threshold": 24, "encoder_cache": 96},
    "everything tight": {"blocks": 36, "threshold": 24, "by_priority": True, "max_num_seqs": 4},
}
SEEDS = range(4)


def _requests(seed: int, rules: dict[str, Any]) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    requests = []
    now = 0
    for _ in range(24):
        now += rng.choice([0, 0, 1, 3, 8])
        prompt = rng.choice([rng.randint(1, 40), rng.randint(30, 300), 96, 160])
        prefix = rng.choice([0, 0, 16, 50, 96])
        prefix = prefix if prefix <= prompt else 0
        images, offset = [], prefix
        for _ in range(rng.choice([0, 0, 1, 2])):
            offset += rng.randint(0, 10)
            tokens = 30 + 4 * rng.randint(0, 2)
            if offset + tokens <= prompt:
                content = f"{tokens}-{rng.randint(0, 5)}"
                if content not in [image["content"] for image in images]:
                    images.append({"offset": offset, "tokens": tokens, "content": content})
                    offset += tokens
        requests.append(
            {
                "arrival_s": now,
                "prompt": prompt,
                "output": rng.randint(1, 60),
                "prefix": rng.randint(0, 1),
                "prefix_tokens": prefix,
                "priority": rng.randint(0, 2) if rules["by_priority"] else 0,
                "images": images,
            }
        )
    return requests


def _scenarios() -> dict[str, dict[str, Any]]:
    found = {}
    for name, changes in VARIANTS.items():
        for seed in SEEDS:
            rules = {**BASE, **changes}
            found[f"{name} #{seed}"] = {
                "rules": rules,
                "requests": _requests(seed + 100 * list(VARIANTS).index(name), rules),
                "max_steps": MAX_STEPS,
            }
    return found


SCENARIOS = _scenarios()


def _simulated(scenario: dict[str, Any]) -> tuple[list[dict[str, Any]], int, bool]:
    rules = dict(scenario["rules"])
    watermark = int(rules.pop("watermark") * rules["blocks"])
    sim = new_sim(
        Rules(policy=VLLM, watermark_blocks=watermark, split=1, depth=2 if rules.pop("asynchronous") else 1, **rules),
        [
            SimRequest(
                arrival_s=item["arrival_s"],
                prompt_tokens=item["prompt"],
                output_tokens=item["output"],
                priority=item["priority"],
                prefix=item["prefix"],
                prefix_tokens=item["prefix_tokens"],
                images=tuple(SimImage(i["offset"], i["tokens"], i["content"]) for i in item["images"]),
            )
            for item in scenario["requests"]
        ],
    )
    one_second = StepTime((1.0, *[0.0] * (FEATURES - 1)), source="a test")
    _, steps, log = run_to_end(sim, one_second, 1e9, 1_000_000)
    stuck = sim.counts[STATE] == STUCK
    found: list[dict[str, Any]] = [
        {
            "tokens": [],
            "images": [],
            "free_blocks": int(row[FEATURES + 4]),
            "running": int(row[FEATURES + 2]),
            "waiting": int(row[FEATURES + 3]),
        }
        for row in steps[:MAX_STEPS]
    ]
    for step, request, tokens, images in log.tolist():
        if step < MAX_STEPS:
            found[step]["tokens"].append([request, tokens])
            if images:
                found[step]["images"].append([request, images])
    for entry in found:
        entry["images"].sort()
    return found, int(sim.req["preemptions"].sum()), bool(stuck)


@pytest.fixture(scope="module")
def engine_steps() -> dict[str, dict[str, Any]]:
    """One start of the server's Python for all scenarios: its imports take longest."""
    if not PYTHON.exists():
        pytest.skip("the server environment .venv-vllm is not installed")
    done = subprocess.run(
        [str(PYTHON), str(DRIVER)],
        input=json.dumps(list(SCENARIOS.values())),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(SCENARIOS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_every_step_is_the_same(name: str, engine_steps: dict[str, dict[str, Any]]) -> None:
    expected = engine_steps[name]["steps"]
    found, _, stuck = _simulated(SCENARIOS[name])
    assert len(expected) > 30
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        assert ours == theirs, f"step {number}"
    assert len(found) == len(expected)
    assert stuck == engine_steps[name]["hangs"]


def test_the_scenarios_exercise_preemption() -> None:
    preempted = {name for name, scenario in SCENARIOS.items() if _simulated(scenario)[1] > 0}
    assert len(preempted) >= 12
