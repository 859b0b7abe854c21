"""Streams made up to the millisecond, against what vLLM's benchmark makes of them by its definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.compare.fidelity import (
    BenchFigures,
    BenchRequest,
    FidelityError,
    RecordedStream,
    compare_figures,
    engine_delays,
    vllm_figures,
)
from tests.scripted_server import chunk, event
from tests.unit.serving.compare.test_attribution import CHAT, Engine, row


def stream(*chunks: tuple[float, bytes], due_s: float = 0.0, sent_s: float = 0.5) -> RecordedStream:
    return RecordedStream("r", due_s, sent_s, 16, (*chunks, (chunks[-1][0], event("[DONE]"))))


def bench(ttft_s: float, itl_s: tuple[float, ...], tokens: int) -> BenchFigures:
    one = BenchRequest(True, ttft_s, itl_s, ttft_s + sum(itl_s), tokens)
    same = {"ttft": (1000 * ttft_s,) * 3, "tpot": (1000 * (one.tpot_s or 0.0),) * 3}
    return BenchFigures((one,), {**same, "itl": _percentiles_ms(itl_s)})


def _percentiles_ms(values: tuple[float, ...]) -> tuple[float, ...]:
    import numpy as np

    return tuple(1000 * float(value) for value in np.percentile(values, (50, 95, 99)))


ROLE = (1.0, chunk(role="assistant", content="", running=0))
TOKENS = ((1.25, chunk("a", running=1)), (1.75, chunk("b", running=3)), (2.0, chunk("c", running=4, finish="length")))


def test_the_same_stream_without_a_role_chunk() -> None:
    found = compare_figures([stream(*TOKENS, due_s=0.5)], bench(0.75, (0.5, 0.25), 4))
    assert found.exact
    assert (found.gaps, found.differences) == (2, ())


def test_differences_are_named_with_their_size() -> None:
    """Due 0.5 s before sent; a role-only chunk 0.25 s before the first token; an empty last chunk 0.5 s after."""
    last = (2.5, chunk("", running=4, finish="stop"))
    streams = [stream(ROLE, *TOKENS[:2], (2.0, chunk("c", running=4)), last)]
    found = compare_figures(streams, bench(0.5, (0.25, 0.5, 0.25, 0.5), 4))
    assert found.exact
    assert found.gaps == 2
    sizes = {one.name: (one.ours_s, one.theirs_s, one.left_s) for one in found.differences}
    assert sizes == {
        "TTFT": (1.25, 0.5, 0.0),
        "sum of ITL": (0.75, 1.5, 0.0),
        "TPOT": (0.25, 0.5, 0.0),
    }
    assert "250.000 ms" in found.differences[0].why
    assert "500.000 ms" in found.differences[0].why


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(bench(0.75, (0.5, 0.251), 4), id="a gap"),
        pytest.param(BenchFigures(bench(0.75, (0.5, 0.25), 4).requests,
                                  bench(0.75, (0.5, 0.25), 4).percentiles_ms | {"itl": (375.0, 488.0, 497.5)}),
                     id="a percentile"),
    ],
)  # fmt: skip
def test_what_the_definitions_do_not_explain_is_found(theirs: BenchFigures) -> None:
    assert not compare_figures([stream(*TOKENS, due_s=0.5)], theirs).exact


def test_an_unexplained_first_token_is_found() -> None:
    found = compare_figures([stream(ROLE, *TOKENS)], bench(0.6, (0.25, 0.5, 0.25), 4))
    assert not found.exact


def test_a_stream_that_they_call_failed() -> None:
    failed = BenchFigures((BenchRequest(False, 0.0, (), 0.0, 0),), {})
    with pytest.raises(FidelityError, match="request r"):
        compare_figures([stream(*TOKENS)], failed)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        pytest.param(True, "failed: no module named vllm", id="fails"),
        pytest.param(False, "cannot be run", id="missing"),
    ],
)
def test_no_benchmark(tmp_path: Path, there: bool, said: str) -> None:
    python = tmp_path / "python"
    if there:
        python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 3\n")
        python.chmod(0o755)
    with pytest.raises(FidelityError, match=said):
        vllm_figures(python, [stream(*TOKENS)])


def test_delays_of_every_token() -> None:
    engine = Engine()
    ends = [
        engine.step(prefill={CHAT: 10}, sampled=(CHAT,)),
        engine.step(decode=(CHAT,)),
        engine.step(decode=(CHAT,)),
    ]
    arrivals = [ends[0] + 0.004, ends[1] + 0.005, ends[2] + 0.006]
    had: dict[tuple[str, float], float] = {(CHAT, at_s): at_s - 0.001 for at_s in arrivals[:2]}
    found: Any = engine_delays([row(CHAT, arrivals)], engine.steps, had)
    assert found.unmatched == 1
    assert found.front_end.count == 2
    assert found.front_end.max_s == pytest.approx(0.004)
    assert found.client.p50_s == pytest.approx(0.001)
