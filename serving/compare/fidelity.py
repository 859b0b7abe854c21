"""Are the figures right? Against vLLM's own benchmark on one recording, and against the engine's own step ends.

Definitions, ours (serving/records.py) and those of `vllm bench serve` (release 0.32):

- TTFT: ours begins when the request was due, theirs when it was sent; ours ends with the first chunk that carries a
  token, theirs with the first chunk that has a choice, which may be the one that only says `role`.
- ITL: ours are gaps between chunks that carry tokens, theirs between all chunks with a choice: after a role-only chunk
  there is one more, and a chunk without a token (an empty last one) makes one more.
- TPOT: the same formula; theirs from their first chunk to their last.
- Percentiles: the same (linear interpolation of pooled samples); a chunk of several tokens is one gap in both.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving.compare.attribution import token_steps
from serving.compare.tables import RequestRow, StepRow
from serving.latency import Percentiles, percentiles
from serving.records import Gap, Outcome, RequestRecord
from serving.sse import EventDecoder
from serving.stream import StreamReader

_SCRIPT = Path(__file__).with_name("vllm_bench.py")
_START_S = 180.0
#: Floats that went through another order of additions.
_ROUNDING_S = 1e-9


class FidelityError(RuntimeError):
    """vLLM's benchmark could not be asked; the message is one line."""


@dataclass(frozen=True, slots=True)
class RecordedStream:
    """One answer as it came: every socket read's time (clock of `now_s`) and bytes."""

    request_id: str
    due_s: float
    sent_s: float
    max_tokens: int
    chunks: tuple[tuple[float, bytes], ...]

    def record(self) -> RequestRecord:
        """What the client makes of it."""
        decoder, reader = EventDecoder(), StreamReader(self.max_tokens)
        for at_s, data in self.chunks:
            for event in decoder.feed(data):
                reader.feed(at_s, event)
        return reader.record(
            request_id=self.request_id,
            traffic_class="chat",
            model="recorded",
            due_s=self.due_s,
            sent_s=self.sent_s,
            finished_s=self.chunks[-1][0],
            outcome=Outcome.DONE,
        )


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request's figures by vLLM's benchmark."""

    success: bool
    ttft_s: float
    itl_s: tuple[float, ...]
    latency_s: float
    tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Theirs: (latency - TTFT) / (tokens - 1)."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class BenchFigures:
    """The benchmark's answer. `percentiles_ms` holds p50, p95, p99 of `ttft`, `tpot` and `itl`."""

    requests: tuple[BenchRequest, ...]
    percentiles_ms: dict[str, tuple[float, ...]]


