"""What one step of the engine did, from the objects that vLLM's scheduler hands out. Figures as in FrameChat's
serving/steptime.py.

The engine waits while this runs: plain loops over the step's requests, one tuple a step, no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MOST_IN_FLIGHT = 64


class Step(NamedTuple):
    """One step. Times are `time.monotonic()`; request ids are vLLM's internal ones.

    `requests` holds (id, tokens, whether they are prompt tokens, tokens generated); `encoded` (id, image tokens,
    images); `finished` the ids of which no later step will tell anything.
    """

    start_s: float
    end_s: float
    duration_s: float
    budget: int
    features: tuple[int, int, int, int, int, int, int]
    running: int
    waiting: int
    preempted: int
    kv_cache_usage: float
    requests: list[tuple[str, int, bool, int]]
    encoded: list[tuple[str, int, int]]
    finished: list[str]


class _Open(NamedTuple):
    start_s: float
    budget: int
    features: tuple[int, int, int, int, int, int, int]
    counts: tuple[int, int, int]
    kv_cache_usage: float
    requests: list[tuple[str, int, bool]]
    encoded: list[tuple[str, int, int]]
    finished: list[str]


class StepRecorder:
    """Joins what was scheduled with what came of it; `put` gets every finished step that processed tokens."""

    def __init__(self, put: Callable[[Step], None]) -> None:
        self._put = put
        self._open: dict[int, _Open] = {}
        self._finished: list[str] = []
        self._last_end_s = 0.0

    def scheduled(
        self,
        output: Any,
        requests: Mapping[str, Any],
        start_s: float,
        budget: int,
        counts: tuple[int, int],
        kv_cache_usage: float,
    ) -> None:
        """`schedule()` returned `output`, a SchedulerOutput; `requests` are the scheduler's, `counts` its running and
        waiting ones. Each request's `num_computed_tokens` already includes the step, as vLLM leaves it."""
        self._finished.extend(output.finished_req_ids)
        tokens_of = output.num_scheduled_tokens
        if not tokens_of:
            return
        decode = prefill = decode_context = pairs = prefill_context = 0
        parts = []
        for name, tokens in tokens_of.items():
            request = requests[name]
            after = request.num_computed_tokens
            before = after - tokens
            # Known tokens that are computed: the prompt or, after a preemption, the answer so far as well. What a
            # decode computes is the newest token.
            is_prefill = before < max(request.num_prompt_tokens, request.num_tokens - 1)
            if is_prefill:
                prefill += tokens
                pairs += tokens * before + tokens * (tokens + 1) // 2
                prefill_context += after
            else:
                decode += tokens
                decode_context += after
            parts.append((name, tokens, is_prefill))
        encoded = []
        image_tokens = images = 0
        for name, places in output.scheduled_encoder_inputs.items():
            features = requests[name].mm_features
            embeddings = sum(features[place].mm_position.get_num_embeds() for place in places)
            encoded.append((name, embeddings, len(places)))
            image_tokens += embeddings
            images += len(places)
        if len(self._open) >= _MOST_IN_FLIGHT:  # steps whose results never came
            self._open.clear()
        self._open[id(output)] = _Open(
            start_s,
            budget,
            (decode, prefill, decode_context, pairs, prefill_context, image_tokens, images),
            (*counts, len(output.preempted_req_ids or ())),
            kv_cache_usage,
            parts,
            encoded,
            self._finished,
        )
        self._finished = []

    def completed(self, output: Any, outputs: Mapping[int, Any], end_s: float) -> None:
        """`update_from_output()` of the same `output` returned `outputs`: EngineCoreOutputs by client."""
        step = self._open.pop(id(output), None)
        if step is None:
            return
        generated = {item.request_id: len(item.new_token_ids) for answer in outputs.values() for item in answer.outputs}
        # With asynchronous scheduling a step is scheduled before the one before it has ended.
        duration_s = end_s - max(step.start_s, self._last_end_s)
        self._last_end_s = end_s
        self._put(
            Step(
                step.start_s,
                end_s,
                duration_s,
                step.budget,
                step.features,
                *step.counts,
                step.kv_cache_usage,
                [(*part, generated.get(part[0], 0)) for part in step.requests],
                step.encoded,
                step.finished,
            )
        )
