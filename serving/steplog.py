"""The engine's own account of its steps, from the lines that `log_steps` makes it write.

vLLM logs one line a step with `--enable-logging-iteration-details` (wording of release 0.32). `context` there is
prefill here, `generation` is decode. The lines name no requests, and a step's time holds scheduling, encoding of
pictures, the forward pass and sampling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_STEP = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Iteration\((?P<index>\d+)\): "
    r"(?P<prefill_requests>\d+) context requests, (?P<prefill_tokens>\d+) context tokens, "
    r"(?P<decode_requests>\d+) generation requests, (?P<decode_tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<elapsed_ms>[\d.]+) ms(?P<dummy> \(dummy\))?"
    r"(?:, \w+ KV cache usage: (?P<usage>[\d.]+)%)?"
    r"(?:, encoder inputs: (?P<encoder_inputs>\d+), encoder output embeddings: (?P<encoder_tokens>\d+))?"
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine.

    Attributes:
        index: Counts from 0 at every start of the engine.
        prefill_requests, prefill_tokens: Requests that still compute their prompt, and their tokens of this step.
        decode_requests, decode_tokens: Requests that generate, and their tokens of this step.
        elapsed_ms: From the scheduler's decision to the sampled tokens, on the engine's clock.
        encoder_inputs, encoder_tokens: Pictures that the vision tower encoded in this step, and what came out.
        kv_cache_usage: After the step, 0..1; None where the line does not say.
        dummy: An empty step of data-parallel engines, which keeps them together.
    """

    index: int
    engine: int
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    elapsed_ms: float
    encoder_inputs: int = 0
    encoder_tokens: int = 0
    kv_cache_usage: float | None = None
    dummy: bool = False

    @property
    def tokens(self) -> int:
        """All tokens of the step: what the token budget bounds."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def shared(self) -> bool:
        """Whether somebody's prefill and somebody's decode shared the step."""
        return self.prefill_tokens > 0 and self.decode_tokens > 0


def parse_step(line: str) -> StepRecord | None:
    """The step that one log line reports; None for every other line."""
    found = _STEP.search(line)
    if found is None:
        return None
    usage = found["usage"]
    return StepRecord(
        index=int(found["index"]),
        engine=int(found["engine"] or 0),
        prefill_requests=int(found["prefill_requests"]),
        prefill_tokens=int(found["prefill_tokens"]),
        decode_requests=int(found["decode_requests"]),
        decode_tokens=int(found["decode_tokens"]),
        elapsed_ms=float(found["elapsed_ms"]),
        encoder_inputs=int(found["encoder_inputs"] or 0),
        encoder_tokens=int(found["encoder_tokens"] or 0),
        kv_cache_usage=None if usage is None else float(usage) / 100,
        dummy=found["dummy"] is not None,
    )


def parse_steps(lines: Iterable[str]) -> Iterator[StepRecord]:
    """The steps among the lines of a server's log, in order."""
    for line in lines:
        if "Iteration(" in line:
            step = parse_step(line)
            if step is not None:
                yield step
