"""A comparison's folder: what is written comes back, and what is half there does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serving.compare.plan import Arm, BlockInfo, Experiment, PlannedBlock, Progress
from serving.compare.tables import (
    REQUEST_SCHEMA,
    STEP_SCHEMA,
    BlockData,
    ComparisonError,
    RequestRow,
    StepRow,
    read_progress,
    read_results,
    write_block,
    write_joined,
    write_json,
)
from serving.config import ClassConfig
from serving.workload import ClassLoad, Workload

REQUEST = RequestRow(
    block=1,
    arm="256",
    request_id="r1",
    traffic_class="chat",
    due_s=100.0,
    sent_s=100.5,
    first_token_s=101.0,
    last_token_s=103.0,
    finished_s=103.1,
    outcome="done",
    error_kind=None,
    error=None,
    reason=None,
    finish_reason="length",
    prompt_tokens=40,
    cached_tokens=None,
    completion_tokens=5,
    image_tokens=0,
    warm_up=False,
    behind_cap_s=0.0,
    tokens_counted=True,
    gap_end_s=(102.0, 103.0),
    gap_duration_s=(1.0, 1.0),
    gap_tokens=(1, 3),
)
UNSENT = replace(
    REQUEST, request_id="r2", sent_s=None, first_token_s=None, last_token_s=None, outcome="skipped",
    completion_tokens=None, gap_end_s=(), gap_duration_s=(), gap_tokens=(),
)  # fmt: skip
STEP = StepRow(
    block=1, arm="256", step=7, start_s=100.6, end_s=100.9, duration_s=0.3, budget=256, decode_tokens=1,
    prefill_tokens=40, decode_context=10, prefill_pairs=820, prefill_context=0, encoder_tokens=0, encoder_items=0,
    running=2, waiting=0, preempted=0, kv_cache_usage=0.25, request_ids=("r1", "r0"), request_tokens=(40, 1),
    request_prefill=(True, False),
)  # fmt: skip


def experiment(blocks: int = 2) -> Experiment:
    return Experiment(
        name="try",
        created_s=1.0,
        command=["framechat", "compare"],
        config={},
        workload=Workload(classes={"chat": ClassLoad()}),
        classes={"chat": ClassConfig(ttft_p95_ms=2000, itl_p99_ms=500, max_tokens=64)},
        arms=[Arm(name="256", kind="step_budget", budget=256)],
        plan=[PlannedBlock(number=number, arm="256", round=number, seed=number) for number in range(blocks)],
        seed=0,
        block_s=60,
        warm_up_s=10,
        drain_s=30,
        planned_s=180,
    )


def info(number: int) -> BlockInfo:
    return BlockInfo(
        number=number, arm="256", round=number, seed=number, start_s=100, end_s=160, load_s=60, warm_up_s=10,
        planned={"chat": 1},
    )  # fmt: skip


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", experiment())
    write_block(tmp_path, BlockData(info(1), [REQUEST, UNSENT], [STEP]))
    results = read_results(tmp_path)
    assert results.experiment == experiment()
    assert [block.info for block in results.blocks] == [info(1)]
    assert results.requests == [REQUEST, UNSENT]
    assert results.steps == [STEP]
    assert results.requests[0].gaps[1].tokens == 3
    assert results.requests[0].tpot_s == pytest.approx(0.5)


def test_the_joined_tables_hold_every_block(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", experiment())
    write_block(tmp_path, BlockData(info(0), [replace(REQUEST, block=0)]))
    write_block(tmp_path, BlockData(info(1), [REQUEST], [STEP]))
    write_joined(read_results(tmp_path))
    joined = pq.read_table(tmp_path / "requests.parquet")
    assert joined.schema.equals(REQUEST_SCHEMA)
    assert joined["block"].to_pylist() == [0, 1]
    assert pq.read_table(tmp_path / "steps.parquet").schema.equals(STEP_SCHEMA)


def test_a_block_written_again_replaces_the_first(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", experiment())
    write_block(tmp_path, BlockData(info(0), [REQUEST, UNSENT]))
    write_block(tmp_path, BlockData(info(0), [UNSENT]))
    assert read_results(tmp_path).requests == [UNSENT]


def test_a_block_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", experiment())
    (tmp_path / "blocks" / ".0000.17").mkdir(parents=True)
    assert read_results(tmp_path).blocks == []


def test_a_block_that_cannot_be_read_says_which(tmp_path: Path) -> None:
    write_json(tmp_path / "experiment.json", experiment())
    write_block(tmp_path, BlockData(info(0), [REQUEST]))
    (tmp_path / "blocks" / "0000" / "requests.parquet").write_bytes(b"torn")
    with pytest.raises(ComparisonError, match=r"blocks/0000 cannot be read .*--resume"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(None, "holds no comparison", id="nothing there"),
        pytest.param("{", "cannot be read", id="not JSON"),
        pytest.param(experiment().model_dump_json().replace('"format":1', '"format":9'), "format 9", id="newer"),
    ],
)
def test_a_folder_that_is_no_comparison_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ComparisonError, match=message) as caught:
        read_results(tmp_path)
    assert "\n" not in str(caught.value)


def test_progress_comes_back(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    progress = Progress(state="running", at_s=5, started_s=1, blocks_done=1, blocks_total=4, remaining_s=180)
    write_json(tmp_path / "progress.json", progress)
    assert read_progress(tmp_path) == progress
