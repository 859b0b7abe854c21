"""Known arrivals, gaps and chunks of several tokens: every figure of a comparison, against the server's own stamps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from serving.compare.experiment import Comparison
from serving.compare.summary import ClassResult, summarise
from serving.compare.tables import BlockData, RequestRow, Results
from tests.component.serving.compare.scripted_arms import CLASSES, Answer, class_of, experiment, load, means, playing
from tests.scripted_server import Received, ScriptedServer

ANSWERS = {
    "camera": Answer(0.08, [0.03, 0.13, 0.02], [1, 3, 2]),
    "chat": Answer(0.04, [0.02, 0.02, 0.09, 0.03], [1, 1, 1, 2]),
}
DUE_S = {"camera": np.arange(0, 2, 1 / 3), "chat": np.arange(0, 2, 1 / 5)}
WARM_UP_S, LOAD_S = 0.5, 2.0
# A timer of the event loop is a millisecond late on an idle machine; three times that is a machine with other work.
QUIET_S = 0.003


@dataclass(frozen=True)
class Told:
    """What a request must have measured."""

    name: str
    due_s: float
    first_s: float
    gaps_s: tuple[float, ...]
    tokens: Sequence[int]

    @property
    def pools(self) -> dict[str, list[float]]:
        return {
            "ttft": [self.first_s - self.due_s],
            "itl": list(self.gaps_s),
            "itl_per_token": [gap / tokens for gap, tokens in zip(self.gaps_s, self.tokens, strict=True)],
            "tpot": [sum(self.gaps_s) / sum(self.tokens)],
        }


def by_the_server(received: Received, due_s: float) -> Told:
    name = class_of(received)
    stamps = received.sent_s[1 : 2 + len(ANSWERS[name].gaps_s)]  # the first is the role chunk
    return Told(name, due_s, stamps[0], tuple(np.diff(stamps)), ANSWERS[name].tokens)


def by_the_client(row: RequestRow) -> Told:
    assert row.first_token_s is not None
    assert row.gap_tokens == tuple(ANSWERS[row.traffic_class].tokens)
    return Told(row.traffic_class, row.due_s, row.first_token_s, row.gap_duration_s, row.gap_tokens)


def check(result: ClassResult, told: Sequence[Told], within_ms: Mapping[str, float]) -> None:
    """Every pool's samples and percentiles."""
    for figure in ("ttft", "itl", "itl_per_token", "tpot"):
        values = [value for request in told for value in request.pools[figure]]
        pool = getattr(result, figure)
        assert pool.samples == len(values)
        for percentile, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            if percentile in within_ms:
                expected_ms = 1000 * float(np.quantile(values, q))
                found_ms = getattr(pool, percentile).value
                assert found_ms == pytest.approx(expected_ms, abs=within_ms[percentile]), (figure, percentile)


Measured = tuple[Results, BlockData, dict[str, Received]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return asyncio.run(measure(tmp_path_factory.mktemp("exact")))


async def measure(folder: Path) -> Measured:
    with ScriptedServer(playing(ANSWERS)) as server:
        comparison = Comparison(folder, experiment(load(LOAD_S)), means(server.endpoint), on_progress=lambda _: None)
        await comparison.run()
        asked = {item.headers.get("x-request-id", ""): item for item in server.received}
    (block,) = comparison.results.blocks
    # Whether this machine was quiet enough to be believed is another test's question.
    block = BlockData(block.info.model_copy(update={"invalid": None}), block.requests)
    return Results(folder, comparison.experiment, [block]), block, asked


def test_every_figure_is_right_to_the_millisecond(measured: Measured) -> None:
    results, block, asked = measured
    arm = summarise(results).arms[0]
    lag_s = block.info.lag.loop_p99_s
    assert lag_s is not None
    # On a busy machine single chunks are late, by the client's doing or the scripted server's: then the median counts.
    within_ms = {"p50": 1.0, "p95": 1.0, "p99": 1.0} if lag_s < QUIET_S else {"p50": 1.0 + 1000 * lag_s}
    for name, times in DUE_S.items():
        rows = [row for row in block.requests if row.traffic_class == name]
        assert [row.due_s - block.info.start_s for row in rows] == pytest.approx(times, abs=1e-6)
        assert [row.warm_up for row in rows] == [bool(time < WARM_UP_S) for time in times]
        counted = [row for row in rows if not row.warm_up]
        result = arm.classes[name]
        check(result, [by_the_server(asked[row.request_id], row.due_s) for row in counted], within_ms)
        check(result, [by_the_client(row) for row in counted], {"p50": 1e-6, "p95": 1e-6, "p99": 1e-6})
        assert (result.requests, result.done, result.failed) == (len(counted), len(counted), {})
        assert (result.prompt_tokens_mean, result.completion_tokens_mean) == (40, 1 + sum(ANSWERS[name].tokens))
        assert result.tokens_counted


def test_stalls_goodput_and_throughput(measured: Measured) -> None:
    results, block, _ = measured
    arm = summarise(results).arms[0]
    seconds = LOAD_S - WARM_UP_S
    for name, result in arm.classes.items():
        rows = [row for row in block.requests if row.traffic_class == name and not row.warm_up]
        objective = CLASSES[name]
        stalls = [gap for row in rows for gap in row.gap_duration_s if gap > objective.itl_p99_ms / 1000]
        assert result.stalls == len(stalls) >= len(rows)  # each answer has one that is scripted
        assert result.stalls_per_min.value == pytest.approx(60 * len(stalls) / seconds)
        assert result.goodput_per_s.value == 0  # so none is within its objective
    start_s = block.info.start_s
    tokens = 0
    for told in map(by_the_client, block.requests):
        ends_s = told.first_s - start_s + np.cumsum([0.0, *told.gaps_s])
        tokens += sum(
            count for end_s, count in zip(ends_s, (1, *told.tokens), strict=True) if WARM_UP_S <= end_s < LOAD_S
        )
    assert arm.output_tokens_per_s.value == pytest.approx(tokens / seconds)


def test_requests_within_their_objectives_are_goodput(measured: Measured) -> None:
    results, _, _ = measured
    easy = {name: item.model_copy(update={"ttft_p95_ms": 1e5, "itl_p99_ms": 1e5}) for name, item in CLASSES.items()}
    relaxed = results.experiment.model_copy(update={"classes": easy})
    arm = summarise(Results(results.folder, relaxed, results.blocks)).arms[0]
    for name, times in DUE_S.items():
        expected = sum(time >= WARM_UP_S for time in times) / (LOAD_S - WARM_UP_S)
        assert arm.classes[name].goodput_per_s.value == pytest.approx(expected)