def vllm_figures(python: Path, streams: Sequence[RecordedStream]) -> BenchFigures:
    """Play the streams to vLLM's benchmark in the server's environment. Takes some 20 s, most of it importing.

    Raises:
        FidelityError: It failed, or has another interface.
    """
    start_s = min(stream.sent_s for stream in streams)
    asked = {
        # Their clock starts near 0, so that floats keep the same precision as differences of ours.
        "streams": [
            {
                "sent_s": stream.sent_s - start_s,
                "chunks": [(at_s - start_s, base64.b64encode(data).decode()) for at_s, data in stream.chunks],
            }
            for stream in streams
        ],
        "percentiles": [50, 95, 99],
        "duration_s": max(stream.chunks[-1][0] for stream in streams) - start_s,
    }
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": "/bin:/usr/bin",
    }
    try:
        done = subprocess.run(
            [str(python), "-P", str(_SCRIPT)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_START_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FidelityError(f"vLLM's benchmark cannot be run: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FidelityError(f"vLLM's benchmark failed: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return BenchFigures(
        tuple(BenchRequest(**{**one, "itl_s": tuple(one["itl_s"])}) for one in answer["requests"]),
        {name: tuple(values) for name, values in answer["percentiles_ms"].items()},
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that the definitions make different: ours, theirs, and the part of the difference that is accounted for.

    `left_s` is what remains when ours is converted to their definition: 0 when that is the whole difference.
    """

    name: str
    why: str
    ours_s: float
    theirs_s: float
    left_s: float

    @property
    def size_s(self) -> float:
        """Theirs - ours."""
        return self.theirs_s - self.ours_s


@dataclass(frozen=True, slots=True)
class Agreement:
    """Ours against vLLM's on the same streams.

    Attributes:
        gaps: Gaps that both count, compared one by one. gap_error_s: The largest difference among them.
        percentile_error_ms: The largest difference between their percentiles and ours of *their* samples.
        differences: Where the definitions differ, one for each request and figure that does.
    """

    requests: int
    gaps: int
    gap_error_s: float
    percentile_error_ms: float
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        """Nothing differs that the definitions do not make different."""
        left = [abs(difference.left_s) for difference in self.differences]
        return max([self.gap_error_s, self.percentile_error_ms / 1000, *left]) <= _ROUNDING_S


def compare_figures(streams: Sequence[RecordedStream], theirs: BenchFigures) -> Agreement:
    """Compare, request by request.

    Raises:
        FidelityError: The benchmark calls a stream failed that we do not.
    """
    differences: list[Difference] = []
    errors = [0.0]
    gaps = 0
    for stream, other in zip(streams, theirs.requests, strict=True):
        record = stream.record()
        if not other.success or record.first_token_s is None or record.last_token_s is None:
            raise FidelityError(f"request {stream.request_id} has no figures in one of the two")
        edges = _choices(stream)
        shared = _shared_gaps(edges, other.itl_s, record.gaps)
        gaps += len(shared)
        errors += [abs(ours - theirs_s) for ours, theirs_s in shared]
        differences += _differences(stream, record, other, [at_s for at_s, _ in edges])
    return Agreement(len(streams), gaps, max(errors), _percentile_error_ms(theirs), tuple(differences))


def _choices(stream: RecordedStream) -> list[tuple[float, bool]]:
    """All chunks with a choice, which their figures are made of: arrival, and whether ours take it for a token."""
    decoder, reader, found = EventDecoder(), StreamReader(stream.max_tokens), []
    for at_s, data in stream.chunks:
        for event in decoder.feed(data):
            bearing = any(token.tokens for token in reader.feed(at_s, event))
            if event.data.strip() != "[DONE]" and json.loads(event.data).get("choices"):
                found.append((at_s, bearing))
    return found


def _shared_gaps(
    edges: Sequence[tuple[float, bool]], theirs: Sequence[float], ours: Sequence[Gap]
) -> list[tuple[float, float]]:
    """Gaps between the same two chunks, ours and theirs: those without a tokenless chunk in between."""
    bearing = [place for place, (_, token) in enumerate(edges) if token]
    return [
        (gap.duration_s, theirs[last - 1])
        for gap, (first, last) in zip(ours, pairwise(bearing), strict=True)
        if last == first + 1
    ]


def _differences(
    stream: RecordedStream, record: RequestRecord, other: BenchRequest, edges: Sequence[float]
) -> list[Difference]:
    found = []
    first_s, last_s = record.first_token_s or 0.0, record.last_token_s or 0.0
    head_s, tail_s = first_s - edges[0], edges[-1] - last_s
    waited_s = stream.sent_s - stream.due_s
    ttft_s = first_s - stream.due_s
    if head_s or waited_s:
        why = (
            f"from sending, not from due ({1000 * waited_s:.3f} ms), "
            f"to the first chunk, not the first token ({1000 * head_s:.3f} ms)"
        )
        found.append(Difference("TTFT", why, ttft_s, other.ttft_s, other.ttft_s - (ttft_s - waited_s - head_s)))
    extra = len(other.itl_s) - len(record.gaps)
    if extra:
        ours_s = sum(gap.duration_s for gap in record.gaps)
        theirs_s = sum(other.itl_s)
        why = f"{extra} more gaps, before or after chunks that carry no token"
        found.append(Difference("sum of ITL", why, ours_s, theirs_s, theirs_s - (ours_s + head_s + tail_s)))
    ours_tpot_s, theirs_tpot_s = record.tpot_s, other.tpot_s
    if ours_tpot_s is not None and theirs_tpot_s is not None and (head_s or tail_s):
        expected_s = ours_tpot_s + (head_s + tail_s) / (other.tokens - 1)
        why = "from the first chunk to the last, with or without a token"
        found.append(Difference("TPOT", why, ours_tpot_s, theirs_tpot_s, theirs_tpot_s - expected_s))
    return found


def _percentile_error_ms(theirs: BenchFigures) -> float:
    samples = {
        "ttft": [one.ttft_s for one in theirs.requests],
        "itl": [gap_s for one in theirs.requests for gap_s in one.itl_s],
        "tpot": [tpot_s for one in theirs.requests if (tpot_s := one.tpot_s) is not None],
    }
    errors = [0.0]
    for name, values in samples.items():
        ours = percentiles(values)
        pairs = zip((ours.p50_s, ours.p95_s, ours.p99_s), theirs.percentiles_ms[name], strict=True)
        errors += [abs(1000 * value_s - value_ms) for value_s, value_ms in pairs if value_s is not None]
    return max(errors)


@dataclass(frozen=True, slots=True)
class EngineDelays:
    """From a step's end to our time stamp, in two parts. All in seconds.

    Attributes:
        front_end: Step end to socket: the server's front end, and the kernel's way through the loopback.
        client: Socket to our time stamp.
        unmatched: Tokens whose step or socket arrival is not known.
    """

    front_end: Percentiles
    client: Percentiles
    unmatched: int


def engine_delays(
    requests: Sequence[RequestRow], steps: Sequence[StepRow], socket_s: dict[tuple[str, float], float]
) -> EngineDelays:
    """The delays of every token-bearing chunk.

    Args:
        requests: Their rows; chunks are joined to steps by counting tokens.
        steps: The steps of the same time, in order.
        socket_s: By request id and our time stamp: when the kernel had the chunk's bytes (clock of `now_s`).
    """
    front_end: list[float] = []
    client: list[float] = []
    unmatched = 0
    for row, givers in zip(requests, token_steps(requests, steps), strict=True):
        for arrival_s, giver in givers:
            had_s = socket_s.get((row.request_id, arrival_s))
            if giver is None or had_s is None:
                unmatched += 1
                continue
            front_end.append(had_s - giver.end_s)
            client.append(arrival_s - had_s)
    return EngineDelays(percentiles(front_end), percentiles(client), unmatched)
