"""The tables of a comparison on disk: one row a request, one row a step of the engine, block by block.

    comparisons/<name>/
        experiment.json                 plan.Experiment
        progress.json                   plan.Progress
        blocks/<number>/requests.parquet, steps.parquet, block.json
        requests.parquet, steps.parquet the blocks joined
        summary.json, report.html

A block's folder appears whole or not at all: it is written beside and then renamed. All times are seconds on the clock
of :func:`serving.records.now_s`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from serving.compare.plan import FORMAT, BlockInfo, Experiment, Progress
from serving.records import Gap, RequestRecord, tpot_s
from serving.workload import PlannedRequest

_BLOCKS = "blocks"
REQUESTS = "requests.parquet"
STEPS = "steps.parquet"


class ComparisonError(Exception):
    """A comparison's folder or setting is not usable; the message is one line."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request of a block. See :class:`serving.records.RequestRecord` for the times and `tokens_counted`.

    `image_tokens` is planned, by the model's rule, not the server's count. `behind_cap_s` (behind `max_in_flight`) and
    `behind_turn_s` (behind the answer before, in a conversation) are parts of sent - due.
    """

    block: int
    arm: str
    request_id: str
    traffic_class: str
    due_s: float
    sent_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    outcome: str
    error_kind: str | None
    error: str | None
    reason: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    image_tokens: int
    warm_up: bool
    behind_cap_s: float
    tokens_counted: bool
    behind_turn_s: float = 0.0
    gap_end_s: tuple[float, ...] = ()
    gap_duration_s: tuple[float, ...] = ()
    gap_tokens: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from due."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, by :func:`serving.records.tpot_s`."""
        return tpot_s(self.first_token_s, self.last_token_s, self.completion_tokens)

    @property
    def gaps(self) -> list[Gap]:
        """The gaps between its token-bearing chunks, in order."""
        return [Gap(*row) for row in zip(self.gap_end_s, self.gap_duration_s, self.gap_tokens, strict=True)]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of the engine.

    Attributes:
        start_s, end_s: `schedule()` entered, results processed. duration_s: end - start; with asynchronous scheduling,
            where steps overlap, between completions.
        budget: Tokens that the step might have processed.
        decode_tokens ... encoder_items: See :data:`serving.steptime.FEATURE_NAMES`.
        running, waiting: Requests after scheduling. preempted: Requests thrown out in this step.
        request_ids, request_tokens, request_prefill: Our ids of the requests in the step, their tokens, and whether
            those were prompt tokens. request_outputs: Tokens that the step gave each of them.
        encoder_request_ids, encoder_request_tokens: Pictures encoded for whom.
    """

    block: int
    arm: str
    step: int
    start_s: float
    end_s: float
    duration_s: float
    budget: int
    decode_tokens: int
    prefill_tokens: int
    decode_context: int
    prefill_pairs: int
    prefill_context: int
    encoder_tokens: int
    encoder_items: int
    running: int
    waiting: int
    preempted: int
    kv_cache_usage: float
    request_ids: tuple[str, ...] = ()
    request_tokens: tuple[int, ...] = ()
    request_prefill: tuple[bool, ...] = ()
    request_outputs: tuple[int, ...] = ()
    encoder_request_ids: tuple[str, ...] = ()
    encoder_request_tokens: tuple[int, ...] = ()


_TYPES: dict[str, Any] = {
    "int": pa.int64(),
    "int | None": pa.int64(),
    "float": pa.float64(),
    "float | None": pa.float64(),
    "str": pa.string(),
    "str | None": pa.string(),
    "bool": pa.bool_(),
    "tuple[int, ...]": pa.list_(pa.int64()),
    "tuple[float, ...]": pa.list_(pa.float64()),
    "tuple[str, ...]": pa.list_(pa.string()),
    "tuple[bool, ...]": pa.list_(pa.bool_()),
}


def _schema(row: type) -> pa.Schema:
    return pa.schema(
        [
            pa.field(item.name, _TYPES[str(item.type)], nullable=str(item.type).endswith("None"))
            for item in dataclasses.fields(row)
        ]
    )


REQUEST_SCHEMA = _schema(RequestRow)
STEP_SCHEMA = _schema(StepRow)


def request_row(
    record: RequestRecord,
    planned: PlannedRequest,
    *,
    block: int,
    arm: str,
    image_tokens: int,
    warm_up: bool,
    behind_cap_s: float = 0.0,
    behind_turn_s: float = 0.0,
) -> RequestRow:
    """The row of a record."""
    return RequestRow(
        block=block,
        arm=arm,
        request_id=record.request_id,
        traffic_class=planned.traffic_class,
        due_s=record.due_s,
        sent_s=record.sent_s,
        first_token_s=record.first_token_s,
        last_token_s=record.last_token_s,
        finished_s=record.finished_s,
        outcome=record.outcome.value,
        error_kind=None if record.error is None else record.error.kind.value,
        error=None if record.error is None else record.error.message,
        reason=record.reason,
        finish_reason=record.finish_reason,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        image_tokens=image_tokens,
        warm_up=warm_up,
        behind_cap_s=behind_cap_s,
        behind_turn_s=behind_turn_s,
        tokens_counted=record.tokens_counted,
        gap_end_s=tuple(gap.end_s for gap in record.gaps),
        gap_duration_s=tuple(gap.duration_s for gap in record.gaps),
        gap_tokens=tuple(gap.tokens for gap in record.gaps),
    )


@dataclass(frozen=True, slots=True)
class BlockData:
    """One block that ended: what it was, and its rows."""

    info: BlockInfo
    requests: list[RequestRow]
    steps: list[StepRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Results:
    """A whole comparison as it lies on disk, blocks in order of their number."""

    folder: Path
    experiment: Experiment
    blocks: list[BlockData]

    @property
    def requests(self) -> list[RequestRow]:
        """Every block's rows, warm-up included."""
        return [row for block in self.blocks for row in block.requests]

    @property
    def steps(self) -> list[StepRow]:
        """Every block's steps."""
        return [row for block in self.blocks for row in block.steps]


