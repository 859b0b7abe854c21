"""The plugin around vLLM's own schedulers, the asynchronous one too, on scenarios with preemptions and pictures."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from serving.compare.tables import StepRow
from serving.scheduler.steps import StepReader
from serving.scheduler.wiring import Wiring
from tests.integration.test_schedule_matches_vllm import PYTHON, SCENARIOS

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).with_name("plugin_schedule.py")
NAMES = ["plain #0", "preemption, no prefix cache #0", "asynchronous #0", "asynchronous, preemption #0"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[dict[str, object]], list[StepRow]]]:
    """By scenario: what the scheduler decided, as the driver saw it, and what the plugin wrote down."""
    folder = tmp_path_factory.mktemp("plugin")
    done = subprocess.run(
        [str(PYTHON), "-P", str(DRIVER), str(folder)],
        input=json.dumps([SCENARIOS[name] for name in NAMES]),
        env={"PATH": os.environ["PATH"], **Wiring(folder).environment({})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return {
        name: (answer["steps"], StepReader(folder / str(number)).read())
        for number, (name, answer) in enumerate(zip(NAMES, answers, strict=True))
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_is_written_down(
    recorded: dict[str, tuple[list[dict[str, object]], list[StepRow]]], name: str
) -> None:
    seen, rows = recorded[name]
    # Steps whose results never came (the driver stops at the last answer) have no record.
    assert 0 <= len(seen) - len(rows) <= 1
    for step, row in zip(seen, rows, strict=False):
        tokens = [[int(request), count] for request, count in zip(row.request_ids, row.request_tokens, strict=True)]
        assert tokens == step["tokens"]
        assert row.running == step["running"]
        assert row.encoder_items == sum(count for _, count in step["images"])  # type: ignore[attr-defined]
        assert row.prefill_tokens + row.decode_tokens == sum(row.request_tokens)


@pytest.mark.parametrize("name", NAMES)
def test_every_token_of_every_answer_is_given_by_a_step(
    recorded: dict[str, tuple[list[dict[str, object]], list[StepRow]]], name: str
) -> None:
    _, rows = recorded[name]
    given: Counter[int] = Counter()
    decoded: Counter[int] = Counter()
    prefilled: Counter[int] = Counter()
    for row in rows:
        for request, tokens, prefill, out in zip(
            row.request_ids, row.request_tokens, row.request_prefill, row.request_outputs, strict=True
        ):
            given[int(request)] += out
            (prefilled if prefill else decoded)[int(request)] += tokens
    asked = SCENARIOS[name]["requests"]
    assert given == {number: request["output"] for number, request in enumerate(asked)}
    preempted = sum(row.preempted for row in rows)
    assert (preempted > 0) == ("preemption" in name)
    if not preempted:
        assert decoded == {n: request["output"] - 1 for n, request in enumerate(asked) if request["output"] > 1}
        assert all(prefilled[n] <= request["prompt"] for n, request in enumerate(asked))
    else:
        # What is computed again after a preemption is prefill: more of it, and the fewer decodes.
        assert sum(decoded.values()) <= sum(request["output"] - 1 for request in asked)
        assert sum(prefilled.values()) > sum(request["prompt"] for request in asked)
