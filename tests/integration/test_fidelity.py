"""Our figures and those of `vllm bench serve` on one recording of the real server (tests/benchmarks/fidelity.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.command import server_python
from serving.compare.fidelity import RecordedStream, compare_figures, vllm_figures
from serving.config import ServerConfig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
RECORDING = Path(__file__).with_name("recorded_streams.json")


def recorded() -> list[RecordedStream]:
    return [
        RecordedStream(
            one["request_id"],
            one["due_s"],
            one["sent_s"],
            one["max_tokens"],
            tuple((at_s, data.encode()) for at_s, data in one["chunks"]),
        )
        for one in json.loads(RECORDING.read_text())
    ]


def test_the_figures_are_the_same_but_for_the_definitions() -> None:
    """Nothing is served: only vLLM's own code is needed. The sizes are this recording's."""
    streams = recorded()
    theirs = vllm_figures(server_python(ServerConfig()), streams)
    found = compare_figures(streams, theirs)
    assert found.exact
    assert (found.requests, found.gaps) == (4, 4 * 11)
    assert found.percentile_error_ms < 1e-6
    assert [one.tokens for one in theirs.requests] == [12] * 4
    sizes_ms = {name: [1000 * one.size_s for one in found.differences if one.name == name]
                for name in ("TTFT", "sum of ITL", "TPOT")}  # fmt: skip
    # Theirs starts when the request is sent and stops at the chunk that only says `role`.
    assert [len(values) for values in sizes_ms.values()] == [4, 4, 4]
    assert all(-60 < size_ms < 0 for size_ms in sizes_ms["TTFT"])
    assert all(0 < size_ms < 5 for size_ms in sizes_ms["sum of ITL"])
    assert all(0 < size_ms < 0.5 for size_ms in sizes_ms["TPOT"])
    extra = [len(one.itl_s) for one in theirs.requests]
    assert extra == [12] * 4, "one more gap than ours: from the role to the first token"