def to_table(rows: Iterable[RequestRow] | Iterable[StepRow], schema: pa.Schema) -> pa.Table:
    """Rows as a table of `REQUEST_SCHEMA` or `STEP_SCHEMA`."""
    kept = list(rows)
    return pa.table({name: [getattr(row, name) for row in kept] for name in schema.names}, schema=schema)


def request_rows(table: pa.Table) -> list[RequestRow]:
    """The rows of a requests table."""
    return [RequestRow(**values) for values in _values(table, REQUEST_SCHEMA)]


def step_rows(table: pa.Table) -> list[StepRow]:
    """The rows of a steps table."""
    return [StepRow(**values) for values in _values(table, STEP_SCHEMA)]


def _values(table: pa.Table, schema: pa.Schema) -> Iterable[dict[str, Any]]:
    columns = table.select(schema.names).cast(schema).to_pydict()
    lists = [name for name in schema.names if pa.types.is_list(schema.field(name).type)]
    for name in lists:
        columns[name] = [tuple(items) for items in columns[name]]
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def write_json(path: Path, model: BaseModel) -> None:
    """Write a model so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(model.model_dump_json(indent=1), encoding="utf-8")
    temporary.replace(path)


def write_block(folder: Path, block: BlockData) -> None:
    """Write one block that ended; an earlier try of the same number is replaced."""
    final = folder / _BLOCKS / f"{block.info.number:04d}"
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    pq.write_table(to_table(block.requests, REQUEST_SCHEMA), temporary / REQUESTS)
    pq.write_table(to_table(block.steps, STEP_SCHEMA), temporary / STEPS)
    write_json(temporary / "block.json", block.info)
    if final.exists():
        shutil.rmtree(final)
    temporary.replace(final)


def write_joined(results: Results) -> None:
    """Write all blocks' tables as one each, from the blocks that lie in the folder."""
    places = [results.folder / _BLOCKS / f"{block.info.number:04d}" for block in results.blocks]
    for name, schema in ((REQUESTS, REQUEST_SCHEMA), (STEPS, STEP_SCHEMA)):
        tables = [pq.read_table(place / name).select(schema.names).cast(schema) for place in places]
        temporary = results.folder / f".{name}.{os.getpid()}"
        pq.write_table(pa.concat_tables(tables) if tables else schema.empty_table(), temporary)
        temporary.replace(results.folder / name)


def read_block(folder: Path, number: int) -> BlockData | None:
    """One block; None when it has not ended.

    Raises:
        ComparisonError: It is there and cannot be read.
    """
    place = folder / _BLOCKS / f"{number:04d}"
    if not place.is_dir():
        return None
    try:
        info = BlockInfo.model_validate_json((place / "block.json").read_text(encoding="utf-8"))
        requests = request_rows(pq.read_table(place / REQUESTS))
        steps = step_rows(pq.read_table(place / STEPS))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise ComparisonError(f"{place} cannot be read ({_line(error)}); remove it and --resume") from error
    return BlockData(info, requests, steps)


def read_experiment(folder: Path) -> Experiment:
    """What the comparison in `folder` is.

    Raises:
        ComparisonError: There is none, or one of another format.
    """
    path = folder / "experiment.json"
    try:
        experiment = Experiment.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ComparisonError(
            f"{folder} holds no comparison (experiment.json: {error.strerror}); give the folder of one"
        ) from error
    except ValidationError as error:
        raise ComparisonError(f"{path} cannot be read: {_line(error)}") from error
    if experiment.format != FORMAT:
        raise ComparisonError(f"{path} has format {experiment.format}, allowed: {FORMAT}; run the comparison again")
    return experiment


def read_results(folder: Path) -> Results:
    """A comparison and every block of it that has ended.

    Raises:
        ComparisonError: There is none, or a part cannot be read.
    """
    experiment = read_experiment(folder)
    blocks = [read_block(folder, planned.number) for planned in experiment.plan]
    return Results(folder, experiment, [block for block in blocks if block is not None])


def read_progress(folder: Path) -> Progress | None:
    """How far it is; None when nothing was written yet, or not readable."""
    try:
        return Progress.model_validate_json((folder / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
